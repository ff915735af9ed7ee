"""A pretraining recipe of Megatron-Bridge with its pinned plan: prints what the plan changes.

usage: python pretrain.py RECIPE CLUSTER (a file of plans/)

The changes are printed as words for ``process_config_with_overrides``, too. In a training script,
under torchrun: ``cfg, plan, changes = planned("llama3_70b", "dgx_h100")``, then
``pretrain(cfg, forward_step)``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from nest_megatron.cluster.records import Cluster
from nest_megatron.integrations.megatron_bridge import apply_plan, to_dotlist
from nest_megatron.integrations.plan_output import launched_report
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.pins import read_pinned

PLANS = Path(__file__).resolve().parent / "plans"


def configured(name: str, model: TransformerSpec, cluster: Cluster, batch: int) -> Any:
    """Megatron-Bridge's configuration with a global batch; the launcher says the cluster's GPUs."""
    recipes = importlib.import_module("megatron.bridge.recipes")
    cfg = getattr(recipes, f"{name}_pretrain_config")()
    if cfg.tokenizer.tokenizer_type == "NullTokenizer":  # a stand-in, of fewer tokens
        cfg.tokenizer.use_tokenizer_vocab_size = False
        cfg.model.vocab_size = model.vocab_size
    cfg.train.global_batch_size = batch
    return cfg


def planned(name: str, cluster: str) -> tuple[Any, ParallelPlan, tuple[Change, ...]]:
    """Megatron-Bridge's configuration with its plan, the plan, and what it changed."""
    plan = read_pinned(PLANS / f"{name}_{cluster}.yaml").plan
    cfg = configured(name, plan.model, plan.cluster, plan.layout.global_batch_size)
    return cfg, plan, apply_plan(cfg, plan)


def main(words: list[str]) -> None:
    """Print a planned configuration."""
    known = sorted(path.stem for path in PLANS.glob("*.yaml"))
    if "_".join(words) not in known or len(words) != 2:
        sys.exit(f"usage: python pretrain.py RECIPE CLUSTER, of plans/: {', '.join(known)}")
    _, plan, changes = planned(*words)
    Console().print(launched_report(plan, changes, what="fields"))
    print("\nAs words behind run_recipe.py:", *to_dotlist(changes), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
