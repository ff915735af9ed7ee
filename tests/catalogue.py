"""Catalogue entries for tests, read with plain YAML (Hydra's composition has its own tests)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.cluster.records import (
    Accelerator,
    Cluster,
    accelerator_from_mapping,
    cluster_from_mapping,
)
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.spec import TransformerSpec

#: The entries that are planned and launched by tests, one of each kind; the others only load.
CORE = (
    "bert_large",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt3_175b",
    "gpt3_35b",
    "gpt_oss_120b",
    "llama2_7b",
    "llama3_1_405b",
    "llama3_70b",
    "llama3_8b",
    "mixtral_8x22b",
    "mixtral_8x7b",
    "mixtral_scaled",
    "mpt_7b",
    "nemotron4_340b",
    "qwen2_5_7b",
    "qwen3_235b_a22b",
    "qwen3_30b_a3b",
)
ROOT = Path(__file__).resolve().parent.parent / "hydra_configs"


def _read(group: str, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / group / f"{name}.yaml").read_text(encoding="utf-8")))


def names(group: str) -> list[str]:
    """Names of a group's entries."""
    return sorted(path.stem for path in (ROOT / group).glob("*.yaml"))


@cache
def model(name: str) -> TransformerSpec:
    """A model of the catalogue."""
    return spec_from_mapping(_read("model", name))


@cache
def cluster(name: str, num_gpus: int) -> Cluster:
    """A cluster of the catalogue, resized."""
    mapping = _read("cluster", name)
    defaults = mapping.pop("defaults", [])
    for entry in defaults:
        if isinstance(entry, dict):
            mapping["accelerator"] = _read("accelerator", next(iter(entry.values())))
    return cluster_from_mapping(mapping, num_gpus=num_gpus)


def accelerator(name: str) -> Accelerator:
    """A device of the catalogue."""
    return accelerator_from_mapping(_read("accelerator", name))
