"""What rank 0 prints of a plan that is about to run, and what ``explain`` says of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, target_named
from nest_megatron.integrations.fields import shown
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan, launch_words
from nest_megatron.planner.pins import Pin, pinned_for
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.answer import answer_report
from nest_megatron.report.before_after import before_after_report
from nest_megatron.report.console import command_lines
from nest_megatron.report.terminal import changes_table, explain_report, notes_report
from nest_megatron.report.words import early_words
from nest_megatron.units import Seconds, format_seconds


def explanation(
    plan: ParallelPlan,
    times: LayerTimes | None,
    differences: Sequence[Mapping[str, Seconds] | None],
    pin: Pin | None = None,
) -> Iterator[RenderableType]:
    """The parts of the report; a text is to be shown as it stands.

    Args:
        times: the measured layer times that the plan was made with.
        differences: as for ``explain_report``.
        pin: who froze the plan.
    """
    if said := early_words(plan.search):
        yield f"{said}.\n"
    if plan.today is not None:
        yield before_after_report(plan.today, plan.priced())
        yield f"Today is {plan.provenance.created[:10]}, when the plan was made.\n"
    yield explain_report(plan, differences)
    for name, launch in plan.launch.items():
        variables = [(k, v) for k, v in launch.environment.items() if v is not None]
        unset = [k for k, v in launch.environment.items() if v is None]
        yield f"\nLaunch with {name}\n"
        yield command_lines(launch_words(plan, launch.script, launch.argv), variables)
        yield ""
        yield notes_report([*launch.notes, *(f"{each} must not be set." for each in unset)])
    yield from _advice(plan, times)
    if pin is not None:
        said = f" ({pin.note})" if pin.note else ""
        yield f"\nPinned {pin.created} by {pin.by}{said}, for {pinned_for(plan, pin.megatron_lm)}."


def _advice(plan: ParallelPlan, times: LayerTimes | None) -> Iterator[str]:
    profile = plan.provenance.profile
    if times is None and profile != ANALYTIC_NAME:
        yield (
            f"\nIts layer times ({profile}) are not in the profile store of this machine; what is "
            "priced again here is priced from data sheets. Import the profile to see its own."
        )
    if plan.launch:
        return
    target = restored_settings(plan.provenance.settings).target
    if target is None or target_named(target) in MEGATRON_LM:
        yield "\nThis plan holds no launch command; plan again with this version to get one."
    else:
        framework = target_named(target).framework
        yield f"\nThe plan is for {framework}; docs/nemo.md says how recipes take it."


def launched_report(
    plan: ParallelPlan, changes: Iterable[Change], notes: Sequence[str] = (), what: str = "flags"
) -> RenderableType:
    """The plan in a few lines, what it changes in a job's flags or fields, and what was assumed."""
    if rows := change_rows(changes):
        table = changes_table(rows, plan.model)
        return _report(plan, notes, Text(f"nest: changes to its {what}"), table)
    return _report(plan, notes, Text(f"nest: its {what} are already the plan"))


def fields_report(
    plan: ParallelPlan, changes: Iterable[Change], notes: Sequence[str] = ()
) -> RenderableType:
    """The same for a job whose configuration has fields instead of flags."""
    return launched_report(plan, changes, notes, "fields")


def values_report(
    plan: ParallelPlan, rows: Iterable[tuple[str, str, str]], notes: Sequence[str]
) -> Iterator[RenderableType]:
    """The same for an application whose fields ask for the plan, by field, value and reason.

    Fields are lines of text, which no width cuts: a path may be longer than a terminal is wide.
    """
    yield _report(plan, ())
    yield "nest: values of its fields"
    for path, value, why in rows:
        yield f"  {path} = {value}"
        yield Padding(Text(why, "dim"), (0, 0, 0, 6))
    if notes:
        yield notes_report(notes)


def _report(plan: ParallelPlan, notes: Sequence[str], *changes: RenderableType) -> RenderableType:
    told = [notes_report(notes)] if notes else []
    early = [Text(f"nest: {said}")] if (said := early_words(plan.search)) else []
    answer = Padding(answer_report(plan), (0, 0, 0, 2))
    return Group(*early, Text("nest: this job runs as"), answer, *changes, *told)


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str | None, str | None, str]]:
    """Changes as ``changes_table`` takes them."""

    def text(value: object) -> str | None:
        return None if value is None else shown(value)

    return [(each.field, text(each.before), text(each.after), each.reason) for each in changes]


def flag_cost_report(planned_s: Seconds, costs: Iterable[tuple[str, Seconds]]) -> RenderableType:
    """What the user's choices cost: the shortest step with all, and with each (last, all) freed."""
    table = Table(box=None, padding=(0, 2))
    for head in ("Freed", "Step", "Kept, it costs"):
        table.add_column(head, justify="left" if head == "Freed" else "right")
    for choice, freed_s in costs:
        cost = 100.0 * (planned_s - freed_s) / freed_s
        words = f"{cost:.1f} %" if cost >= 0.05 else "nothing"
        table.add_row(f"nest.free=[{choice}]", format_seconds(freed_s), words)
    step = format_seconds(planned_s)
    title = f"nest: what your flags cost, by predicted steps ({step} with all)"
    return Group(Text(title), table)
