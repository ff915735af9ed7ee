"""NeMo's Llama 3 70B on 8 nodes of H100: plan its recipe and print what changes; launch nothing.

usage: python llama3_70b.py
"""

from __future__ import annotations

from nemo.collections import llm
from rich.console import Console

from nest_megatron.integrations.nemo import auto_recipe
from nest_megatron.integrations.plan_output import launched_report

recipe = llm.recipes.llama3_70b.pretrain_recipe(
    name="llama3_70b", dir="/checkpoints", num_nodes=8, num_gpus_per_node=8, performance_mode=True
)
plan, changes = auto_recipe(recipe, cluster="dgx_h100")
Console().print(launched_report(plan, changes, what="fields"))

# To train, hand the recipe on as ever:
# run.run(recipe, executor=run.SlurmExecutor(..., nodes=8, ntasks_per_node=8))
