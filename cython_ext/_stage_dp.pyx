# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
# cython: embedsignature=False, binding=False
"""The stage problem solved in C: returns exactly what ``nest_megatron.solver.reference`` returns.

Whole numbers only (ticks and bytes in int64), no NumPy. ``solve`` packs a problem into one
workspace with the gil held; everything else runs without it and allocates nothing. The parts are
inline functions of their own files: ``stage_work.pxd`` (the workspace), ``stage_tables.pxd`` (1 to
3 below), ``stage_rows.pxd`` (simulator), ``stage_search.pxd`` and ``stage_nogoods.pxd`` (4),
``stage_layouts.pxd`` (virtual stages).

Loop order, which is the reference's:

1. Memory: ``fit_end[k, x]``, the last end with which stage ``k`` from unit ``x`` fits; sums of
   units never shrink as a stage grows, so every smaller end fits too.
2. Stage bounds are computed where they are asked for, from prefix sums.
3. Bottleneck program: stages last to first, starts ``x`` descending. Only the least value of each
   place counts, so ends that a monotone lower bound or a prefix minimum rules out are passed over.
4. Search: depth first, stages first to last, ends largest first, through the ends whose bound and
   bottleneck lie below the threshold. Every simulation leaves a cut, in a ring of ``max_cuts``;
   a search that takes long also keeps nogoods.

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

from stage_layouts cimport prepare_layouts, search_layouts, visit_layouts
from stage_nogoods cimport start_keeping
from stage_search cimport prepare, search, start_search
from stage_work cimport (
    MOST_TICKS,
    NO_THRESHOLD,
    NUM_FIELDS,
    PAUSED,
    STATUS_BOUNDED,
    STATUS_LIMIT,
    STATUS_OPTIMAL,
    Cell,
    Cut,
    Need,
    Work,
    larger,
    smaller,
)


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
    w.again_backward = take_wide(arena, n + 1)
    w.head_least = take_wide(arena, n + 1)
    w.head_rest = take_wide(arena, n + 1)
    w.tail_least = take_wide(arena, n + 1)
    w.tail_rest = take_wide(arena, n + 1)
    w.optimizer = take_wide(arena, n + 1)
    w.static_bytes = take_wide(arena, n + 1)
    w.saved = take_wide(arena, n + 1)
    w.again_saved = take_wide(arena, n + 1)
    w.working = take_wide(arena, num_levels * n)
    w.block_working = take_wide(arena, num_levels * n if w.block else 0)
    w.scratch = take_wide(arena, n + 2)
    w.scratch_end = take_narrow(arena, n + 2)
    w.log2 = take_narrow(arena, n + 2)
    w.again_first = take_narrow(arena, n + 1)
    w.again_end = take_narrow(arena, n + 1)
    w.time_forward = take_wide(arena, chunks)
    w.time_backward = take_wide(arena, chunks)
    w.head = take_wide(arena, p)
    w.tail = take_wide(arena, p)
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
    """Places of what the search needs beyond the tables: the cells and the cuts."""
    cdef int64_t count = w.max_cuts
    w.cells = <Cell*>take(arena, w.num_cells, sizeof(Cell))
    w.cuts = <Cut*>take(arena, count, sizeof(Cut))
    w.cut_passes = take_wide(arena, count * 2 * w.p)
    w.cut_so_far = take_wide(arena, count * (w.p + 1))
    w.cut_remaining = take_wide(arena, count * w.num_nodes)
    w.barred = take_narrow(arena, w.p)


cdef void lay_out_nogoods(Work* w, Arena* arena) noexcept nogil:
    """Places of the needs of open levels, and of those kept."""
    cdef int64_t count = w.num_live * w.max_nogoods
    w.needs = take_wide(arena, w.p * w.max_cuts)
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
            w.working[level * n + x] = larger(
                w.working[(level - 1) * n + x], w.working[(level - 1) * n + x + half]
            )
            if w.block:
                w.block_working[level * n + x] = larger(
                    w.block_working[(level - 1) * n + x],
                    w.block_working[(level - 1) * n + x + half],
                )
    for x in range(n + 1):
        w.again_first[x] = larger(x, 1)
        w.again_end[x] = larger(
            w.again_first[x], smaller(w.again_first[x] + w.block, w.num_layers + 1)
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
    w.forward[0] = w.backward[0] = w.again_backward[0] = w.head_least[0] = w.head_rest[0] = 0
    w.tail_least[0] = w.tail_rest[0] = w.optimizer[0] = w.static_bytes[0] = 0
    w.saved[0] = w.again_saved[0] = 0
    for x in range(w.n):
        c = costs + kinds[x] * NUM_FIELDS
        layer = 1 <= x <= w.num_layers
        w.forward[x + 1] = w.forward[x] + c[0]
        w.backward[x + 1] = w.backward[x] + c[1]
        w.again_backward[x + 1] = w.again_backward[x] + (c[2] - c[1] if layer else 0)
        w.head_least[x + 1] = w.head_least[x] + c[3]
        w.head_rest[x + 1] = w.head_rest[x] + c[4]
        w.tail_least[x + 1] = w.tail_least[x] + c[5]
        w.tail_rest[x + 1] = w.tail_rest[x] + c[6]
        w.optimizer[x + 1] = w.optimizer[x] + c[7]
        w.static_bytes[x + 1] = w.static_bytes[x] + c[8]
        w.saved[x + 1] = w.saved[x] + c[9]
        w.again_saved[x + 1] = w.again_saved[x] + (c[10] - c[9] if layer else 0)
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
    return (
        status,
        w.iteration if w.found else NO_THRESHOLD,
        boundaries,
        w.lower,
        w.nodes,
        w.simulations,
    )


def solve(
    Py_ssize_t p,
    Py_ssize_t v,
    int64_t m,
    bytes unit_kinds,
    tuple costs,
    Py_ssize_t num_layers,
    Py_ssize_t block_num_layers,
    tuple send_forward,
    tuple send_backward,
    bint overlap_p2p,
    int64_t capacity_bytes,
    int64_t constant,
    int64_t threshold,
    int64_t node_limit,
    Py_ssize_t max_cuts,
    int64_t nogoods_after,
    Py_ssize_t max_nogoods,
    Py_ssize_t max_needs,
    object out_of_time,
):
    """Solve one stage problem; the arguments are the fields of a ``PipelineProblem``.

    The caller has checked the shape (``door.check_shape``): there are at least ``p * v`` units,
    ``p`` divides ``m`` where ``v > 1``, every kind has its costs, every chunk its sends.

    Args:
        unit_kinds: for each unit its index into ``costs``.
        costs: for each kind 13 whole numbers, as ``UnitCost`` orders them, ticks and bytes.
        send_forward, send_backward: ``p * v`` whole numbers each, ticks.
        threshold: iteration time to beat, at most ``NO_THRESHOLD``; ticks.
        node_limit: 0 asks for memory and the lower bound alone; nothing is simulated.
        max_cuts, nogoods_after, max_nogoods, max_needs: the fields of a ``Learning``.
        out_of_time: asked at every pause, or ``None``; once true the search ends as at its limit.

    Returns:
        ``(status, iteration, boundaries, lower_bound, nodes, simulations)``, or ``None`` where a
        value is negative or so large that a sum could leave int64.

    Raises:
        MemoryError: if the tables do not fit.
        OverflowError: if an argument leaves int64.
    """
    cdef Work* w = <Work*>PyMem_Malloc(sizeof(Work))
    cdef Arena tables = Arena(NULL, 0), extra = Arena(NULL, 0)
    cdef Arena learned = Arena(NULL, 0)
    cdef const uint8_t* kinds = unit_kinds
    cdef int64_t[NUM_FIELDS * 256] unit_costs
    cdef int status
    cdef Py_ssize_t num_levels, field, index
    cdef int64_t count
    if w == NULL:
        raise MemoryError
    try:
        memset(w, 0, sizeof(Work))
        w.p, w.v, w.n, w.m = p, v, len(unit_kinds), m
        w.num_layers, w.overlap = num_layers, overlap_p2p
        w.block = smaller(block_num_layers, num_layers)
        w.capacity, w.constant = capacity_bytes, constant
        w.threshold, w.node_limit = threshold, node_limit
        w.max_cuts, w.max_nogoods, w.max_needs = max_cuts, max_nogoods, max_needs
        w.nogoods_after = nogoods_after
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
        for index in range(p * v):
            w.send_forward[index] = send_forward[index]
            w.send_backward[index] = send_backward[index]
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
                w.lower = smaller(w.lower, w.threshold)
                status = STATUS_LIMIT
        if v == 1 and (status == STATUS_OPTIMAL or status == STATUS_BOUNDED) and extra.base != NULL:
            w.lower = w.threshold
        return solution_of(w, status)
    finally:
        PyMem_Free(learned.base)
        PyMem_Free(extra.base)
        PyMem_Free(tables.base)
        PyMem_Free(w)
