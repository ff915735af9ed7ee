"""The recurrence in C: what ``nest_megatron.research.nest_dp.reference`` fills, bit for bit.

Times are whole ticks and memory whole bytes in int64, so no order of additions or of candidates can
change a value, and what a bound leaves out is what the caps would refuse. ``fill`` takes arrays
that the caller made; everything else runs without the gil and allocates nothing.
"""

from libc.stdint cimport int64_t

cdef int64_t UNREACHABLE = 1LL << 61
cdef Py_ssize_t FORWARD = 0, RECOMPUTE = 1, BACKWARD = 2, SYNC = 3


cdef struct Question:
    # As in ``nest_dp/records.py``.
    Py_ssize_t num_downsets
    Py_ssize_t num_levels
    Py_ssize_t num_devices
    Py_ssize_t num_pairs
    Py_ssize_t num_strategies
    Py_ssize_t most_stages
    int64_t capacity_bytes
    int64_t sync_cap
    const int64_t* nested_first  # [downsets + 1]
    const int64_t* nested  # [pairs]
    const int64_t* ends  # [levels, devices]
    const int64_t* options_first  # [strategies + 1]
    const int64_t* option_devices  # [options]
    const int64_t* reserved  # [options] bytes
    const int64_t* rows  # [options, devices]
    const int64_t* times  # [rows, 4, downsets] ticks
    const int64_t* least_work  # [strategies, downsets] ticks
    const int64_t* static_bytes  # [options, downsets]
    const int64_t* policies_first  # [strategies + 1]
    const int64_t* recomputes  # [policies]
    const int64_t* kept  # [policies, 3, downsets] bytes
    const int64_t* peaks  # [policies, pairs] bytes
    const int64_t* send  # [strategies, levels, downsets] ticks
    const int64_t* in_flight  # [most_stages + 1]
    const int64_t* caps  # [most_stages + 1] ticks
    int64_t* table  # [most_stages + 1, levels, downsets, devices + 1] ticks
    int64_t* ending  # [levels, devices + 1] ticks, scratch


cdef struct Work:
    # The stage that is tried: between two downsets, in one way, at one place.
    Py_ssize_t stages
    Py_ssize_t outer
    Py_ssize_t inner
    Py_ssize_t pair
    Py_ssize_t strategy
    Py_ssize_t policy
    Py_ssize_t option
    int64_t cap


cdef inline int64_t* state(
    const Question* q, Py_ssize_t stages, Py_ssize_t level, Py_ssize_t downset
) noexcept nogil:
    return q.table + ((stages * q.num_levels + level) * q.num_downsets + downset) * (
        q.num_devices + 1
    )


cdef inline int64_t sum_of(
    const Question* q, const Work* w, Py_ssize_t row, Py_ssize_t kind
) noexcept nogil:
    """Ticks of the stage's nodes in a row of times."""
    cdef const int64_t* sums = q.times + (4 * row + kind) * q.num_downsets
    return sums[w.outer] - sums[w.inner]


cdef int64_t memory_of(const Question* q, const Work* w) noexcept nogil:
    cdef Py_ssize_t d = q.num_downsets
    cdef const int64_t* static_bytes = q.static_bytes + w.option * d
    cdef const int64_t* kept = q.kept + w.policy * 3 * d
    cdef int64_t each = kept[d + w.outer] - kept[d + w.inner] + kept[2 * d + w.outer]
    return (
        q.reserved[w.option]
        + static_bytes[w.outer]
        - static_bytes[w.inner]
        + kept[w.outer]
        - kept[w.inner]
        + (q.in_flight[w.stages] - 1) * each
        + q.peaks[w.policy * q.num_pairs + w.pair]
    )


cdef bint take_first_that_fits(const Question* q, Work* w) noexcept nogil:
    """Set the option to the strategy's first that memory holds, if there is one."""
    cdef Py_ssize_t option
    for option in range(q.options_first[w.strategy], q.options_first[w.strategy + 1]):
        w.option = option
        if memory_of(q, w) <= q.capacity_bytes:
            return True
    return False


