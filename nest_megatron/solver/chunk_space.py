"""The stage partitions among which the solver chooses, stated exactly.

* One chunk a rank (``v = 1``): every contiguous partition into non-empty stages (MTP layers not on
  the first of several, which Megatron refuses).
* Virtual stages (``v > 1``): the layouts that interleaving can use well. The first chunk holds the
  embedding and ``a`` layers, the last one ``b`` layers and the head, and all chunks between hold
  ``q`` layers, or one more: either the first ``r`` of them or the last ``r``. ``a`` and ``b`` range
  over ``0 .. q + 1``. With MTP layers the last chunk holds them too, or the chunk before it does,
  with its layers or without any, and the head stands alone. Decision 003 of ``docs/decisions.md``
  says why.

The order in which partitions are listed is the tie rule: of two that take equally long, the earlier
one is the answer. Bigger chunks come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from nest_megatron.cost_model.pipeline import PipelineProblem

Boundaries = tuple[int, ...]


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
    """Partitions whose MTP layers lie in one place.

    Args:
        mtp_apart: not in the last chunk but in the one before it.
        mtp_alone: which then holds no layers.
    """
    layers, interior = problem.num_layers, problem.num_chunks - (3 if mtp_alone else 2)
    most = layers // interior + 1
    for first in range(most, -1, -1):
        for last in range(0 if mtp_apart else most, -1, -1):
            base, extra = divmod(layers - first - last, interior)
            if base < 1 or max(first, last) > base + 1:
                continue
            larger, smaller = [base + 1] * extra, [base] * (interior - extra)
            orders = [larger + smaller]
            if extra:
                orders.append(smaller + larger)
            for sizes in orders:
                ends = [*accumulate(sizes, initial=1 + first)]
                if mtp_alone:
                    ends.append(ends[-1] + 1)
                elif mtp_apart:
                    ends[-1] += 1
                yield (0, *ends, problem.num_units)
