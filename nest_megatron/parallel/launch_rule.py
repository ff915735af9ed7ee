"""A rule of Megatron on what is launched, and what breaks one, in words for a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nest_megatron.parallel.rules import LaunchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, in words for a user."""

    what: str
    value: object
    limit: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of Megatron.

    Args:
        name: short and stable, for tests and messages.
        source: where Megatron enforces it.
        check: the violation, or ``None``.
    """

    name: str
    source: str
    check: Callable[[LaunchRequest], Violation | None]


def rule(
    name: str,
    source: str,
    holds: Callable[[LaunchRequest], bool],
    *,
    what: str,
    limit: str,
    fix: str,
    value: Callable[[LaunchRequest], object] | None = None,
) -> Rule:
    """A rule whose words are the same for every request that breaks it.

    Args:
        holds: whether a request keeps it.
        what: the field to blame, by Megatron's name.
        limit: with ``{field}`` for the request's value of a field.
        value: what is shown of a request, where that is not the value of ``what``.
    """

    def check(request: LaunchRequest) -> Violation | None:
        if holds(request):
            return None
        shown = request[what] if value is None else value(request)
        return Violation(what=what, value=shown, limit=limit.format_map(request), fix=fix)

    return Rule(name=name, source=source, check=check)


def violations(request: LaunchRequest, asked: Iterable[Rule]) -> Iterator[tuple[Rule, Violation]]:
    """Every broken rule, in the order of the rules."""
    for each in asked:
        found = each.check(request)
        if found is not None:
            yield each, found