cdef void link_back(
    const Question* q,
    const Work* w,
    Py_ssize_t place,
    Py_ssize_t end,
    Py_ssize_t nearest,
    int64_t before,
    int64_t time,
) noexcept nogil:
    """Offer the stage to every level that its own link to the one before it may have."""
    cdef Py_ssize_t level
    cdef int64_t found
    cdef int64_t* best
    for level in range(nearest, q.num_levels):
        found = q.send[(w.strategy * q.num_levels + level) * q.num_downsets + w.outer] + time
        found = max(found, before)
        best = q.ending + level * (q.num_devices + 1) + end
        if found < w.cap and found < best[0]:
            best[0] = found


cdef void place_at(const Question* q, const Work* w, Py_ssize_t place) noexcept nogil:
    """One place of the stage, with every level of the link to the stage behind it."""
    cdef Py_ssize_t end = place + q.option_devices[w.option]
    cdef Py_ssize_t row = q.rows[w.option * q.num_devices + place], nearest = 0, after
    cdef int64_t work, recomputed = 0, before, going
    if sum_of(q, w, row, SYNC) >= q.sync_cap:
        return
    work = sum_of(q, w, row, FORWARD) + sum_of(q, w, row, BACKWARD)
    if work >= w.cap:
        return
    if q.recomputes[w.policy]:
        recomputed = sum_of(q, w, row, RECOMPUTE)
    while q.ends[nearest * q.num_devices + place] < end:
        nearest += 1
    for after in range(nearest, q.num_levels):
        before = state(q, w.stages - 1, after, w.inner)[place]
        if before < w.cap:
            going = q.send[(w.strategy * q.num_levels + after) * q.num_downsets + w.inner]
            link_back(q, w, place, end, nearest, before, work + max(recomputed, going))


cdef bint is_reached(const Question* q, const Work* w) noexcept nogil:
    """Whether what lies behind the stage can be had anywhere below the cap.

    A state only falls with its device inside a stretch, so the last device of each is enough.
    """
    cdef Py_ssize_t level, device
    cdef const int64_t* row
    cdef const int64_t* ends
    for level in range(q.num_levels):
        row, ends = state(q, w.stages - 1, level, w.inner), q.ends + level * q.num_devices
        device = 0
        while device < q.num_devices:
            device = ends[device]
            if row[device - 1] < w.cap:
                return True
    return False


cdef inline bint may_be_short(const Question* q, const Work* w) noexcept nogil:
    """Whether the strategy's least work for the stage is below the cap."""
    cdef const int64_t* least = q.least_work + w.strategy * q.num_downsets
    return least[w.outer] - least[w.inner] < w.cap


cdef bint is_worth(const Question* q, Work* w) noexcept nogil:
    """Whether some strategy may do, and what lies behind the stage can be had below the cap."""
    cdef Py_ssize_t strategy
    for strategy in range(q.num_strategies):
        w.strategy = strategy
        if may_be_short(q, w):
            return is_reached(q, w)
    return False


cdef void try_pair(const Question* q, Work* w) noexcept nogil:
    """Every way to run the stage between two downsets."""
    cdef Py_ssize_t strategy, policy, place, taken
    for strategy in range(q.num_strategies):
        w.strategy, taken = strategy, -1
        if not may_be_short(q, w):
            continue
        for policy in range(q.policies_first[strategy], q.policies_first[strategy + 1]):
            w.policy = policy
            if not take_first_that_fits(q, w) or w.option == taken:
                continue
            taken = w.option
            for place in range(q.num_devices - q.option_devices[w.option] + 1):
                place_at(q, w, place)


