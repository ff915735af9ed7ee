"""``explain``."""

from __future__ import annotations

from pathlib import Path

from nest_megatron.cost_model.stored_settings import restored_settings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, target_named
from nest_megatron.errors import OK
from nest_megatron.files import write_text
from nest_megatron.integrations.megatron_lm.attach import launch_request, launch_words
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.planner.pins import pinned_for, read_plan
from nest_megatron.profile.choose import times_of
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.console import command_lines, say, show, show_json
from nest_megatron.report.differences import term_differences
from nest_megatron.report.words import proof


def run_explain(path: Path, *, html: Path | None, timeline: Path | None, as_json: bool) -> int:
    """Print a plan file with its reasons, and write the pages and pictures asked for."""
    plan, pin = read_plan(path)
    times = times_of(plan.provenance.profile, plan.model)
    _write_pages(plan, times, html, timeline)
    differences = term_differences(plan, times)
    if as_json:
        reasons = {
            "certificate": proof(plan),
            "alternative_term_differences_s": [d and dict(d) for d in differences],
        }
        pinned = {} if pin is None else {"pin": to_plain(pin)}
        show_json({**pinned, **to_plain(plan), "explained": reasons})
        return OK
    from nest_megatron.report.terminal import explain_report, notes_report

    show(explain_report(plan, differences))
    for name, launch in plan.launch.items():
        kept = [(k, v) for k, v in launch.environment.items() if v is not None]
        unset = [k for k, v in launch.environment.items() if v is None]
        say(f"\nLaunch with {name}\n")
        say(command_lines(launch_words(plan, launch.script, launch.argv), kept))
        say()
        notes = [*launch.notes, *(f"{variable} must not be set." for variable in unset)]
        show(notes_report(notes))
    _advise(plan, times)
    if pin is not None:
        said = f" ({pin.note})" if pin.note else ""
        say(f"\nPinned {pin.created} by {pin.by}{said}, for {pinned_for(plan, pin.megatron_lm)}.")
    return OK


def _write_pages(
    plan: ParallelPlan, times: LayerTimes | None, html: Path | None, timeline: Path | None
) -> None:
    if html is not None:
        from nest_megatron.report.html import html_report

        write_text(html, html_report(plan, times, flags=parallel_argv(launch_request(plan))))
    if timeline is not None and timeline.suffix == ".json":
        from nest_megatron.report.timeline import chrome_trace

        write_text(timeline, chrome_trace(plan, times))
    elif timeline is not None:
        from nest_megatron.report.timeline import draw_timeline

        draw_timeline(plan, timeline, times)


def _advise(plan: ParallelPlan, times: LayerTimes | None) -> None:
    profile = plan.provenance.profile
    if times is None and profile != ANALYTIC_NAME:
        say(
            f"\nIts layer times ({profile}) are not in the profile store of this machine; what is "
            "priced again here is priced from data sheets. Import the profile to see its own."
        )
    if plan.launch:
        return
    target = restored_settings(plan.provenance.settings).target
    if target is None or target_named(target) in MEGATRON_LM:
        say("\nThis plan holds no launch command; plan again with this version to get one.")
        return
    framework = target_named(target).framework
    say(f"\nThe plan is for {framework}; docs/nemo.md says how recipes take it.")
