"""No module reaches itself through what it imports.

Every import counts: one inside a function or under ``TYPE_CHECKING`` is no way out of a cycle,
since neither of the two modules can be read, moved or tested without the other. What does not
count is that importing a module loads the package around it.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from tests.architecture.imports import SOURCES, dotted_name, imports_of

Graph = dict[str, set[str]]


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


def test_no_module_imports_itself_through_others() -> None:
    assert not cycle_in(import_graph())
