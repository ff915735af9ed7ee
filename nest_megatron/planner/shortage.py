"""Why a job has no plan, and what would help: no legal degrees, or too little memory.

Where none is legal, every combination that keeps what is fixed is held to the rules that a search
keeps to; those that break the fewest say what binds. Then each fixed value is left out alone, to
see which of them would make some combination legal.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product

from nest_megatron.cost_model.memory import capacity_bytes, within_error
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE, PeakLimit
from nest_megatron.errors import UserInputError
from nest_megatron.layout import rulebook
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import SearchRecord
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook.facts import Facts, Rule
from nest_megatron.layout.rulebook.search import CHOSEN, SearchStep, is_searched
from nest_megatron.model.execution import PLAIN
from nest_megatron.model.shard import LayerShard
from nest_megatron.planner.layouts import PredictedLayout, describe_grid
from nest_megatron.planner.request import Deadline, NoPlan, NumericOffer, Remedy, Request
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.executions import known_facts, launch_request
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.memory_shortage import Shortage, fits, least_memory
from nest_megatron.solver.outcome import OutOfTime
from nest_megatron.solver.ranking import SearchResult
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace

#: Largest cluster that is tried to make a job fit.
LARGEST_CLUSTER = 65_536
#: Finds a good layout of a request before some time, if there is one.
Find = Callable[[Request, Deadline], PredictedLayout | None]

#: Share of the time in which the number of GPUs is looked for, and the nearest plan.
_NUMBER_SHARE = 0.5
#: Share of all time in which the plan of one change is looked for.
_PLAN_SHARE = 0.05
#: Changes of what memory holds that are reported.
_MOST_OF_MEMORY = 5
#: Larger numbers of hosts are tried in steps of this share.
_STEP = 1 / 32


def refuse_if_nothing_is_legal(request: Request, result: SearchResult, deadline: Deadline) -> None:
    """Tell a job that no grid can hold from one that lacks memory.

    Args:
        deadline: when it passes, what was found until then is reported.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules.
    """
    if result.candidates:
        return
    broken = binding_rules(request, deadline.passed)
    rules = "; ".join(f"{rule.what} = {rule.value}: {rule.limit}" for rule in broken)
    rules = rules or "; ".join(result.illegal) or "nothing divides the GPUs"
    advice = _advice_on_fixed(request, deadline)
    if not advice and all(rule.what != "global_batch_size" for rule in broken):
        advice = " ".join(rule.fix for rule in broken)
    fix = advice or "Use a batch and a number of GPUs with more common divisors."
    if request.policy:
        rules += f"; within the policy of {', '.join(file.path for file in request.policy)}"
        fix += " Or ask the operators of the cluster."
    fixed = (f"{name}={value}" for name, value in _fixed(request.space).items())
    job = f"{request.cluster.num_gpus} GPUs, global batch {request.global_batch_size}"
    raise UserInputError(
        "the job",
        ", ".join([job, *fixed]),
        f"no combination of degrees is legal for {request.spec.name} ({rules})",
        fix,
    )


def _advice_on_fixed(request: Request, deadline: Deadline) -> str:
    """Which fixed values to free, as far as that makes some combination legal."""
    free = single_relaxations(request, deadline.passed)
    if free:
        alone = "any one of them" if len(free) > 1 else "that"
        return f"Change or free {' or '.join(free)}: {alone} alone makes it legal."
    if is_legal_without(request, tuple(_fixed(request.space)), deadline.passed):
        return "Change or free more than one of these: no single one alone makes it legal."
    return ""


def _fixed(space: SearchSpace) -> dict[str, object]:
    """The degrees, the ZeRO stage and the recomputation that are fixed."""
    fixed: dict[str, object] = {**space.fixed}
    if space.sharding is None and len(space.zero_stages) == 1:
        fixed["zero_stage"] = int(space.zero_stages[0])
    if space.recompute is not None:
        fixed["recompute_granularity"] = space.recompute.granularity
    return fixed


_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_DP, _MICRO = "data_parallel_size", "micro_batch_size"


def binding_rules(
    request: Request, out_of_time: OutOfTime = lambda: False
) -> tuple[UserInputError, ...]:
    """The rules that the least illegal combination breaks.

    Nothing where a combination breaks none of them, so that something else must bind, or where time
    did not allow to look at all. Degrees that do not multiply out say less than any rule.
    """
    found, fewest = tuple[UserInputError, ...](), (True, math.inf)
    for rules, facts, others in _broken(request):
        broken = len(rules) + len(others)
        if not broken or out_of_time():
            return ()
        number = not facts, broken
        if number < fewest:
            found, fewest = (*(rule.violation(facts) for rule in rules), *others), number
    return found


def single_relaxations(request: Request, out_of_time: OutOfTime = lambda: False) -> list[str]:
    """Fixed values, each of which makes some combination legal when it alone is left out.

    Args:
        out_of_time: once true, those found until then are returned.
    """
    return [n for n in _fixed(request.space) if is_legal_without(request, (n,), out_of_time)]


def is_legal_without(request: Request, names: Collection[str], out_of_time: OutOfTime) -> bool:
    """Whether some combination is legal where these fixed values are left out."""
    space = request.space
    space = replace(
        space,
        fixed={name: value for name, value in space.fixed.items() if name not in names},
        partition=None if {_PP, _VPP} & set(names) else space.partition,
        zero_stages=SearchSpace().zero_stages if "zero_stage" in names else space.zero_stages,
        recompute=None if "recompute_granularity" in names else space.recompute,
    )
    grids = GridSpace(request.cost_model(), request.global_batch_size, space)
    for shard in grids.shards():
        if out_of_time():
            return False
        if any(next(grids.families(grid), None) is not None for grid in grids.grids(shard)):
            return True
    return False


def _broken(request: Request) -> Iterator[tuple[list[Rule], Facts, list[UserInputError]]]:
    """The rules that each combination breaks, its facts, and what else does not go with it.

    Neither for one that only the search excludes.
    """
    space, spec = request.space, request.spec
    model, world = request.cost_model(), request.cluster.num_gpus
    batch = space.batch_unit or request.global_batch_size
    rules = [rule for rule in rulebook.RULES if is_searched(rule)]
    step = SearchStep(known_facts(model, space, batch), CHOSEN, rules)

    def values(name: str, number: int) -> list[int]:
        if name in space.fixed:
            return [space.fixed[name]]
        return space.values(name, number, request.cluster)

    experts = spec.num_experts or 1
    sizes = product(
        values(_TP, world),
        values(_CP, world),
        values(_PP, world),
        values(_EP, experts) if spec.is_moe else [1],
        values(_ETP, world) if spec.is_moe else [1],
        values(_MICRO, batch),
        [space.fixed.get(_VPP, 1)],
        space.zero_stages,
        space.rank_orders,
    )
    for tp, cp, pp, ep, etp, micro, vpp, zero, order in sizes:
        if world % (tp * cp * pp):
            continue
        try:
            dims = ParallelDims(
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp,
                data_parallel_size=world // (tp * cp * pp),
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                rank_order=order,
            )
        except UserInputError as error:
            yield [], Facts(), [error]
            continue
        grid = PartialLayout(  # of a batch that divides: whether the real one does is a rule
            dims=dims,
            micro_batch_size=micro,
            global_batch_size=micro * dims.data_parallel_size,
            recompute=space.recompute or NO_RECOMPUTE,
            zero=zero,
            sequence_parallel=tp > 1,
        )
        own_graphs = space.cuda_graphs is not None
        execution = allowed_execution(space.execution, grid, own_graphs=own_graphs)
        job = launch_request(model, space, replace(grid, execution=execution))
        facts = replace(job, global_batch_size=batch, partition=space.partition).facts
        yield step.broken(facts), facts, list(_other_limits(request, dims))


def _other_limits(request: Request, dims: ParallelDims) -> Iterator[UserInputError]:
    """What the space demands in addition to Megatron's rules."""
    space = request.space
    wanted = space.fixed.get(_DP, dims.data_parallel_size)
    if wanted != dims.data_parallel_size:
        yield UserInputError(
            _DP,
            wanted,
            f"the other degrees leave {dims.data_parallel_size} of the GPUs for it",
            "Leave it out.",
        )
    elif not space.allows(_DP, wanted, request.cluster):
        least, most = space.least.get(_DP, 1), space.limit(_DP, request.cluster)
        yield UserInputError(
            _DP,
            wanted,
            f"it is {least} to {most} here, and the other degrees leave it no other value",
            f"Widen its limits (search.max_{_DP}), or those of other degrees.",
        )


