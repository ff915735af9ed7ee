# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""The workspace of one solve, and sums over its units. Shared by the parts of the stage solver."""

from libc.stdint cimport int32_t, int64_t, uint8_t

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

cdef struct Cut:
    int64_t* remaining  # OUT, [num_nodes]: least that the path can still grow by, ticks
    int64_t* so_far     # INOUT, [p + 1]: length over the stages chosen so far, ticks
    int64_t* forward    # [p]: passes on the path
    int64_t* backward   # [p]
    Py_ssize_t head_rank
    int head_kind       # 0: no head, 1: the least, 2: the rest
    Py_ssize_t tail_rank
    int tail_kind
    Py_ssize_t optimizer_rank

cdef struct Need:
    # One condition of a nogood.
    int64_t so_far     # least length of the cut so far, ticks
    int64_t cut        # its number among all cuts ever made

cdef struct Work:
    # IN: the problem.
    Py_ssize_t p, v, n, num_layers, block, overlap
    int64_t m, capacity, constant, threshold, node_limit
    bint all_fit             # whether all partitions fit, seen without a look at any
    int64_t* send_forward    # [p * v], ticks
    int64_t* send_backward   # [p * v], ticks
    # Prefix sums over units, [n + 1]; the ``again_`` ones hold block minus plain, layers only.
    int64_t* forward
    int64_t* backward
    int64_t* again_backward
    int64_t* head_least
    int64_t* head_rest
    int64_t* tail_least
    int64_t* tail_rest
    int64_t* optimizer
    int64_t* static_bytes
    int64_t* saved
    int64_t* again_saved
    int64_t* working         # [levels, n]: largest of 2**level units from each, bytes
    int64_t* block_working   # [levels, n]
    int32_t* log2            # [n + 1]
    int32_t* again_first     # [n + 1]: first layer of a chunk that starts here
    int32_t* again_end       # [n + 1]: end of the layers that such a chunk computes again
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
    Py_ssize_t max_cuts
    Cut* cuts                # [max_cuts], a ring
    int64_t* cut_passes      # [max_cuts, 2, p]
    int64_t* cut_so_far      # [max_cuts, p + 1]
    int64_t* cut_remaining   # [max_cuts, num_nodes]
    int64_t num_cuts         # ever made
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
    int64_t* needs           # [p, max_cuts]: least lengths so far, or NO_NEED; ticks
    int64_t* nogoods_made    # [num_nodes]: ever
    int64_t* live_index      # [num_nodes]: place in ``live``
    int64_t* nogood_size     # [num_live, max_nogoods]
    Need* nogoods            # [num_live, max_nogoods, max_needs]
    # The simulator, [p] each unless noted.
    int64_t* time_forward    # [p * v]
    int64_t* time_backward   # [p * v]
    int64_t* delay_forward   # [p * v]
    int64_t* delay_backward  # [p * v]
    int64_t* head
    int64_t* tail
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
    Py_ssize_t path_head, path_tail, path_optimizer
    # Virtual stages.
    int64_t* saved_chunk     # [p * v], bytes
    int32_t* members         # [num_members, p * v + 1]
    int64_t* member_bound    # [num_members]
    int64_t num_members
    int64_t next_member


cdef inline int64_t larger(int64_t a, int64_t b) noexcept nogil:
    return a if a > b else b


cdef inline int64_t smaller(int64_t a, int64_t b) noexcept nogil:
    return a if a < b else b


cdef inline Py_ssize_t again_until(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    """End of the layers of units ``x .. y`` that are computed again."""
    cdef Py_ssize_t end = w.again_end[x]
    if end > y:
        end = y
    return end if end > w.again_first[x] else w.again_first[x]


cdef inline int64_t sum_forward(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    return w.forward[y] - w.forward[x]


cdef inline int64_t sum_backward(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t total = w.backward[y] - w.backward[x]
    if w.block:
        total += w.again_backward[again_until(w, x, y)] - w.again_backward[w.again_first[x]]
    return total


cdef inline int64_t sum_saved(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    cdef int64_t total = w.saved[y] - w.saved[x]
    if w.block:
        total += w.again_saved[again_until(w, x, y)] - w.again_saved[w.again_first[x]]
    return total


cdef inline int64_t largest_between(
    const Work* w, const int64_t* table, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    """Largest entry of a sparse table over units ``x .. y``; at least one unit."""
    cdef Py_ssize_t level = w.log2[y - x]
    cdef const int64_t* row = table + level * w.n
    return larger(row[x], row[y - (1 << level)])


cdef inline int64_t most_working(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    """Largest working memory of units ``x .. y``, bytes."""
    cdef Py_ssize_t first, end
    cdef int64_t most
    if not w.block:
        return largest_between(w, w.working, x, y)
    first, end = w.again_first[x], again_until(w, x, y)
    most = -1
    if first > x:
        most = largest_between(w, w.working, x, first)
    if end > first:
        most = larger(most, largest_between(w, w.block_working, first, end))
    if y > end:
        most = larger(most, largest_between(w, w.working, end, y))
    return most


cdef inline int64_t stage_forward(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    return sum_forward(w, x, y) + w.send_forward[k]


cdef inline int64_t stage_backward(
    const Work* w, Py_ssize_t k, Py_ssize_t x, Py_ssize_t y
) noexcept nogil:
    return sum_backward(w, x, y) + w.send_backward[k]


cdef inline int64_t stage_head(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    return larger(
        larger(w.head_least[y] - w.head_least[x], w.head_rest[y] - w.head_rest[x]), 0
    )


cdef inline int64_t stage_tail(const Work* w, Py_ssize_t x, Py_ssize_t y) noexcept nogil:
    return larger(
        larger(w.tail_least[y] - w.tail_least[x], w.tail_rest[y] - w.tail_rest[x]), 0
    )


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
