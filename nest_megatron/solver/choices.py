"""Recompute settings in the order in which a search asks for them."""

from __future__ import annotations

from typing import NamedTuple

from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)


class Choices(NamedTuple):
    """The settings of a grid, sorted.

    ``none`` says whether computing nothing again is one of them. ``blocks`` are those that are
    asked for lazily, smallest first; ``others`` all the rest, large sets of modules first, with
    their ``modules``.
    """

    none: bool
    blocks: tuple[Recompute, ...]
    others: tuple[Recompute, ...]
    modules: tuple[frozenset[RecomputeModule], ...]


def sort_settings(settings: tuple[Recompute, ...], *, lazily: bool) -> Choices:
    """Sort the settings of a grid.

    Args:
        settings: blocks among them rise by one layer each.
        lazily: whether blocks are asked for one after the other, as long as they may win.
    """
    blocks = tuple(r for r in settings if lazily and r.method is RecomputeMethod.BLOCK)
    rest = [r for r in settings if r != NO_RECOMPUTE and r not in blocks]
    others = tuple(sorted(rest, key=lambda r: -len(r.modules)))
    return Choices(
        none=NO_RECOMPUTE in settings,
        blocks=blocks,
        others=others,
        modules=tuple(frozenset(r.modules) for r in others),
    )


def sparing(settings: tuple[Recompute, ...]) -> list[Recompute]:
    """The settings that keep least: the largest block, uniform, the largest sets of modules."""
    if len(settings) == 1:
        return list(settings)
    most = max(len(r.modules) for r in settings)
    blocks = [r for r in settings if r.method is RecomputeMethod.BLOCK]
    uniform = [r for r in settings if r.method is RecomputeMethod.UNIFORM]
    return [*uniform, *blocks[-1:], *(r for r in settings if 0 < len(r.modules) >= most - 1)]
