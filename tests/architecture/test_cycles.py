"""No module reaches itself through what it imports.

Every import counts: one inside a function or under ``TYPE_CHECKING`` is no way out of a cycle,
since neither of the two modules can be read, moved or tested without the other. What does not
count is that importing a module loads the package around it.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.imports import SOURCES, dotted_name, imports_of

Graph = dict[str, set[str]]

#: Imports that close a cycle and are still to be removed: who imports what.
KNOWN: set[tuple[str, str]] = {
    ("cost_model.stage_problems", "cost_model.model"),
}


def import_graph() -> Graph:
    """The modules of the package, and what each imports of it."""
    modules = {dotted_name(path): path for path in SOURCES}
    return {
        short(name): {short(found.module) for found in imports_of(path) if found.module in modules}
        - {short(name)}
        for name, path in modules.items()
    }


def short(module: str) -> str:
    """A module's name without the package's.

    >>> short("nest_megatron.cli.plan"), short("nest_megatron")
    ('cli.plan', 'nest_megatron')
    """
    return module.removeprefix("nest_megatron.")


def cycle_in(graph: Graph) -> list[str]:
    """One cycle, each module importing the next; nothing where there is none.

    >>> cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}), cycle_in({"a": {"b"}})
    (['b', 'c', 'b'], [])
    """
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[::-1]
    return []


def without(graph: Graph, edges: set[tuple[str, str]]) -> Graph:
    """The graph without some imports."""
    return {
        name: {found for found in imported if (name, found) not in edges}
        for name, imported in graph.items()
    }


def test_no_module_imports_itself_through_others() -> None:
    assert not cycle_in(without(import_graph(), KNOWN))


@pytest.mark.parametrize("edge", sorted(KNOWN), ids=" -> ".join)
def test_known_cycles_are_still_there(edge: tuple[str, str]) -> None:
    """One that is removed leaves the table, so that it cannot come back."""
    assert cycle_in(without(import_graph(), KNOWN - {edge})), f"take {edge} out of KNOWN"
