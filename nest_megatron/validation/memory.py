"""Memory as sources measure it: which GPU, and with or without what the allocator does not see."""

from __future__ import annotations

from nest_megatron.cluster.records import Accelerator
from nest_megatron.units import Bytes
from nest_megatron.validation.golden import is_local
from nest_megatron.validation.job import RowJob
from nest_megatron.validation.predict import RowPrediction
from nest_megatron.validation.rows import Row

_MIB = 2**20
#: Workspaces of cuBLAS that PyTorch holds: one for the forward and one for the backward thread.
_CUBLAS_HANDLES = 2
#: ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, and what PyTorch takes without it on Hopper.
_CUBLAS_LARGE = 32 * _MIB
#: ``:4096:2:16:8``, what PyTorch takes on every other GPU.
_CUBLAS_SMALL = 8 * _MIB + 128 * 1024
#: Workspace of Transformer Engine, from Hopper on and before (``get_cublas_workspace_size_bytes``).
_ENGINE_LARGE, _ENGINE_SMALL = 32 * _MIB, 4 * _MIB
#: Streams of Transformer Engine's grouped GEMMs.
_GROUPED_STREAMS = 4
_BEFORE_HOPPER = ("v100", "a100", "a800", "mi")


#: What PyTorch's allocator holds at its peak over what it has given out. SimuMax prints both for
#: one node of B200: 1.03 to 1.08 times; jobs of 2021 and 2022 lie higher.
_HELD, _CACHED = 1.06, 1.2


def workspace_bytes(
    accelerator: Accelerator, *, deterministic: bool, engine: bool = True, grouped: bool = False
) -> Bytes:
    """What libraries take from PyTorch's allocator and keep.

    Args:
        deterministic: ``CUBLAS_WORKSPACE_CONFIG`` is set as deterministic runs set it.
        engine: layers are Transformer Engine's; Megatron's own take another handle of cuBLAS.
        grouped: experts run as grouped GEMMs, on streams with a workspace each.
    """
    name = accelerator.name.lower()
    hopper = name.startswith(("h100", "h20", "h800", "gh200"))
    cublas = _CUBLAS_LARGE if deterministic or hopper else _CUBLAS_SMALL
    large = not name.startswith(_BEFORE_HOPPER)
    if not engine:
        return (_CUBLAS_HANDLES + 1) * cublas
    own = _ENGINE_LARGE if large else _ENGINE_SMALL
    return _CUBLAS_HANDLES * cublas + own * (1 + _GROUPED_STREAMS * grouped)


def predicted_memory(row: Row, job: RowJob, prediction: RowPrediction) -> Bytes | None:
    """Peak bytes of the GPU that the row speaks of; ``None`` where they follow from a choice.

    A job that may have had several micro batches, or may have computed several things again, was
    taken to be the fastest of those that fit; its peak says nothing of the formula.

    Rank 0 is on the first pipeline stage; everything else is taken as the GPU with the highest
    peak. What a process takes as a whole (``nvidia-smi``, "device memory") holds what the allocator
    caches too, and the reserve outside it. torchtitan prints what the allocator holds
    (``max_reserved_gib``).
    """
    if len({(grid.micro_batch_size, grid.recompute) for grid in job.grids}) > 1:
        return None
    scope = f"{row.get('peak_mem_scope', '')} {row.get('peak_mem_unit', '')}".lower()
    stages = prediction.stage_memory
    peak = stages[0] if "rank-0" in scope or "rank 0" in scope else max(stages)
    if "torchtitan" in row.get("framework", "").lower():
        return round(peak * _HELD)
    if "device memory" in scope:
        return round(peak * _HELD) + job.settings.memory_reserve_bytes
    if "nvidia-smi" not in scope:
        return peak
    return round(peak * _CACHED) + job.settings.memory_reserve_bytes


def predicted_golden(row: Row, job: RowJob, prediction: RowPrediction) -> Bytes:
    """Peak bytes that PyTorch's allocator gave out on the last pipeline stage."""
    return prediction.stage_memory[-1] + workspace_bytes(
        job.cluster.accelerator,
        deterministic=row.get("deterministic") == "1",
        engine=not is_local(row),
        grouped="moe-grouped-gemm=True" in row.get("extra_args", ""),
    )