def no_plan(
    request: Request, model: CostModel, record: SearchRecord, deadline: Deadline, find: Find
) -> NoPlan:
    """Explain an infeasible job: the nearest plan, and changes with which one fits.

    Args:
        deadline: when it passes, what was found until then is reported.
        find: looks for the plans that changes make possible.
    """
    until = deadline.part(_NUMBER_SHARE)
    number = _fewest_gpus(request, model, until) if request.remedies else None
    until = deadline.part(_NUMBER_SHARE)
    shortage = least_memory(_new_search(request, model, until))
    is_complete = not until.passed()
    assert shortage is not None, "a legal space has a plan that lacks least memory"
    others = _with_plans(request, model, number, deadline, find) if request.remedies else ()
    return NoPlan(
        shortage=shortage,
        missing_bytes=shortage.missing_bytes,
        capacity_bytes=shortage.limit_bytes,
        nearest=describe_grid(shortage.grid),
        remedies=(*others, *_of_capacity(request, shortage)),
        search=record,
        complete=is_complete,
    )


def _with_plans(
    request: Request,
    model: CostModel,
    number: tuple[int, bool] | None,
    deadline: Deadline,
    find: Find,
) -> Iterator[Remedy]:
    """Changes after which something fits, each with the plan then, as far as time allows.

    Args:
        number: as of ``_fewest_gpus``.
    """

    def remedy(change: str, other: Request) -> Remedy:
        space = _least_memory(other.space, other.cost_model())
        narrow = replace(other, space=space, num_alternatives=0)
        found = find(narrow, deadline.within(_PLAN_SHARE * other.max_seconds))
        if found is None:
            return Remedy(change=change)
        return Remedy(
            change=change,
            layout=describe_grid(found.layout),
            iteration_time_s=found.predicted.iteration_time_s,
            peak_memory_bytes=found.predicted.peak_memory_bytes,
        )

    riskier = replace(request, max_oom_chance=MOST_OOM_CHANCE)
    if request.max_oom_chance < MOST_OOM_CHANCE and _fits(riskier, model, deadline):
        yield remedy(f"memory.max_oom_chance={MOST_OOM_CHANCE:g}, at your own risk", riskier)
    if number is not None:
        num_gpus, some_plan_fits = number
        change = f"cluster.num_gpus={num_gpus}"
        if some_plan_fits:
            yield remedy(change, replace(request, cluster=request.cluster.resized(num_gpus)))
        else:
            change += " at least, by the memory of weights and optimizer states"
            yield Remedy(change=change)
    for change, other in _of_memory(request, model, deadline):
        yield remedy(change, other)
    held = _restrictions(request.space)
    everything = {name: getattr(SearchSpace(), name) for name in _HELD}
    freed = replace(request, space=replace(request.space, **everything))
    if held and _fits(freed, model, deadline):
        yield remedy(f"leave free what is fixed ({', '.join(held)})", freed)


