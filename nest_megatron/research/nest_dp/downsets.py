"""A graph of layers, and the parts of it that a pipeline can still have before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nest_megatron.errors import UserInputError

#: Most downsets that are listed; the work grows with the square of their number.
MOST_DOWNSETS = 2048
#: Where counting stops when there are more.
_MOST_COUNTED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDag:
    """Nodes in an order in which they can run; edges are pairs (maker, reader) of their places.

    Raises:
        UserInputError: for an edge that does not lead on in the order.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for maker, reader in self.edges:
            if not 0 <= maker < reader < len(self.names):
                limit = "an edge leads from a node to a later one"
                fix = "Put the nodes in the order in which they run."
                raise UserInputError("edges", (maker, reader), limit, fix)

    @classmethod
    def chain(cls, names: Sequence[str]) -> LayerDag:
        """Each node reads the one before it."""
        edges = tuple((at, at + 1) for at in range(len(names) - 1))
        return cls(names=tuple(names), edges=edges)

    def readers(self) -> list[int]:
        """For each node the set of those that read it, as bits."""
        found = [0] * len(self.names)
        for maker, reader in self.edges:
            found[maker] |= 1 << reader
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Downsets:
    """Every set of nodes that holds all readers of its members, smaller ones first.

    Known by identity, so that results for one can be cached by it.

    Args:
        masks: bit ``v`` of a mask stands for node ``v``; the first is empty, the last is all nodes.
        parents: for each, a downset that lacks one node of it, and that node; (0, -1) for the
            empty one.
    """

    dag: LayerDag
    masks: tuple[int, ...]
    parents: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.masks)

    def sums(self, values: Sequence[int]) -> list[int]:
        """The sum of the nodes' values over each downset.

        >>> downsets_of(LayerDag.chain("abc")).sums([1, 10, 100])
        [0, 100, 110, 111]
        """
        found = [0]
        for parent, node in self.parents[1:]:
            found.append(found[parent] + values[node])
        return found

    def nested(self, at: int) -> list[int]:
        """The smaller downsets inside one, largest first."""
        outside = ~self.masks[at]
        return [inner for inner in range(at - 1, -1, -1) if not self.masks[inner] & outside]

    def cut_bytes(self, output_bytes: Sequence[int]) -> Iterator[int]:
        """What crosses into each downset: every output that is read inside it and made outside.

        A tensor that skips stages is handed on by each stage between.
        """
        makers = list(zip(self.dag.readers(), output_bytes, strict=True))
        for mask in self.masks:
            yield sum(
                num
                for node, (readers, num) in enumerate(makers)
                if not mask >> node & 1 and readers & mask
            )


def downsets_of(dag: LayerDag) -> Downsets:
    """All downsets of a graph; a chain of n nodes has n + 1.

    Raises:
        UserInputError: if there are more than ``MOST_DOWNSETS``, naming how many, and the nodes
            that can run side by side and are to be contracted.
    """
    readers = dag.readers()
    found: dict[int, tuple[int, int]] = {0: (0, -1)}
    masks, widest = [0], list[int]()
    for mask in masks:  # which grows on the way
        ready = [v for v, after in enumerate(readers) if not mask >> v & 1 and not after & ~mask]
        widest = max(widest, ready, key=len)
        for node in ready:
            if (grown := mask | 1 << node) not in found:
                found[grown] = (mask, node)
                masks.append(grown)
        if len(masks) > _MOST_COUNTED:
            break
    if len(masks) > MOST_DOWNSETS:
        more = "more than " if len(masks) > _MOST_COUNTED else ""
        names = ", ".join(dag.names[node] for node in widest)
        raise UserInputError(
            "downsets of the layer graph",
            f"{more}{min(len(masks), _MOST_COUNTED)}",
            limit=f"at most {MOST_DOWNSETS} are searched",
            fix=f"Contract branches that run side by side into one node each: {names}.",
        )
    masks.sort(key=lambda mask: (mask.bit_count(), mask))
    index = {mask: at for at, mask in enumerate(masks)}
    parents = tuple((index[parent], node) for parent, node in map(found.__getitem__, masks))
    return Downsets(dag=dag, masks=tuple(masks), parents=parents)
