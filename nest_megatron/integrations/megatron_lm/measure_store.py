"""What to measure for a job, and what of it the profile store knows already, failures included.

The most useful comes first: the best plans' shapes, then near ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cluster.records import Precision
from nest_megatron.config.layout import LAYER_DEGREES
from nest_megatron.cost_model.model import CostModel
from nest_megatron.documents import read_json
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.files import now
from nest_megatron.integrations.megatron_lm.measure_child import Answer, Orders
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.planner import Request
from nest_megatron.profile import store
from nest_megatron.profile.installed import driver_version
from nest_megatron.profile.lookup import Point, point_of, shard_of
from nest_megatron.profile.profile_file import LAYERS
from nest_megatron.profile.records import (
    LayerProfile,
    Machine,
    default_name,
    fingerprint,
    shape_digest,
)
from nest_megatron.profile.session import Skipped, Task, tasks_of, this_machine
from nest_megatron.solver.grids import GridSpace

#: A block and the point that its time depends on.
Shape = tuple[LayerBlock, Point]


def tasks_for(
    plan: ParallelPlan, request: Request, implementation: Implementation
) -> tuple[Task, ...]:
    """Layer blocks and shapes in the order in which they are to be timed, from ``plan`` on."""
    like = LayerShard(flash_attention=implementation is Implementation.TRANSFORMER_ENGINE)
    best = _shard(plan.layout, like)

    def distance(shard: LayerShard) -> tuple[float, ...]:
        """Doublings from the best shape; what is equally far goes by size."""
        pairs = zip(_degrees(shard), _degrees(best), strict=True)
        return (math.fsum(abs(math.log2(a / b)) for a, b in pairs), *_degrees(shard))

    near = sorted(set(_legal(request, like)), key=distance)
    others = (_shard(other.layout, like) for other in plan.alternatives)
    return tasks_of(request.spec, (best, *others, *near))


def shape_of(spec: TransformerSpec, task: Task) -> Shape:
    """What tells two tasks apart: the block, and what its time depends on."""
    return task.block, point_of(spec, task.block, task.shard)


def _shard(layout: PartialLayout, like: LayerShard) -> LayerShard:
    return dataclasses.replace(
        like,
        **{name: getattr(layout.dims, name) for name in LAYER_DEGREES},
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=layout.sequence_parallel,
    )


def _legal(request: Request, like: LayerShard) -> Iterator[LayerShard]:
    """Shapes that the search may choose and whose groups lie inside a node."""
    model = CostModel(request.spec, request.cluster, request.settings)
    node = request.cluster.gpus_per_node
    for grid in GridSpace(model, request.global_batch_size, request.space).shards():
        dims = grid.dims
        inside = max(dims.tensor_model_parallel_size, dims.expert_ranks) <= node
        if inside and dims.context_parallel_size == 1:
            yield _shard(grid, like)


def _degrees(shard: LayerShard) -> tuple[int, ...]:
    return (
        shard.tensor_model_parallel_size,
        shard.micro_batch_size,
        shard.expert_model_parallel_size,
        shard.expert_tensor_parallel_size,
    )


#: What tells this machine, set up as it is now, from others.
_IDENTITY = (
    "device_name",
    "is_cpu",
    "implementation",
    "driver",
    "torch",
    "megatron_core",
    "transformer_engine",
)


def here(implementation: Implementation) -> Machine:
    """This machine as far as it is known without CUDA: its GPU as the driver names it, or its CPU.

    Raises:
        UserInputError: if GPUs are here that cannot be used.
    """
    try:
        gpus = local_gpus()
    except UserInputError as error:
        raise UserInputError(
            "nest.profile.mode",
            "measure",
            f"{error.what} = {error.value}: {error.limit}",
            "Leave nest.profile.mode=measure out.",
        ) from error
    machine = this_machine(Where.CPU, implementation)
    if gpus is None:
        return machine
    return dataclasses.replace(
        machine, device_name=gpus.device_name, is_cpu=False, driver=driver_version()
    )


def is_same(machine: Machine, other: Machine) -> bool:
    """Whether two machines are one as far as ``here`` knows; builds of a version are alike."""

    def identity(each: Machine) -> list[str]:
        return [str(getattr(each, name)).partition("+")[0] for name in _IDENTITY]

    return identity(machine) == identity(other)


def stored_profile(
    spec: TransformerSpec, precision: Precision, machine: Machine
) -> LayerProfile | None:
    """The newest profile that was measured on a machine, of these layers."""
    layers, found = shape_digest(spec, precision), []
    for entry in store.stored_entries():
        with contextlib.suppress(ProfileError):  # a broken file is named where it is looked for
            if entry.line(LAYERS) == layers:
                found.append(entry.read())
    own = (p for p in found if not p.imported and is_same(p.machine, machine))
    return max(own, key=lambda p: datetime.fromisoformat(p.created), default=None)


def missing(
    spec: TransformerSpec, tasks: Iterable[Task], profile: LayerProfile | None
) -> tuple[Task, ...]:
    """The tasks that a profile has neither timed nor found impossible."""
    if profile is None:
        return tuple(tasks)
    anything = LayerShard()
    timed = (Task(timing.block, shard_of(timing, anything)) for timing in profile.timings)
    failed = (skipped.task for skipped in untimed(profile))
    known = {shape_of(spec, task) for task in (*timed, *failed)}
    return tuple(task for task in tasks if shape_of(spec, task) not in known)


def untimed_file(profile: LayerProfile) -> Path:
    """The file of what could not be timed for a profile, which is not tried each time."""
    identity = fingerprint(profile.machine, profile.model, profile.precision)
    return store.profiles_folder() / f".untimed-{identity}.json"


def untimed(profile: LayerProfile) -> tuple[Skipped, ...]:
    """What could not be timed for a profile; a file that cannot be read says nothing."""
    try:
        lines = read_json(untimed_file(profile), "list of what was not timed")
        return tuple(from_plain(Skipped, line) for line in lines)
    except (ValueError, TypeError):
        return ()


def record(answer: Answer, orders: Orders, name: str | None) -> LayerProfile | None:
    """Put what was measured into the store; ``None`` where nothing was timed.

    Args:
        name: of a profile that is new; made up if not given.

    Raises:
        ProfileError: if the store cannot be written to, or the name is taken by another profile.
    """
    if answer.machine is None or not answer.timings:
        return None
    profile = store.record(
        LayerProfile(
            name=name or default_name(answer.machine, orders.spec, orders.precision),
            created=now(),
            precision=orders.precision,
            machine=answer.machine,
            model=orders.spec,
            timings=answer.timings,
        )
    )
    failed = (*untimed(profile), *answer.skipped)
    shapes = {shape_of(profile.model, one.task): one for one in failed}
    if shapes:
        text = json.dumps([to_plain(one) for one in shapes.values()])
        with contextlib.suppress(OSError):
            untimed_file(profile).write_text(text, encoding="utf-8")
    return profile
