"""Megatron-Bridge's GPT-3 175B on 512 H100: plan its configuration and print what changes.

The same is printed as overrides for ``process_config_with_overrides``; nothing is trained.

usage: python gpt3_175b.py
"""

from __future__ import annotations

from megatron.bridge.recipes.gpt.gpt3_175b import gpt3_175b_pretrain_config
from rich.console import Console

from nest_megatron.integrations.megatron_bridge import auto_recipe, to_dotlist, to_yaml
from nest_megatron.integrations.plan_output import launched_report

cfg = gpt3_175b_pretrain_config()
plan, changes = auto_recipe(cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=512"])
Console().print(launched_report(plan, changes, what="fields"))
print("\nAs words behind run_recipe.py:", *to_dotlist(changes), sep="\n  ")
print("\nAs a YAML overlay:\n" + to_yaml(changes))

# To train: pretrain(cfg, forward_step), under torchrun with 512 ranks. Then the launcher knows the
# size, and auto_recipe(cfg, cluster="dgx_h100") needs no overrides.
