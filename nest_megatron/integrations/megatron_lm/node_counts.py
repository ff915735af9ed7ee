"""A plan of one job for each of several numbers of nodes, so that it can go on on any of them.

The batch stays as it is. Every plan loads the checkpoints that one of them saves, by the rules of
``checkpoint.py``: those hold the search for all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Requirement
from nest_megatron.config.space import check_quotients, require_all_gpus
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import checkpoint
from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint, checkpoint_of_plan
from nest_megatron.integrations.megatron_lm.search_space import with_required
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import frozen
from nest_megatron.planner import Progress, Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.plan_table import PlanTable, TableEntry
from nest_megatron.planner.shortage import binding_rules
from nest_megatron.report.failure import WITHOUT_PLAN, require_plan
from nest_megatron.solver.space import DEGREES
from nest_megatron.units import Seconds, format_seconds

#: Why a checkpoint loads on no other number of replicas without a flag.
_WHY = {
    "ddp_bucket_size": "the optimizer's state lies by bucket, and their size follows the replicas",
    "no_load_rng": "beside experts, random states are saved by replica",
}
#: An entry with its plan, if it has one.
Planned = tuple[TableEntry, ParallelPlan | None]


def gpus_per_host(cluster: Cluster) -> int:
    """GPUs that one more host brings.

    Raises:
        UserInputError: for a cluster whose description has no hosts.
    """
    size = cluster.host_size
    if size is None:
        raise UserInputError(
            f"cluster {cluster.name}",
            None,
            "its description does not say how many GPUs a host has",
            "Describe a level of the node, or give gpus_per_host.",
        )
    return size


def settings_for_nodes(composed: Settings, counts: Sequence[int]) -> Settings:
    """A configuration with the cluster at the size of the most nodes.

    Raises:
        UserInputError: if there is no cluster, or its ``cluster.num_gpus`` is less.
    """
    require_all_gpus(composed, "each row of --for-nodes")
    cluster = read_cluster(composed)
    most = max(counts) * gpus_per_host(cluster)
    if "cluster.num_gpus" in composed.given and cluster.num_gpus < most:
        raise UserInputError(
            "--for-nodes",
            max(counts),
            f"they have {most} GPUs, and cluster.num_gpus={cluster.num_gpus}",
            f"Leave cluster.num_gpus out, or raise it to {most}.",
        )
    fields = {**(composed.cluster or {}), "num_gpus": most}
    return replace(composed, cluster=fields, given={**composed.given, "cluster.num_gpus": None})


@frozen
class Resharding:
    """A checkpoint that plans for other numbers of nodes load.

    Args:
        needed: flags, besides the job's own, without which it loads on no other number of
            replicas, by destination.
        values: the job's arguments with those.
    """

    saved: SavedCheckpoint
    needed: Mapping[str, int | bool]
    values: Mapping[str, Any]

    def required(self) -> Mapping[str, Requirement]:
        """What a plan that loads it must keep."""
        who = str(self.saved.directory)
        needs = checkpoint.requirements(self.saved, self.values)
        return {name: replace(need, who=who) for name, need in needs.items()}


@frozen
class TableJob:
    """A job to plan for several numbers of nodes.

    Args:
        request: of the largest one.
        values: the job's arguments by destination; Megatron's defaults where there is no command.
        version: of Megatron-LM, whose rules say what a checkpoint can be loaded into.
        finished: makes a plan that is found one that is launched, and may refuse it.
    """

    request: Request
    version: str
    finished: Callable[[ParallelPlan], ParallelPlan]
    values: Mapping[str, Any] = field(default_factory=dict)
    on_progress: Progress | None = None

    def request_for(self, num_gpus: int, loads: Resharding | None) -> Request:
        """What to plan for so many GPUs; an error if what is fixed does not divide them."""
        request = self.request
        space = self.request.space
        if loads is not None:
            space = with_required(space, request.spec, loads.required())
        cluster = request.cluster.resized(num_gpus)
        check_quotients(space, num_gpus, request.global_batch_size)
        today = request.present  # runs on the GPUs of its own number alone
        if today is not None and today.num_gpus != num_gpus:
            today = None
        return replace(
            request, cluster=cluster, space=space, present=today, begun_s=None, remedies=False
        )

    def plan(self, asked: Request, loads: Resharding | None) -> ParallelPlan:
        """The plan that is asked for."""
        found = require_plan(find_plan(asked, self.on_progress), asked.notes)
        if loads is not None:
            self.check_loadable(found, loads)
        return self.finished(found)

    def check_loadable(self, plan: ParallelPlan, loads: Resharding) -> None:
        """Refuse a plan that does not load a checkpoint."""
        checkpoint.check_loadable(loads.saved, plan.arguments, loads.values, self.version)

    def checkpoint_of(self, plan: ParallelPlan, num_nodes: int) -> Resharding:
        """What the plan for so many nodes saves.

        Source of the flags: ``_check_optimizer`` and ``_check_rng`` of ``checkpoint.py``.
        """
        name = f"the checkpoint of the plan for {num_nodes} nodes"
        needed = dict[str, int | bool]()
        experts = self.request.spec.num_experts
        values = {"num_experts": experts, "moe_grouped_gemm": bool(experts), **self.values}
        saved = checkpoint_of_plan(plan, values, self.version, name)
        dims = plan.layout.dims
        own = saved.arguments
        bucket = 1_000_000 * dims.data_parallel_size * dims.context_parallel_size
        is_bucketed = saved.distrib_optim_sharding_type == "dp_reshardable"
        is_fixed = own["ddp_bucket_size"] or own["ddp_num_buckets"]
        if is_bucketed and plan.layout.overlap_grad_reduce and bucket > 40_000_000 and not is_fixed:
            needed["ddp_bucket_size"] = bucket
        if len(saved.rng_shape or ()) > 2 and not self.values.get("no_load_rng"):
            needed["no_load_rng"] = True
        saved = replace(saved, arguments={**own, **needed})
        return Resharding(saved=saved, needed=needed, values=values | needed)


def plan_for_nodes(job: TableJob, counts: Sequence[int]) -> PlanTable:
    """A plan for each number of nodes, and why where there is none.

    Each number is planned by itself first. What one of these plans saves then holds the plans for
    the others: of those with which the job goes on with the most numbers of nodes, some of them
    idle, the one with the shortest step with the most nodes.

    Raises:
        NothingFitsError, SearchEndedError: if there is no plan for any of them.
        UserInputError: if none has, and no layout of the most nodes is legal.
    """
    alone = [_plan_entry(job, nodes, None) for nodes in sorted(counts, reverse=True)]
    # what all plans may load: one checkpoint of each layout, that of the most nodes first
    candidates: dict[tuple[object, ...], Resharding] = {}
    for entry, plan in alone:
        if plan:
            loads = job.checkpoint_of(plan, entry.num_nodes)
            layout = tuple(need.value for need in loads.required().values())
            candidates.setdefault(layout, loads)
    tables = [(loads, _plans_that_load(job, alone, loads)) for loads in candidates.values()]
    if not tables:
        most = alone[0][0]
        asked = job.request_for(most.num_gpus, None)
        about = f"No number of nodes has a plan; this is about {most.num_nodes}."
        job.plan(replace(asked, remedies=True, notes=(*asked.notes, about)), None)
    loads, found = max(tables, key=lambda each: _worth(each[1]))
    return PlanTable(
        entries=_entries_with_advice(found, _best_below(job, found, loads)),
        plans={plan_file.checksum(plan): plan for _, plan in found if plan},
        notes=tuple(_notes(loads)),
    )


def _plans_that_load(job: TableJob, alone: Sequence[Planned], loads: Resharding) -> list[Planned]:
    """The plans that load a checkpoint, most nodes first: those found alone, where they do."""
    found = [*alone]
    for at, (entry, plan) in enumerate(alone):
        try:
            if plan:
                job.check_loadable(plan, loads)
        except UserInputError:
            found[at] = _plan_entry(job, entry.num_nodes, loads)
    return found


def _worth(found: Sequence[Planned]) -> tuple[float, ...]:
    """With how many numbers of nodes the job goes on, then how fast, with the most nodes first.

    Where a number has no plan, or a slow one, some of its nodes stay idle.
    """
    rates = (1.0 / plan.predicted.iteration_time_s if plan else 0.0 for _, plan in reversed(found))
    steps_per_s = [*accumulate(rates, max)]
    return sum(each > 0 for each in steps_per_s), *reversed(steps_per_s)


def _plan_entry(job: TableJob, num_nodes: int, loads: Resharding | None) -> Planned:
    """An entry with its plan, or with the reason why it has none."""
    num_gpus = num_nodes * gpus_per_host(job.request.cluster)
    asked = checksum = plan = None
    told = ""
    try:
        asked = job.request_for(num_gpus, loads)
        plan = job.plan(asked, loads)
        checksum = plan_file.checksum(plan)
    except UserInputError as error:
        broken = next(iter(() if asked is None else binding_rules(asked)), error)
        told = f"no layout is legal ({broken.what} = {broken.value}: {broken.limit})."
    except WITHOUT_PLAN as error:
        told = f"{error}."
    return TableEntry(num_nodes=num_nodes, num_gpus=num_gpus, checksum=checksum, told=told), plan


def _best_below(
    job: TableJob, found: Sequence[Planned], loads: Resharding
) -> tuple[int, Seconds] | None:
    """Nodes and step of the plan for the most nodes below all, where the fewest have no plan."""
    least, plan = found[-1]
    size = least.num_gpus // least.num_nodes
    with contextlib.suppress(*WITHOUT_PLAN):  # fewer nodes have less memory
        for nodes in () if plan else range(least.num_nodes - 1, 0, -1):
            with contextlib.suppress(UserInputError):
                smaller = job.plan(job.request_for(nodes * size, loads), loads)
                return nodes, smaller.predicted.iteration_time_s
    return None


def _notes(loads: Resharding) -> Iterator[str]:
    """What holds all plans but the first, and what their command needs."""
    needs = loads.required().items()
    for reason in dict.fromkeys(need.reason for name, need in needs if name in DEGREES):
        yield f"All plans load {loads.saved.directory}, and keep its layout: {reason}."
    for name, value in loads.needed.items():
        flag = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        yield f"Launch all of them with {flag}: {_WHY[name]}; without it no other number loads."


def _entries_with_advice(
    found: Sequence[Planned], best: tuple[int, Seconds] | None
) -> tuple[TableEntry, ...]:
    """The entries, fewest nodes first, with what fewer nodes do better.

    Args:
        best: the best number of nodes below all entries, and its step.
    """
    advised = []
    for entry, plan in sorted(found, key=lambda each: each[0].num_nodes):
        step = plan.predicted.iteration_time_s if plan else None
        told = entry.told
        if best is not None and (step is None or step > best[1]):
            nodes, shorter = best
            idle = f"with {entry.num_nodes - nodes} of them idle"
            told = f"{told} {nodes} nodes, {idle}, take {format_seconds(shorter)} a step.".lstrip()
        elif step is not None:
            best = entry.num_nodes, step
        advised.append(replace(entry, told=told))
    return tuple(advised)
