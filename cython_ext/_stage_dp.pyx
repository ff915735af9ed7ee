"""The stage problem solved in C: returns exactly what ``nest_megatron.solver.reference`` returns.

Whole numbers only (ticks and bytes in int64), no NumPy. ``solve`` packs a problem into one
workspace with the gil held; everything else runs without it and allocates nothing. It is one file
because the C compiler inlines its small functions into each other, which it cannot do across
modules. Sections, each under a comment: the workspace and sums over units, tables (1 to 3 below),
the simulator, nogoods and search (4), virtual stages, packing.

Loop order, which is the reference's:

1. Memory: ``fit_end[k, x]``, the last end with which stage ``k`` from unit ``x`` fits; sums of
   units never shrink as a stage grows, so every smaller end fits too.
2. Stage bounds are computed where they are asked for, from prefix sums.
3. Bottleneck program: stages last to first, starts ``x`` descending. Only the least value of each
   place counts, so ends that a monotone lower bound or a prefix minimum rules out are passed over.
4. Search: depth first, stages first to last, ends largest first, through the ends whose bound and
   bottleneck lie below the threshold. Every simulation leaves a path bound (what its critical path
   takes under another partition), in a ring of ``max_path_bounds``; a search that takes long also
   keeps nogoods.

With virtual stages: members in the order of ``chunk_space``, bounded, then simulated in that order.

The simulators advance all ranks in step. Where rows repeat with constant increments, and as long as
no maximum changes its argument, whole runs of rows are added at once; that is exact, and so is the
critical path read back through such a run.
"""

from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.math cimport fabs
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

cdef enum:
    STATUS_OPTIMAL = 0
    STATUS_BOUNDED = 1
    STATUS_INFEASIBLE = 2
    STATUS_LIMIT = 3
    PAUSED = 4

cdef enum:
    PAUSE_NODES = 1 << 12
    NUM_FIELDS = 13

cdef enum:
    MOST_UNITS = (1 << 31) - 2  # places are kept in int32

cdef enum:
    MTP_ALONE = 2  # of the ways in which MTP layers stand apart from the head

cdef enum:
    BY_PREVIOUS = 0
    BY_SOURCE = 1
    BY_NOTHING = 2


cdef extern from *:
    """
    #define STAGE_NO_THRESHOLD ((int64_t)1 << 61)
    #define STAGE_MOST ((int64_t)1 << 59)
    #define STAGE_NO_NEED (-((int64_t)1 << 61))
    """
    const int64_t NO_THRESHOLD "STAGE_NO_THRESHOLD"
    const int64_t MOST_TICKS "STAGE_MOST"
    const int64_t NO_NEED "STAGE_NO_NEED"

cdef struct Cell:
    # One admissible stage: an end and what the search asks about it.
    int64_t key        # larger of the stage bound and the bottleneck behind it, ticks
    int64_t forward    # with its transfer, ticks
    int64_t backward   # with its transfer, ticks
    int64_t optimizer  # ticks
    int32_t end        # unit
    int64_t node       # of the next stage from there

cdef struct PathBound:
    int64_t* remaining  # OUT, [num_nodes]: least that the path can still grow by, ticks
    int64_t* so_far     # INOUT, [p + 1]: length over the stages chosen so far, ticks
    int64_t* forward    # [p]: passes on the path
    int64_t* backward   # [p]
    Py_ssize_t gather_rank
    int gather_kind       # 0: no gather, 1: unhidden, 2: hideable
    Py_ssize_t reduction_rank
    int reduction_kind
    Py_ssize_t optimizer_rank

cdef struct Need:
    # One condition of a nogood.
    int64_t so_far     # least length of the path so far, ticks
    int64_t number     # of the path bound among all ever made

cdef struct Work:
    # IN: the problem.
    Py_ssize_t p, v, n, num_layers, block, overlap
    int64_t m, capacity, constant, threshold, node_limit
    bint all_fit             # whether all partitions fit, seen without a look at any
    int64_t* send_forward    # [p * v], ticks
    int64_t* send_backward   # [p * v], ticks
    # Prefix sums over units, [n + 1]; the ``recomputed_`` ones hold block minus plain, layers only.
    int64_t* forward
    int64_t* backward
    int64_t* recomputed_backward
    int64_t* gather_unhidden
    int64_t* gather_hideable
    int64_t* reduce_unhidden
    int64_t* reduce_hideable
    int64_t* optimizer
    int64_t* static_bytes
    int64_t* saved
    int64_t* recomputed_saved
    int64_t* working         # [levels, n]: largest of 2**level units from each, bytes
    int64_t* block_working   # [levels, n]
    int32_t* log2            # [n + 1]
    int32_t* recomputed_first     # [n + 1]: first layer of a chunk that starts here
    int32_t* recomputed_end       # [n + 1]: end of the layers that such a chunk recomputes
    # Sums over stages, [p + 1], ticks.
    int64_t* sent_forward
    int64_t* sent_backward
    # Tables over nodes (stage k, start x): index k * width + x - k.
    Py_ssize_t width
    int64_t num_nodes
    int32_t* fit_end         # [num_nodes]
    int64_t* after           # [num_nodes]
    int64_t* before          # [num_nodes]
    int64_t* bottleneck      # [num_nodes]
    int64_t* scratch         # [n + 1]
    int32_t* scratch_end     # [n + 2]
    int64_t all_forward, least_optimizer
    # The search.
    int64_t* cell_first      # [num_nodes]
    int64_t* cell_end        # [num_nodes]
    int64_t* live            # [num_nodes]: nodes that the search can reach, stage by stage
    Py_ssize_t num_live
    Cell* cells              # [num_cells], ends ascending
    int64_t num_cells
    Py_ssize_t max_path_bounds
    PathBound* path_bounds                # [max_path_bounds], a ring
    int64_t* bound_passes      # [max_path_bounds, 2, p]
    int64_t* bound_so_far      # [max_path_bounds, p + 1]
    int64_t* bound_remaining   # [max_path_bounds, num_nodes]
    int64_t num_path_bounds         # ever made
    Py_ssize_t last_killer
    Py_ssize_t depth
    int64_t* cursor          # [p]
    int32_t* path            # [p * v + 1]
    int32_t* best            # [p * v + 1]
    bint found
    int64_t nodes, simulations, lower, iteration
    # Nogoods.
    int64_t nogoods_after
    Py_ssize_t max_nogoods, max_needs
    bint keeping             # whether their places exist
    int32_t* barred          # [p]: 1 where a level learns nothing
    int64_t* needs           # [p, max_path_bounds]: least lengths so far, or NO_NEED; ticks
    int64_t* nogoods_made    # [num_nodes]: ever
    int64_t* live_index      # [num_nodes]: place in ``live``
    int64_t* nogood_size     # [num_live, max_nogoods]
    Need* nogoods            # [num_live, max_nogoods, max_needs]
    # The simulator, [p] each unless noted.
    int64_t* time_forward    # [p * v]
    int64_t* time_backward   # [p * v]
    int64_t* delay_forward   # [p * v]
    int64_t* delay_backward  # [p * v]
    int64_t* gather
    int64_t* reduction
    int64_t* end_forward
    int64_t* end_backward
    int64_t* step_forward
    int64_t* step_backward
    int64_t* kept            # [3 * p]
    int64_t* count_forward
    int64_t* count_backward
    int64_t* old_forward
    int64_t* old_backward
    uint8_t* choice          # [m + p, p]: what each pass of a row waited for
    int64_t* row_first       # [m + p]
    int64_t* row_count       # [m + p]
    int64_t num_records
    Py_ssize_t path_gather, path_reduction, path_optimizer
    # Virtual stages.
    int64_t* saved_chunk     # [p * v], bytes
    int32_t* members         # [num_members, p * v + 1]
    int64_t* member_bound    # [num_members]
    int64_t num_members
    int64_t next_member


