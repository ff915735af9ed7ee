# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""What fits, what each stage costs at least, and the bottleneck program. One chunk a rank."""

from libc.stdint cimport int64_t

from stage_work cimport (
    NO_THRESHOLD,
    Work,
    again_until,
    first_start,
    larger,
    last_start,
    most_working,
    node_of,
    smaller,
    stage_backward,
    stage_forward,
    stage_head,
    stage_tail,
    sum_saved,
)


cdef inline bint stage_fits(const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t live = smaller(w.m, w.p - k)
    cdef int64_t peak = w.static_bytes[y] - w.static_bytes[x] + live * sum_saved(w, x, y)
    return peak + most_working(w, x, y) <= w.capacity


cdef inline void tabulate_fit(Work* w) noexcept nogil:
    """``fit_end``: last end of stage ``k`` from unit ``x`` that fits, ``x`` if there is none."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, end, last
    for x in range(n):
        k = 0 if x == 0 else larger(1, x - (n - p))
        last = x
        while k <= x and k < p:
            end = n - (p - 1 - k)
            if k == 0 and p > 1:
                # Megatron keeps MTP layers off the first of several ranks.
                end = smaller(end, w.num_layers + 1)
            y = last
            if not w.block and k > 0 and x > k:
                y = larger(y, w.fit_end[node_of(w, k, x - 1)])
            if y < end:
                if stage_fits(w, k, x, end):
                    y = end
                elif k == p - 1:
                    y = x
                else:
                    while stage_fits(w, k, x, y + 1):
                        y += 1
            w.fit_end[node_of(w, k, x)] = y
            last = y
            k += 1


cdef inline void tabulate_after(Work* w) noexcept nogil:
    """Least backward time of stages ``k ..`` from unit ``x``, through stages that fit; ticks."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, low, end, split
    cdef int64_t best, own
    cdef int64_t* behind
    cdef int64_t* here
    cdef int64_t rest
    for x in range(w.width):
        w.after[p * w.width + x] = NO_THRESHOLD
    w.after[node_of(w, p, n)] = 0
    for k in range(p - 1, -1, -1):
        # after[k + 1] by unit, and the next unit from which the rest can go on.
        behind = w.after + (k + 1) * w.width - (k + 1)
        here = w.after + k * w.width - k
        low = n + 1
        y = n - (p - 1 - k)
        for x in range(last_start(w, k), first_start(w, k) - 1, -1):
            while y > x:
                if behind[y] < NO_THRESHOLD:
                    low = y
                w.scratch_end[y] = low
                y -= 1
            end = w.fit_end[node_of(w, k, x)]
            here[x] = NO_THRESHOLD
            if w.scratch_end[x + 1] > end:
                continue
            if not w.block:
                here[x] = w.backward[n] - w.backward[x] + w.sent_backward[p] - w.sent_backward[k]
                continue
            best = NO_THRESHOLD
            split = again_until(w, x, n)
            own = w.backward[x] + w.again_backward[w.again_first[x]] - w.send_backward[k]
            low = w.scratch_end[x + 1]
            while low <= end and low < split:
                if behind[low] < NO_THRESHOLD:
                    rest = w.backward[low] + w.again_backward[low] + behind[low]
                    best = smaller(best, rest)
                low += 1
            if low < split:
                low = split
            while low <= end:
                rest = w.backward[low] + w.again_backward[split] + behind[low]
                best = smaller(best, rest)
                low += 1
            here[x] = best - own
            low = w.scratch_end[x + 1]


cdef inline void tabulate_before(Work* w) noexcept nogil:
    """Least backward time of the stages before stage ``k`` at unit ``x``; ticks."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, reach
    cdef int64_t* here
    cdef int64_t* next_
    cdef int64_t* behind
    w.before[0] = 0
    for k in range(p):
        here = w.before + k * w.width - k
        next_ = w.before + (k + 1) * w.width - (k + 1)
        behind = w.after + (k + 1) * w.width - (k + 1)
        for y in range(k + 1, n - (p - 1 - k) + 1):
            next_[y] = NO_THRESHOLD
        if w.block:
            for x in range(first_start(w, k), last_start(w, k) + 1):
                if here[x] >= NO_THRESHOLD:
                    continue
                for y in range(n if k == p - 1 else x + 1, w.fit_end[node_of(w, k, x)] + 1):
                    if behind[y] < NO_THRESHOLD:
                        next_[y] = smaller(next_[y], here[x] + stage_backward(w, k, x, y))
            continue
        reach = -1
        x = first_start(w, k)
        for y in range(n if k == p - 1 else k + 1, n - (p - 1 - k) + 1):
            while x < y and x <= last_start(w, k):
                if here[x] < NO_THRESHOLD and w.fit_end[node_of(w, k, x)] > reach:
                    reach = w.fit_end[node_of(w, k, x)]
                x += 1
            if reach >= y and behind[y] < NO_THRESHOLD:
                next_[y] = w.backward[y] + w.sent_backward[k + 1]


cdef inline int64_t least_bound(
    const Work* w, Py_ssize_t k, Py_ssize_t x, int64_t forward, int64_t backward
) noexcept nogil:
    """At most the stage bound, and never less for a longer stage from the same unit; ticks."""
    cdef int64_t node = node_of(w, k, x)
    cdef int64_t reached = w.forward[x] + w.sent_forward[k] + w.m * (forward + backward)
    cdef int64_t wait = larger(0, w.m - w.p + k)
    cdef int64_t back = w.all_forward + w.after[node] + (w.m - 1) * backward + wait * forward
    return w.constant + larger(reached, back) + w.before[node] + w.least_optimizer


cdef inline int64_t stage_bound(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y, int64_t forward, int64_t backward
) noexcept nogil:
    """Longest of the paths that pass through stage ``k`` alone, with units ``x .. y``; ticks."""
    cdef int64_t ends = larger(stage_tail(w, x, y), w.before[node_of(w, k, x)])
    cdef int64_t returned = w.all_forward + backward + w.after[node_of(w, k + 1, y)]
    cdef int64_t wait = larger(0, w.m - w.p + k)
    cdef int64_t started = larger(stage_head(w, x, y), w.forward[x] + w.sent_forward[k])
    cdef int64_t longest = larger(
        returned + (w.m - 1) * backward + wait * forward,
        started + w.m * (forward + backward),
    )
    cdef int64_t optimizer = larger(w.optimizer[y] - w.optimizer[x], w.least_optimizer)
    return w.constant + longest + ends + optimizer


cdef inline void tabulate_bottleneck(Work* w) noexcept nogil:
    """Least that the largest stage bound can be for units ``x ..`` on stages ``k ..``; ticks."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, end, low, start, first
    cdef int64_t best, worst, forward, backward
    cdef int64_t* behind
    cdef int64_t* falling = w.scratch
    for x in range(w.width):
        w.bottleneck[p * w.width + x] = NO_THRESHOLD
    w.bottleneck[node_of(w, p, n)] = 0
    for k in range(p - 1, -1, -1):
        behind = w.bottleneck + (k + 1) * w.width - (k + 1)
        # Prefix minimum: ``falling[y]`` is the least bottleneck of any end up to ``y``.
        best = NO_THRESHOLD
        for y in range(k + 1, n - (p - 1 - k) + 1):
            best = smaller(best, behind[y])
            falling[y] = best
        start = n
        for x in range(last_start(w, k), first_start(w, k) - 1, -1):
            best = NO_THRESHOLD
            if w.before[node_of(w, k, x)] < NO_THRESHOLD:
                end = w.fit_end[node_of(w, k, x)]
                low = n if k == p - 1 else x + 1
                first = start = larger(low, smaller(start, end))
                for y in range(first, end + 1):
                    forward = stage_forward(w, k, x, y)
                    backward = stage_backward(w, k, x, y)
                    if least_bound(w, k, x, forward, backward) >= best:
                        break
                    if behind[y] < best:
                        worst = larger(stage_bound(w, k, x, y, forward, backward), behind[y])
                        if worst < best:
                            best, start = worst, y
                for y in range(first - 1, low - 1, -1):
                    if falling[y] >= best:
                        break
                    if behind[y] < best:
                        forward = stage_forward(w, k, x, y)
                        backward = stage_backward(w, k, x, y)
                        worst = larger(stage_bound(w, k, x, y, forward, backward), behind[y])
                        if worst < best:
                            best, start = worst, y
            w.bottleneck[node_of(w, k, x)] = best
