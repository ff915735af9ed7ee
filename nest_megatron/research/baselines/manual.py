"""What an engineer sets by hand: NVIDIA's recipe for the model, or else Megatron's rule of thumb.

Where NVIDIA published a layout for the model on such GPUs, at up to four times more or fewer of
them (``nvidia_recipes.yaml``), it is used as it is, with more or fewer replicas. What its tables do
not state is filled in: the recomputation that runs fastest of all that fit, and even stages, or the
fastest ones where the layers do not divide and NVIDIA writes them by hand.

Otherwise the rule of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (SC 2021), sections 3 and 5: tensor parallelism inside a node up to what
memory asks, then pipeline stages, the rest replicas; with three virtual stages, or two, where whole
layers divide (Korthikanti et al., arXiv 2205.05198, use three); the micro batch that runs fastest
of those that fit. Selective and then full recomputation, sequence parallelism and the
distributed optimizer are those of the second paper and today's defaults; a longer context is split
only where nothing fits without. Experts are spread over a node first, whole.

Memory is checked by the full model, where an engineer tries. Left out: anything that neither
source advises, among it uneven stages and the second rank order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.documents import packaged
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, frozen
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    ComparisonJob,
    chosen,
    even_partition,
    pipeline_of,
    restricted,
    shard_of,
    solved,
)
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD
from nest_megatron.solver.ranking import SolvedLayout, fastest

_ZERO = (ZeroStage.OPTIMIZER,)
#: By rising recomputation; with fused attention the second frees nothing and is passed over.
_LADDER = (NO_RECOMPUTE, selective_recompute([RecomputeModule.CORE_ATTN]), FULL_RECOMPUTE)
_VIRTUAL = (3, 2, 1)
#: Servers of the papers hold eight GPUs; nobody splits a layer over all 72 of a rack.
_WIDEST = 8

#: Context, tensor and pipeline sizes: one step of the rule.
_Step = tuple[int, int, int]


def find(job: ComparisonJob) -> BaselineChoice:
    """The nearest recipe that fits, else what the rule of thumb leads to."""
    model, cluster = job.model, job.model.cluster
    recipes = published(model.spec, cluster, model.settings.precision)
    for recipe in recipes:
        plan = _from_recipe(job, recipe)
        if plan is not None:
            size = recipe.nearest(cluster.num_gpus)[1]
            reason = f"NVIDIA's recipe ({recipe.source}, for {size} GPUs)"
            return chosen(plan, len(recipes), reason)
    passed = " (no published recipe fits this job)" if recipes else ""
    return chosen(*_from_rule(job), f"Megatron's rule of thumb{passed}")


def _from_recipe(job: ComparisonJob, recipe: Recipe) -> SolvedLayout | None:
    """A recipe on this job, with the recomputation that suits it best."""
    space = job.space
    if not all(space.allows(*each, job.model.cluster) for each in recipe.degrees.items()):
        return None
    fixed = replace(space, fixed={**space.fixed, **recipe.degrees})
    return fastest(
        _in_stages(job, grid, recompute)
        for grid in job.families(restricted(replace(job, space=fixed), zero_stages=_ZERO))
        for recompute in job.grids(fixed).recompute_settings(grid)
    )


def _in_stages(
    job: ComparisonJob, grid: PartialLayout, recompute: Recompute
) -> SolvedLayout | None:
    """A recipe's grid in even stages, in the fastest ones where the layers do not divide."""
    grid = replace(grid, recompute=recompute)
    boundaries = even_partition(job.model.spec, grid.dims.num_chunks)
    if boundaries is not None:
        return job.price(grid, boundaries)
    return solved(grid, job.solve_stages(job.problem(grid), NO_THRESHOLD, DEFAULT_NODE_LIMIT))


def _from_rule(job: ComparisonJob) -> tuple[SolvedLayout | None, int]:
    """The first step that fits, by rising recomputation, and how many layouts were tried."""
    steps, tried = _steps(job), 0
    for recompute in _ladder(job, next(iter(steps.values()), [])):
        for step in sorted(steps):
            plans = [
                job.price(replace(grid, recompute=recompute), boundaries)
                for grid in steps[step]
                if (boundaries := even_partition(job.model.spec, grid.dims.num_chunks)) is not None
            ]
            tried += len(plans)
            plan = fastest(_most_interleaved([p for p in plans if p is not None]))
            if plan is not None:
                return plan, tried
    return None, tried


