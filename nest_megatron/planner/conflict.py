"""Which rule a job breaks where no combination of degrees is legal, and which choice would free it.

Every combination that keeps what is fixed is held to the rules that a search keeps to; those
that break the fewest say what binds. Then each fixed value is left out alone, to see which of
them would make some combination legal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from nest_megatron.errors import UserInputError
from nest_megatron.layout import rulebook
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook.facts import violations
from nest_megatron.layout.rulebook.search import is_searched
from nest_megatron.planner.request import Request
from nest_megatron.solver.executions import launched
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import OutOfTime

_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_DP, _MICRO = "data_parallel_size", "micro_batch_size"


def binding(request: Request, out_of_time: OutOfTime = lambda: False) -> tuple[UserInputError, ...]:
    """The rules that the least illegal combination breaks.

    Nothing where a combination breaks none of them, so that something else must bind, or where time
    did not allow to look at all.
    """
    found: tuple[UserInputError, ...] = ()
    for broken in _broken(request):
        if not broken or out_of_time():
            return ()
        if not found or len(broken) < len(found):
            found = broken
    return found


def single_relaxations(request: Request, out_of_time: OutOfTime = lambda: False) -> list[str]:
    """Fixed values, each of which makes some combination legal when it alone is left out.

    Args:
        out_of_time: once true, those found until then are returned.
    """
    fixed = request.space.fixed
    return [name for name in fixed if is_legal_without(request, (name,), out_of_time)]


def is_legal_without(
    request: Request, names: Collection[str], out_of_time: OutOfTime = lambda: False
) -> bool:
    """Whether some combination is legal where these fixed values are left out."""
    space = request.space
    fixed = {name: value for name, value in space.fixed.items() if name not in names}
    partition = None if {_PP, _VPP} & set(names) else space.partition
    space = replace(space, fixed=fixed, partition=partition)
    grids = GridSpace(request.cost_model(), request.global_batch_size, space)
    for shard in grids.shards():
        if out_of_time():
            return False
        if any(next(grids.families(grid), None) is not None for grid in grids.grids(shard)):
            return True
    return False


def _broken(request: Request) -> Iterator[tuple[UserInputError, ...]]:
    """Rules that each combination breaks; none for one that only the search excludes."""
    space, spec = request.space, request.spec
    model, world = request.cost_model(), request.cluster.num_gpus
    batch = space.batch_unit or request.global_batch_size

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
            yield (error,)
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
        way = allowed_execution(space.execution, grid, own_graphs=own_graphs)
        asked = launched(model, space, replace(grid, execution=way))
        asked = replace(asked, global_batch_size=batch, partition=space.partition)
        searched = filter(is_searched, rulebook.RULES)
        broken = tuple(found for _, found in violations(asked.facts, searched))
        yield broken + tuple(_other_limits(request, dims))


def _other_limits(request: Request, dims: ParallelDims) -> Iterator[UserInputError]:
    """What the space demands beside Megatron's rules."""
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