def _of_memory(
    request: Request, model: CostModel, deadline: Deadline
) -> Iterator[tuple[str, Request]]:
    """The fewest changes of what memory holds, of each set whose every change together fits."""
    tried = memory_changes(request)
    largest = [words for words in tried if not any({*words} < {*more} for more in tried)]
    enough = [{*words} for words in largest if _fits(tried[words], model, deadline)]
    found: list[set[str]] = []
    for words, other in tried.items():
        changes = {*words}
        if len(found) == _MOST_OF_MEMORY or deadline.passed():
            return
        if any(fewer <= changes for fewer in found) or not any(changes <= more for more in enough):
            continue
        if changes in enough or _fits(other, model, deadline):
            found.append(changes)
            yield " ".join(words), other


def memory_changes(request: Request) -> dict[tuple[str, ...], Request]:
    """The job needing less memory by what the user sets, the fewest changes first."""
    unchanged = NumericOffer(knobs=(), words=(), settings=request.settings)
    spaces = {(): request.space, **request.memory_spaces}
    found = []
    for offer, (more, space) in product((unchanged, *request.memory_offers), spaces.items()):
        words, narrow = (*offer.words, *more), offer.space_of(space)
        if words and narrow.zero_stages:
            other = replace(request, settings=offer.settings, space=narrow)
            found.append((words, more, other))
    found.sort(key=lambda each: (len(each[0]), len(each[1])))
    return {words: other for words, _, other in found}