cdef inline Py_ssize_t recomputed_until(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    """End of the layers of units ``x .. y`` that are recomputed."""
    cdef Py_ssize_t end = w.recomputed_end[x]
    if end > y:
        end = y
    return end if end > w.recomputed_first[x] else w.recomputed_first[x]


cdef inline int64_t sum_forward(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    return w.forward[y] - w.forward[x]


cdef inline int64_t sum_backward(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t total = w.backward[y] - w.backward[x]
    if w.block:
        total += w.recomputed_backward[recomputed_until(w, x, y)]
        total -= w.recomputed_backward[w.recomputed_first[x]]
    return total


cdef inline int64_t sum_saved(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t total = w.saved[y] - w.saved[x]
    if w.block:
        total += w.recomputed_saved[recomputed_until(w, x, y)]
        total -= w.recomputed_saved[w.recomputed_first[x]]
    return total


cdef inline int64_t largest_between(
    const Work* w, const int64_t* table, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    """Largest entry of a sparse table over units ``x .. y``; at least one unit."""
    cdef Py_ssize_t level = w.log2[y - x]
    cdef const int64_t* row = table + level * w.n
    return max(row[x], row[y - (1 << level)])


cdef inline int64_t most_working(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    """Largest working memory of units ``x .. y``, bytes."""
    cdef Py_ssize_t first, end
    cdef int64_t most
    if not w.block:
        return largest_between(w, w.working, x, y)
    first, end = w.recomputed_first[x], recomputed_until(w, x, y)
    most = -1
    if first > x:
        most = largest_between(w, w.working, x, first)
    if end > first:
        most = max(most, largest_between(w, w.block_working, first, end))
    if y > end:
        most = max(most, largest_between(w, w.working, end, y))
    return most


cdef inline int64_t stage_forward(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    return sum_forward(w, x, y) + w.send_forward[k]


cdef inline int64_t stage_backward(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    return sum_backward(w, x, y) + w.send_backward[k]


cdef inline int64_t stage_gather(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t unhidden = w.gather_unhidden[y] - w.gather_unhidden[x]
    return max(unhidden, w.gather_hideable[y] - w.gather_hideable[x], 0)


cdef inline int64_t stage_reduction(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t unhidden = w.reduce_unhidden[y] - w.reduce_unhidden[x]
    return max(unhidden, w.reduce_hideable[y] - w.reduce_hideable[x], 0)


cdef inline Py_ssize_t node_of(const Work* w, Py_ssize_t k, Py_ssize_t x) noexcept nogil:
    return k * w.width + x - k


cdef inline Py_ssize_t last_start(const Work* w, Py_ssize_t k) noexcept nogil:
    """Largest start of stage ``k``."""
    return 0 if k == 0 else w.n - w.p + k


cdef inline Py_ssize_t first_start(const Work* w, Py_ssize_t k) noexcept nogil:
    """Smallest start of stage ``k`` (for ``k = p``: the end of the last stage)."""
    return w.n if k == w.p else k


cdef inline int64_t ceiling(int64_t a, int64_t b) noexcept nogil:
    """``a / b`` rounded up, ``b > 0``."""
    cdef int64_t quotient = a // b
    if quotient * b < a:
        quotient += 1
    return quotient


# What fits, what each stage costs at least, and the bottleneck program. One chunk a rank.


cdef inline bint stage_fits(const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t live = min(w.m, w.p - k)
    cdef int64_t peak = w.static_bytes[y] - w.static_bytes[x] + live * sum_saved(w, x, y)
    return peak + most_working(w, x, y) <= w.capacity


cdef void tabulate_fit(Work* w) noexcept nogil:
    """``fit_end``: last end of stage ``k`` from unit ``x`` that fits, ``x`` if there is none."""
    cdef Py_ssize_t p = w.p, n = w.n, k, x, y, end, last
    for x in range(n):
        k = 0 if x == 0 else max(1, x - (n - p))
        last = x
        while k <= x and k < p:
            end = n - (p - 1 - k)
            if k == 0 and p > 1:
                # Megatron keeps MTP layers off the first of several ranks.
                end = min(end, w.num_layers + 1)
            y = last
            if not w.block and k > 0 and x > k:
                y = max(y, w.fit_end[node_of(w, k, x - 1)])
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


cdef void tabulate_after(Work* w) noexcept nogil:
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
            split = recomputed_until(w, x, n)
            own = w.backward[x] + w.recomputed_backward[w.recomputed_first[x]] - w.send_backward[k]
            low = w.scratch_end[x + 1]
            while low <= end and low < split:
                if behind[low] < NO_THRESHOLD:
                    rest = w.backward[low] + w.recomputed_backward[low] + behind[low]
                    best = min(best, rest)
                low += 1
            if low < split:
                low = split
            while low <= end:
                rest = w.backward[low] + w.recomputed_backward[split] + behind[low]
                best = min(best, rest)
                low += 1
            here[x] = best - own
            low = w.scratch_end[x + 1]


cdef void tabulate_before(Work* w) noexcept nogil:
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
                        next_[y] = min(next_[y], here[x] + stage_backward(w, k, x, y))
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
    cdef int64_t wait = max(0, w.m - w.p + k)
    cdef int64_t back = w.all_forward + w.after[node] + (w.m - 1) * backward + wait * forward
    return w.constant + max(reached, back) + w.before[node] + w.least_optimizer


cdef inline int64_t stage_bound(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y, int64_t forward, int64_t backward
) noexcept nogil:
    """Longest of the paths that pass through stage ``k`` alone, with units ``x .. y``; ticks."""
    cdef int64_t ends = max(stage_reduction(w, x, y), w.before[node_of(w, k, x)])
    cdef int64_t returned = w.all_forward + backward + w.after[node_of(w, k + 1, y)]
    cdef int64_t wait = max(0, w.m - w.p + k)
    cdef int64_t started = max(stage_gather(w, x, y), w.forward[x] + w.sent_forward[k])
    cdef int64_t longest = max(
        returned + (w.m - 1) * backward + wait * forward,
        started + w.m * (forward + backward),
    )
    cdef int64_t optimizer = max(w.optimizer[y] - w.optimizer[x], w.least_optimizer)
    return w.constant + longest + ends + optimizer


cdef void tabulate_bottleneck(Work* w) noexcept nogil:
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
            best = min(best, behind[y])
            falling[y] = best
        start = n
        for x in range(last_start(w, k), first_start(w, k) - 1, -1):
            best = NO_THRESHOLD
            if w.before[node_of(w, k, x)] < NO_THRESHOLD:
                end = w.fit_end[node_of(w, k, x)]
                low = n if k == p - 1 else x + 1
                first = start = max(low, min(start, end))
                for y in range(first, end + 1):
                    forward = stage_forward(w, k, x, y)
                    backward = stage_backward(w, k, x, y)
                    if least_bound(w, k, x, forward, backward) >= best:
                        break
                    if behind[y] < best:
                        worst = max(stage_bound(w, k, x, y, forward, backward), behind[y])
                        if worst < best:
                            best, start = worst, y
                for y in range(first - 1, low - 1, -1):
                    if falling[y] >= best:
                        break
                    if behind[y] < best:
                        forward = stage_forward(w, k, x, y)
                        backward = stage_backward(w, k, x, y)
                        worst = max(stage_bound(w, k, x, y, forward, backward), behind[y])
                        if worst < best:
                            best, start = worst, y
            w.bottleneck[node_of(w, k, x)] = best


# The 1F1B schedule, row by row, and its critical path.


cdef int64_t simulate_rows(Work* w, const int32_t* boundaries) noexcept nogil:
    """Iteration time of the partition ``boundaries`` [p + 1], ticks; fills ``choice``.

    Row ``s`` holds, of each rank ``i``, the forward pass of micro batch ``s + p - 1 - i`` and the
    backward pass of micro batch ``s``, so that a pass needs passes of its own row and the one
    before alone. Ranks are advanced last to first.
    """
    cdef Py_ssize_t p = w.p, i
    cdef int64_t m = w.m, row, skipped, latest, slowest, value, here
    cdef uint8_t* last = NULL
    cdef uint8_t* choice
    cdef bint steady
    latest = slowest = -NO_THRESHOLD
    for i in range(p):
        w.time_forward[i] = stage_forward(w, i, boundaries[i], boundaries[i + 1])
        w.time_backward[i] = stage_backward(w, i, boundaries[i], boundaries[i + 1])
        w.gather[i] = stage_gather(w, boundaries[i], boundaries[i + 1])
        w.reduction[i] = stage_reduction(w, boundaries[i], boundaries[i + 1])
        value = w.optimizer[boundaries[i + 1]] - w.optimizer[boundaries[i]]
        if value > slowest:
            slowest = value
            w.path_optimizer = i
        w.end_backward[i] = w.gather[i]
        w.end_forward[i] = 0
    w.num_records = 0
    row = 1 - p
    while row < m:
        choice = w.choice + w.num_records * p
        w.row_first[w.num_records] = row
        w.row_count[w.num_records] = 1
        w.num_records += 1
        if row < 0 or row > m - p:
            partial_row(w, row, choice)
            last = NULL
            row += 1
            continue
        steady = full_row(w, choice, last)
        last = choice
        row += 1
        if steady and row <= m - p:
            skipped = rows_alike(w, choice, m - p - row + 1)
            if skipped:
                for i in range(p):
                    w.end_forward[i] += skipped * w.step_forward[i]
                    w.end_backward[i] += skipped * w.step_backward[i]
                w.row_count[w.num_records - 1] += skipped
                row += skipped
    for i in range(p):
        here = w.end_backward[i] + w.reduction[i]
        if here > latest:
            latest = here
            w.path_reduction = i
    return w.constant + latest + slowest


cdef void partial_row(Work* w, int64_t row, uint8_t* choice) noexcept nogil:
    """A row of the start or the end, where some ranks have no forward or no backward pass."""
    cdef Py_ssize_t p = w.p, i
    cdef int64_t m = w.m, start, clock
    cdef int bits
    for i in range(p - 1, -1, -1):
        clock = w.end_backward[i]
        bits = 0
        if 0 <= row + p - 1 - i < m:
            start = clock
            bits = BY_PREVIOUS if start > w.gather[i] else BY_NOTHING
            if i > 0 and w.end_forward[i - 1] >= clock:
                start, bits = w.end_forward[i - 1], BY_SOURCE
            clock = w.end_forward[i] = start + w.time_forward[i]
        if row >= 0:
            start = clock
            if i == p - 1:
                bits |= BY_SOURCE << 2
            elif w.end_backward[i + 1] >= clock:
                start = w.end_backward[i + 1]
                bits |= BY_SOURCE << 2
            else:
                bits |= (BY_PREVIOUS if start > w.gather[i] else BY_NOTHING) << 2
            clock = start + w.time_backward[i]
        w.end_backward[i] = clock
        choice[i] = <uint8_t>bits


cdef inline bint full_row(Work* w, uint8_t* choice, const uint8_t* last) noexcept nogil:
    """A row with all passes; whether it and its increments choose and grow as the row before did.

    ``last`` is that row's choices, or NULL.
    """
    cdef Py_ssize_t p = w.p, i
    cdef int64_t start, clock, behind, forward, backward, change = 0
    cdef int bits
    behind = -NO_THRESHOLD
    for i in range(p - 1, -1, -1):
        start = w.end_backward[i]
        bits = BY_PREVIOUS if start > w.gather[i] else BY_NOTHING
        if i > 0 and w.end_forward[i - 1] >= start:
            start, bits = w.end_forward[i - 1], BY_SOURCE
        forward = clock = start + w.time_forward[i]
        if behind >= clock or i == p - 1:
            clock = max(clock, behind)
            bits |= BY_SOURCE << 2
        elif clock <= w.gather[i]:
            bits |= BY_NOTHING << 2
        backward = behind = clock + w.time_backward[i]
        start = forward - w.end_forward[i]
        change |= start ^ w.step_forward[i]
        w.step_forward[i] = start
        w.end_forward[i] = forward
        start = backward - w.end_backward[i]
        change |= start ^ w.step_backward[i]
        w.step_backward[i] = start
        w.end_backward[i] = backward
        choice[i] = <uint8_t>bits
    if change or last == NULL:
        return False
    for i in range(p):
        if choice[i] != last[i] or choice[i] & (BY_NOTHING | BY_NOTHING << 2):
            return False
    return True


cdef inline int64_t rows_alike(const Work* w, const uint8_t* choice, int64_t most) noexcept nogil:
    """Rows that follow with the same choices and increments, at most ``most``.

    Each maximum's two arguments drift apart or together by the difference of their increments.
    """
    cdef Py_ssize_t p = w.p, i
    cdef int64_t lead, drift
    for i in range(p):
        if i > 0:
            lead = w.end_forward[i - 1] - w.end_backward[i]
            drift = w.step_forward[i - 1] - w.step_backward[i]
            # The next row compares what this row leaves.
            if choice[i] & BY_SOURCE:
                if lead < 0:
                    return 0
                if drift < 0:
                    most = min(most, lead // -drift + 1)
            else:
                if lead >= 0:
                    return 0
                if drift > 0:
                    most = min(most, (-lead - 1) // drift + 1)
        if i < p - 1:
            lead = w.end_backward[i + 1] - w.end_forward[i]
            drift = w.step_backward[i + 1] - w.step_forward[i]
            if choice[i] & (BY_SOURCE << 2):
                if drift < 0:
                    most = min(most, lead // -drift)
            elif drift > 0:
                most = min(most, (-lead - 1) // drift)
    return most


cdef void walk_back(Work* w) noexcept nogil:
    """Passes of each stage on the critical path of the schedule just simulated.

    Of two passes that a pass waited for, the one on the other rank is followed. In a run of equal
    rows the walk soon repeats itself; then whole rounds are counted at once.
    """
    cdef Py_ssize_t p = w.p, rank = w.path_reduction
    cdef int bits
    cdef int64_t m = w.m, row = m - 1, first, rounds, marked_row = 0
    cdef int64_t record = w.num_records - 1, steps = 0
    cdef Py_ssize_t marked_rank = -1, i
    cdef bint is_forward = False, marked_forward = False
    memset(w.count_forward, 0, p * sizeof(int64_t))
    memset(w.count_backward, 0, p * sizeof(int64_t))
    while True:
        while w.row_first[record] > row:
            record -= 1
            steps = 0
        if w.row_count[record] > 1:
            steps += 1
            first = w.row_first[record]
            if steps == 2 * p + 1 and row - first > 4 * p:
                marked_rank, marked_forward, marked_row = rank, is_forward, row
                for i in range(p):
                    w.old_forward[i] = w.count_forward[i]
                    w.old_backward[i] = w.count_backward[i]
            elif (
                steps > 2 * p + 1
                and rank == marked_rank
                and is_forward == marked_forward
                and marked_row > row
            ):
                rounds = (row - first) // (marked_row - row)
                row -= rounds * (marked_row - row)
                for i in range(p):
                    w.count_forward[i] += rounds * (w.count_forward[i] - w.old_forward[i])
                    w.count_backward[i] += rounds * (w.count_backward[i] - w.old_backward[i])
                marked_rank = -1
        bits = w.choice[record * p + rank]
        if is_forward:
            w.count_forward[rank] += 1
            if bits & BY_SOURCE:
                rank -= 1
                row -= 1
            elif bits & BY_NOTHING:
                break
            else:
                row -= 1
                is_forward = row < 0
        else:
            w.count_backward[rank] += 1
            bits >>= 2
            if bits & BY_SOURCE:
                if rank == p - 1:
                    is_forward = True
                else:
                    rank += 1
            elif bits & BY_NOTHING:
                break
            elif row + p - 1 - rank < m:
                is_forward = True
            elif row > 0:
                row -= 1
            else:
                row = m - p + rank
                is_forward = True
    w.path_gather = rank


# Why branches died, so that later prefixes need not die there again. One chunk a rank.
#
# An open level keeps, for each path bound that killed something below it, the least length so far
# with which it all still dies: its *needs*. ``nest_megatron.solver.nogoods`` says it in full.


cdef void start_keeping(Work* w) noexcept nogil:
    """Empty tables. The levels that are open now stay barred: what killed branches is forgotten."""
    cdef int64_t index
    for index in range(w.num_live):
        w.live_index[w.live[index]] = index
    memset(w.nogoods_made, 0, w.num_nodes * sizeof(w.nogoods_made[0]))
    for index in range(w.p * w.max_path_bounds):
        w.needs[index] = NO_NEED
    w.keeping = True


cdef inline void open_level(Work* w, Py_ssize_t k) noexcept nogil:
    """Nothing has died below stage ``k`` yet."""
    cdef Py_ssize_t index
    if w.keeping:
        w.barred[k] = 0
        for index in range(min(w.num_path_bounds, w.max_path_bounds)):
            w.needs[k * w.max_path_bounds + index] = NO_NEED


cdef inline void ask(Work* w, Py_ssize_t k, Py_ssize_t index, int64_t so_far) noexcept nogil:
    """Something below stage ``k`` dies of a path bound at least ``so_far`` long at ``k``."""
    cdef int64_t* need = w.needs + k * w.max_path_bounds + index
    if not w.barred[k] and so_far > need[0]:
        need[0] = so_far


cdef inline void ask_above(Work* w, Py_ssize_t k, Py_ssize_t index, int64_t so_far) noexcept nogil:
    """What stage ``k`` asks of a path bound, asked one stage earlier."""
    cdef int64_t* length = w.path_bounds[index].so_far
    ask(w, k - 1, index, so_far - (length[k] - length[k - 1]))


cdef inline void forget_path_bound(Work* w, Py_ssize_t index) noexcept nogil:
    """A path bound is overwritten: what needed it is not known any more."""
    cdef Py_ssize_t k
    if w.keeping:
        for k in range(w.p):
            if w.needs[k * w.max_path_bounds + index] > NO_NEED:
                w.needs[k * w.max_path_bounds + index] = NO_NEED
                w.barred[k] = 1


cdef void close_level(Work* w, Py_ssize_t k, Py_ssize_t node) noexcept nogil:
    """Everything below stage ``k`` died: keep its needs as a nogood and pass them up."""
    cdef Py_ssize_t held = min(w.num_path_bounds, w.max_path_bounds), index, size = 0
    cdef int64_t* needs = w.needs + k * w.max_path_bounds
    cdef int64_t place
    cdef Need* nogood
    if w.barred[k]:
        w.barred[k - 1] = 1
        return
    for index in range(held):
        if needs[index] > NO_NEED:
            ask_above(w, k, index, needs[index])
            size += 1
    if size > w.max_needs:
        return
    place = place_of(w, node, w.nogoods_made[node])
    w.nogoods_made[node] += 1
    w.nogood_size[place] = size
    nogood = w.nogoods + place * w.max_needs
    for index in range(held):
        if needs[index] > NO_NEED:
            nogood.so_far = needs[index]
            nogood.number = number_of(w, index)
            nogood += 1


cdef inline int64_t place_of(const Work* w, Py_ssize_t node, Py_ssize_t made) noexcept nogil:
    """Where a node's nogood lies before which ``made`` others were made."""
    return w.live_index[node] * w.max_nogoods + made % w.max_nogoods


cdef inline int64_t number_of(const Work* w, Py_ssize_t index) noexcept nogil:
    """Number among all path bounds ever made of the one that the ring holds at ``index``."""
    cdef int64_t newest = w.num_path_bounds - 1
    return newest - (newest - index) % w.max_path_bounds


cdef inline bint known_dead(Work* w, Py_ssize_t k, Py_ssize_t node) noexcept nogil:
    """Whether the prefix before stage ``k`` meets all that some nogood asks, newest first."""
    cdef Py_ssize_t i, j, made, size
    cdef int64_t place
    cdef const Need* nogood
    if not w.keeping:
        return False
    made = w.nogoods_made[node]
    for j in range(min(made, w.max_nogoods)):
        place = place_of(w, node, made - 1 - j)
        nogood = w.nogoods + place * w.max_needs
        size = w.nogood_size[place]
        if meets(w, k, nogood, size):
            for i in range(size):
                ask_above(w, k, nogood[i].number % w.max_path_bounds, nogood[i].so_far)
            return True
    return False


cdef inline bint meets(
    const Work* w, Py_ssize_t k, const Need* nogood, Py_ssize_t size
) noexcept nogil:
    """Whether the ring still holds all path bounds of a nogood, each as long as it asks."""
    cdef Py_ssize_t i
    for i in range(size):
        if nogood[i].number < w.num_path_bounds - w.max_path_bounds:
            return False
        if w.path_bounds[nogood[i].number % w.max_path_bounds].so_far[k] < nogood[i].so_far:
            return False
    return True


# Path bounds, and the depth-first search that they prune. One chunk a rank.


cdef inline int active(int64_t least, int64_t rest) noexcept nogil:
    """Which of two sums counts: 1 the least, 2 the rest, 0 neither."""
    if least >= rest:
        return 1 if least > 0 else 0
    return 2 if rest > 0 else 0


cdef inline int64_t weight_of(
    const Work* w, const PathBound* bound, Py_ssize_t k, Py_ssize_t x, const Cell* cell
) noexcept nogil:
    """What stage ``k`` with a cell's units adds to a path bound, ticks."""
    cdef int64_t weight
    cdef Py_ssize_t y = cell.end
    weight = bound.forward[k] * cell.forward + bound.backward[k] * cell.backward
    if k == bound.gather_rank:
        if bound.gather_kind == 1:
            weight += w.gather_unhidden[y] - w.gather_unhidden[x]
        elif bound.gather_kind == 2:
            weight += w.gather_hideable[y] - w.gather_hideable[x]
    if k == bound.reduction_rank:
        if bound.reduction_kind == 1:
            weight += w.reduce_unhidden[y] - w.reduce_unhidden[x]
        elif bound.reduction_kind == 2:
            weight += w.reduce_hideable[y] - w.reduce_hideable[x]
    if k == bound.optimizer_rank:
        weight += cell.optimizer
    return weight


cdef void add_path_bound(Work* w, const int32_t* boundaries, Py_ssize_t depth) noexcept nogil:
    """Keep the critical path of the schedule just simulated; the oldest is overwritten.

    ``boundaries`` [p + 1] is its partition; sums so far follow ``path`` down to ``depth`` stages.
    """
    cdef PathBound* bound = &w.path_bounds[w.num_path_bounds % w.max_path_bounds]
    cdef Py_ssize_t p = w.p, k, x, y, index, node
    cdef int64_t least
    cdef Py_ssize_t i
    cdef const Cell* cell
    cdef Cell here
    forget_path_bound(w, w.num_path_bounds % w.max_path_bounds)
    w.num_path_bounds += 1
    walk_back(w)
    bound.gather_rank, bound.reduction_rank = w.path_gather, w.path_reduction
    bound.optimizer_rank = w.path_optimizer
    x, y = boundaries[bound.gather_rank], boundaries[bound.gather_rank + 1]
    bound.gather_kind = active(
        w.gather_unhidden[y] - w.gather_unhidden[x], w.gather_hideable[y] - w.gather_hideable[x]
    )
    x, y = boundaries[bound.reduction_rank], boundaries[bound.reduction_rank + 1]
    bound.reduction_kind = active(
        w.reduce_unhidden[y] - w.reduce_unhidden[x], w.reduce_hideable[y] - w.reduce_hideable[x]
    )
    for k in range(p):
        bound.forward[k] = w.count_forward[k]
        bound.backward[k] = w.count_backward[k]
    bound.remaining[node_of(w, p, w.n)] = 0
    for index in range(w.num_live - 1, -1, -1):
        node = w.live[index]
        k = node // w.width
        x = node % w.width + k
        least = NO_THRESHOLD
        for i in range(w.cell_first[node], w.cell_end[node]):
            cell = &w.cells[i]
            if cell.key < w.threshold:
                least = min(least, weight_of(w, bound, k, x, cell) + bound.remaining[cell.node])
        bound.remaining[node] = least
    bound.so_far[0] = w.constant
    w.lower = max(w.lower, w.constant + bound.remaining[0])
    for k in range(depth):
        x, y = w.path[k], w.path[k + 1]
        here.end = y
        here.forward = stage_forward(w, k, x, y)
        here.backward = stage_backward(w, k, x, y)
        here.optimizer = w.optimizer[y] - w.optimizer[x]
        bound.so_far[k + 1] = bound.so_far[k] + weight_of(w, bound, k, x, &here)


cdef inline bint is_pruned(Work* w, Py_ssize_t k, Py_ssize_t x, const Cell* cell) noexcept nogil:
    """Whether a path bound proves that nothing below this branch wins; else extend the sums so far.

    Of the path bounds that prove it, one that asks nothing new of the prefix is enough, or else the
    one with the most to spare. So their order does not matter; the last to succeed is asked first.
    """
    cdef Py_ssize_t held = min(w.num_path_bounds, w.max_path_bounds), i, index, best = -1
    cdef int64_t so_far, margin, most = -1
    cdef bint learns = not w.barred[k]
    cdef PathBound* bound
    for i in range(-1, held):
        index = w.last_killer if i < 0 else i
        bound = &w.path_bounds[index]
        so_far = bound.so_far[k] + weight_of(w, bound, k, x, cell)
        margin = so_far + bound.remaining[cell.node] - w.threshold
        if margin >= 0:
            if not learns or bound.so_far[k] - margin <= w.needs[k * w.max_path_bounds + index]:
                w.last_killer = index
                return True
            if margin > most or (margin == most and index < best):
                most, best = margin, index
        bound.so_far[k + 1] = so_far
    if best < 0:
        return False
    w.last_killer = best
    ask(w, k, best, w.path_bounds[best].so_far[k] - most)
    return True


cdef void collect_ranges(Work* w) noexcept nogil:
    """Nodes that the search can reach below the threshold, and the ends worth a look from each.

    Sets ``live``, ``cell_first``, ``cell_end`` (places of the cells, in order) and ``num_cells``.
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
            for y in range(max(low, x + 1), w.fit_end[node] + 1):
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


cdef void fill_cells(Work* w) noexcept nogil:
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
                    cell.key = max(bound, behind[y])
                    cell.forward = forward
                    cell.backward = backward
                    cell.optimizer = w.optimizer[y] - w.optimizer[x]
                    cell.end = y
                    cell.node = node_of(w, k + 1, y)
                    cell += 1
                    low -= 1
            y += 1


cdef void keep_best(Work* w, int64_t time) noexcept nogil:
    """The partition in ``path`` is the best so far."""
    cdef Py_ssize_t k
    w.iteration = time
    w.found = 1
    for k in range(w.p + 1):
        w.best[k] = w.path[k]


cdef void first_guess(Work* w) noexcept nogil:
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


cdef void visit_leaf(Work* w) noexcept nogil:
    cdef int64_t time = simulate_rows(w, w.path)
    cdef Py_ssize_t index = w.num_path_bounds % w.max_path_bounds
    cdef int64_t* so_far
    w.simulations += 1
    if time < w.threshold:
        keep_best(w, time)
        w.threshold = time
    add_path_bound(w, w.path, w.p)
    so_far = w.path_bounds[index].so_far
    ask(w, w.p - 1, index, so_far[w.p - 1] - (so_far[w.p] - w.threshold))


cdef int search(Work* w) noexcept nogil:
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
            w.lower = min(w.lower, w.threshold)
            return STATUS_LIMIT
        if not is_pruned(w, k, w.path[k], cell) and not known_dead(w, k + 1, cell.node):
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


cdef void start_search(Work* w) noexcept nogil:
    """Cells, the first guess's path bound, and the search at its first stage."""
    cdef Py_ssize_t k
    cdef int64_t i
    for k in range(w.p):
        w.barred[k] = 1
    for i in range(w.max_path_bounds):
        w.path_bounds[i].forward = w.bound_passes + i * 2 * w.p
        w.path_bounds[i].backward = w.bound_passes + i * 2 * w.p + w.p
        w.path_bounds[i].so_far = w.bound_so_far + i * (w.p + 1)
        w.path_bounds[i].remaining = w.bound_remaining + i * w.num_nodes
    fill_cells(w)
    add_path_bound(w, w.path, 0)
    w.depth = 0
    w.cursor[0] = w.cell_end[0]


cdef int prepare(Work* w) noexcept nogil:
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


# The declared space with virtual stages: its members, their memory, bounds and schedules.


cdef int64_t visit_layouts(Work* w, bint store) noexcept nogil:
    """Number of layouts in the declared space, in its order; written to ``members`` if asked."""
    cdef Py_ssize_t apart, first, last, base, extra, rising
    cdef Py_ssize_t interior, most
    cdef int64_t count = 0
    for apart in range(3 if w.n == w.num_layers + 3 and w.p > 2 else 1):
        interior = w.p * w.v - 2 - (apart == MTP_ALONE)
        most = w.num_layers // interior + 1
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


cdef void write_layout(
    Work* w,
    int64_t index,
    Py_ssize_t first,
    Py_ssize_t base,
    Py_ssize_t extra,
    bint rising,
    Py_ssize_t apart,
) noexcept nogil:
    cdef Py_ssize_t chunks = w.p * w.v, interior = chunks - 2 - (apart == MTP_ALONE), k
    cdef int32_t* boundaries = w.members + index * (chunks + 1)
    boundaries[0] = 0
    boundaries[1] = 1 + first
    for k in range(interior):
        boundaries[k + 2] = boundaries[k + 1] + base
        if (k >= interior - extra) if rising else (k < extra):
            boundaries[k + 2] += 1
    if apart == MTP_ALONE:
        boundaries[chunks - 1] = boundaries[chunks - 2]
    if apart:
        boundaries[chunks - 1] += 1
    boundaries[chunks] = w.n


cdef int64_t most_saved(const Work* w, Py_ssize_t rank) noexcept nogil:
    """Peak of the activations that a rank keeps, from ``saved_chunk``; bytes.

    After its warm-up a rank keeps a forward and a backward pass apart by a constant number of
    passes, and the mix of chunks repeats after ``p * v`` of them. Between two changes of chunk the
    sum is linear.
    """
    cdef Py_ssize_t p = w.p, v = w.v, chunk_in, chunk_out, i
    cdef int64_t group = p * v, total = w.m * v, ahead, held = 0, peak, done, length
    cdef int64_t change, saved_in
    ahead = min(2 * (p - rank - 1) + (v - 1) * p, total)
    for i in range(v):
        # Passes of this chunk among the first ``ahead``: whole groups, then a part of one.
        done = (ahead // group) * p + min(p, max(0, ahead % group - i * p))
        held += done * w.saved_chunk[i * p + rank]
    peak = held
    done = 0
    while done < min(group, total - ahead):
        chunk_in = (ahead + done) % group // p
        chunk_out = v - 1 - done // p
        length = min(p - (ahead + done) % p, p - done % p)
        length = min(length, min(group, total - ahead) - done)
        saved_in = w.saved_chunk[chunk_in * p + rank]
        change = saved_in - w.saved_chunk[chunk_out * p + rank]
        peak = max(peak, held + saved_in + max(0, (length - 1) * change))
        held += length * change
        done += length
    return peak


cdef bint layout_fits(Work* w, const int32_t* boundaries) noexcept nogil:
    cdef Py_ssize_t p = w.p, i, k, rank
    cdef int64_t fixed, working
    if w.all_fit:
        return True
    for rank in range(p):
        fixed = 0
        working = -1
        for i in range(w.v):
            k = i * p + rank
            fixed += w.static_bytes[boundaries[k + 1]] - w.static_bytes[boundaries[k]]
            working = max(working, most_working(w, boundaries[k], boundaries[k + 1]))
            w.saved_chunk[k] = sum_saved(w, boundaries[k], boundaries[k + 1])
        if fixed + working > w.capacity or fixed + working + most_saved(w, rank) > w.capacity:
            return False
    return True


cdef int64_t price_rank(Work* w, const int32_t* boundaries, Py_ssize_t rank) noexcept nogil:
    """Fill the simulator's times, gather and reduction of a rank; its optimizer step, ticks."""
    cdef Py_ssize_t p = w.p, i, k, x, y
    cdef int64_t unhidden_gather = 0, hideable_gather = 0
    cdef int64_t unhidden_reduce = 0, hideable_reduce = 0, optimizer = 0
    for i in range(w.v):
        k = i * p + rank
        x, y = boundaries[k], boundaries[k + 1]
        w.time_forward[k] = sum_forward(w, x, y)
        w.time_backward[k] = sum_backward(w, x, y)
        w.delay_forward[k] = w.delay_backward[k] = 0
        if w.overlap:
            w.delay_forward[k] = w.send_forward[k]
            w.delay_backward[k] = w.send_backward[k]
        else:
            w.time_forward[k] += w.send_forward[k]
            w.time_backward[k] += w.send_backward[k]
        unhidden_gather += w.gather_unhidden[y] - w.gather_unhidden[x]
        hideable_gather += w.gather_hideable[y] - w.gather_hideable[x]
        unhidden_reduce += w.reduce_unhidden[y] - w.reduce_unhidden[x]
        hideable_reduce += w.reduce_hideable[y] - w.reduce_hideable[x]
        optimizer += w.optimizer[y] - w.optimizer[x]
    w.gather[rank] = max(0, max(unhidden_gather, hideable_gather))
    w.reduction[rank] = max(0, max(unhidden_reduce, hideable_reduce))
    return optimizer


cdef int64_t price_layout(Work* w, const int32_t* boundaries) noexcept nogil:
    """Price every rank; the largest optimizer step, ticks."""
    cdef Py_ssize_t rank
    cdef int64_t slowest = 0
    for rank in range(w.p):
        slowest = max(slowest, price_rank(w, boundaries, rank))
    return slowest


cdef int64_t work_bound(Work* w, const int32_t* boundaries, int64_t limit) noexcept nogil:
    """Longest of: reach a rank, do all its work, drain; ticks.

    What does not matter is not computed: from ``limit`` on, only that the bound is no smaller.
    """
    cdef Py_ssize_t p = w.p, i, k, rank
    cdef int64_t longest = 0, slowest = 0, reach = 0, drain = 0, work, bound = 0
    for rank in range(p):
        slowest = max(slowest, price_rank(w, boundaries, rank))
        work = 0
        for i in range(w.v):
            k = i * p + rank
            work += w.time_forward[k] + w.time_backward[k]
        work *= w.m
        work += max(w.gather[rank], reach) + max(w.reduction[rank], drain)
        longest = max(longest, work)
        bound = w.constant + longest + slowest
        if bound >= limit:
            break
        reach += w.time_forward[rank] + w.delay_forward[rank]
        drain += w.time_backward[rank]
        if w.overlap:
            drain += w.send_backward[rank + 1]
    return bound


cdef int64_t simulate_layout(Work* w, int64_t slowest) noexcept nogil:
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
        w.end_backward[rank] = w.gather[rank]
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
        value = max(value, w.end_backward[rank] + w.reduction[rank])
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


cdef void layout_step(Work* w, int64_t u, int64_t lag, int64_t total) noexcept nogil:
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
            clock = max(clock, w.end_forward[rank - 1])
        elif chunk > 0:
            clock = max(clock, from_last)
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
            clock = max(clock, w.step_backward[rank + 1])
        elif chunk < chunks - 1:
            clock = max(clock, from_first)
        clock += w.time_backward[chunk]
        w.end_backward[rank] = clock
        w.step_backward[rank] = clock + w.delay_backward[chunk]


cdef int prepare_layouts(Work* w) noexcept nogil:
    """Bounds of the layouts that fit, and the most promising one simulated; as ``prepare``."""
    cdef Py_ssize_t chunks = w.p * w.v, guess = -1
    cdef int64_t all_layouts = visit_layouts(w, True), index, kept = 0, limit
    cdef int32_t* boundaries
    cdef Py_ssize_t k
    w.lower = NO_THRESHOLD
    for index in range(all_layouts):
        boundaries = w.members + index * (chunks + 1)
        if not layout_fits(w, boundaries):
            continue
        if w.threshold <= 0:
            w.lower = 0
            return STATUS_BOUNDED
        for k in range(chunks + 1):
            w.members[kept * (chunks + 1) + k] = boundaries[k]
        # Of bounds that no search looks at, the least alone is asked for.
        limit = w.lower if w.node_limit == 0 else max(w.threshold, w.lower)
        w.member_bound[kept] = work_bound(w, boundaries, limit)
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
    boundaries = w.members + guess * (chunks + 1)
    w.threshold = min(w.threshold, simulate_layout(w, price_layout(w, boundaries)) + 1)
    w.simulations = 1
    return PAUSED


cdef int search_layouts(Work* w) noexcept nogil:
    """Simulate the next layout that may win; as ``search``."""
    cdef Py_ssize_t chunks = w.p * w.v, k
    cdef int64_t time
    cdef int32_t* boundaries
    while w.next_member < w.num_members:
        boundaries = w.members + w.next_member * (chunks + 1)
        w.next_member += 1
        if w.member_bound[w.next_member - 1] < w.threshold:
            time = simulate_layout(w, price_layout(w, boundaries))
            w.simulations += 1
            if time < w.threshold:
                w.threshold = w.iteration = time
                w.found = 1
                for k in range(chunks + 1):
                    w.best[k] = boundaries[k]
            return PAUSED
    w.lower = w.threshold
    return STATUS_OPTIMAL if w.found else STATUS_BOUNDED


# The workspace of one solve.


cdef struct Arena:
    # Sizes first (base NULL), then addresses: the same calls made twice.
    char* base
    int64_t used


cdef void* take(Arena* arena, int64_t count, int64_t size) noexcept nogil:
    cdef void* place = arena.base + arena.used if arena.base != NULL else NULL
    arena.used += (count * size + 15) // 16 * 16
    return place


cdef int claim(Arena* arena) except -1:
    """Memory for what was counted; the same calls again give its places."""
    arena.base = <char*>PyMem_Malloc(arena.used)
    if arena.base == NULL:
        raise MemoryError
    arena.used = 0
    return 0


cdef inline int64_t* take_wide(Arena* arena, int64_t count) noexcept nogil:
    return <int64_t*>take(arena, count, sizeof(int64_t))


cdef inline int32_t* take_narrow(Arena* arena, int64_t count) noexcept nogil:
    return <int32_t*>take(arena, count, sizeof(int32_t))


cdef void lay_out(Work* w, Arena* arena, Py_ssize_t num_levels) noexcept nogil:
    """Give every table its place."""
    cdef int64_t n = w.n, p = w.p, chunks = w.p * w.v
    w.send_forward = take_wide(arena, chunks)
    w.send_backward = take_wide(arena, chunks)
    w.forward = take_wide(arena, n + 1)
    w.backward = take_wide(arena, n + 1)
    w.recomputed_backward = take_wide(arena, n + 1)
    w.gather_unhidden = take_wide(arena, n + 1)
    w.gather_hideable = take_wide(arena, n + 1)
    w.reduce_unhidden = take_wide(arena, n + 1)
    w.reduce_hideable = take_wide(arena, n + 1)
    w.optimizer = take_wide(arena, n + 1)
    w.static_bytes = take_wide(arena, n + 1)
    w.saved = take_wide(arena, n + 1)
    w.recomputed_saved = take_wide(arena, n + 1)
    w.working = take_wide(arena, num_levels * n)
    w.block_working = take_wide(arena, num_levels * n if w.block else 0)
    w.scratch = take_wide(arena, n + 2)
    w.scratch_end = take_narrow(arena, n + 2)
    w.log2 = take_narrow(arena, n + 2)
    w.recomputed_first = take_narrow(arena, n + 1)
    w.recomputed_end = take_narrow(arena, n + 1)
    w.time_forward = take_wide(arena, chunks)
    w.time_backward = take_wide(arena, chunks)
    w.gather = take_wide(arena, p)
    w.reduction = take_wide(arena, p)
    if w.v > 1:
        w.delay_forward = take_wide(arena, chunks)
        w.delay_backward = take_wide(arena, chunks)
        w.saved_chunk = take_wide(arena, chunks)
    else:
        w.sent_forward = take_wide(arena, p + 1)
        w.sent_backward = take_wide(arena, p + 1)
        w.fit_end = take_narrow(arena, w.num_nodes)
        w.after = take_wide(arena, w.num_nodes)
        w.before = take_wide(arena, w.num_nodes)
        w.bottleneck = take_wide(arena, w.num_nodes)
    if w.node_limit > 0:
        lay_out_simulator(w, arena)


cdef void lay_out_simulator(Work* w, Arena* arena) noexcept nogil:
    """Places of what only a simulation and the search after it need."""
    cdef int64_t p = w.p, chunks = w.p * w.v
    w.path = take_narrow(arena, chunks + 1)
    w.best = take_narrow(arena, chunks + 1)
    w.end_forward = take_wide(arena, p)
    w.end_backward = take_wide(arena, p)
    w.step_forward = take_wide(arena, p)
    w.step_backward = take_wide(arena, p)
    if w.v > 1:
        w.kept = take_wide(arena, 3 * p)
        return
    w.cell_first = take_wide(arena, w.num_nodes)
    w.cell_end = take_wide(arena, w.num_nodes)
    w.live = take_wide(arena, w.num_nodes)
    w.cursor = take_wide(arena, p)
    w.count_forward = take_wide(arena, p)
    w.count_backward = take_wide(arena, p)
    w.old_forward = take_wide(arena, p)
    w.old_backward = take_wide(arena, p)
    w.row_first = take_wide(arena, w.m + p)
    w.row_count = take_wide(arena, w.m + p)
    w.choice = <uint8_t*>take(arena, (w.m + p) * p, 1)


cdef void lay_out_search(Work* w, Arena* arena) noexcept nogil:
    """Places of what the search needs beyond the tables: the cells and the path bounds."""
    cdef int64_t count = w.max_path_bounds
    w.cells = <Cell*>take(arena, w.num_cells, sizeof(Cell))
    w.path_bounds = <PathBound*>take(arena, count, sizeof(PathBound))
    w.bound_passes = take_wide(arena, count * 2 * w.p)
    w.bound_so_far = take_wide(arena, count * (w.p + 1))
    w.bound_remaining = take_wide(arena, count * w.num_nodes)
    w.barred = take_narrow(arena, w.p)


cdef void lay_out_nogoods(Work* w, Arena* arena) noexcept nogil:
    """Places of the needs of open levels, and of those kept."""
    cdef int64_t count = w.num_live * w.max_nogoods
    w.needs = take_wide(arena, w.p * w.max_path_bounds)
    w.live_index = take_wide(arena, w.num_nodes)
    w.nogoods_made = take_wide(arena, w.num_nodes)
    w.nogood_size = take_wide(arena, count)
    w.nogoods = <Need*>take(arena, count * w.max_needs, sizeof(Need))


cdef void lay_out_layouts(Work* w, Arena* arena, int64_t count) noexcept nogil:
    """Places of the members of the declared space."""
    w.members = take_narrow(arena, count * (w.p * w.v + 1))
    w.member_bound = take_wide(arena, count)


cdef void finish_tables(Work* w, Py_ssize_t num_levels) noexcept nogil:
    """What follows from the units: sparse tables, recomputed layers, sums of transfers."""
    cdef Py_ssize_t n = w.n, x, k, level, half
    w.log2[0] = w.log2[1] = 0
    for x in range(2, n + 1):
        w.log2[x] = w.log2[x >> 1] + 1
    for level in range(1, num_levels):
        half = 1 << (level - 1)
        for x in range(n - 2 * half + 1):
            w.working[level * n + x] = max(
                w.working[(level - 1) * n + x], w.working[(level - 1) * n + x + half]
            )
            if w.block:
                w.block_working[level * n + x] = max(
                    w.block_working[(level - 1) * n + x],
                    w.block_working[(level - 1) * n + x + half],
                )
    for x in range(n + 1):
        w.recomputed_first[x] = max(x, 1)
        w.recomputed_end[x] = max(
            w.recomputed_first[x], min(w.recomputed_first[x] + w.block, w.num_layers + 1)
        )
    if w.v == 1:
        w.sent_forward[0] = w.sent_backward[0] = 0
        for k in range(w.p):
            w.sent_forward[k + 1] = w.sent_forward[k] + w.send_forward[k]
            w.sent_backward[k + 1] = w.sent_backward[k] + w.send_backward[k]


cdef void add_units(Work* w, const uint8_t* kinds, const int64_t* costs) noexcept nogil:
    """Prefix sums from the costs [num_kinds, NUM_FIELDS] of each unit's kind; no checks."""
    cdef Py_ssize_t x
    cdef const int64_t* c
    cdef bint layer
    w.forward[0] = w.backward[0] = w.recomputed_backward[0] = 0
    w.gather_unhidden[0] = w.gather_hideable[0] = 0
    w.reduce_unhidden[0] = w.reduce_hideable[0] = w.optimizer[0] = w.static_bytes[0] = 0
    w.saved[0] = w.recomputed_saved[0] = 0
    for x in range(w.n):
        c = costs + kinds[x] * NUM_FIELDS
        layer = 1 <= x <= w.num_layers
        w.forward[x + 1] = w.forward[x] + c[0]
        w.backward[x + 1] = w.backward[x] + c[1]
        w.recomputed_backward[x + 1] = w.recomputed_backward[x] + (c[2] - c[1] if layer else 0)
        w.gather_unhidden[x + 1] = w.gather_unhidden[x] + c[3]
        w.gather_hideable[x + 1] = w.gather_hideable[x] + c[4]
        w.reduce_unhidden[x + 1] = w.reduce_unhidden[x] + c[5]
        w.reduce_hideable[x + 1] = w.reduce_hideable[x] + c[6]
        w.optimizer[x + 1] = w.optimizer[x] + c[7]
        w.static_bytes[x + 1] = w.static_bytes[x] + c[8]
        w.saved[x + 1] = w.saved[x] + c[9]
        w.recomputed_saved[x + 1] = w.recomputed_saved[x] + (c[10] - c[9] if layer else 0)
        w.working[x] = c[11]
        if w.block:
            w.block_working[x] = c[12]


cdef bint too_large(
    const uint8_t* kinds, const int64_t* costs, Work* w, Py_ssize_t num_kinds
) noexcept nogil:
    """Whether a value is negative where it may not be, or any sum could leave int64.

    The guard alone counts in floating point: it must not overflow itself. Where twice all the
    memory that it counts is left free, no partition needs to be asked (twice: whatever rounding).
    """
    cdef double times = 0, edges = 0, kept = 0, static_bytes = 0, working = 0, m = <double>w.m
    cdef double most_bytes
    cdef const int64_t* c
    cdef Py_ssize_t x, field
    for x in range(num_kinds):
        c = costs + x * NUM_FIELDS
        for field in range(NUM_FIELDS):
            if c[field] < 0 and field != 4 and field != 6:
                return True
        working = working + <double>c[11] + <double>c[12]
    for x in range(w.n):
        c = costs + kinds[x] * NUM_FIELDS
        times += <double>c[0] + <double>c[1] + <double>c[2]
        edges += <double>c[3] + <double>c[5] + <double>c[7]
        edges += fabs(<double>c[4]) + fabs(<double>c[6])
        static_bytes += <double>c[8]
        kept += <double>c[9] + <double>c[10]
    for x in range(w.p * w.v):
        if w.send_forward[x] < 0 or w.send_backward[x] < 0:
            return True
        times += <double>w.send_forward[x] + <double>w.send_backward[x]
    if w.constant < 0 or (m + 4) * times + edges + <double>w.constant > <double>MOST_TICKS:
        return True
    if fabs(<double>w.capacity) > <double>MOST_TICKS:
        return True
    most_bytes = static_bytes + m * kept + working
    w.all_fit = 2 * most_bytes <= <double>w.capacity
    return most_bytes > <double>MOST_TICKS


cdef object solution_of(const Work* w, int status):
    cdef Py_ssize_t length = w.p * w.v + 1, k
    boundaries = tuple([w.best[k] for k in range(length)]) if w.found else ()
    iteration = w.iteration if w.found else NO_THRESHOLD
    return status, w.lower, iteration, boundaries, w.nodes, w.simulations


cdef bint has_shape(
    const Work* w,
    const uint8_t* kinds,
    Py_ssize_t num_kinds,
    Py_ssize_t num_forward,
    Py_ssize_t num_backward,
) noexcept nogil:
    """Whether the numbers of a problem belong together, as ``backend._check_shape`` asks."""
    cdef Py_ssize_t x
    if w.p < 1 or w.v < 1 or w.m < 1 or w.n > MOST_UNITS or w.p > w.n or w.v > w.n // w.p:
        return False
    if w.m > MOST_TICKS // w.n:
        return False
    if w.v == 1 and w.overlap or w.v > 1 and (w.p == 1 or w.m % w.p):
        return False
    if not 0 <= w.num_layers < w.n or w.block < 0:
        return False
    if num_forward != w.p * w.v or num_backward != num_forward or num_kinds > 256:
        return False
    if not -NO_THRESHOLD <= w.threshold <= NO_THRESHOLD or not 0 <= w.node_limit <= NO_THRESHOLD:
        return False
    for x in range(w.n):
        if kinds[x] >= num_kinds:
            return False
    return True


def solve(problem, int64_t threshold, int64_t node_limit, learning, out_of_time):
    """Solve one stage problem.

    Args:
        problem: a ``PipelineProblem``.
        threshold: iteration time to beat, at most ``NO_THRESHOLD``; ticks.
        node_limit: 0 asks for memory and the lower bound alone; nothing is simulated.
        learning: a ``Learning``.
        out_of_time: asked at every pause, or ``None``; once true the search ends as at its limit.

    Returns:
        The fields of a ``StageSolution``, or ``None`` for what ``backend`` refuses:
        malformed, or with a value that is negative or so large that a sum could leave int64.

    Raises:
        MemoryError: if the tables do not fit.
    """
    cdef Work* w = <Work*>PyMem_Malloc(sizeof(Work))
    cdef Arena tables = Arena(NULL, 0), extra = Arena(NULL, 0)
    cdef Arena learned = Arena(NULL, 0)
    cdef bytes unit_kinds = problem.unit_kinds
    cdef tuple costs = problem.costs
    cdef const uint8_t* kinds = unit_kinds
    cdef int64_t[NUM_FIELDS * 256] unit_costs
    cdef int status
    cdef Py_ssize_t p, v, num_levels, field, index
    cdef int64_t count
    if w == NULL:
        raise MemoryError
    try:
        memset(w, 0, sizeof(Work))
        p, v = w.p, w.v = problem.num_stages, problem.num_virtual
        w.n, w.m = len(unit_kinds), problem.num_microbatches
        w.num_layers, w.overlap = problem.num_layers, problem.overlap_p2p
        w.block = min(<Py_ssize_t>problem.block_num_layers, w.num_layers)
        w.capacity, w.constant = problem.capacity_bytes, problem.constant
        w.threshold, w.node_limit = threshold, node_limit
        if not has_shape(
            w, kinds, len(costs), len(problem.send_forward), len(problem.send_backward)
        ):
            return None
        w.max_path_bounds, w.nogoods_after = learning.max_path_bounds, learning.nogoods_after
        w.max_nogoods, w.max_needs = learning.max_nogoods, learning.max_needs
        w.width = w.n - p + 1
        w.num_nodes = (p + 1) * w.width
        num_levels = 1
        while (1 << num_levels) <= w.n:
            num_levels += 1
        lay_out(w, &tables, num_levels)
        claim(&tables)
        lay_out(w, &tables, num_levels)
        index = 0
        for cost in costs:
            for field in range(NUM_FIELDS):
                unit_costs[index] = (<tuple>cost)[field]
                index += 1
        for index, (forward, backward) in enumerate(
            zip(problem.send_forward, problem.send_backward, strict=True)
        ):
            w.send_forward[index], w.send_backward[index] = forward, backward
        if too_large(kinds, unit_costs, w, len(costs)):
            return None
        with nogil:
            add_units(w, kinds, unit_costs)
            finish_tables(w, num_levels)
            status = prepare(w) if v == 1 else STATUS_OPTIMAL
        if v > 1:
            count = visit_layouts(w, False)
            lay_out_layouts(w, &extra, count)
            claim(&extra)
            lay_out_layouts(w, &extra, count)
            with nogil:
                status = prepare_layouts(w)
        elif status == PAUSED:
            lay_out_search(w, &extra)
            claim(&extra)
            lay_out_search(w, &extra)
            with nogil:
                start_search(w)
        while status == PAUSED:
            if v == 1 and w.nodes >= w.nogoods_after and not w.keeping:
                lay_out_nogoods(w, &learned)
                claim(&learned)
                lay_out_nogoods(w, &learned)
                start_keeping(w)
            with nogil:
                status = search(w) if v == 1 else search_layouts(w)
            PyErr_CheckSignals()
            if status == PAUSED and out_of_time is not None and out_of_time():
                w.lower = min(w.lower, w.threshold)
                status = STATUS_LIMIT
        if v == 1 and (status == STATUS_OPTIMAL or status == STATUS_BOUNDED) and extra.base != NULL:
            w.lower = w.threshold
        return solution_of(w, status)
    except OverflowError:
        return None
    finally:
        PyMem_Free(learned.base)
        PyMem_Free(extra.base)
        PyMem_Free(tables.base)
        PyMem_Free(w)
