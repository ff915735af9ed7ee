# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""Cuts, and the depth-first search that they bound. One chunk a rank."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from stage_nogoods cimport ask, close_level, forget_cut, known_dead, open_level
from stage_rows cimport simulate_rows, walk_back
from stage_tables cimport (
    least_bound,
    stage_bound,
    tabulate_after,
    tabulate_before,
    tabulate_bottleneck,
    tabulate_fit,
)
from stage_work cimport (
    NO_THRESHOLD,
    PAUSED,
    PAUSE_NODES,
    STATUS_BOUNDED,
    STATUS_INFEASIBLE,
    STATUS_LIMIT,
    STATUS_OPTIMAL,
    Cell,
    Cut,
    Work,
    ceiling,
    first_start,
    larger,
    last_start,
    node_of,
    smaller,
    stage_backward,
    stage_forward,
)


cdef inline int active(int64_t least, int64_t rest) noexcept nogil:
    """Which of two sums counts: 1 the least, 2 the rest, 0 neither."""
    if least >= rest:
        return 1 if least > 0 else 0
    return 2 if rest > 0 else 0


cdef inline int64_t weight_of(
    const Work* w, const Cut* cut, Py_ssize_t k, Py_ssize_t x, const Cell* cell
) noexcept nogil:
    """What stage ``k`` with a cell's units adds to a cut, ticks."""
    cdef int64_t weight
    cdef Py_ssize_t y = cell.end
    weight = cut.forward[k] * cell.forward + cut.backward[k] * cell.backward
    if k == cut.head_rank:
        if cut.head_kind == 1:
            weight += w.head_least[y] - w.head_least[x]
        elif cut.head_kind == 2:
            weight += w.head_rest[y] - w.head_rest[x]
    if k == cut.tail_rank:
        if cut.tail_kind == 1:
            weight += w.tail_least[y] - w.tail_least[x]
        elif cut.tail_kind == 2:
            weight += w.tail_rest[y] - w.tail_rest[x]
    if k == cut.optimizer_rank:
        weight += cell.optimizer
    return weight


cdef inline void add_cut(Work* w, const int32_t* marks, Py_ssize_t depth) noexcept nogil:
    """Keep the critical path of the schedule just simulated; the oldest makes room.

    ``marks`` [p + 1] is its partition; the sums so far follow ``path`` down to ``depth`` stages.
    """
    cdef Cut* cut = &w.cuts[w.num_cuts % w.max_cuts]
    cdef Py_ssize_t p = w.p, k, x, y, index, node
    cdef int64_t least
    cdef Py_ssize_t i
    cdef const Cell* cell
    cdef Cell here
    forget_cut(w, w.num_cuts % w.max_cuts)
    w.num_cuts += 1
    walk_back(w)
    cut.head_rank, cut.tail_rank, cut.optimizer_rank = w.path_head, w.path_tail, w.path_optimizer
    x, y = marks[cut.head_rank], marks[cut.head_rank + 1]
    cut.head_kind = active(w.head_least[y] - w.head_least[x], w.head_rest[y] - w.head_rest[x])
    x, y = marks[cut.tail_rank], marks[cut.tail_rank + 1]
    cut.tail_kind = active(w.tail_least[y] - w.tail_least[x], w.tail_rest[y] - w.tail_rest[x])
    for k in range(p):
        cut.forward[k] = w.count_forward[k]
        cut.backward[k] = w.count_backward[k]
    cut.remaining[node_of(w, p, w.n)] = 0
    for index in range(w.num_live - 1, -1, -1):
        node = w.live[index]
        k = node // w.width
        x = node % w.width + k
        least = NO_THRESHOLD
        for i in range(w.cell_first[node], w.cell_end[node]):
            cell = &w.cells[i]
            if cell.key < w.threshold:
                least = smaller(least, weight_of(w, cut, k, x, cell) + cut.remaining[cell.node])
        cut.remaining[node] = least
    cut.so_far[0] = w.constant
    w.lower = larger(w.lower, w.constant + cut.remaining[0])
    for k in range(depth):
        x, y = w.path[k], w.path[k + 1]
        here.end = y
        here.forward = stage_forward(w, k, x, y)
        here.backward = stage_backward(w, k, x, y)
        here.optimizer = w.optimizer[y] - w.optimizer[x]
        cut.so_far[k + 1] = cut.so_far[k] + weight_of(w, cut, k, x, &here)


