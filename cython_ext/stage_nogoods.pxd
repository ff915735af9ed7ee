# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, nonecheck=False, overflowcheck=False
"""Why branches died, so that later prefixes need not die there again. One chunk a rank.

An open level keeps, for each cut that killed something below it, the least length so far with which
it all still dies: its *needs*. ``nest_megatron.solver.nogoods`` says it in full.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from stage_work cimport NO_NEED, Need, Work, smaller


cdef inline void start_keeping(Work* w) noexcept nogil:
    """Empty tables. The levels that are open now stay barred: what killed branches is forgotten."""
    cdef int64_t index
    for index in range(w.num_live):
        w.live_index[w.live[index]] = index
    memset(w.nogoods_made, 0, w.num_nodes * sizeof(w.nogoods_made[0]))
    for index in range(w.p * w.max_cuts):
        w.needs[index] = NO_NEED
    w.keeping = True


cdef inline void open_level(Work* w, Py_ssize_t k) noexcept nogil:
    """Nothing has died below stage ``k`` yet."""
    cdef Py_ssize_t index
    if w.keeping:
        w.barred[k] = 0
        for index in range(smaller(w.num_cuts, w.max_cuts)):
            w.needs[k * w.max_cuts + index] = NO_NEED


cdef inline void ask(Work* w, Py_ssize_t k, Py_ssize_t index, int64_t so_far) noexcept nogil:
    """Something below stage ``k`` dies of a cut if that is at least ``so_far`` long at ``k``."""
    cdef int64_t* need = w.needs + k * w.max_cuts + index
    if not w.barred[k] and so_far > need[0]:
        need[0] = so_far


cdef inline void ask_above(Work* w, Py_ssize_t k, Py_ssize_t index, int64_t so_far) noexcept nogil:
    """What stage ``k`` asks of a cut, asked one stage earlier."""
    cdef int64_t* length = w.cuts[index].so_far
    ask(w, k - 1, index, so_far - (length[k] - length[k - 1]))


cdef inline void forget_cut(Work* w, Py_ssize_t index) noexcept nogil:
    """A cut makes room: what needed it is not known any more."""
    cdef Py_ssize_t k
    if w.keeping:
        for k in range(w.p):
            if w.needs[k * w.max_cuts + index] > NO_NEED:
                w.needs[k * w.max_cuts + index] = NO_NEED
                w.barred[k] = 1


cdef inline void close_level(Work* w, Py_ssize_t k, Py_ssize_t node) noexcept nogil:
    """Everything below stage ``k`` died: keep its needs as a nogood and pass them up."""
    cdef Py_ssize_t held = smaller(w.num_cuts, w.max_cuts), index, size = 0
    cdef int64_t* needs = w.needs + k * w.max_cuts
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
            nogood.cut = number_of(w, index)
            nogood += 1


cdef inline int64_t place_of(const Work* w, Py_ssize_t node, Py_ssize_t made) noexcept nogil:
    """Where a node's nogood lies before which ``made`` others were made."""
    return w.live_index[node] * w.max_nogoods + made % w.max_nogoods


cdef inline int64_t number_of(const Work* w, Py_ssize_t index) noexcept nogil:
    """Number among all cuts ever made of the one that the ring holds at ``index``."""
    cdef int64_t newest = w.num_cuts - 1
    return newest - (newest - index) % w.max_cuts


cdef inline bint known_dead(Work* w, Py_ssize_t k, Py_ssize_t node) noexcept nogil:
    """Whether the prefix before stage ``k`` meets all that some nogood asks, newest first."""
    cdef Py_ssize_t i, j, made, size
    cdef int64_t place
    cdef const Need* nogood
    if not w.keeping:
        return False
    made = w.nogoods_made[node]
    for j in range(smaller(made, w.max_nogoods)):
        place = place_of(w, node, made - 1 - j)
        nogood = w.nogoods + place * w.max_needs
        size = w.nogood_size[place]
        if meets(w, k, nogood, size):
            for i in range(size):
                ask_above(w, k, nogood[i].cut % w.max_cuts, nogood[i].so_far)
            return True
    return False


cdef inline bint meets(
    const Work* w, Py_ssize_t k, const Need* nogood, Py_ssize_t size
) noexcept nogil:
    """Whether the ring still holds all cuts of a nogood, each as long as it asks."""
    cdef Py_ssize_t i
    for i in range(size):
        if nogood[i].cut < w.num_cuts - w.max_cuts:
            return False
        if w.cuts[nogood[i].cut % w.max_cuts].so_far[k] < nogood[i].so_far:
            return False
    return True
