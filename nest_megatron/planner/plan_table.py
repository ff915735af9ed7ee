"""A table of plans of one job, one for each number of nodes that it may find itself on.

Its file is a stream of YAML documents: first what it holds for each number of nodes, then the
plans, each as in a separate file. A launch reads the first document and the plan that it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from nest_megatron.errors import PlanFileError
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import from_plain, frozen, to_plain

_SCHEMA = 1
_KEY, _NOTES = "plan_table", "notes"
_HEAD = re.compile(rf"schema: \d+\n{_KEY}:")
_NEXT = "\n---\n"
_AGAIN = "Write it again with nest-megatron plan --for-nodes."


@frozen
class TableEntry:
    """What a table holds for one number of nodes.

    Args:
        checksum: of the plan; ``None`` where there is none.
        told: why there is no plan, or what is better than it.
    """

    num_nodes: int
    num_gpus: int
    checksum: str | None = None
    told: str = ""


@frozen
class PlanTable:
    """Plans of one job by the number of its nodes.

    Args:
        entries: fewest nodes first.
        plans: by the checksum that the entries name.
        notes: what every launch of the table needs.
    """

    entries: tuple[TableEntry, ...]
    plans: Mapping[str, ParallelPlan]
    notes: tuple[str, ...] = ()

    def plan_of(self, entry: TableEntry) -> ParallelPlan | None:
        """The plan of an entry, if it has one."""
        return None if entry.checksum is None else self.plans[entry.checksum]

    def planned(self) -> Iterator[tuple[TableEntry, ParallelPlan]]:
        """Entries that have a plan, with it."""
        for entry in self.entries:
            if entry.checksum is not None:
                yield entry, self.plans[entry.checksum]


def dump(table: PlanTable, more: Mapping[str, Any] | None = None) -> str:
    """The text of a plan table; ``more`` is written into its first document."""
    head = {"schema": _SCHEMA, _KEY: to_plain(table.entries), _NOTES: list(table.notes)}
    head |= more or {}
    first = plan_file.written(head)
    return _NEXT.join([first.rstrip("\n"), *(plan_file.dump(p) for _, p in table.planned())])


def is_table(text: str) -> bool:
    """Whether a plan file's text is a table."""
    return _HEAD.match(text) is not None


class TableText:
    """A table's text whose plans are read one by one.

    Args:
        name: of the file, for errors.

    Attributes:
        head: fields of the first document that ``PlanTable`` does not have.
        sizes: numbers of GPUs that have a plan.

    Raises:
        PlanFileError: if it is no sound table.
    """

    def __init__(self, text: str, name: str) -> None:
        first, *self._documents = text.split(_NEXT)
        self._name, fields = name, plan_file.parse(first, name)
        if (schema := fields.pop("schema")) != _SCHEMA:
            raise PlanFileError(
                f"{name}: schema",
                schema,
                f"this version reads tables of schema {_SCHEMA}",
                "Upgrade nest-megatron.",
            )
        where, listed = f"{name}: {_KEY}", fields.pop(_KEY)
        if not isinstance(listed, list):
            raise PlanFileError(
                where, listed, "it is a list, an entry for each number of nodes", _AGAIN
            )
        self.entries = tuple(from_plain(TableEntry, each, where) for each in listed)
        self._planned = [each for each in self.entries if each.checksum is not None]
        self.sizes = tuple(each.num_gpus for each in self._planned)
        self._notes = tuple(map(str, fields.pop(_NOTES, ())))
        self.head: Mapping[str, Any] = fields
        if not self.sizes or len(self.sizes) != len(self._documents):
            raise PlanFileError(
                name,
                None,
                f"it lists {len(self.sizes)} plans and holds {len(self._documents)}",
                _AGAIN,
            )
        if any(less.num_gpus >= more.num_gpus for less, more in pairwise(self.entries)):
            raise PlanFileError(
                name, None, "its entries are not in the order of their sizes", _AGAIN
            )

    def plan_for(self, num_gpus: int) -> ParallelPlan:
        """The plan for so many GPUs, else for the most below, else for the fewest.

        Raises:
            PlanFileError: if it is not the plan that the table lists.
        """
        at = max((i for i, size in enumerate(self.sizes) if size <= num_gpus), default=0)
        return self._read(at)

    def _read(self, at: int) -> ParallelPlan:
        entry, name = self._planned[at], f"{self._name}: {self._planned[at].num_nodes} nodes"
        plan = plan_file.load(self._documents[at], name)
        value = plan_file.checksum(plan), plan.layout.num_gpus
        if value != (entry.checksum, entry.num_gpus):
            raise PlanFileError(
                name,
                value,
                f"the table lists {entry.checksum} for {entry.num_gpus} GPUs",
                _AGAIN,
            )
        return plan

    def table(self) -> PlanTable:
        """All plans.

        Raises:
            PlanFileError: as ``plan_for``.
        """
        plans = map(self._read, range(len(self._documents)))
        by_checksum = {plan_file.checksum(plan): plan for plan in plans}
        return PlanTable(entries=self.entries, plans=by_checksum, notes=self._notes)