cdef inline bint cut_off(Work* w, Py_ssize_t k, Py_ssize_t x, const Cell* cell) noexcept nogil:
    """Whether a cut proves that nothing below this branch wins; else extend the sums so far.

    Of the cuts that prove it, one that asks nothing new of the prefix is enough, or else the one
    with the most to spare. So their order does not matter, and the last to succeed is asked first.
    """
    cdef Py_ssize_t held = smaller(w.num_cuts, w.max_cuts), i, index, best = -1
    cdef int64_t so_far, margin, most = -1
    cdef bint learns = not w.barred[k]
    cdef Cut* cut
    for i in range(-1, held):
        index = w.last_killer if i < 0 else i
        cut = &w.cuts[index]
        so_far = cut.so_far[k] + weight_of(w, cut, k, x, cell)
        margin = so_far + cut.remaining[cell.node] - w.threshold
        if margin >= 0:
            if not learns or cut.so_far[k] - margin <= w.needs[k * w.max_cuts + index]:
                w.last_killer = index
                return True
            if margin > most or (margin == most and index < best):
                most, best = margin, index
        cut.so_far[k + 1] = so_far
    if best < 0:
        return False
    w.last_killer = best
    ask(w, k, best, w.cuts[best].so_far[k] - most)
    return True


cdef inline void collect_ranges(Work* w) noexcept nogil:
    """Nodes that the search can reach below the threshold, and the ends worth a look from each.

    Sets ``live``, ``cell_first``, ``cell_end`` (room for the cells, in order) and ``num_cells``.
    """
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, low, node
    cdef int64_t forward, backward, bound
    cdef int64_t* behind
    memset(w.scratch_end, 0, (n + 2) * sizeof(int32_t))
    w.num_live = 0
    w.num_cells = 0
    for node in range(w.num_nodes):
        w.cell_end[node] = 0
    w.cell_end[0] = 1
    for k in range(p):
        behind = w.bottleneck + (k + 1) * w.width - (k + 1)
        low = n if k == p - 1 else k + 1
        while low < n - (p - 1 - k) and behind[low] >= w.threshold:
            low += 1
        for x in range(first_start(w, k), last_start(w, k) + 1):
            node = node_of(w, k, x)
            if not w.cell_end[node]:
                continue
            w.live[w.num_live] = node
            w.num_live += 1
            w.cell_first[node] = w.num_cells
            for y in range(larger(low, x + 1), w.fit_end[node] + 1):
                forward = stage_forward(w, k, x, y)
                backward = stage_backward(w, k, x, y)
                if least_bound(w, k, x, forward, backward) >= w.threshold:
                    break
                if behind[y] >= w.threshold:
                    continue
                bound = stage_bound(w, k, x, y, forward, backward)
                if bound < w.threshold:
                    if k < p - 1:
                        w.cell_end[node_of(w, k + 1, y)] = 1
                    w.num_cells += 1
            w.cell_end[node] = w.num_cells


cdef inline void fill_cells(Work* w) noexcept nogil:
    """The cells counted by ``collect_ranges``."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, low, node, index
    cdef int64_t forward, backward, bound
    cdef int64_t* behind
    cdef Cell* cell = w.cells
    for index in range(w.num_live):
        node = w.live[index]
        k = node // w.width
        x = node % w.width + k
        behind = w.bottleneck + (k + 1) * w.width - (k + 1)
        y = n if k == p - 1 else x + 1
        low = w.cell_end[node] - w.cell_first[node]
        while low > 0:
            if behind[y] < w.threshold:
                forward = stage_forward(w, k, x, y)
                backward = stage_backward(w, k, x, y)
                bound = stage_bound(w, k, x, y, forward, backward)
                if bound < w.threshold:
                    cell.key = larger(bound, behind[y])
                    cell.forward = forward
                    cell.backward = backward
                    cell.optimizer = w.optimizer[y] - w.optimizer[x]
                    cell.end = y
                    cell.node = node_of(w, k + 1, y)
                    cell += 1
                    low -= 1
            y += 1


cdef inline void keep_best(Work* w, int64_t time) noexcept nogil:
    """The partition in ``path`` is the best so far."""
    cdef Py_ssize_t k
    w.iteration = time
    w.found = 1
    for k in range(w.p + 1):
        w.best[k] = w.path[k]


cdef inline void first_guess(Work* w) noexcept nogil:
    """The bottleneck program's partition, largest stages first, into ``path``; simulate it."""
    cdef Py_ssize_t p = w.p, k, x, y
    cdef int64_t target = w.bottleneck[0], time
    cdef int64_t* behind
    w.path[0] = 0
    for k in range(p):
        x = w.path[k]
        behind = w.bottleneck + (k + 1) * w.width - (k + 1)
        y = w.fit_end[node_of(w, k, x)]
        while behind[y] > target or stage_bound(
            w, k, x, y, stage_forward(w, k, x, y), stage_backward(w, k, x, y)
        ) > target:
            y -= 1
        w.path[k + 1] = y
    time = simulate_rows(w, w.path)
    w.simulations += 1
    if time < w.threshold:
        keep_best(w, time)
        w.threshold = time + 1


