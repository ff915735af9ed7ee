"""Rows of ``refused_options.json`` as options by destination, and as a command's flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.layout.rulebook.facts import is_within
from nest_megatron.layout.rulebook.options import COMMAND_RULES, DESTINATIONS

ROWS: dict[str, dict[str, str]] = {
    rule.id: row
    for rule, row in zip(
        COMMAND_RULES,
        packaged("nest_megatron.layout.rulebook", "refused_options.json"),
        strict=True,
    )
}
#: Values of options that take one, where a row names none.
_VALUES = {
    **dict.fromkeys(("batch_size", "warmup", "model_parallel_size", "recompute_num_layers"), "1"),
    **dict.fromkeys(("encoder_num_layers", "num_layers", "num_experts"), "8"),
    **dict.fromkeys(("encoder_seq_length", "seq_length", "moe_ffn_hidden_size"), "512"),
    **dict.fromkeys(("train_samples", "lr_decay_samples", "lr_warmup_samples"), "1000"),
    **dict.fromkeys(("train_iters", "lr_decay_iters", "lr_warmup_iters"), "10"),
    **dict.fromkeys(("lr_warmup_fraction", "end_weight_decay", "lr"), "0.1"),
    **dict.fromkeys(("min_lr", "lr_warmup_init", "start_weight_decay"), "0.2"),
    **dict.fromkeys(("log_memory_interval", "save_retain_interval"), "10"),
    **dict.fromkeys(("log_interval", "save_interval", "moe_router_num_groups"), "3"),
    **dict.fromkeys(
        ("save", *(f"{part}data_path" for part in ("", "train_", "valid_", "test_"))), "somewhere"
    ),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern"), "M*M*M*M*"),
    "fp8_format": "hybrid",
    "fp4_format": "e2m1",
    "moe_latent_size": "256",
    "moe_router_group_topk": "4",
    "moe_expert_capacity_factor": "1.5",
    "moe_expert_rank_capacity_factor": "1.5",
    "cpu_offloading_num_layers": "1",
    "recompute_granularity": "selective",
    "recompute_method": "uniform",
    "save_params_interval": "5",
    "global_batch_size": "64",
    "step_batch_size_schedule": "0:64",
    "rampup_batch_size": "16 16 1000",
    "cuda_graph_scope": "mlp",
    "cuda_graph_modules": "attn",
}


def options_of(rule: str) -> dict[str, Any]:
    """Options by destination that break the rule of a row."""
    found: dict[str, Any] = {}
    for name, text in _stated(rule):
        own = DESTINATIONS.get(name, name)
        found[own] = [found[own], _value(text)] if own in found else _value(text)
    return found


def _value(text: str) -> Any:
    if re.fullmatch(r"[\d.]+", text):
        return float(text) if "." in text else int(text)
    return text or True


def flags_of(rule: str) -> list[str]:
    """A command's flags that break the rule of a row; an option named twice has both values."""
    words: dict[str, list[str]] = {}
    for name, value in _stated(rule):
        words.setdefault(name, []).extend(value.split())
    return [
        word for name, values in words.items() for word in (f"--{name.replace('_', '-')}", *values)
    ]


def has_row(rule: str, version: str) -> bool:
    """Whether a release has the rule of a row."""
    return is_within(version, ROWS[rule].get("since", ""), ROWS[rule].get("until", ""))


def _stated(rule: str) -> Iterator[tuple[str, str]]:
    for condition in ROWS[rule]["options"].split():
        name, _, values = condition.partition("=")
        if not name.startswith("!"):
            yield name, values.split("|")[0] or _VALUES.get(name, "")
