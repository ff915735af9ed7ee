"""What is printed where there is no plan: nothing fits, or time ended the search."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.errors import typed_setting
from nest_megatron.planner import EndedEarly, NoPlan, describe_grid
from nest_megatron.report.tables import heading, indented, pairs
from nest_megatron.report.words import MAX_SECONDS, certificate, no_plan_verdict
from nest_megatron.units import format_gib, format_seconds


def no_plan_report(refusal: NoPlan) -> RenderableType:
    """Nothing fits: by how much, where, and what helps."""
    most = "" if refusal.complete else "at most "
    nearest = "Nearest plan" if refusal.complete else "Nearest seen"
    rows: list[tuple[str, str | Text]] = [
        ("Binding", "peak memory per GPU, of the plan that needs least"),
        ("Missing", Text(f"{most}{format_gib(refusal.missing_bytes)}", style="bold red")),
        ("Needed", f"{most}{format_gib(refusal.shortage.needed_bytes)}"),
        ("Usable", f"{format_gib(refusal.capacity_bytes)} on each GPU"),
        (nearest, describe_grid(refusal.shortage.grid)),
    ]
    unknown = refusal.search.not_modelled
    verdict = no_plan_verdict(refusal.missing_bytes, refusal.capacity_bytes, unknown)
    incomplete = (
        "Time ended this analysis: another plan may lack less, and fewer GPUs or other changes may "
        f"do. Raise {typed_setting(MAX_SECONDS)} for the nearest."
    )
    return Group(
        Text(f"{verdict[0].upper()}{verdict[1:]}.", style="bold red"),
        pairs(rows),
        heading("Single changes that help"),
        pairs(("-", remedy) for remedy in refusal.remedies),
        *([] if refusal.complete else [indented(incomplete)]),
        heading("What was tried"),
        indented(certificate(refusal.search)),
    )


def ended_report(ended: EndedEarly) -> RenderableType:
    """Time ended the search before it had a plan: what is known, and what to do."""
    limit = typed_setting(MAX_SECONDS)
    rows = [
        ("Limit", f"{limit}={ended.max_seconds:g}"),
        ("Lower bound", f"no plan has a step below {format_seconds(ended.lower_bound_s)}"),
    ]
    advice = [
        ("-", f"a larger {limit}"),
        ("-", "fewer choices: fix a degree (parallel.tensor_model_parallel_size=8)"),
    ]
    return Group(
        Text("The search ended before it found a plan.", style="bold yellow"),
        pairs(rows),
        heading("What helps"),
        pairs(advice),
        heading("What was tried"),
        indented(certificate(ended.search)),
    )
