"""NVIDIA's published layouts (``nvidia_recipes.yaml``), and which of them is nearest to a job."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import yaml

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain

#: A recipe is scaled over replicas to at most so many times more or fewer GPUs.
FARTHEST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One layout with which results were published.

    Args:
        models: names in the catalogue of models of this shape.
        num_gpus: sizes at which it was run.
        source: repository and month.
    """

    models: tuple[str, ...]
    accelerator: str
    precision: Precision
    seq_length: int
    num_gpus: tuple[int, ...]
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    micro_batch: int
    source: str

    @property
    def degrees(self) -> Mapping[str, int]:
        """What the recipe fixes, under Megatron's names."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "micro_batch_size": self.micro_batch,
        }

    def distance(self, num_gpus: int) -> float:
        """How many times more or fewer GPUs the nearest of its runs had."""
        return min(max(num_gpus / size, size / num_gpus) for size in self.num_gpus)

    def describe(self, num_gpus: int) -> str:
        """Where it is from, and for how many GPUs.

        Example: ``dgxc-benchmarking, 2025-06, for 512 GPUs``.
        """
        nearest = min(self.num_gpus, key=lambda size: max(num_gpus / size, size / num_gpus))
        return f"{self.source}, for {nearest} GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipes:
    recipes: tuple[Recipe, ...]


def published(spec: TransformerSpec, cluster: Cluster, precision: Precision) -> list[Recipe]:
    """Recipes for the model at its sequence length on such GPUs, the nearest first.

    The job's own number format comes before others, then the nearest number of GPUs counts, then
    the newest.
    """
    near = [
        recipe
        for recipe in _recipes()
        if spec.name in recipe.models
        and spec.seq_length == recipe.seq_length
        and cluster.accelerator.name == recipe.accelerator
        and recipe.distance(cluster.num_gpus) <= FARTHEST
    ]
    return sorted(near, key=lambda r: (r.precision is not precision, r.distance(cluster.num_gpus)))


@cache
def _recipes() -> tuple[Recipe, ...]:
    path = importlib.resources.files(__package__).joinpath("nvidia_recipes.yaml")
    return from_plain(_Recipes, yaml.safe_load(path.read_text(encoding="utf-8"))).recipes