cdef inline void visit_leaf(Work* w) noexcept nogil:
    cdef int64_t time = simulate_rows(w, w.path)
    cdef Py_ssize_t index = w.num_cuts % w.max_cuts
    cdef int64_t* so_far
    w.simulations += 1
    if time < w.threshold:
        keep_best(w, time)
        w.threshold = time
    add_cut(w, w.path, w.p)
    so_far = w.cuts[index].so_far
    ask(w, w.p - 1, index, so_far[w.p - 1] - (so_far[w.p] - w.threshold))


cdef inline int search(Work* w) noexcept nogil:
    """Go on with the search; its status, or PAUSED to let the caller look at signals."""
    cdef Py_ssize_t p = w.p, k = w.depth, node
    cdef Cell* cell
    while True:
        node = node_of(w, k, w.path[k])
        if w.cursor[k] <= w.cell_first[node]:
            if k == 0:
                return STATUS_OPTIMAL if w.found else STATUS_BOUNDED
            close_level(w, k, node)
            k -= 1
            continue
        w.cursor[k] -= 1
        cell = &w.cells[w.cursor[k]]
        if cell.key >= w.threshold:
            continue
        w.nodes += 1
        if w.nodes > w.node_limit:
            w.lower = smaller(w.lower, w.threshold)
            return STATUS_LIMIT
        if not cut_off(w, k, w.path[k], cell) and not known_dead(w, k + 1, cell.node):
            w.path[k + 1] = cell.end
            if k == p - 1:
                visit_leaf(w)
            else:
                k += 1
                open_level(w, k)
                w.cursor[k] = w.cell_end[cell.node]
        if w.nodes % PAUSE_NODES == 0 or w.nodes == w.nogoods_after:
            w.depth = k
            return PAUSED


cdef inline void start_search(Work* w) noexcept nogil:
    """Cells, the first guess's cut, and the search at its first stage."""
    cdef Py_ssize_t k
    cdef int64_t i
    for k in range(w.p):
        w.barred[k] = 1
    for i in range(w.max_cuts):
        w.cuts[i].forward = w.cut_passes + i * 2 * w.p
        w.cuts[i].backward = w.cut_passes + i * 2 * w.p + w.p
        w.cuts[i].so_far = w.cut_so_far + i * (w.p + 1)
        w.cuts[i].remaining = w.cut_remaining + i * w.num_nodes
    fill_cells(w)
    add_cut(w, w.path, 0)
    w.depth = 0
    w.cursor[0] = w.cell_end[0]


cdef inline int prepare(Work* w) noexcept nogil:
    """Memory, bounds, bottleneck program: a status if they settle the matter, else PAUSED."""
    tabulate_fit(w)
    tabulate_after(w)
    if w.after[0] >= NO_THRESHOLD:
        w.lower = NO_THRESHOLD
        return STATUS_INFEASIBLE
    if w.threshold <= 0:
        w.lower = 0
        return STATUS_BOUNDED
    tabulate_before(w)
    w.all_forward = w.forward[w.n] + w.sent_forward[w.p]
    w.least_optimizer = ceiling(w.optimizer[w.n], w.p)
    tabulate_bottleneck(w)
    w.lower = w.bottleneck[0]
    if w.lower >= w.threshold:
        return STATUS_BOUNDED
    if w.node_limit == 0:
        return STATUS_LIMIT
    first_guess(w)
    collect_ranges(w)
    return PAUSED
