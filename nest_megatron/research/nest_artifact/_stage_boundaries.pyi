from array import array

def fill(
    num_stages: int,
    forward: array[float],
    backward: array[float],
    recomputed: array[float],
    weights: array[float],
    activations: array[float],
    edges: array[float],
    bandwidths: array[float],
    latencies: array[float],
    factors: array[float],
    link_levels: array[int],
    memory_bytes: float,
    states: float,
    most_weight_bytes: float,
    num_devices: int,
    recompute: bool,
    firsts: array[float],
    ends: array[int],
    work: array[float],
    positions: array[int],
) -> None: ...
