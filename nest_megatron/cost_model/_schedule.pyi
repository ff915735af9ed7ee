from array import array

def run(
    p: int,
    v: int,
    m: int,
    times: array[int],
    releases: array[int],
    reductions: array[int],
) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]: ...
