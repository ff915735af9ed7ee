# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""The 1F1B schedule, row by row, and its critical path."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

from stage_work cimport (
    BY_NOTHING,
    BY_PREVIOUS,
    BY_SOURCE,
    NO_THRESHOLD,
    Work,
    larger,
    smaller,
    stage_backward,
    stage_forward,
    stage_head,
    stage_tail,
)


cdef inline int64_t simulate_rows(Work* w, const int32_t* marks) noexcept nogil:
    """Iteration time of the partition ``marks`` [p + 1], ticks; leaves its choices in ``choice``.

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
        w.time_forward[i] = stage_forward(w, i, marks[i], marks[i + 1])
        w.time_backward[i] = stage_backward(w, i, marks[i], marks[i + 1])
        w.head[i] = stage_head(w, marks[i], marks[i + 1])
        w.tail[i] = stage_tail(w, marks[i], marks[i + 1])
        value = w.optimizer[marks[i + 1]] - w.optimizer[marks[i]]
        if value > slowest:
            slowest = value
            w.path_optimizer = i
        w.end_backward[i] = w.head[i]
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
        here = w.end_backward[i] + w.tail[i]
        if here > latest:
            latest = here
            w.path_tail = i
    return w.constant + latest + slowest


cdef inline void partial_row(Work* w, int64_t row, uint8_t* choice) noexcept nogil:
    """A row of the start or the end, where some ranks have no forward or no backward pass."""
    cdef Py_ssize_t p = w.p, i
    cdef int64_t m = w.m, start, clock
    cdef int bits
    for i in range(p - 1, -1, -1):
        clock = w.end_backward[i]
        bits = 0
        if 0 <= row + p - 1 - i < m:
            start = clock
            bits = BY_PREVIOUS if start > w.head[i] else BY_NOTHING
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
                bits |= (BY_PREVIOUS if start > w.head[i] else BY_NOTHING) << 2
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
        bits = BY_PREVIOUS if start > w.head[i] else BY_NOTHING
        if i > 0 and w.end_forward[i - 1] >= start:
            start, bits = w.end_forward[i - 1], BY_SOURCE
        forward = clock = start + w.time_forward[i]
        if behind >= clock or i == p - 1:
            clock = larger(clock, behind)
            bits |= BY_SOURCE << 2
        elif clock <= w.head[i]:
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
                    most = smaller(most, lead // -drift + 1)
            else:
                if lead >= 0:
                    return 0
                if drift > 0:
                    most = smaller(most, (-lead - 1) // drift + 1)
        if i < p - 1:
            lead = w.end_backward[i + 1] - w.end_forward[i]
            drift = w.step_backward[i + 1] - w.step_forward[i]
            if choice[i] & (BY_SOURCE << 2):
                if drift < 0:
                    most = smaller(most, lead // -drift)
            elif drift > 0:
                most = smaller(most, (-lead - 1) // drift)
    return most


cdef inline void walk_back(Work* w) noexcept nogil:
    """Passes of each stage on the critical path of the schedule just simulated.

    Of two passes that a pass waited for, the one on the other rank is followed. In a run of equal
    rows the walk soon repeats itself; then whole rounds are counted at once.
    """
    cdef Py_ssize_t p = w.p, rank = w.path_tail
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
    w.path_head = rank
