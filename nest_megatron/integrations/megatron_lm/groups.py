"""Which process is which rank, and whether Megatron's groups came out as planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from nest_megatron.cluster.placement import network_order
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_of_rank

#: Megatron's function for each kind of group; the last two are those of experts.
_GETTERS = {
    GroupKind.TP: "get_tensor_model_parallel_group",
    GroupKind.CP: "get_context_parallel_group",
    GroupKind.PP: "get_pipeline_model_parallel_group",
    GroupKind.DP_CP: "get_data_parallel_group",
    GroupKind.EP: "get_expert_model_parallel_group",
    GroupKind.EDP: "get_expert_data_parallel_group",
}


def ranks_by_host(
    hosts: Sequence[str], groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[int, ...] | None:
    """New global ranks that keep the ranks of each host together; ``None`` if they already are.

    Args:
        groups: switches above each host, innermost first, whose hosts stay together as well.

    >>> ranks_by_host(["a", "b", "a", "b"]), ranks_by_host(["a", "a", "b", "b"])
    ((0, 2, 1, 3), None)
    >>> ranks_by_host(["a", "b", "c"], {"a": ("s1",), "b": ("s2",), "c": ("s1",)})
    (0, 2, 1)
    """
    names = list(dict.fromkeys(hosts))
    in_order = network_order([groups.get(name, ()) for name in names])
    order = {names[host]: place for place, host in enumerate(in_order)}
    launched = sorted(range(len(hosts)), key=lambda rank: order[hosts[rank]])
    if launched == list(range(len(hosts))):
        return None
    return tuple(new for _, new in sorted(zip(launched, range(len(hosts)), strict=True)))


def check_permutation(ranks: Sequence[int], world_size: int, *, zero_may_move: bool) -> None:
    """Raise for a list that is no permutation, or moves rank 0 where it hosts the store of all."""
    limit = None
    if sorted(ranks) != list(range(world_size)):
        limit = f"it names each of the ranks 0 to {world_size - 1} once"
        fix = "Correct the list, or use by_host."
    elif ranks and ranks[0] != 0 and not zero_may_move:
        limit = "global rank 0 hosts the store at MASTER_ADDR and cannot move"
        fix = "Begin the list with 0, or launch with torchrun."
    if limit is not None:
        raise UserInputError("nest.ranks", list(ranks)[:16], limit, fix)


def compare_groups(plan: ParallelPlan, parallel_state: ModuleType) -> None:
    """Raise for the first process group that Megatron made otherwise than planned.

    Args:
        parallel_state: ``megatron.core.parallel_state`` after ``initialize_model_parallel``.
    """
    import torch

    rank = torch.distributed.get_rank()
    # megatron-core before 0.10, which NeMo 1 runs on, makes the experts' groups in another way
    has_experts = plan.model.is_moe and hasattr(parallel_state, "get_expert_data_parallel_group")
    for kind, name in _GETTERS.items():
        if kind in (GroupKind.EP, GroupKind.EDP) and not has_experts:
            continue
        options = {"with_context_parallel": True} if kind is GroupKind.DP_CP else {}
        group = getattr(parallel_state, name)(**options)
        made = [int(member) for member in torch.distributed.get_process_group_ranks(group)]
        planned = group_of_rank(plan.layout.dims, kind, rank)
        if sorted(made) != sorted(planned):
            raise NestError(
                f"rank {rank}: Megatron's {kind.value} group is {made[:16]}, the plan's is "
                f"{list(planned)[:16]}. Either the program did not take all of the plan's degrees, "
                "or this Megatron numbers its ranks in another way; launch without nest and "
                "report it."
            )
