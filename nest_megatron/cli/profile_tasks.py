"""What a profiling process is to time: shapes that plans need first, and are not stored yet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import Composed
from nest_megatron.config.request import request_of
from nest_megatron.config.target import read_precision
from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.substitutes import quiet
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.plan import Alternative, ParallelChoice, ParallelPlan
from nest_megatron.planner import plan
from nest_megatron.profile import store
from nest_megatron.profile.ranks import Ranks
from nest_megatron.profile.records import Machine, Timing, fingerprint, fingerprint_of
from nest_megatron.profile.shapes import divides, usual_shards

if TYPE_CHECKING:
    from nest_megatron.profile.layer_timer import Measuring
    from nest_megatron.profile.session import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What this process measures.

    Args:
        num_shapes: shapes that all ranks together should have.
        known: of these, those that were stored when this process looked.
    """

    spec: TransformerSpec
    precision: Precision
    machine: Machine
    ranks: Ranks
    tasks: tuple[Task, ...]
    num_shapes: int
    known: frozenset[object]


def session(
    composed: Composed,
    spec: TransformerSpec,
    ranks: Ranks,
    measuring: Measuring,
    *,
    again: bool,
) -> Session:
    """The tasks of one process.

    Args:
        again: time what is stored already, too.

    Raises:
        UserInputError: for a number format in which the catalogue's layers are not timed.
    """
    with quiet():
        from nest_megatron.profile.session import share_of, tasks_of, this_machine

        machine = this_machine(measuring.where, measuring.implementation)
    precision = read_precision(composed.config)
    _require_measurable(precision)
    known = () if again else _known(machine, spec, precision)
    flash = measuring.implementation is Implementation.TRANSFORMER_ENGINE
    shards = (*_wanted_shards(composed, spec, flash), *usual_shards(spec, flash_attention=flash))
    tasks = tasks_of(spec, shards)
    stored = frozenset(timing.shape for timing in known).intersection(map(_shape, tasks))
    # Shared out before what is known is left out: another rank may have stored its first by now.
    mine = share_of(tasks, ranks.rank, ranks.size)
    return Session(
        spec=spec,
        precision=precision,
        machine=machine,
        ranks=ranks,
        tasks=tuple(task for task in mine if _shape(task) not in stored),
        num_shapes=len(tasks),
        known=stored,
    )


def _require_measurable(precision: Precision) -> None:
    if precision is not Precision.BF16:
        raise UserInputError(
            "train.precision",
            value=precision.value,
            limit="layers of the catalogue's models are timed in bf16",
            fix="Use bf16; +nest=auto nest.profile.mode=measure times a job in its own format.",
        )


def _shape(task: Task) -> tuple[object, ...]:
    """What tells timings apart (``Timing.shape``)."""
    shard = task.shard
    return (
        task.block,
        shard.tensor_model_parallel_size,
        shard.context_parallel_size,
        shard.expert_model_parallel_size,
        shard.expert_tensor_parallel_size,
        shard.micro_batch_size,
        shard.sequence_parallel,
    )


def _known(machine: Machine, spec: TransformerSpec, precision: Precision) -> tuple[Timing, ...]:
    """Timings that the store holds already for this machine and these layers."""
    wanted = fingerprint(machine, spec, precision)
    profiles = (
        entry.read() for entry in store.stored_entries() if entry.line("fingerprint") == wanted
    )
    return tuple(
        timing
        for profile in profiles
        if not profile.imported and fingerprint_of(profile) == wanted
        for timing in profile.timings
    )


def _wanted_shards(
    composed: Composed, spec: TransformerSpec, flash: bool
) -> tuple[LayerShard, ...]:
    """Shards of the best plans by data sheets, where a cluster is given: they are needed first."""
    if composed.config.cluster is None:
        return ()
    request = request_of(composed)
    found = plan(dataclasses.replace(request, times=None))
    if not isinstance(found, ParallelPlan):
        return ()
    layouts: list[tuple[ParallelChoice | Alternative, int]] = [
        (found.parallel, found.train.micro_batch_size),
        *((other, other.micro_batch_size) for other in found.alternatives),
    ]
    return tuple(
        LayerShard(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            micro_batch_size=micro_batch_size,
            sequence_parallel=layout.tensor_model_parallel_size > 1,
            flash_attention=flash,
        )
        for layout, micro_batch_size in layouts
        if divides(spec, layout.tensor_model_parallel_size)
    )
