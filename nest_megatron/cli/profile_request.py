"""What ``nest-megatron profile`` times: a model by its settings, or what decides between plans."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nest_megatron.api import load_plan
from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cluster.records import Precision
from nest_megatron.config.catalogue import read_spec
from nest_megatron.config.compose import compose
from nest_megatron.config.job import read_precision
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import LAYER_DEGREES
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.megatron_core.stage import Where
from nest_megatron.megatron_core.substitutes import quiet
from nest_megatron.model.execution import Implementation
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.to_measure import undecided
from nest_megatron.printing import print_to_stderr
from nest_megatron.profile.installed import installed_versions
from nest_megatron.profile.session import (
    Ranks,
    Task,
    divides,
    tasks_of,
    telling_apart,
    usual_shards,
)
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
        count = torch.cuda.device_count()
        if 1 < count < here.local_size:  # one alone may be its own, as some launchers have it
            raise UserInputError(
                "processes of this host",
                here.local_size,
                f"this host shows {count} GPUs, and processes that share one time each other",
                f"Start {count} processes on each host.",
            )
        torch.cuda.set_device(here.local_rank % count)
        free, total = torch.cuda.mem_get_info()
        if total - free > _IDLE * total:
            gpu = f"GPU {torch.cuda.current_device()} ({torch.cuda.get_device_name()})"
            print_to_stderr(
                f"warning: {format_gib(total - free)} of {gpu} are in use before anything is timed."
                " What else runs there makes times longer: end it (nvidia-smi names it)."
            )
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
        what, fix = "it needs a GPU and the package transformer-engine", "Use local."
        if has_engine:
            what = ""
            try:
                importlib.import_module("transformer_engine.pytorch")
            except (ImportError, OSError) as error:
                what = f"transformer-engine is installed, but does not load: {error}"
                fix = "Repair it, or add --implementation local."
        if what:
            raise UserInputError("--implementation", chosen.value, what, fix)
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
    raise UserInputError(
        "torch",
        str(torch.__version__),
        limit,
        "Install torch for CUDA, or look at CUDA_VISIBLE_DEVICES; --cpu times the CPU.",
    )


#: Share of a GPU's memory that CUDA itself and an idle process may hold.
_IDLE = 0.05


@frozen
class ProfileRequest:
    """What is to be timed.

    Args:
        layouts: that need their shapes first.
        plan: whose undecided layouts these are; their differences alone are timed.
        names: of these layouts in the plan's tables.
    """

    spec: TransformerSpec
    precision: Precision
    layouts: tuple[Layout, ...]
    plan: ParallelPlan | None = None
    names: str = ""

    def tasks(self, *, flash_attention: bool) -> tuple[Task, ...]:
        """The blocks to time, those that are needed first before others."""
        spec = self.spec
        shards = [
            LayerShard(
                **{name: getattr(layout.dims, name) for name in LAYER_DEGREES},
                micro_batch_size=layout.micro_batch_size,
                sequence_parallel=layout.dims.tensor_model_parallel_size > 1,
                flash_attention=flash_attention,
            )
            for layout in self.layouts
            if divides(spec, layout.dims.tensor_model_parallel_size)
        ]
        if self.plan is not None:
            return telling_apart(spec, shards)
        return tasks_of(spec, (*shards, *usual_shards(spec, flash_attention=flash_attention)))


def request_of_settings(overrides: Sequence[str], config_dir: Path | None) -> ProfileRequest:
    """The layers of a model; with a cluster first those of the best plans by data sheets."""
    settings = parse(overrides)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    if composed.out is not None:
        fix = "Leave it out; `nest-megatron profiles export NAME --out FILE` writes one."
        raise UserInputError("out", composed.out, "profiles are kept in the store", fix)
    spec = read_spec(composed)
    precision = read_precision(composed)
    _require_timed(spec, precision)
    layouts: tuple[Layout, ...] = ()
    if composed.cluster is not None:
        found = find_plan(dataclasses.replace(request_of(composed), times=None))
        if isinstance(found, ParallelPlan):
            layouts = (found.layout, *(other.layout for other in found.alternatives))
    return ProfileRequest(spec=spec, precision=precision, layouts=layouts)


def request_of_plan(path: Path) -> ProfileRequest:
    """What decides between a plan and those of its runners-up that could be the fastest."""
    plan = load_plan(path).record
    _require_timed(plan.model, plan.train.precision)
    numbers = undecided(plan)
    if len(numbers) < 2:
        raise UserInputError(
            "--for",
            str(path),
            "it lists no other layout that could be the fastest, so that nothing is undecided",
            "`nest-megatron profile model=...` times the layers of a model.",
        )
    others = [other.layout for other in plan.alternatives]
    return ProfileRequest(
        spec=plan.model,
        precision=plan.train.precision,
        layouts=tuple([plan.layout, *others][number] for number in numbers),
        plan=plan,
        names=_names(sorted(numbers)),
    )


def _names(numbers: Sequence[int]) -> str:
    """What a plan's tables call layouts.

    >>> _names([0, 1]), _names([0, 2, 3])
    ('the plan and runner-up 1', 'the plan and runners-up 2, 3')
    """
    others = [str(number) for number in numbers if number]
    what = "runner-up" if len(others) == 1 else "runners-up"
    plan = "the plan and " if 0 in numbers else ""
    return f"{plan}{what} {', '.join(others)}"


def _require_timed(spec: TransformerSpec, precision: Precision) -> None:
    if spec.family is not ModelFamily.GPT:
        raise UserInputError(
            "model",
            spec.name,
            "only the layers of GPT-like models are built here",
            "Profile a GPT-like model; BERT is planned from data sheets.",
        )
    if precision is not Precision.BF16:
        raise UserInputError(
            "train.precision",
            precision.value,
            "layers of the catalogue's models are timed in bf16",
            "Use bf16; +nest=auto nest.profile.mode=measure times a job in its own format.",
        )
