# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""The declared space with virtual stages: its members, their memory, bounds and schedules."""

from libc.stdint cimport int32_t, int64_t

from stage_work cimport (
    NO_THRESHOLD,
    PAUSED,
    STATUS_BOUNDED,
    STATUS_INFEASIBLE,
    STATUS_LIMIT,
    STATUS_OPTIMAL,
    Work,
    larger,
    most_working,
    smaller,
    sum_backward,
    sum_forward,
    sum_saved,
)


cdef inline int64_t visit_layouts(Work* w, bint store) noexcept nogil:
    """Number of layouts in the declared space, in its order; written to ``members`` if asked."""
    cdef Py_ssize_t apart, first, last, base, extra, rising
    cdef Py_ssize_t interior = w.p * w.v - 2, most = w.num_layers // interior + 1
    cdef int64_t count = 0
    for apart in range(2 if w.n == w.num_layers + 3 and w.p > 2 else 1):
        for first in range(most, -1, -1):
            for last in range(0 if apart else most, -1, -1):
                base = (w.num_layers - first - last) // interior
                extra = (w.num_layers - first - last) % interior
                if base < 1 or first > base + 1 or last > base + 1:
                    continue
                for rising in range(2 if extra else 1):
                    if store:
                        write_layout(w, count, first, base, extra, rising, apart)
                    count += 1
    return count


cdef inline void write_layout(
    Work* w,
    int64_t index,
    Py_ssize_t first,
    Py_ssize_t base,
    Py_ssize_t extra,
    bint rising,
    bint apart,
) noexcept nogil:
    cdef Py_ssize_t chunks = w.p * w.v, interior = chunks - 2, k
    cdef int32_t* marks = w.members + index * (chunks + 1)
    marks[0] = 0
    marks[1] = 1 + first
    for k in range(interior):
        marks[k + 2] = marks[k + 1] + base
        if (k >= interior - extra) if rising else (k < extra):
            marks[k + 2] += 1
    if apart:
        marks[chunks - 1] += 1
    marks[chunks] = w.n


