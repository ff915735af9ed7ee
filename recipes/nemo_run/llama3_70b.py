"""NeMo's Llama 3 70B as an experiment of NeMo-Run, planned by the plugin; launches nothing.

usage: python llama3_70b.py
"""

from __future__ import annotations

import tempfile

import nemo_run as run
from nemo.collections import llm

from nest_megatron.integrations.nemo_run import NestPlugin

recipe = llm.recipes.llama3_70b.pretrain_recipe(
    name="llama3_70b", dir="/checkpoints", num_nodes=8, num_gpus_per_node=8
)
# On a real cluster: run.SlurmExecutor(account=..., partition=..., nodes=8, ntasks_per_node=8)
executor = run.LocalExecutor(nodes=8, ntasks_per_node=8, launcher="torchrun")

with (
    tempfile.TemporaryDirectory() as base,
    run.Experiment("llama3_70b", executor=executor, base_dir=base) as experiment,
):
    experiment.add(recipe, plugins=[NestPlugin(cluster="dgx_h100")], name="pretrain")
    planned = experiment.jobs[0].task.trainer.strategy
    mine = recipe.trainer.strategy

print(f"the recipe: TP {mine.tensor_model_parallel_size}, PP {mine.pipeline_model_parallel_size}")
print(
    f"the job: TP {planned.tensor_model_parallel_size}, PP {planned.pipeline_model_parallel_size}, "
    f"layout {planned.pipeline_model_parallel_layout}"
)
# `experiment.run(detach=True)` inside the block would launch it.