cdef void store(
    const Question* q, Py_ssize_t stages, Py_ssize_t level, Py_ssize_t outer
) noexcept nogil:
    """From where stages end to where the next may begin: least so far inside each stretch."""
    cdef Py_ssize_t device
    cdef int64_t least = UNREACHABLE
    cdef const int64_t* ending = q.ending + level * (q.num_devices + 1)
    cdef const int64_t* ends = q.ends + level * q.num_devices
    cdef int64_t* row = state(q, stages, level, outer)
    row[0] = UNREACHABLE
    for device in range(1, q.num_devices + 1):
        if device < q.num_devices and ends[device - 1] == device:
            least = UNREACHABLE
        else:
            least = ending[device] if ending[device] < least else least
        row[device] = least


cdef void clear(const Question* q, Py_ssize_t stages, Py_ssize_t downset) noexcept nogil:
    """Nothing is known of a downset; without a stage, everything may begin anywhere."""
    cdef Py_ssize_t level, device
    cdef int64_t* row
    for level in range(q.num_levels):
        row = state(q, stages, level, downset)
        for device in range(q.num_devices + 1):
            row[device] = UNREACHABLE
            if stages == 0 and downset == 0 and level == q.num_levels - 1:
                row[device] = 0


cdef void fill_states(const Question* q) noexcept nogil:
    cdef Work w
    cdef Py_ssize_t level, at
    for at in range(q.num_downsets):
        clear(q, 0, at)
    for w.stages in range(1, q.most_stages + 1):
        clear(q, w.stages, 0)
        w.cap = q.caps[w.stages]
        for w.outer in range(1, q.num_downsets):
            for at in range(q.num_levels * (q.num_devices + 1)):
                q.ending[at] = UNREACHABLE
            for w.pair in range(q.nested_first[w.outer], q.nested_first[w.outer + 1]):
                w.inner = q.nested[w.pair]
                if is_worth(q, &w):
                    try_pair(q, &w)
            for level in range(q.num_levels):
                store(q, w.stages, level, w.outer)


def fill(
    Py_ssize_t num_downsets,
    Py_ssize_t num_levels,
    Py_ssize_t num_devices,
    Py_ssize_t most_stages,
    int64_t capacity_bytes,
    const int64_t[::1] nested_first,
    const int64_t[::1] nested,
    const int64_t[::1] ends,
    const int64_t[::1] options_first,
    const int64_t[::1] option_devices,
    const int64_t[::1] reserved,
    const int64_t[::1] rows,
    const int64_t[::1] times,
    const int64_t[::1] least_work,
    const int64_t[::1] static_bytes,
    const int64_t[::1] policies_first,
    const int64_t[::1] recomputes,
    const int64_t[::1] kept,
    const int64_t[::1] peaks,
    const int64_t[::1] send,
    const int64_t[::1] in_flight,
    const int64_t[::1] caps,
    int64_t sync_cap,
    int64_t[::1] table,
    int64_t[::1] scratch,
):
    """Fill ``table``; the arguments up to ``in_flight`` are the fields of ``Tables``.

    Args:
        caps: IN, [most_stages + 1], ticks that a state of so many stages stays below.
        sync_cap: ticks that every stage's sum of gradients stays below.
        table: OUT, [most_stages + 1, levels, downsets, devices + 1], or larger.
        scratch: [levels * (devices + 1)] at least.
    """
    cdef Question q
    q.num_downsets, q.num_levels, q.num_devices = num_downsets, num_levels, num_devices
    q.num_pairs, q.num_strategies = nested.shape[0], options_first.shape[0] - 1
    q.most_stages, q.capacity_bytes, q.sync_cap = most_stages, capacity_bytes, sync_cap
    q.nested_first, q.nested, q.ends = &nested_first[0], &nested[0], &ends[0]
    q.options_first, q.option_devices = &options_first[0], &option_devices[0]
    q.reserved, q.least_work = &reserved[0], &least_work[0]
    q.rows, q.times, q.static_bytes = &rows[0], &times[0], &static_bytes[0]
    q.policies_first, q.recomputes = &policies_first[0], &recomputes[0]
    q.kept, q.peaks, q.send = &kept[0], &peaks[0], &send[0]
    q.in_flight, q.caps, q.table, q.ending = &in_flight[0], &caps[0], &table[0], &scratch[0]
    with nogil:
        fill_states(&q)