cdef inline int64_t most_saved(const Work* w, Py_ssize_t rank) noexcept nogil:
    """Peak of the activations that a rank keeps, from ``saved_chunk``; bytes.

    After its warm-up a rank keeps a forward and a backward pass apart by a constant number of
    passes, and the mix of chunks repeats after ``p * v`` of them. Between two changes of chunk the
    sum is linear.
    """
    cdef Py_ssize_t p = w.p, v = w.v, chunk_in, chunk_out, i
    cdef int64_t group = p * v, total = w.m * v, ahead, held = 0, peak, done, length
    cdef int64_t change, saved_in
    ahead = smaller(2 * (p - rank - 1) + (v - 1) * p, total)
    for i in range(v):
        # Passes of this chunk among the first ``ahead``: whole groups, then a part of one.
        done = (ahead // group) * p + smaller(p, larger(0, ahead % group - i * p))
        held += done * w.saved_chunk[i * p + rank]
    peak = held
    done = 0
    while done < smaller(group, total - ahead):
        chunk_in = (ahead + done) % group // p
        chunk_out = v - 1 - done // p
        length = smaller(p - (ahead + done) % p, p - done % p)
        length = smaller(length, smaller(group, total - ahead) - done)
        saved_in = w.saved_chunk[chunk_in * p + rank]
        change = saved_in - w.saved_chunk[chunk_out * p + rank]
        peak = larger(peak, held + saved_in + larger(0, (length - 1) * change))
        held += length * change
        done += length
    return peak


cdef inline bint layout_fits(Work* w, const int32_t* marks) noexcept nogil:
    cdef Py_ssize_t p = w.p, i, k, rank
    cdef int64_t fixed, working
    if w.all_fit:
        return True
    for rank in range(p):
        fixed = 0
        working = -1
        for i in range(w.v):
            k = i * p + rank
            fixed += w.static_bytes[marks[k + 1]] - w.static_bytes[marks[k]]
            working = larger(working, most_working(w, marks[k], marks[k + 1]))
            w.saved_chunk[k] = sum_saved(w, marks[k], marks[k + 1])
        if fixed + working > w.capacity or fixed + working + most_saved(w, rank) > w.capacity:
            return False
    return True


cdef inline int64_t price_rank(Work* w, const int32_t* marks, Py_ssize_t rank) noexcept nogil:
    """Fill the simulator's times, head and tail of a rank; its optimizer step, ticks."""
    cdef Py_ssize_t p = w.p, i, k, x, y
    cdef int64_t least_head = 0, rest_head = 0, least_tail = 0, rest_tail = 0, optimizer = 0
    for i in range(w.v):
        k = i * p + rank
        x, y = marks[k], marks[k + 1]
        w.time_forward[k] = sum_forward(w, x, y)
        w.time_backward[k] = sum_backward(w, x, y)
        w.delay_forward[k] = w.delay_backward[k] = 0
        if w.overlap:
            w.delay_forward[k] = w.send_forward[k]
            w.delay_backward[k] = w.send_backward[k]
        else:
            w.time_forward[k] += w.send_forward[k]
            w.time_backward[k] += w.send_backward[k]
        least_head += w.head_least[y] - w.head_least[x]
        rest_head += w.head_rest[y] - w.head_rest[x]
        least_tail += w.tail_least[y] - w.tail_least[x]
        rest_tail += w.tail_rest[y] - w.tail_rest[x]
        optimizer += w.optimizer[y] - w.optimizer[x]
    w.head[rank] = larger(0, larger(least_head, rest_head))
    w.tail[rank] = larger(0, larger(least_tail, rest_tail))
    return optimizer


cdef inline int64_t price_layout(Work* w, const int32_t* marks) noexcept nogil:
    """Price every rank; the largest optimizer step, ticks."""
    cdef Py_ssize_t rank
    cdef int64_t slowest = 0
    for rank in range(w.p):
        slowest = larger(slowest, price_rank(w, marks, rank))
    return slowest


cdef inline int64_t work_bound(Work* w, const int32_t* marks, int64_t limit) noexcept nogil:
    """Longest of: reach a rank, do all its work, drain; ticks.

    What does not matter is not computed: from ``limit`` on, only that the bound is no smaller.
    """
    cdef Py_ssize_t p = w.p, i, k, rank
    cdef int64_t longest = 0, slowest = 0, reach = 0, drain = 0, work, bound = 0
    for rank in range(p):
        slowest = larger(slowest, price_rank(w, marks, rank))
        work = 0
        for i in range(w.v):
            k = i * p + rank
            work += w.time_forward[k] + w.time_backward[k]
        work *= w.m
        work += larger(w.head[rank], reach) + larger(w.tail[rank], drain)
        longest = larger(longest, work)
        bound = w.constant + longest + slowest
        if bound >= limit:
            break
        reach += w.time_forward[rank] + w.delay_forward[rank]
        drain += w.time_backward[rank]
        if w.overlap:
            drain += w.send_backward[rank + 1]
    return bound


cdef inline int64_t simulate_layout(Work* w, int64_t slowest) noexcept nogil:
    """Iteration time of the layout that ``price_layout`` saw last, ticks.

    At step ``u`` rank ``r`` runs its forward pass ``u - r`` and its backward pass ``u + r`` less
    the rows of the start: then every pass needs its neighbour's latest result alone. Once all
    ranks run both, the chunks repeat every ``p * v`` steps; if a period moved every clock by the
    same time, so will all further ones.
    """
    cdef Py_ssize_t p = w.p, v = w.v, rank
    cdef int64_t group = p * v, total = w.m * v, u, last, lag, full, mark, periods, value
    lag = (v - 1) * p + 2 * (p - 1)
    full = -1
    # end_backward: the rank's clock; end_forward, step_backward: latest arrivals at its neighbours.
    for rank in range(p):
        w.end_backward[rank] = w.head[rank]
        w.end_forward[rank] = w.step_backward[rank] = 0
    last = total - 1 + lag
    mark = lag + group
    u = 0
    while u <= last:
        if u == mark and u < total:
            if full >= 0:
                periods = (total - u) // group
                value = w.end_backward[0] - w.kept[0]
                if periods > 0 and moved_alike(w, value):
                    for rank in range(p):
                        w.end_backward[rank] += periods * value
                        w.end_forward[rank] += periods * value
                        w.step_backward[rank] += periods * value
                    u += periods * group
            full = u
            mark = u + group
            for rank in range(p):
                w.kept[3 * rank] = w.end_backward[rank]
                w.kept[3 * rank + 1] = w.end_forward[rank]
                w.kept[3 * rank + 2] = w.step_backward[rank]
            if u > last:
                break
        layout_step(w, u, lag, total)
        u += 1
    value = 0
    for rank in range(p):
        value = larger(value, w.end_backward[rank] + w.tail[rank])
    return w.constant + value + slowest


cdef inline bint moved_alike(const Work* w, int64_t change) noexcept nogil:
    cdef Py_ssize_t rank
    for rank in range(w.p):
        if (
            w.end_backward[rank] - w.kept[3 * rank] != change
            or w.end_forward[rank] - w.kept[3 * rank + 1] != change
            or w.step_backward[rank] - w.kept[3 * rank + 2] != change
        ):
            return False
    return True


cdef inline void layout_step(Work* w, int64_t u, int64_t lag, int64_t total) noexcept nogil:
    cdef Py_ssize_t p = w.p, v = w.v, rank, chunk, chunks = w.p * w.v
    cdef int64_t group = p * v, index, clock, from_last = w.end_forward[p - 1]
    cdef int64_t from_first = w.step_backward[0]
    for rank in range(p - 1, -1, -1):
        index = u - rank
        if not 0 <= index < total:
            continue
        chunk = index % group // p * p + rank
        clock = w.end_backward[rank]
        if rank > 0:
            clock = larger(clock, w.end_forward[rank - 1])
        elif chunk > 0:
            clock = larger(clock, from_last)
        clock += w.time_forward[chunk]
        w.end_backward[rank] = clock
        w.end_forward[rank] = clock + w.delay_forward[chunk]
    for rank in range(p):
        index = u - lag + rank
        if not 0 <= index < total:
            continue
        chunk = (v - 1 - index % group // p) * p + rank
        clock = w.end_backward[rank]
        if rank < p - 1:
            clock = larger(clock, w.step_backward[rank + 1])
        elif chunk < chunks - 1:
            clock = larger(clock, from_first)
        clock += w.time_backward[chunk]
        w.end_backward[rank] = clock
        w.step_backward[rank] = clock + w.delay_backward[chunk]


cdef inline int prepare_layouts(Work* w) noexcept nogil:
    """Bounds of the layouts that fit, and the most promising one simulated; as ``prepare``."""
    cdef Py_ssize_t chunks = w.p * w.v, guess = -1
    cdef int64_t all_layouts = visit_layouts(w, True), index, kept = 0, limit
    cdef int32_t* marks
    cdef Py_ssize_t k
    w.lower = NO_THRESHOLD
    for index in range(all_layouts):
        marks = w.members + index * (chunks + 1)
        if not layout_fits(w, marks):
            continue
        if w.threshold <= 0:
            w.lower = 0
            return STATUS_BOUNDED
        for k in range(chunks + 1):
            w.members[kept * (chunks + 1) + k] = marks[k]
        # Of bounds that no search looks at, the least alone is asked for.
        limit = w.lower if w.node_limit == 0 else larger(w.threshold, w.lower)
        w.member_bound[kept] = work_bound(w, marks, limit)
        if w.member_bound[kept] < w.lower:
            w.lower = w.member_bound[kept]
            guess = kept
        kept += 1
    w.num_members = kept
    w.nodes = kept
    if kept == 0:
        return STATUS_INFEASIBLE
    if w.lower >= w.threshold:
        return STATUS_BOUNDED
    if w.node_limit == 0:
        w.nodes = 0
        return STATUS_LIMIT
    marks = w.members + guess * (chunks + 1)
    w.threshold = smaller(w.threshold, simulate_layout(w, price_layout(w, marks)) + 1)
    w.simulations = 1
    return PAUSED


cdef inline int search_layouts(Work* w) noexcept nogil:
    """Simulate the next layout that may win; as ``search``."""
    cdef Py_ssize_t chunks = w.p * w.v, k
    cdef int64_t time
    cdef int32_t* marks
    while w.next_member < w.num_members:
        marks = w.members + w.next_member * (chunks + 1)
        w.next_member += 1
        if w.member_bound[w.next_member - 1] < w.threshold:
            time = simulate_layout(w, price_layout(w, marks))
            w.simulations += 1
            if time < w.threshold:
                w.threshold = w.iteration = time
                w.found = 1
                for k in range(chunks + 1):
                    w.best[k] = marks[k]
            return PAUSED
    w.lower = w.threshold
    return STATUS_OPTIMAL if w.found else STATUS_BOUNDED
