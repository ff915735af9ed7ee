"""The recurrence's problems, priced by the shared cost model, and the loops over them.

Strategies and replicas are tried the most promising first.

Exact over what ``ResearchChoices`` allows: every case whose lower bound is below the best plan so
far is solved. The first rounds look for a plan not far above the least bound of all, so that the
tables are filled with caps; a round that finds a plan has found the best one.

Of one problem, the objective has two maxima, of the stages' times and of their gradient sums. The
second is met by caps that come down: the table is filled without a cap, then with sums below what a
better plan can still have, until none can be better. Nothing is lost: a plan that beats the best so
far by a total of ``limit`` has a bottleneck of at least the last table's, and so a sum below
``limit`` less that.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from operator import mul

from nest_megatron.errors import UserInputError
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import ACT
from nest_megatron.packages import is_built
from nest_megatron.plain import frozen
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp import reference
from nest_megatron.research.nest_dp.job import Division, ResearchJob, Strategy, strategies
from nest_megatron.research.nest_dp.layers import LayerPrices
from nest_megatron.research.nest_dp.records import (
    UNREACHABLE,
    FoundPipeline,
    LayerDag,
    PricedStrategy,
    Problem,
    Tables,
    ZeroOption,
    downsets_of,
    tables_of,
)
from nest_megatron.research.nest_dp.topology import (
    GroupShapes,
    LinkLevel,
    Replicas,
    Shape,
    common_unit,
    level_ends,
    link_levels,
    send_ticks,
)
from nest_megatron.units import Bytes, Ticks


@frozen
class Case:
    """Strategies that the stages of one pipeline may take, its replicas, a bound on its step."""

    strategies: tuple[Strategy, ...]
    replicas: Replicas
    num_microbatches: int
    least_total: Ticks

    @property
    def stage_devices(self) -> list[int]:
        """Devices of a stage, by strategy."""
        return [strategy.block.num_devices for strategy in self.strategies]


class Pricer:
    """Prices the cases of one job; what cases share is worked out once."""

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.kinds = job.spec.layer_kinds()
        self.downsets = downsets_of(LayerDag.chain(node_names(self.kinds)))
        self.link_levels = link_levels(job.cluster, job.choices.topology)
        self.layers = LayerPrices(job)
        self._group_shapes = cache(partial(GroupShapes, job.cluster.group_sizes()))
        self._crossing = cache(self._crossing_bytes)
        self._send = cache(self._send_ticks)

    def lacks_memory(self, case: Case) -> bool:
        """Whether a replica's devices together hold less than its layers alone take.

        ZeRO divides over devices that the stage takes besides, so it changes nothing in the sum.
        """
        static = [self.layers.static_bytes(s, ZeroStage.NONE, 1)[0] for s in case.strategies]
        layers = zip(*static, strict=True)
        least: Bytes = sum(min(map(mul, each, case.stage_devices)) for each in layers)
        return least > case.replicas.stride * self.layers.capacity_bytes

    def problem(self, case: Case, most_stages: int) -> Problem:
        """A case as a problem."""
        possible = [level.num_devices for level in self.link_levels if self._may_link(level, case)]
        sizes = [*self.job.cluster.group_sizes(), *possible]
        unit = common_unit(sizes, case.replicas, case.stage_devices)
        shapes = self._group_shapes(case.replicas)
        ends = self._ends(case, unit)
        return Problem(
            downsets=self.downsets,
            ends=tuple(ends.values()),
            strategies=tuple(
                PricedStrategy(
                    label=strategy.label(),
                    options=tuple(self._options(strategy, shapes, unit)),
                    policies=self.layers.policies(strategy, self._crossing(strategy)),
                    send=tuple(self._send(strategy)[level] for level in ends),
                )
                for strategy in case.strategies
            ),
            num_microbatches=case.num_microbatches,
            schedule=self.job.choices.schedule,
            capacity_bytes=self.layers.capacity_bytes,
            most_stages=most_stages,
            least_stages=self.job.choices.fixed.get("pipeline_model_parallel_size", 1),
            unit=unit,
            level_names=tuple(level.name for level in ends),
        )

    def _ends(self, case: Case, unit: int) -> dict[LinkLevel, Shape]:
        """Stretches of the levels that a link can have.

        Left out are levels too small for two stages, and of those that join the same devices all
        but the nearest.
        """
        found: dict[LinkLevel, Shape] = {}
        blocks = [level.num_devices for level in self.link_levels]
        all_ends = level_ends(blocks, case.replicas, unit)
        for level, ends in zip(self.link_levels, all_ends, strict=True):
            if self._may_link(level, case) and ends not in found.values():
                found[level] = ends
        return found

    def _may_link(self, level: LinkLevel, case: Case) -> bool:
        """Whether a block of it holds two stages; the last one always counts."""
        return level.num_devices >= 2 * min(case.stage_devices) or level is self.link_levels[-1]

    def _crossing_bytes(self, strategy: Strategy) -> tuple[int, ...]:
        """Bytes that a device takes in for each downset: the residual stream between layers."""
        shard, spec = self.layers.shard(strategy), self.job.spec
        size = math.ceil(shard.tokens_between_blocks(spec) * spec.hidden_size * ACT)
        return tuple(self.downsets.cut_bytes([size] * len(self.kinds)))

    def _send_ticks(self, strategy: Strategy) -> dict[LinkLevel, tuple[Ticks, ...]]:
        """For each level, ticks of what crosses into each downset."""
        crossing = self._crossing(strategy)
        known = {size: send_ticks(self.link_levels, size) for size in set(crossing)}
        levels = zip(*(known[size] for size in crossing), strict=True)
        return dict(zip(self.link_levels, levels, strict=True))

    def _options(self, strategy: Strategy, shapes: GroupShapes, unit: int) -> Iterator[ZeroOption]:
        """No ZeRO, then degrees 2, 4, 8, ... as devices allow, each from stage 1 to 3."""
        stage_devices = strategy.block.num_devices
        most = shapes.replicas.stride // stage_devices if self.job.choices.zero else 1
        none, *zeros = ZeroStage
        divided = product((1 << power for power in range(1, most.bit_length())), zeros)
        for degree, zero in ((1, none), *divided):
            distinct, numbers = shapes.along(strategy.block, degree, unit)
            static, reserved = self.layers.static_bytes(strategy, zero, degree)
            yield ZeroOption(
                zero_stage=zero,
                zero_degree=degree,
                num_devices=stage_devices * degree // unit,
                static_bytes=static,
                reserved_bytes=reserved,
                times_at=numbers,
                times=tuple(self.layers.times(strategy, each, zero, degree) for each in distinct),
            )


def node_names(kinds: Sequence[LayerKind]) -> list[str]:
    """Names of the layers of a model.

    >>> node_names([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE, LayerKind.HEAD])
    ['embedding', 'layer 0', 'layer 1', 'head']
    """
    layers = iter(range(len(kinds)))
    return [f"layer {next(layers)}" if kind.is_layer else str(kind) for kind in kinds]


has_kernel = partial(
    is_built, "nest_megatron.research.nest_dp._recurrence", "the recurrence is far slower"
)
#: How far above the least bound each round looks.
_ROUNDS = (1.05, 1.2, 1.5, 2.0, 4.0)


@frozen
class RecurrenceSolution:
    """The best plan.

    Args:
        num_cases: pairs of strategies and replicas that are allowed; of these ``num_solved`` had a
            bound low enough to be solved.
    """

    case: Case
    problem: Problem
    pipeline: FoundPipeline
    num_cases: int
    num_solved: int


def solve(job: ResearchJob, *, compiled: bool | None = None) -> RecurrenceSolution | NoSolution:
    """The fastest plan, or why there is none.

    Ties go to the case with the lower bound, then to fewer replicas.

    Args:
        compiled: as for ``best_pipeline``.

    Raises:
        UserInputError: if the rules and the batch leave no strategy.
    """
    pricer, best = Pricer(job), None
    found, solved = cases(pricer), set[Case]()
    for factor in (*_ROUNDS, None):
        limit = UNREACHABLE if factor is None else round(found[0].least_total * factor)
        for case in found:
            if case.least_total >= limit:
                break
            if pricer.lacks_memory(case):
                continue
            solved.add(case)
            problem = pricer.problem(case, _most_stages(pricer, case))
            pipeline = best_pipeline(problem, limit, compiled=compiled)
            if pipeline is not None:
                best, limit = (case, problem, pipeline), pipeline.total
        if best is not None:
            case, problem, pipeline = best
            return RecurrenceSolution(
                case=case,
                problem=problem,
                pipeline=pipeline,
                num_cases=len(found),
                num_solved=len(solved),
            )
    return _no_solution(pricer, found)


def cases(pricer: Pricer) -> list[Case]:
    """All strategies with all replicas, least bound first.

    Raises:
        UserInputError: if there are none.
    """
    found = [case for together in _together(pricer.job) for case in _cases(pricer, together)]
    if not found:
        raise UserInputError(
            "parallel.* and train.*",
            dict(pricer.job.choices.fixed),
            "no strategy fits the model, the batch and the devices",
            "Change the degrees that are fixed, the batch, or the number of GPUs.",
        )
    return sorted(found, key=lambda case: case.least_total)


def _together(job: ResearchJob) -> list[tuple[Strategy, ...]]:
    """Strategies that one pipeline may mix: each alone, or all with the same samples."""
    allowed = list(strategies(job))
    if not job.choices.strategy_per_stage:
        return [(strategy,) for strategy in allowed]
    samples = sorted({strategy.samples for strategy in allowed})
    return [tuple(strategy for strategy in allowed if strategy.samples == n) for n in samples]


def _cases(pricer: Pricer, together: tuple[Strategy, ...]) -> Iterator[Case]:
    job, choices = pricer.job, pricer.job.choices
    least = list(map(min, zip(*map(pricer.layers.least, together), strict=True)))
    whole, largest = sum(least), max(least)
    devices, batches = job.cluster.num_gpus, job.global_batch_size // together[0].samples
    narrowest = min(strategy.block.num_devices for strategy in together)
    most = choices.limits.get("data_parallel_size", devices)
    for count in range(1, min(devices // narrowest, batches, most) + 1):
        if choices.divide is Division.EXACTLY and (devices % count or batches % count):
            continue
        if choices.fixed.get("data_parallel_size", count) != count:
            continue
        stride, each = devices // count, -(-batches // count)
        yield Case(
            strategies=tuple(s for s in together if s.block.num_devices <= stride),
            replicas=Replicas(count=count, stride=stride),
            num_microbatches=each,
            # no pipeline takes less: some stage has the largest layer, and one its share of all
            least_total=min(
                max(largest, -(-whole // depth)) * (each + depth - 1)
                for depth in range(1, min(len(least), stride // narrowest) + 1)
            ),
        )


def _most_stages(pricer: Pricer, case: Case) -> int:
    name, choices = "pipeline_model_parallel_size", pricer.job.choices
    most = min(len(pricer.kinds), case.replicas.stride // min(case.stage_devices))
    return min(most, choices.fixed.get(name, most), choices.limits.get(name, most))


def _no_solution(pricer: Pricer, found: Sequence[Case]) -> NoSolution:
    """The least that is missing anywhere, looking at one case of each set of strategies."""
    widest = {case.strategies: case for case in sorted(found, key=lambda c: c.replicas.stride)}
    missing, node, label = min(_shortage(pricer, case) for case in widest.values())
    if missing > 0:
        reason = f"{node} alone lacks {missing / 1e9:.3f} GB on its devices with {label}"
    elif all(pricer.lacks_memory(case) for case in found):
        reason = "every layer fits alone, but all of them together take more than all devices have"
    else:
        reason = "every layer fits alone, but not in the depth that devices and layers allow"
    return NoSolution(reason=reason, missing_bytes=max(0, missing))


def _shortage(pricer: Pricer, case: Case) -> tuple[Bytes, str, str]:
    """What the layer that is worst off lacks alone in the last stage, at its best."""
    problem = pricer.problem(case, 1)
    further = problem.schedule.in_flight(1, problem.num_microbatches) - 1
    return max(
        min(
            (
                option.static_bytes[node]
                + option.reserved_bytes
                + policy.first_bytes[node]
                + further * policy.further_bytes[node]
                + policy.peak_bytes[node]
                - problem.capacity_bytes,
                name,
                strategy.label,
            )
            for strategy in problem.strategies
            for option, policy in product(strategy.options, strategy.policies)
        )
        for node, name in enumerate(problem.downsets.dag.names)
    )


def best_pipeline(
    problem: Problem, limit: Ticks = UNREACHABLE, *, compiled: bool | None = None
) -> FoundPipeline | None:
    """The fastest pipeline whose step takes less than ``limit``, if there is one.

    Ties go to fewer stages; ``reference.pipeline_of`` says how stages are chosen.

    Args:
        compiled: whether the kernel or the reference fills the tables; they agree bit for bit. The
            kernel where it is built, by default.
    """
    t = tables_of(problem)
    places = (times.sync for s in problem.strategies for o in s.options for times in o.times)
    # no plan stays below the sum of the node with the largest, at its best place
    least_sync: Ticks = max(min(sums) for sums in zip(*places, strict=True))
    sync_cap, found = UNREACHABLE, None
    while least_sync < sync_cap and least_sync < limit:
        table = filled(t, _caps(problem, limit - least_sync), sync_cap, compiled=compiled)
        depth = _best_depth(problem, t, table)
        if depth is None:
            break
        one = reference.pipeline_of(problem, t, table, depth, sync_cap)
        if one.total < limit:
            found, limit = one, one.total
        sync_cap = min(sync_cap, limit - (one.total - one.sync))
    return found


def filled(
    t: Tables, caps: Sequence[Ticks], sync_cap: Ticks, *, compiled: bool | None = None
) -> Sequence[int]:
    """The table of states.

    Args:
        caps: by number of stages; states count below this only.
        compiled: as for ``best_pipeline``.
    """
    if not (has_kernel() if compiled is None else compiled):
        return reference.filled(t, caps, sync_cap)
    from nest_megatron.research.nest_dp import _recurrence

    table = array("q", [0]) * t.table_size
    scratch = array("q", [0]) * (t.num_levels * (t.num_devices + 1) + len(t.options_first))
    question = [getattr(t, field.name) for field in dataclasses.fields(t)]
    question += [array("q", caps), sync_cap, table, scratch]
    _recurrence.fill(*question)
    return table


def _caps(problem: Problem, left: Ticks) -> list[Ticks]:
    """What a bottleneck must stay below at each depth, so that all its passes take less."""
    depths = range(1, problem.most_stages + 1)
    if left >= UNREACHABLE:
        return [UNREACHABLE] * (problem.most_stages + 1)
    return [0, *(-(-left // problem.num_steps(depth)) for depth in depths)]


def _best_depth(problem: Problem, t: Tables, table: Sequence[int]) -> int | None:
    best, found = UNREACHABLE, None
    for depth in range(problem.least_stages, t.most_stages + 1):
        least = table[t.at(depth, t.num_levels - 1, t.num_downsets - 1, t.num_devices)]
        whole = least * problem.num_steps(depth)
        if least < UNREACHABLE and whole < best:
            best, found = whole, depth
    return found
