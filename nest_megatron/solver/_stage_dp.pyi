from collections.abc import Callable

from nest_megatron.cost_model.pipeline import UnitCost

def solve(
    p: int,
    v: int,
    m: int,
    unit_kinds: bytes,
    costs: tuple[UnitCost, ...],
    num_layers: int,
    block_num_layers: int,
    send_forward: tuple[int, ...],
    send_backward: tuple[int, ...],
    overlap_p2p: bool,
    capacity_bytes: int,
    constant: int,
    threshold: int,
    node_limit: int,
    max_path_bounds: int,
    nogoods_after: int,
    max_nogoods: int,
    max_needs: int,
    out_of_time: Callable[[], bool] | None,
) -> tuple[int, int, tuple[int, ...], int, int, int] | None: ...
