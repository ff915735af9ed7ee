"""A pretraining recipe of NeMo with its pinned plan: prints what it changes, launches nothing.

usage: python pretrain.py RECIPE CLUSTER (a file of plans/)

In a script of yours: ``recipe, plan, changes = planned("llama3_70b", "dgx_h100")``, then
``run.run(recipe, executor=executor)``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from nest_megatron.cluster.records import Cluster
from nest_megatron.integrations.nemo import apply_plan
from nest_megatron.integrations.plan_output import launched_report
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.pins import read_pinned

PLANS = Path(__file__).resolve().parent / "plans"


def configured(name: str, model: TransformerSpec, cluster: Cluster, batch: int) -> Any:
    """NeMo's recipe on all GPUs of a cluster, with a global batch; of the model nothing is read."""
    module = importlib.import_module(f"nemo.collections.llm.recipes.{name}")
    per_node = cluster.launch_gpus_per_host
    recipe = module.pretrain_recipe(
        name=name,
        dir="/checkpoints",
        num_nodes=cluster.num_gpus // per_node,
        num_gpus_per_node=per_node,
    )
    recipe.data.global_batch_size = batch
    return recipe


def planned(name: str, cluster: str) -> tuple[Any, ParallelPlan, tuple[Change, ...]]:
    """NeMo's recipe at the size, batch and layout of its plan, the plan, and what it changed."""
    plan = read_pinned(PLANS / f"{name}_{cluster}.yaml").plan
    recipe = configured(name, plan.model, plan.cluster, plan.layout.global_batch_size)
    return recipe, plan, apply_plan(recipe, plan)


def main(words: list[str]) -> None:
    """Print a planned recipe."""
    known = sorted(path.stem for path in PLANS.glob("*.yaml"))
    if "_".join(words) not in known or len(words) != 2:
        sys.exit(f"usage: python pretrain.py RECIPE CLUSTER, of plans/: {', '.join(known)}")
    _, plan, changes = planned(*words)
    Console().print(launched_report(plan, changes, what="fields"))


if __name__ == "__main__":
    main(sys.argv[1:])
