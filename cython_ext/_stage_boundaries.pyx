"""Stage boundaries of the artifact mode in C: what its ``reference`` returns, bit for bit.

Doubles are in the instance's unit of time and in bytes. ``fill`` takes arrays that the caller made;
everything else runs without the gil and allocates nothing.

Order of additions and ties, which are the reference's: a stage's layers are added in the order in
which its passes run; ends are tried in ascending order and the first least bottleneck is kept.
"""

from libc.math cimport floor
from libc.stdint cimport int32_t

cdef double INFINITE = float("inf")


cdef struct Chain:
    # One row a layer; links one a level; link_levels one a position from the end.
    Py_ssize_t n
    Py_ssize_t num_stages
    Py_ssize_t num_levels
    const double* forward
    const double* backward
    const double* recomputed
    const double* weights
    const double* activations
    const double* edges  # [n, n] bytes from row to column, -1 where there is no edge
    const double* bandwidths
    const double* latencies
    const double* factors
    const int32_t* link_levels
    double memory_bytes
    double states
    double most_weight_bytes
    int32_t num_devices
    bint recompute
    # Tables that are made here.
    double* coming  # [n, n] most bytes to a column from before a row, -1 where none come
    double* kept  # [n, n] all bytes to a column from before a row
    double* going  # [n, n] most bytes from a column to after a row, -1 where none go
    double* forward_times  # [num_levels, n, n] of the stage from row to column
    double* backward_times  # [num_levels, n, n], with the recomputed pass if there is one
    double* last_times  # [n] of the last stage from a row, which never recomputes
    int32_t* positions  # [n, n] farthest place from the end at which memory holds a stage


cdef inline double sent(const Chain* c, Py_ssize_t level, double num_bytes) noexcept nogil:
    """Time for bytes over a level; -1 is no transfer and takes none."""
    if num_bytes < 0:
        return 0
    return c.factors[level] * (num_bytes / c.bandwidths[level] + c.latencies[level])


cdef void gather_edges(Chain* c) noexcept nogil:
    """What crosses each stage boundary, from the edges."""
    cdef Py_ssize_t x, v, n = c.n
    cdef double size
    for v in range(n):
        c.coming[v] = c.going[(n - 1) * n + v] = -1
        c.kept[v] = 0
    for x in range(1, n):
        for v in range(n):
            size = c.edges[(x - 1) * n + v]
            c.coming[x * n + v] = max(c.coming[(x - 1) * n + v], size)
            c.kept[x * n + v] = c.kept[(x - 1) * n + v] + max(size, 0)
    for x in range(n - 2, -1, -1):
        for v in range(n):
            size = c.edges[v * n + x + 1]
            c.going[x * n + v] = max(c.going[(x + 1) * n + v], size)


cdef void time_forward(Chain* c, Py_ssize_t level) noexcept nogil:
    cdef Py_ssize_t x, y, n = c.n
    cdef double finished
    for x in range(n):
        finished = 0
        for y in range(x, n):
            finished = max(finished, sent(c, level, c.coming[x * n + y])) + c.forward[y]
            c.forward_times[(level * n + x) * n + y] = finished


cdef double backward_of(
    const Chain* c, Py_ssize_t level, Py_ssize_t x, Py_ssize_t y, double begins
) noexcept nogil:
    cdef Py_ssize_t v
    cdef double finished = begins
    for v in range(y, x - 1, -1):
        finished = max(finished, sent(c, level, c.going[y * c.n + v])) + c.backward[v]
    return finished


cdef void time_backward(Chain* c, Py_ssize_t level) noexcept nogil:
    """The recomputed pass begins a stage's, so that nothing is shared between starts."""
    cdef Py_ssize_t x, y, n = c.n
    cdef double begins
    for x in range(n):
        begins = 0
        for y in range(x, n):
            if c.recompute:
                begins = begins + c.recomputed[y]
            c.backward_times[(level * n + x) * n + y] = backward_of(c, level, x, y, begins)


cdef void time_last(Chain* c) noexcept nogil:
    cdef Py_ssize_t x, n = c.n
    cdef Py_ssize_t before = c.link_levels[1]
    for x in range(n):
        c.last_times[x] = c.forward_times[(before * n + x) * n + n - 1]
        c.last_times[x] += backward_of(c, 0, x, n - 1, 0)


cdef int32_t position_of(const Chain* c, double resident, double stashed) noexcept nogil:
    cdef double places
    if resident + (c.num_devices - 1) * stashed <= c.memory_bytes:
        return c.num_devices
    if resident > c.memory_bytes:
        return 0
    places = 1 + floor((c.memory_bytes - resident) / stashed)
    return c.num_devices if places > c.num_devices else <int32_t>places


