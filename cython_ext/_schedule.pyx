"""When a pipeline schedule ends, and its critical path.

It returns what ``critical_path.summarize_reference`` returns.

The passes are laid out in steps: at step ``u`` rank ``r`` runs its ``u - r``-th forward pass, then
its ``u - lag + turn * r``-th backward pass (``turn`` is 0 without virtual stages, else 1), so that
a pass needs no more than its rank's clock and the newest result of one neighbour. Of each pass one
bit is kept: whether it waited for its input.

Once every rank runs both ways, the chunks repeat with a period of ``p * v`` steps (one without
virtual stages). Periods are added at once, and walked back at once, exactly, in two cases. Where
two in a row choose alike and move every clock as before, the times grow linearly until a pass waits
for the other of its two causes. Where all clocks have moved by the same time since an earlier
period, what followed that one follows again. So the work hardly grows with the micro batches.
"""

from array import array

from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

cdef enum:
    FORWARD_WAITED = 1
    BACKWARD_WAITED = 2
    FIRST_BLOCKS = 1 << 9


cdef struct Block:
    # Rows that stand for ``count`` runs through ``length`` steps each, from step ``first`` on.
    int64_t first, length, count, row


cdef struct Shape:
    int64_t p, v, turn, total, lag, period


cdef struct State:
    int64_t step             # the next one
    int64_t marked           # a step before, or -1
    int64_t patience         # steps after which another one is marked
    # Ticks, [p] each: when the rank is free, when its newest results reach their receivers.
    int64_t* clock
    int64_t* forward
    int64_t* backward


cdef struct History:
    # OUT: [num_rows, p] bits of the passes, and the blocks in the order of time.
    uint8_t* rows
    int64_t num_rows, rows_capacity
    Block* blocks
    int64_t num_blocks, blocks_capacity


cdef bint add_block(History* h, int64_t first, int64_t length) noexcept nogil:
    """Place for the rows of a block that runs once; false where the history is full."""
    if h.num_blocks == h.blocks_capacity or h.num_rows + length > h.rows_capacity:
        return False
    h.blocks[h.num_blocks] = Block(first, length, 1, h.num_rows)
    h.num_blocks += 1
    h.num_rows += length
    return True


