"""NeMo's Mixtral 8x7B on 16 nodes: its micro batch is kept, and an own plan file is applied.

usage: python mixtral_8x7b.py
"""

from __future__ import annotations

from nemo.collections import llm
from rich.console import Console

from nest_megatron.integrations.nemo import apply_plan, auto_recipe
from nest_megatron.integrations.plan_output import launched_report
from nest_megatron.layout import plan_file

recipe = llm.recipes.mixtral_8x7b.pretrain_recipe(
    name="mixtral_8x7b", dir="/checkpoints", num_nodes=16, num_gpus_per_node=8
)
plan, changes = auto_recipe(
    recipe,
    cluster="dgx_h100",
    keep=["micro_batch_size"],
    overrides=["search.max_context_parallel_size=1"],
)
Console().print(launched_report(plan, changes, what="fields"))

# A plan can be kept, reviewed, and applied to a fresh recipe later.
text = plan_file.dump(plan)
again = llm.recipes.mixtral_8x7b.pretrain_recipe(
    name="mixtral_8x7b", dir="/checkpoints", num_nodes=16, num_gpus_per_node=8
)
assert apply_plan(again, plan_file.load(text)) == changes
