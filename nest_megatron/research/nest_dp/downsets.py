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
    """Nodes in an order in which they can run, and who reads whose output.

    Args:
        names: of the nodes.
        edges: pairs (maker, reader) of places in ``names``.

    Raises:
        UserInputError: for an edge that does not lead on in the order.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for maker, reader in self.edges:
            if not 0 <= maker < reader < len(self.names):
                raise UserInputError(
                    "edges",
                    value=(maker, reader),
                    limit="an edge leads from a node to a later one",
                    fix="Put the nodes in the order in which they run.",
                )

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

    Known by identity, so that what is worked out for one can be kept by it.

    Args:
        masks: bit ``v`` of a mask stands for node ``v``; the first is empty, the last is all nodes.
        parents: for each, a downset that lacks one node of it; -1 for the empty one.
        added: that node.
    """

    dag: LayerDag
    masks: tuple[int, ...]
    parents: tuple[int, ...]
    added: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.masks)

    def sums(self, values: Sequence[int]) -> Iterator[int]:
        """The sum of the nodes' values over each downset.

        >>> list(downsets_of(LayerDag.chain("abc")).sums([1, 10, 100]))
        [0, 100, 110, 111]
        """
        found = [0] * len(self.masks)
        for at in range(1, len(self.masks)):
            found[at] = found[self.parents[at]] + values[self.added[at]]
        yield from found

    def nested(self, at: int) -> Iterator[int]:
        """The smaller downsets inside one, largest first."""
        whole = self.masks[at]
        for inner in range(at - 1, -1, -1):
            if self.masks[inner] & ~whole == 0:
                yield inner

    def cut_bytes(self, output_bytes: Sequence[int]) -> Iterator[int]:
        """What crosses into each downset: every output that is read inside it and made outside.

        A tensor that skips stages is handed on by each stage between.
        """
        readers = self.dag.readers()
        for mask in self.masks:
            yield sum(
                num
                for node, num in enumerate(output_bytes)
                if not mask >> node & 1 and readers[node] & mask
            )


def downsets_of(dag: LayerDag, most: int = MOST_DOWNSETS) -> Downsets:
    """All downsets of a graph; a chain of n nodes has n + 1.

    Raises:
        UserInputError: if there are more than ``most``, naming how many, and the nodes that can run
            side by side and are to be contracted.
    """
    readers = dag.readers()
    found: dict[int, tuple[int, int]] = {0: (0, -1)}
    widest: list[int] = []
    for mask in _growing(found):
        ready = [v for v, after in enumerate(readers) if not mask >> v & 1 and not after & ~mask]
        widest = max(widest, ready, key=len)
        for node in ready:
            found.setdefault(mask | 1 << node, (mask, node))
        if len(found) > _MOST_COUNTED:
            break
    if len(found) > most:
        raise _too_many(dag, len(found), most, widest)
    return _ordered(dag, found)


def _growing(found: dict[int, tuple[int, int]]) -> Iterator[int]:
    """The masks, those found on the way included."""
    queue, seen = list(found), 0
    while queue:
        yield from queue
        seen += len(queue)
        queue = list(found)[seen:]


def _ordered(dag: LayerDag, found: dict[int, tuple[int, int]]) -> Downsets:
    masks = sorted(found, key=lambda mask: (mask.bit_count(), mask))
    index = {mask: at for at, mask in enumerate(masks)}
    return Downsets(
        dag=dag,
        masks=tuple(masks),
        parents=tuple(index[found[mask][0]] if mask else -1 for mask in masks),
        added=tuple(found[mask][1] for mask in masks),
    )


def _too_many(dag: LayerDag, count: int, most: int, widest: Sequence[int]) -> UserInputError:
    names = ", ".join(dag.names[node] for node in widest)
    more = "more than " if count > _MOST_COUNTED else ""
    return UserInputError(
        "downsets of the layer graph",
        value=f"{more}{min(count, _MOST_COUNTED)}",
        limit=f"at most {most} are searched",
        fix=f"Contract branches that run side by side into one node each: {names}.",
    )
