"""The stage partitions among which the solver chooses, stated exactly.

* One chunk a rank (``v = 1``): every contiguous partition into non-empty stages (MTP layers not on
  the first of several, which Megatron refuses).
* Virtual stages (``v > 1``): the layouts that interleaving can use well. The first chunk holds the
  embedding and ``a`` layers, the last one ``b`` layers and the head, and all chunks between hold
  ``q`` layers, but that ``r`` of them hold one more: either the first ``r`` or the last ``r``.
  ``a`` and ``b`` range over ``0 .. q + 1``. With MTP layers the last chunk holds them too, or the
  chunk before it does, beside its layers or without any, and the head stands alone. (Within one
  round of chunks all ranks work in step, so chunks of different sizes only make ranks wait for each
  other: ``docs/solver.md``.)

The order in which partitions are listed is the tie rule: of two that take equally long, the earlier
one is the answer. Bigger chunks come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from nest_megatron.cost_model.pipeline import PipelineProblem

Boundaries = tuple[int, ...]


def partitions(problem: PipelineProblem) -> Iterator[Boundaries]:
    """Every partition of the declared space, in tie order."""
    if problem.num_virtual == 1:
        for boundaries in _compositions(problem.num_units, problem.num_stages):
            if problem.num_stages == 1 or boundaries[1] <= problem.num_layers + 1:
                yield boundaries
    else:
        yield from interleaved_partitions(problem)


def _compositions(num_units: int, num_stages: int, first: int = 0) -> Iterator[Boundaries]:
    if num_stages == 1:
        if num_units > first:
            yield (first, num_units)
        return
    for end in range(num_units - num_stages + 1, first, -1):
        for rest in _compositions(num_units, num_stages - 1, end):
            yield (first, *rest)


def interleaved_partitions(problem: PipelineProblem) -> Iterator[Boundaries]:
    """The declared space with virtual stages."""
    has_mtp = problem.num_units == problem.num_layers + 3
    yield from _edge_layouts(problem)
    if has_mtp and problem.num_stages > 2:
        yield from _edge_layouts(problem, mtp_apart=True)
        yield from _edge_layouts(problem, mtp_apart=True, mtp_alone=True)


def _edge_layouts(
    problem: PipelineProblem, *, mtp_apart: bool = False, mtp_alone: bool = False
) -> Iterator[Boundaries]:
    layers, interior = problem.num_layers, problem.num_chunks - 2 - mtp_alone
    most = layers // interior + 1
    for first in range(most, -1, -1):
        for last in range(0 if mtp_apart else most, -1, -1):
            base, extra = divmod(layers - first - last, interior)
            if base < 1 or max(first, last) > base + 1:
                continue
            rising = [base] * (interior - extra) + [base + 1] * extra
            nothing = [0] * mtp_alone
            yield _boundaries(problem, first, rising[::-1] + nothing, mtp_apart=mtp_apart)
            if extra:
                yield _boundaries(problem, first, rising + nothing, mtp_apart=mtp_apart)


def _boundaries(
    problem: PipelineProblem, first: int, interior: list[int], *, mtp_apart: bool
) -> Boundaries:
    inner = [*accumulate(interior, initial=1 + first)]
    inner[-1] += mtp_apart
    return (0, *inner, problem.num_units)
