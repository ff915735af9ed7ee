"""Stage partitions that need no search: even ones, and as balanced as whole layers allow."""

from __future__ import annotations

from itertools import accumulate

from nest_megatron.model.spec import TransformerSpec

Boundaries = tuple[int, ...]


def even_partition(spec: TransformerSpec, num_chunks: int) -> Boundaries | None:
    """What Megatron makes without a layout: as many layers in each chunk.

    Where the layers do not divide, embedding and head count as a layer each
    (``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``).

    Returns:
        ``None`` where that does not come out whole either.
    """
    layers = spec.num_layers
    if layers % num_chunks == 0:
        return _boundaries(spec, [layers // num_chunks] * num_chunks)
    size, rest = divmod(layers + 2, num_chunks)
    if rest or size < 2:
        return None
    return _boundaries(spec, [size - 1, *[size] * (num_chunks - 2), size - 1])


def balanced_partition(spec: TransformerSpec, num_chunks: int) -> Boundaries:
    """Layers as evenly as they go, bigger chunks first; only end chunks may hold none."""
    size, rest = divmod(spec.num_layers, num_chunks)
    if size:
        return _boundaries(spec, [size + 1] * rest + [size] * (num_chunks - rest))
    first = spec.num_layers - (num_chunks - 2)
    return _boundaries(spec, [first, *[1] * (num_chunks - 2), 0])


def shifted(spec: TransformerSpec, boundaries: Boundaries) -> list[Boundaries]:
    """Every partition of a plain pipeline in which one unit has moved to a neighbouring stage."""
    found = []
    for at in range(1, len(boundaries) - 1):
        for boundary in (boundaries[at] - 1, boundaries[at] + 1):
            moved = (*boundaries[:at], boundary, *boundaries[at + 1 :])
            if moved[at - 1] < boundary < moved[at + 1] and moved[1] <= spec.num_layers + 1:
                found.append(moved)
    return found


def _boundaries(spec: TransformerSpec, layers: list[int]) -> Boundaries:
    """The embedding joins the first chunk; MTP layers and the head join the last."""
    ends = [1 + count for count in accumulate(layers)]
    return (0, *ends[:-1], len(spec.layer_kinds()))
