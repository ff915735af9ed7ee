"""The catalogue's models and clusters, as mappings that a notebook shows as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.report.console import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = TypeVar("Record", TransformerSpec, Cluster)


class Catalogue(Shown, Mapping[str, Record]):
    """Models or clusters by name, each read when it is asked for; a notebook shows a table."""

    def __init__(
        self,
        group: str,
        read: Callable[[str], Record],
        table: Callable[[Catalogue[Record]], RenderableType],
    ) -> None:
        self._group, self._names = group, catalogue_names(group)
        self._read: Callable[[str], Record] = read
        self._table: Callable[[Catalogue[Record]], RenderableType] = table

    def __getitem__(self, name: str) -> Record:
        try:
            return self._read(name)
        except UserInputError as error:
            raise KeyError(str(error)) from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Catalogue of {len(self)} {self._group}s>"

    def report(self) -> tuple[RenderableType]:
        """The table."""
        return (self._table(self),)
