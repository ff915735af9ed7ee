"""Which process is which rank, and whether Megatron's groups came out as planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rank_order import GroupKind, group_of_rank

#: Megatron's function for each kind of group, and its arguments.
_GETTERS: Mapping[GroupKind, tuple[str, Mapping[str, bool]]] = {
    GroupKind.TP: ("get_tensor_model_parallel_group", {}),
    GroupKind.CP: ("get_context_parallel_group", {}),
    GroupKind.PP: ("get_pipeline_model_parallel_group", {}),
    GroupKind.DP_CP: ("get_data_parallel_group", {"with_context_parallel": True}),
}
_EXPERT_GETTERS: Mapping[GroupKind, tuple[str, Mapping[str, bool]]] = {
    GroupKind.EP: ("get_expert_model_parallel_group", {}),
    GroupKind.EDP: ("get_expert_data_parallel_group", {}),
}


def ranks_by_host(hosts: Sequence[str]) -> tuple[int, ...] | None:
    """New global ranks that keep the ranks of each host together; ``None`` if they already are.

    Args:
        hosts: name of the host of each launched rank.

    >>> ranks_by_host(["a", "b", "a", "b"]), ranks_by_host(["a", "a", "b", "b"])
    ((0, 2, 1, 3), None)
    """
    order = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
    launched = sorted(range(len(hosts)), key=lambda rank: (order[hosts[rank]], rank))
    ranks = [0] * len(hosts)
    for new, old in enumerate(launched):
        ranks[old] = new
    return None if launched == list(range(len(hosts))) else tuple(ranks)


def check_permutation(ranks: Sequence[int], world_size: int, *, zero_may_move: bool) -> None:
    """Refuse a list that is no permutation, or that moves rank 0 from the host of the store.

    Args:
        zero_may_move: torchrun hosts the store that all ranks meet at.

    Raises:
        UserInputError: naming what is wrong with it.
    """
    if sorted(ranks) != list(range(world_size)):
        raise UserInputError(
            "nest.ranks",
            value=list(ranks)[:16],
            limit=f"it names each of the ranks 0 to {world_size - 1} once",
            fix="Correct the list, or use by_host.",
        )
    if ranks and ranks[0] != 0 and not zero_may_move:
        raise UserInputError(
            "nest.ranks",
            value=list(ranks)[:16],
            limit="global rank 0 hosts the store at MASTER_ADDR and cannot move",
            fix="Begin the list with 0, or launch with torchrun.",
        )


def check_groups(
    parallel_state: ModuleType, dims: ParallelDims, rank: int, *, has_experts: bool
) -> None:
    """Compare the process groups that Megatron made with those that were planned.

    Args:
        parallel_state: ``megatron.core.parallel_state`` after ``initialize_model_parallel``.

    Raises:
        NestError: naming the first group that differs.
    """
    getters = {**_GETTERS, **(_EXPERT_GETTERS if has_experts else {})}
    for kind, (name, options) in getters.items():
        made = _members(getattr(parallel_state, name)(**options))
        planned = group_of_rank(dims, kind, rank)
        if tuple(sorted(made)) != tuple(sorted(planned)):
            raise NestError(
                f"rank {rank}: Megatron's {kind.value} group is {list(made)[:16]}, the plan's is "
                f"{list(planned)[:16]}. Either the program did not take all of the plan's degrees, "
                "or this Megatron numbers its ranks in another way; launch without nest and "
                "report it."
            )


def _members(group: object) -> Iterable[int]:
    import torch

    return [int(rank) for rank in torch.distributed.get_process_group_ranks(group)]