def _of_capacity(request: Request, shortage: Shortage) -> Iterator[Remedy]:
    """The margin and larger GPUs, which take no search."""
    accelerator, settings = request.cluster.accelerator, request.settings
    # A smaller margin, where less is missing than such predictions are wrong by.
    missing, limit = shortage.missing_bytes, capacity_bytes(accelerator, settings)
    margin = math.floor(1000 * (settings.memory_margin - missing / accelerator.memory_bytes)) / 1000
    if within_error(limit + missing, limit) and margin >= 0:
        narrower = replace(request, settings=replace(settings, memory_margin=margin))
        if _holds(narrower, shortage):  # else the margin is not what limits
            risk = "at your own risk: it may run out of memory"
            yield Remedy(change=f"memory.margin={margin:g}, {risk}")
    enough, batch = _least_device_gib(request, shortage), request.global_batch_size
    yield Remedy(change=f"GPUs with {enough} GiB of memory or more, for a global batch of {batch}")


def _holds(request: Request, shortage: Shortage) -> bool:
    """Whether a request allows the peak of the plan that lacks least."""
    peaks = PeakLimit(request.cost_model(), request.max_oom_chance, request.site)
    return peaks.of(shortage.grid) >= shortage.needed_bytes


def _least_device_gib(request: Request, shortage: Shortage) -> int:
    """Memory of a GPU on which the plan that lacks least may have its peak."""

    def holds(gib: int) -> bool:
        device = replace(request.cluster.accelerator, memory_bytes=gib * 2**30)
        return _holds(
            replace(request, cluster=replace(request.cluster, accelerator=device)), shortage
        )

    return bisect.bisect_left(range(2**30), True, shortage.needed_bytes // 2**30, key=holds)


#: What the user holds, by fields of a space; what the framework or the run limits is none of it.
_HELD = ("fixed", "limits", "partition", "recompute", "sharding", "zero_stages", "rank_orders")


def _restrictions(space: SearchSpace) -> list[str]:
    """What the user holds fixed or limits."""
    everything = SearchSpace()
    others = {
        "use_megatron_fsdp": space.sharding is not None,
        "zero_stage": space.sharding is None and space.zero_stages != everything.zero_stages,
        "rank_order": space.rank_orders != everything.rank_orders,
        "recompute_granularity": space.recompute is not None,
    }
    limits = (f"max_{name}" for name in space.limits)
    return [*space.fixed, *limits, *(name for name, is_held in others.items() if is_held)]


def _fewest_gpus(request: Request, model: CostModel, deadline: Deadline) -> tuple[int, bool] | None:
    """More GPUs, beyond a host in whole ones, with which some plan fits; or a bound on them.

    The bound on states is doubled and halved to, which takes little time; from there on up numbers
    are tried, of more than 32 hosts one in each ``_STEP``. Where time ends that, the bound is left,
    if states are what the job's GPUs lack memory for. ``None`` where no number is known to help.
    """
    cluster = request.cluster
    host = cluster.host_size or cluster.gpus_per_node

    def held(*names: str) -> int:
        return math.prod(request.space.fixed.get(name, 1) for name in names)

    # whole hosts with whole replicas of what is fixed
    unit = math.lcm(host, held(_TP, _CP, _PP), held(_EP, _ETP, _PP))

    def request_of(num_gpus: int) -> Request:
        while not cluster.part_of_nodes(num_gpus):
            num_gpus += unit
        return replace(request, cluster=cluster.resized(num_gpus))

    def has_room(num_gpus: int) -> bool:
        search = _new_search(request_of(num_gpus), model, deadline)
        states = map(search.memory.of_shard_states, search.grids.shards())
        return min(states, default=math.inf) <= search.most_bytes

    bound, size = None, 0
    for at_least in _sizes(cluster.num_gpus, host, unit, has_room):
        if at_least <= size:
            continue
        larger = request_of(at_least)
        size = larger.cluster.num_gpus
        bound = bound or size
        if deadline.passed():
            return None if has_room(cluster.num_gpus) else (bound, False)
        if _fits(larger, model, deadline):
            return size, True
    return None


def _sizes(num_gpus: int, host: int, unit: int, has_room: Callable[[int], bool]) -> Iterator[int]:
    """Numbers of GPUs with room for states, from the smallest on: beyond a host whole units."""
    yield from filter(has_room, range(num_gpus + 1, host))
    low = num_gpus // unit
    high = low + 1
    while not has_room(high * unit):
        low, high = high, 2 * high
        if high * unit > LARGEST_CLUSTER:
            return
    between = range(low + 1, high)
    number = low + 1 + bisect.bisect_left(between, True, key=lambda units: has_room(units * unit))
    while number * unit <= LARGEST_CLUSTER:
        yield number * unit
        number += max(1, int(_STEP * number))


def _fits(request: Request, model: CostModel, deadline: Deadline) -> bool:
    """Whether some plan fits, as far as there was time to find one."""
    return fits(_new_search(request, model, deadline))


def _new_search(request: Request, model: CostModel, deadline: Deadline) -> Search:
    """A search of a request.

    Args:
        model: of the job that nothing fits, whose prices are shared.
    """
    solve = solver_of(backend_to_run(request.backend), deadline.passed)
    if (request.cluster, request.settings) != (model.cluster, model.settings):
        model = model.with_figures(request.cluster, request.settings)
    limit = PeakLimit(model, request.max_oom_chance, request.site)
    space = _least_memory(request.space, model)
    batch, passed = request.global_batch_size, deadline.passed
    return Search(model, batch, space, solve, limit=limit, out_of_time=passed)


def _least_memory(space: SearchSpace, model: CostModel) -> SearchSpace:
    """The part of a space that needs least memory.

    No larger micro batch needs less than one sequence, but where attention keeps its scores: their
    softmax is fused for four matrices at a time. Of how layers run only offloading frees memory,
    and leaving out what the job has; the exchange of windows is what Megatron accepts.
    """
    name, job = "micro_batch_size", space.execution
    needed = {"offload_modules"}
    if model.spec.window_size:
        needed.add("cp_comm_type")
    executions = {
        choice: values
        for choice, values in space.executions.items()
        if choice in needed or getattr(job, choice) != getattr(PLAIN, choice)
    }
    limits, most = space.limits, 1
    if LayerShard(flash_attention=model.flash_attention).keeps_scores(model.spec):
        most = 4
    if name not in {*space.fixed, *space.least}:
        limits = {**limits, name: min(most, limits.get(name, most))}
    return replace(space, limits=limits, executions=executions)
