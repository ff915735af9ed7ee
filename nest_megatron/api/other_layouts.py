"""What ``Explanation`` answers about other layouts of a plan's job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nest_megatron.integrations.megatron_lm import other_layout
from nest_megatron.integrations.megatron_lm.planned_job import SEARCH_S
from nest_megatron.parallel.dims import SHORT_DEGREES
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.report.console import Shown
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.words import term_words
from nest_megatron.units import format_gib, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_BOUNDED = (
    f"Time ended the search after {SEARCH_S:g} s: what is said of other layouts is what was found "
    "until then."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Versus(Shown):
    """A plan beside another layout of its job: what ``explain --versus`` prints."""

    record: other_layout.Versus

    def to_dict(self) -> dict[str, Any]:
        """What ``explain --versus --json`` prints."""
        found = self.record
        return {
            "plan": to_plain(found.plan.priced()),
            "other": to_plain(found.other.priced()),
            "difference": to_plain(found.difference),
            "term_differences_s": dict(found.terms),
            "memory_differences_bytes": dict(found.memory),
            "notes": list(found.notes),
        }

    def report(self) -> Iterator[RenderableType]:
        """The tables that ``explain --versus`` prints."""
        from nest_megatron.report.terminal import notes_report
        from nest_megatron.report.versus import versus_report

        found = self.record
        yield versus_report(found.plan, found.other, found.difference, found.terms, found.memory)
        yield notes_report(found.notes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WhyNot(Shown):
    """Why a plan is not another layout: what ``explain --why-not`` prints."""

    record: other_layout.WhyNot

    @property
    def verdict(self) -> str:
        """``illegal``, ``does not fit``, or where it is neither ``slower``, ``faster`` or ``tie``.

        A tie is what predictions do not tell apart with a chance of 90 %.
        """
        found = self.record
        if found.rule:
            return "illegal"
        if found.needed_bytes is not None or found.versus is None:
            return "does not fit"
        if not found.versus.difference.is_sure:
            return "tie"
        return "faster" if found.versus.difference.chance_faster >= 0.5 else "slower"

    def to_dict(self) -> dict[str, Any]:
        """What ``explain --why-not --json`` prints."""
        found = self.record
        return {
            "asked": dict(found.asked),
            "verdict": self.verdict,
            "rule": found.rule,
            "needed_bytes": found.needed_bytes,
            "versus": found.versus and Versus(record=found.versus).to_dict(),
            "nearest": found.nearest and to_plain(found.nearest.priced()),
            "changed": list(found.changed),
            "bounded": found.bounded,
        }

    def report(self) -> Iterator[RenderableType]:
        """What ``explain --why-not`` prints."""
        from rich.text import Text

        from nest_megatron.report.tables import heading, indented
        from nest_megatron.report.terminal import notes_report
        from nest_megatron.report.versus import layout_words, stages_table

        found = self.record
        asked = ", ".join(f"{_short(name)} {value}" for name, value in found.asked.items())
        yield Text(f"{asked}: {self._words()}")
        if found.versus is not None and found.needed_bytes is not None:
            yield heading("What each pipeline rank needs, with even stages")
            yield indented(f"The layout that needs least: {layout_words(found.versus.other)}")
            yield stages_table(found.versus.other)
        elif found.versus is not None:
            yield Text("What is not named is searched; sharding and execution are the plan's.")
            yield from Versus(record=found.versus).report()
        if self.verdict in ("illegal", "does not fit"):
            yield heading("The nearest layout that is legal and fits")
            yield indented(_nearest_words(found.nearest, found.changed, found))
        if found.bounded:
            yield notes_report((_BOUNDED,))

    def _words(self) -> str:
        found = self.record
        if found.rule:
            return f"Megatron refuses it. {found.rule}."
        assert found.versus is not None, "a layout that is legal is priced"
        if found.needed_bytes is not None:
            limit = found.versus.other.predicted.capacity_bytes
            needed, missing = map(format_gib, (found.needed_bytes, found.needed_bytes - limit))
            until = " that was found" if found.bounded else ""
            return (
                f"no layout with these sizes is predicted to fit: the least peak{until} is "
                f"{needed}, the limit {format_gib(limit)}, {missing} are missing."
            )
        return self._slower()

    def _slower(self) -> str:
        versus = self.record.versus
        assert versus is not None
        found, verdict = versus.difference, plan_verdict(versus.other)
        fits = f"legal, {verdict}," if verdict else "legal and fits,"
        percent = f"{abs(found.percent):.1f} %"
        said = f"{fits} but {percent} slower"
        if found.percent <= 0:
            said = f"{fits} and is predicted to be {percent} faster"
        if not found.is_sure:
            said += ", which predictions do not tell apart"
        return f"{said}, because of {term_words(versus.terms)}."


def _short(name: str) -> str:
    return SHORT_DEGREES.get(name, name)


def _nearest_words(
    nearest: ParallelPlan | None, changed: tuple[str, ...], found: other_layout.WhyNot
) -> str:
    from nest_megatron.report.versus import layout_words

    if nearest is None:
        said = "was found that makes" if found.bounded else "makes"
        return f"No change of one or two of the sizes {said} it legal and fit."
    sizes = {name: other_layout.size_of(nearest, name) for name in changed}
    names = ", ".join(f"{_short(n)} {found.asked[n]} -> {size}" for n, size in sizes.items())
    step = format_seconds(nearest.predicted.iteration_time_s)
    return f"{names}: {step} a step. {layout_words(nearest)}"