cdef int64_t forward_chunk(const Shape* s, int64_t rank, int64_t index) noexcept nogil:
    return (index % (s.p * s.v) // s.p) * s.p + rank


cdef int64_t backward_chunk(const Shape* s, int64_t rank, int64_t index) noexcept nogil:
    return (s.v - 1 - (index % (s.p * s.v) // s.p)) * s.p + rank


cdef void step(
    const Shape* s, const int64_t* times, State* now, int64_t u, uint8_t* row, int64_t* leads
) noexcept nogil:
    """Run step ``u``; ``times`` [4, p * v] are those of a chunk: both passes, both transfers.

    ``row`` [p] and ``leads`` [2, p] receive whether, and by how many ticks, each pass waited.
    """
    cdef int64_t p = s.p, chunks = s.p * s.v, rank, chunk
    cdef int64_t index, clock, lead, behind = 0, ours
    cdef int64_t from_last = now.forward[p - 1], from_first = now.backward[0]
    for rank in range(p - 1, -1, -1):
        clock = now.clock[rank]
        row[rank] = 0
        ours = now.backward[rank]
        index = u - rank
        if 0 <= index < s.total:
            chunk = forward_chunk(s, rank, index)
            lead = 0
            if rank > 0:
                lead = now.forward[rank - 1] - clock
            elif chunk > 0:
                lead = from_last - clock
            if lead > 0:
                clock += lead
                row[rank] |= FORWARD_WAITED
            leads[rank] = lead
            clock += times[chunk]
            now.forward[rank] = clock + times[2 * chunks + chunk]
        index = u - s.lag + s.turn * rank
        if 0 <= index < s.total:
            chunk = backward_chunk(s, rank, index)
            lead = 0
            if rank < p - 1:
                lead = behind - clock
            elif chunk < chunks - 1:
                lead = from_first - clock
            if lead > 0:
                clock += lead
                row[rank] |= BACKWARD_WAITED
            leads[p + rank] = lead
            clock += times[chunks + chunk]
            now.backward[rank] = clock + times[3 * chunks + chunk]
        # Without virtual stages a backward pass needs one of this very step, else of the last one.
        behind = ours if s.turn else now.backward[rank]
        now.clock[rank] = clock


cdef int64_t periods_alike(
    const int64_t* leads, const int64_t* before, int64_t count, int64_t most
) noexcept nogil:
    """Periods that follow with the same choices, at most ``most``, by the leads of the last two."""
    cdef int64_t i, drift
    for i in range(count):
        drift = leads[i] - before[i]
        if leads[i] > 0:
            if drift < 0 and (leads[i] - 1) // -drift < most:
                most = (leads[i] - 1) // -drift
        elif drift > 0 and -leads[i] // drift < most:
            most = -leads[i] // drift
    return most


cdef bint chosen_alike(const uint8_t* row, const uint8_t* other, int64_t count) noexcept nogil:
    cdef int64_t i
    for i in range(count):
        if row[i] != other[i]:
            return False
    return True


cdef bint moved_alike(
    const Shape* s, const int64_t* clocks, const int64_t* mark
) noexcept nogil:
    """Whether all of [3 * p] clocks have moved by the same time since the mark."""
    cdef int64_t k
    for k in range(3 * s.p):
        if clocks[k] - mark[k] != clocks[0] - mark[0]:
            return False
    return True


cdef bint simulate(
    const Shape* s, const int64_t* times, State* now, int64_t* spare, History* h
) noexcept nogil:
    """Run the steps that are left; false where the history is full.

    ``spare`` [9 * p + 4 * p * period], zero at first, holds what periods are compared by: the
    clocks at the mark and at the start of the last one, how far it moved each, and every lead of
    the last two.
    """
    cdef int64_t p = s.p
    cdef int64_t u, k, length, skipped, moved, size = 2 * p * s.period
    cdef int64_t* mark = spare
    cdef int64_t* old = spare + 3 * p
    cdef int64_t* moves = spare + 6 * p
    cdef int64_t* leads = spare + 9 * p
    cdef int64_t* before = leads + size
    cdef Block* last
    cdef uint8_t* rows
    cdef bint full, alike
    while now.step < s.total + s.lag:
        u = now.step
        full = s.lag <= u and u + s.period <= s.total
        length = s.period if full else 1
        if not add_block(h, u, length):
            return False
        last = h.blocks + h.num_blocks - 1
        rows = h.rows + last.row * p
        memcpy(old, now.clock, 3 * p * sizeof(int64_t))
        for k in range(length):
            step(s, times, now, u + k, rows + k * p, leads + 2 * p * k)
        now.step += length
        if not full:
            continue
        last -= 1
        alike = u > s.lag and last.length == length
        alike = alike and chosen_alike(rows, h.rows + last.row * p, length * p)
        if alike:
            # These rows stand there already.
            last.count += 1
            h.num_blocks -= 1
            h.num_rows -= length
        for k in range(3 * p):
            moved = now.clock[k] - old[k]
            if moved != moves[k]:
                alike = False
            moves[k] = moved
        if alike:
            skipped = periods_alike(leads, before, size, (s.total - now.step) // length)
            last.count += skipped
            now.step += skipped * length
            for k in range(3 * p):
                now.clock[k] += skipped * moves[k]
            for k in range(size):
                leads[k] += skipped * (leads[k] - before[k])
        memcpy(before, leads, size * sizeof(int64_t))
        if now.marked >= 0 and moved_alike(s, now.clock, mark):
            if not run_rounds(s, times, now, now.clock[0] - mark[0], leads, h):
                return False
        elif now.marked < 0 or now.step - now.marked >= now.patience:
            memcpy(mark, now.clock, 3 * p * sizeof(int64_t))
            now.marked = now.step
            now.patience *= 2
    return True


cdef bint run_rounds(
    const Shape* s, const int64_t* times, State* now, int64_t moved, int64_t* leads, History* h
) noexcept nogil:
    """Run all that is left of rounds as long as the one since the mark; false where
    the history is full.

    ``moved`` is what a round moves every clock by, ``leads`` [2, p] is written over.
    """
    cdef int64_t length = now.step - now.marked, rounds = (s.total - now.step) // length, k
    cdef uint8_t* rows
    if rounds == 0:
        return True
    if not add_block(h, now.step, length):
        return False
    h.blocks[h.num_blocks - 1].count = rounds
    rows = h.rows + h.blocks[h.num_blocks - 1].row * s.p
    for k in range(length):
        step(s, times, now, now.step + k, rows + k * s.p, leads)
    for k in range(3 * s.p):
        now.clock[k] += (rounds - 1) * moved
    now.step += rounds * length
    return True


cdef int64_t walk_back(
    const Shape* s, const History* h, int64_t rank, int64_t* counts, int64_t* saved
) noexcept nogil:
    """Count what lies on the critical path that ends on ``rank``; the rank where it begins.

    ``counts`` and ``saved`` are [4, p * v]: both passes, both transfers of each chunk. Within a
    block the walk depends on where it enters a run alone, so it soon repeats itself; then whole
    rounds are counted at once (Brent's way to find them).
    """
    cdef int64_t p = s.p, chunks = s.p * s.v, chunk, old_rank = -1
    cdef int64_t u = s.total - 1 + s.lag - s.turn * rank, run, seen = -1, old_run = -1, patience = 1
    cdef int64_t rounds, number = h.num_blocks - 1, i
    cdef const Block* block
    cdef bint is_forward = False, old_forward = False
    cdef int bits
    memset(counts, 0, 4 * chunks * sizeof(int64_t))
    while True:
        while h.blocks[number].first > u:
            number -= 1
            seen = old_run = -1
        block = h.blocks + number
        run = (u - block.first) // block.length
        if block.count > 1 and run != seen:
            seen = run
            if run < old_run and rank == old_rank and is_forward == old_forward:
                rounds = run // (old_run - run)
                for i in range(4 * chunks):
                    counts[i] += rounds * (counts[i] - saved[i])
                u -= rounds * (old_run - run) * block.length
                seen = run - rounds * (old_run - run)
                old_run = -1
            elif old_run < 0 or old_run - run == patience:
                memcpy(saved, counts, 4 * chunks * sizeof(int64_t))
                patience = 2 * patience if old_run >= 0 else 1
                old_run, old_rank, old_forward = run, rank, is_forward
        bits = h.rows[(block.row + (u - block.first) % block.length) * p + rank]
        if is_forward:
            chunk = forward_chunk(s, rank, u - rank)
            counts[chunk] += 1
            if bits & FORWARD_WAITED:
                counts[2 * chunks + chunk - 1] += 1
                rank = (rank + p - 1) % p
                u -= 1
            elif u == rank:
                return rank
            else:
                u -= 1
                is_forward = not 0 <= u - s.lag + s.turn * rank < s.total
        else:
            chunk = backward_chunk(s, rank, u - s.lag + s.turn * rank)
            counts[chunks + chunk] += 1
            if bits & BACKWARD_WAITED:
                counts[3 * chunks + chunk + 1] += 1
                rank = (rank + 1) % p
                u -= s.turn
            elif u - rank < s.total:
                is_forward = True
            elif u > s.lag - s.turn * rank:
                u -= 1
            else:
                u = s.total - 1 + rank
                is_forward = True


cdef int grow(History* h, int64_t p, int64_t period) except -1:
    """Twice the capacity, or some at first."""
    cdef int64_t blocks = 2 * h.blocks_capacity + FIRST_BLOCKS
    cdef int64_t rows = blocks + 2 * h.rows_capacity + period
    cdef void* place = PyMem_Realloc(h.blocks, blocks * sizeof(Block))
    if place == NULL:
        raise MemoryError
    h.blocks = <Block*>place
    h.blocks_capacity = blocks
    place = PyMem_Realloc(h.rows, rows * p)
    if place == NULL:
        raise MemoryError
    h.rows = <uint8_t*>place
    h.rows_capacity = rows
    return 0


def run(int64_t p, int64_t v, int64_t m, times, releases, reductions):
    """Simulate a schedule; the caller has checked the shape, and that no sum leaves int64.

    Args:
        times: an array of [4, p * v] ticks, of each chunk: forward pass, backward pass, transfer of
            the activation, transfer of the gradient.
        releases, reductions: [p] ticks before the first and after the last pass of a rank.

    Returns:
        ``(ends, first_rank, last_rank, counts)``: when each rank's last pass ends; the ranks on
        which the critical path begins and ends; how often each of ``times`` lies on it.

    Raises:
        MemoryError: if the choices do not fit.
    """
    cdef Shape s = Shape(p, v, v > 1, m * v, 0, p * v if v > 1 else 1)
    s.lag = (v - 1) * p + (1 + s.turn) * (p - 1)
    ends = array("q", releases) + array("q", bytes(16 * p))
    counts, saved = (array("q", bytes(32 * p * v)) for _ in range(2))
    spare = array("q", bytes(8 * (9 * p + 4 * p * s.period)))
    cdef const int64_t[::1] each = times, after = reductions
    cdef int64_t[::1] clocks = ends, kept = spare, on_path = counts, earlier = saved
    cdef State now = State(0, -1, s.period, &clocks[0], &clocks[p], &clocks[2 * p])
    cdef History h = History(NULL, 0, 0, NULL, 0, 0)
    cdef bint done = False
    cdef int64_t last = 0, first = 0, rank
    try:
        while not done:
            grow(&h, p, s.period)
            with nogil:
                done = simulate(&s, &each[0], &now, &kept[0], &h)
        with nogil:
            for rank in range(p):
                if clocks[rank] + after[rank] > clocks[last] + after[last]:
                    last = rank
            first = walk_back(&s, &h, last, &on_path[0], &earlier[0])
        return tuple(ends[:p]), first, last, tuple(counts)
    finally:
        PyMem_Free(h.rows)
        PyMem_Free(h.blocks)