cdef void fill_positions(Chain* c) noexcept nogil:
    cdef Py_ssize_t x, y, n = c.n
    cdef double weights, activations, stashed
    for x in range(n):
        weights = activations = stashed = 0
        for y in range(x, n):
            weights = weights + c.weights[y]
            activations = activations + c.activations[y]
            stashed = stashed + c.kept[x * n + y] if c.recompute else activations
            c.positions[x * n + y] = 0
            if weights <= c.most_weight_bytes:
                c.positions[x * n + y] = position_of(
                    c, 2.0 * weights + c.states * weights + activations, stashed
                )


cdef double stage_of(
    const Chain* c, Py_ssize_t x, Py_ssize_t end, Py_ssize_t position
) noexcept nogil:
    """The time of a stage at its place from the end; infinite where memory does not hold it."""
    cdef Py_ssize_t n = c.n, before = c.link_levels[position], after
    if c.positions[x * n + end - 1] < position:
        return INFINITE
    if position == 1:
        return c.last_times[x]
    after = c.link_levels[position - 1]
    return (
        c.forward_times[(before * n + x) * n + end - 1]
        + c.backward_times[(after * n + x) * n + end - 1]
    )


cdef void fill_tables(
    const Chain* c, double* bottlenecks, double* firsts, int32_t* ends
) noexcept nogil:
    """The recurrence over positions from the end, then the first stage of each depth."""
    cdef Py_ssize_t s, x, y, n = c.n, row = c.n + 1
    cdef double best, found
    for x in range(n):
        bottlenecks[row + x] = stage_of(c, x, n, 1)
        ends[row + x] = <int32_t>n
    firsts[row + n] = bottlenecks[row]
    for s in range(2, c.num_stages + 1):
        for x in range(n - s + 1):
            best = INFINITE
            for y in range(x + 1, n - s + 2):
                if bottlenecks[(s - 1) * row + y] >= best and x > 0:
                    continue
                found = max(stage_of(c, x, y, s), bottlenecks[(s - 1) * row + y])
                if x == 0:
                    firsts[s * row + y] = found
                if found < best:
                    best = found
                    ends[s * row + x] = <int32_t>y
            bottlenecks[s * row + x] = best


def fill(
    Py_ssize_t num_stages,
    const double[::1] forward,
    const double[::1] backward,
    const double[::1] recomputed,
    const double[::1] weights,
    const double[::1] activations,
    const double[::1] edges,
    const double[::1] bandwidths,
    const double[::1] latencies,
    const double[::1] factors,
    const int32_t[::1] link_levels,
    double memory_bytes,
    double states,
    double most_weight_bytes,
    int32_t num_devices,
    bint recompute,
    double[::1] firsts,
    int32_t[::1] ends,
    double[::1] work,
    int32_t[::1] positions,
):
    """Fill ``firsts`` and ``ends``; ``boundaries`` makes the arguments.

    Args:
        forward, backward, recomputed, weights, activations: IN, [n], time and bytes.
        edges: IN, [n, n], bytes, -1 where there is none.
        bandwidths, latencies, factors: IN, [num_levels], bytes per unit of time, time, none.
        link_levels: IN, [num_stages + 1], the level of the link before each position from the end.
        most_weight_bytes: of one stage; infinite for any.
        firsts: INOUT, [num_stages + 1, n + 1], given infinite; the bottleneck of each depth by
            where its first stage ends.
        ends: INOUT, [num_stages + 1, n + 1], given 0; where the stage at a position ends, by
            its start.
        work: scratch, [(num_stages + 1) * (n + 1) + (3 + 2 * num_levels) * n * n + n], infinite.
        positions: scratch, [n * n].
    """
    cdef Chain c
    cdef Py_ssize_t level, n = forward.shape[0], square = forward.shape[0] * forward.shape[0]
    cdef double* table = &work[0] + (num_stages + 1) * (n + 1)
    c.n, c.num_stages, c.num_levels = n, num_stages, bandwidths.shape[0]
    c.forward, c.backward, c.recomputed = &forward[0], &backward[0], &recomputed[0]
    c.weights, c.activations, c.edges = &weights[0], &activations[0], &edges[0]
    c.bandwidths, c.latencies, c.factors = &bandwidths[0], &latencies[0], &factors[0]
    c.link_levels, c.positions = &link_levels[0], &positions[0]
    c.memory_bytes, c.states, c.most_weight_bytes = memory_bytes, states, most_weight_bytes
    c.num_devices, c.recompute = num_devices, recompute
    c.coming, c.kept, c.going = table, table + square, table + 2 * square
    c.forward_times = table + 3 * square
    c.backward_times = c.forward_times + c.num_levels * square
    c.last_times = c.backward_times + c.num_levels * square
    with nogil:
        gather_edges(&c)
        for level in range(c.num_levels):
            time_forward(&c, level)
            time_backward(&c, level)
        time_last(&c)
        fill_positions(&c)
        fill_tables(&c, &work[0], &firsts[0], &ends[0])
