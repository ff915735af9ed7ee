"""The device that ``nest-megatron profile`` times on: chosen, or refused with the reason."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.stage import Where
from nest_megatron.megatron_core.substitutes import quiet
from nest_megatron.model.implementation import Implementation
from nest_megatron.printing import print_to_stderr
from nest_megatron.profile.installed import installed_versions
from nest_megatron.profile.session import Ranks
from nest_megatron.units import format_gib

if TYPE_CHECKING:
    from nest_megatron.profile.layer_timer import Measuring


def measuring_here(here: Ranks, implementation: str | None, *, on_cpu: bool) -> Measuring:
    """Where and how this process measures; its device is chosen here."""
    import torch

    with quiet():
        from nest_megatron.profile.layer_timer import Measuring

    where = Where.GPU if torch.cuda.is_available() and not on_cpu else Where.CPU
    if where is Where.GPU:
        torch.cuda.set_device(here.local_rank % _num_gpus(here))
        _tell_others()
    else:
        if not on_cpu:
            _require_no_gpu()
        cores = len(os.sched_getaffinity(0))  # more threads than these wait for one another
        torch.set_num_threads(max(1, cores // here.local_size))
    has_engine = where is Where.GPU and "transformer_engine" in installed_versions()
    chosen = Implementation.TRANSFORMER_ENGINE if has_engine else Implementation.LOCAL
    if implementation is not None:
        chosen = Implementation(implementation)
    if chosen is Implementation.TRANSFORMER_ENGINE:
        _require_engine(has_engine)
    return Measuring(where=where, implementation=chosen)


def _require_no_gpu() -> None:
    """Refuse to time the CPU where the driver has GPUs that torch does not see."""
    import torch

    try:
        gpus = local_gpus()
        found = None if gpus is None else gpus.describe()
    except UserInputError as error:  # there are some, of which no job is planned
        found = f"{error.value} ({error.limit})"
    if found is None:
        return
    limit = f"it sees none of this host's GPUs: {found}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # as a torch without CUDA has it
        limit += f"; it says: {next(iter(str(error).splitlines()), '')}"
    fix = "Install torch for CUDA, or look at CUDA_VISIBLE_DEVICES; --cpu times the CPU."
    raise UserInputError("torch", str(torch.__version__), limit, fix)


#: Share of a GPU's memory that CUDA itself and an idle process may hold.
_IDLE = 0.05


def _tell_others() -> None:
    """Say that a GPU is in use before anything is timed on it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    if total - free > _IDLE * total:
        gpu = f"GPU {torch.cuda.current_device()} ({torch.cuda.get_device_name()})"
        told = f"{format_gib(total - free)} of {gpu} are in use before anything is timed"
        fix = "What else runs there makes times longer: end it (nvidia-smi names it)"
        print_to_stderr(f"warning: {told}. {fix}.")


def _num_gpus(here: Ranks) -> int:
    """GPUs that this process sees; one alone may be its own, as some launchers have it."""
    import torch

    count = int(torch.cuda.device_count())
    if 1 < count < here.local_size:
        limit = f"this host shows {count} GPUs, and processes that share one time each other"
        fix = f"Start {count} processes on each host."
        raise UserInputError("processes of this host", here.local_size, limit, fix)
    return count


def _require_engine(has_engine: bool) -> None:
    """Refuse to time Transformer Engine's layers where they are not, or do not load."""
    limit, fix = "it needs a GPU and the package transformer-engine", "Use local."
    if has_engine:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError) as error:
            limit = f"transformer-engine is installed, but does not load: {error}"
            fix = "Repair it, or add --implementation local."
        else:
            return
    value = Implementation.TRANSFORMER_ENGINE.value
    raise UserInputError("--implementation", value, limit, fix)