def _most_interleaved(plans: list[SolvedLayout]) -> Iterator[SolvedLayout]:
    """Of the plans that fit, for each micro batch those with most virtual stages."""
    by_micro = defaultdict(list)
    for plan in plans:
        by_micro[plan.layout.micro_batch_size].append(plan)
    for group in by_micro.values():
        most = max(pipeline_of(plan.layout).virtual for plan in group)
        yield from (plan for plan in group if pipeline_of(plan.layout).virtual == most)


def _steps(job: ComparisonJob) -> dict[_Step, list[PartialLayout]]:
    """Grids by step: tensor sizes up to a node's without stages, then stages with the largest."""
    grids = list(job.families(restricted(job, zero_stages=_ZERO)))
    node = job.model.cluster.gpus_per_node
    degrees = [shard_of(grid).tensor for grid in grids]
    inside = (tp for tp in degrees if tp <= min(node, _WIDEST))
    widest = max(inside, default=min(degrees, default=1))
    steps = defaultdict(list)
    for grid, tp in zip(grids, degrees, strict=True):
        pipeline = pipeline_of(grid)
        advised = tp <= widest and (pipeline.stages == 1 or tp == widest)
        if advised and pipeline.virtual in _VIRTUAL:
            steps[shard_of(grid).context, tp, pipeline.stages].append(grid)
    return {step: _experts_in_node(grids, node) for step, grids in steps.items()}


def _experts_in_node(grids: list[PartialLayout], node: int) -> list[PartialLayout]:
    """Those that spread whole experts over most ranks of a node, and no farther."""

    def spread(grid: PartialLayout) -> tuple[bool, int, int]:
        experts, degree = shard_of(grid).expert, shard_of(grid).expert_tensor
        inside = experts * degree <= node
        return inside, -degree, experts if inside else -experts

    best = max(map(spread, grids))
    return [grid for grid in grids if spread(grid) == best]


def _ladder(job: ComparisonJob, grids: list[PartialLayout]) -> list[Recompute]:
    """Recompute settings to try, the user's if one is fixed."""
    if job.space.recompute is not None:
        return [job.space.recompute]
    allowed = job.grids(job.space).recompute_settings(grids[0]) if grids else ()
    return [setting for setting in _LADDER if setting in allowed]


#: A recipe is scaled over replicas to at most so many times more or fewer GPUs.
_FARTHEST = 4.0


@frozen
class Recipe:
    """One layout with which results were published for models of the catalogue, at some sizes.

    Args:
        degrees: what the recipe fixes, under Megatron's names.
    """

    models: tuple[str, ...]
    accelerator: str
    precision: Precision
    seq_length: int
    num_gpus: tuple[int, ...]
    degrees: Mapping[str, int]
    source: str

    def nearest(self, num_gpus: int) -> tuple[float, int]:
        """How many times more or fewer GPUs the nearest of its runs had, and how many."""
        return min((max(num_gpus / size, size / num_gpus), size) for size in self.num_gpus)


def published(spec: TransformerSpec, cluster: Cluster, precision: Precision) -> list[Recipe]:
    """Recipes for the model at its sequence length on such GPUs, the nearest first.

    The job's number format comes before others, then the nearest number of GPUs counts, then
    the newest.
    """
    near = [
        recipe
        for recipe in _recipes()
        if spec.name in recipe.models
        and spec.seq_length == recipe.seq_length
        and cluster.accelerator.name == recipe.accelerator
        and recipe.nearest(cluster.num_gpus)[0] <= _FARTHEST
    ]
    return sorted(
        near, key=lambda r: (r.precision is not precision, r.nearest(cluster.num_gpus)[0])
    )


@cache
def _recipes() -> tuple[Recipe, ...]:
    recipes = packaged(__package__, "nvidia_recipes.yaml")["recipes"]
    return tuple(from_plain(Recipe, each) for each in recipes)
