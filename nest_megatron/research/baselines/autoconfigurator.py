"""NeMo AutoConfigurator: a table of degrees by model size, every entry measured.

Source: NVIDIA/NeMo, ``nemo/collections/llm/tools/auto_configurator`` (wheels 2.4.1 to 2.7.3); the
table is ``autoconfigurator.yaml``.

Kept: tensor, pipeline and micro batch sizes come from a table by billions of parameters, sequence
length and 40 or 80 GB of memory; heads must divide by the first, layers by the second, and their
product lies between two bounds of the table. With more than two stages there are as many virtual
stages as layers on a rank. Context and expert parallelism are 1 unless the user gives them. It has
no memory and no cost model: it launches each candidate for some steps and ranks the times, so that
here the fastest candidate that fits under the full cost model is its answer.

Its gaps stay: no recomputation, no ZeRO but stage 1 (its recipes' distributed optimizer), no
topology, no choice above 45 billion parameters at 8,192 tokens (such models are tried without a
pipeline alone), models with latent attention refused. It offers 40 and 80 GB; a device with 60 GB
or more counts as the second.

Different here: a model's size is its number of parameters, where the tool reads Mixtral 8x7B as
7 B; virtual stages are at most as many as our space allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from nest_megatron.documents import packaged
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, frozen
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    ComparisonJob,
    chosen,
    even_partition,
    pipeline_of,
    restricted,
)
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.ranking import fastest

_GIVEN_BY_USER = ("context_parallel_size", "expert_model_parallel_size")
_LARGE_MEMORY_BYTES = 60 * 10**9


@frozen
class DegreeRow:
    """What is tried for models of up to so many parameters; ``None`` is any.

    Pipeline size and product of degrees lie between two bounds.
    """

    gpu_memory_gb: int | None
    seq_length: int | None
    up_to_billions: float
    tensor: tuple[int, ...]
    pipeline: tuple[int, int]
    micro_batch: tuple[int, ...]
    model_parallel: tuple[int, int]


def find(job: ComparisonJob) -> BaselineChoice:
    """The fastest candidate of the table that fits."""
    spec = job.model.spec
    if spec.multi_latent_attention:
        reason = "it does not take models with latent attention"
        return BaselineChoice(plan=None, reason=reason, candidates=0)
    row = row_for(spec, job.model.cluster.accelerator.memory_bytes)
    grids = list(_candidates(job, row))
    best = fastest(
        job.price(grid, boundaries)
        for grid in grids
        if (boundaries := even_partition(spec, grid.dims.num_chunks)) is not None
    )
    return chosen(best, len(grids), f"the fastest of the {len(grids)} candidates of its table")


def row_for(spec: TransformerSpec, memory_bytes: int) -> DegreeRow:
    """The first row of the table for a model on a device."""
    memory_gb = 80 if memory_bytes >= _LARGE_MEMORY_BYTES else 40
    billions = total_parameters(spec) / 1e9
    return next(
        row
        for row in _rows()
        if row.gpu_memory_gb in (None, memory_gb)
        and row.seq_length in (None, spec.seq_length)
        and billions <= row.up_to_billions
    )


@cache
def _rows() -> tuple[DegreeRow, ...]:
    table = packaged(__package__, "autoconfigurator.yaml")
    return tuple(from_plain(DegreeRow, each) for each in table["rows"])


def _candidates(job: ComparisonJob, row: DegreeRow) -> Iterator[PartialLayout]:
    """Grids of the table that Megatron launches."""
    zeros = (ZeroStage.OPTIMIZER,)
    grids = job.grids(restricted(job, _GIVEN_BY_USER, zero_stages=zeros, recompute=NO_RECOMPUTE))
    for shard in grids.shards():
        tp, micro = shard.dims.tensor_model_parallel_size, shard.micro_batch_size
        if tp in row.tensor and micro in row.micro_batch:
            for grid in grids.grids(shard):
                if _allows(row, grid, job.model.spec.num_layers):
                    yield from _with_virtual_stages(grids, grid)


def _allows(row: DegreeRow, grid: PartialLayout, num_layers: int) -> bool:
    dims = grid.dims
    pp = dims.pipeline_model_parallel_size
    product = dims.tensor_model_parallel_size * pp
    product *= dims.context_parallel_size * dims.expert_model_parallel_size
    limits = ((row.pipeline, pp), (row.model_parallel, product))
    return num_layers % pp == 0 and all(low <= size <= high for (low, high), size in limits)


def _with_virtual_stages(grids: GridSpace, grid: PartialLayout) -> list[PartialLayout]:
    """With more than two stages, as many virtual ones as divide the layers of a rank."""
    pp = grid.dims.pipeline_model_parallel_size
    layers = grids.model.spec.num_layers // pp
    families = [(pipeline_of(found).virtual, found) for found in grids.families(grid)]
    dividing = [virtual for virtual, _ in families if layers % virtual == 0]
    wanted = max(dividing, default=1) if pp > 2 else 1
    return [found for virtual, found in families if virtual == wanted]
