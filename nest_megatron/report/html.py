"""The HTML report of a plan: what each section of ``templates/plan.html`` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nest_megatron.cost_model.settings import OF_EXPERTS, CostSettings
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan, SearchRecord, launch_words
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.before_after import before_after_section
from nest_megatron.report.charts import (
    MEMORY_COLOURS,
    OTHER_COLOUR,
    TERM_COLOURS,
    ink_on,
)
from nest_megatron.report.console import command_lines
from nest_megatron.report.html_layout import choices, groups, runners_up, stages
from nest_megatron.report.html_sensitivity import sensitivity
from nest_megatron.report.memory_words import memory_level, plan_verdict, risk_words
from nest_megatron.report.page import render_page
from nest_megatron.report.runners_up import shortlist_words
from nest_megatron.report.schedule_view import schedule_view
from nest_megatron.report.site import site_rows
from nest_megatron.report.terminal import provenance_rows, summary_rows
from nest_megatron.report.timeline import schedule
from nest_megatron.report.words import (
    MEMORY_WORDS,
    TERM_WORDS,
    certificate,
    confidence_words,
    early_words,
    incomplete_ranking,
    proof,
    range_words,
    ranged_words,
    setting_value,
    stage_legend,
)
from nest_megatron.units import GIB, format_chance, format_gib, format_seconds, to_ticks

#: Of the summary, what the page shows as figures at its top.
_FIGURES = ("Step", "Range")
#: Titles of the sections by their names, in the order of the page.
_SECTIONS = {
    "launch": "Launch",
    "today": "Today and planned",
    "plan": "The plan",
    "time": "Where the time of a step goes",
    "memory": "Memory",
    "schedule": "The schedule of one step",
    "traffic": "Where each group's traffic runs",
    "stages": "Stages",
    "runners_up": "Runners-up",
    "sensitivity": "Sensitivity",
    "search": "The search",
    "choices": "What the plan sets, and why",
    "assumptions": "Assumptions",
    "site": "What this site's calibration changes",
    "provenance": "Provenance",
}
_LAYOUT = "pipeline_model_parallel_layout"
#: What states a stage layout in a command.
_LAYOUT_FLAGS = ("--pipeline-model-parallel-layout", "--hybrid-layer-pattern")
#: A setting of ``CostSettings`` in its documentation.
_ENTRY = re.compile(r"^(\w+): (.*(?:\n {4}.*)*)", re.MULTILINE)


def html_report(
    plan: ParallelPlan, times: LayerTimes | None = None, *, flags: Iterable[str] = ()
) -> str:
    """The report of a plan as one self-contained page.

    Args:
        times: the measured layer times that the plan was made with.
        flags: Megatron-LM's for the layout, shown where the plan holds no launch command.
    """
    rows = summary_rows(plan)
    return render_page(
        "plan.html",
        f"{plan.model.name} on {plan.cluster.describe()}",
        script="plan.js",
        plan=plan,
        headline=_headline(plan, dict(rows)["Layout"]),
        model=_model_words(plan.model),
        range=range_words(plan.uncertainty),
        titles=_titles(plan),
        verdict=_verdict(plan),
        certificate=proof(plan),
        letters=f"Letters of a stage layout: {stage_legend(plan.model)}.",
        has_layout=bool(plan.arguments.get(_LAYOUT)),
        level=memory_level(plan, plan.search.not_modelled)
        or ("warning" if incomplete_ranking(plan.search) else ""),
        facts=[row for row in rows if row[0] not in _FIGURES],
        stages=stages(plan),
        terms=_terms(plan),
        memory=_memory(plan),
        schedule=schedule(plan, schedule_view(plan, times)),
        groups=groups(plan),
        choices=choices(plan),
        runners_up=runners_up(plan, times),
        shortlist=plan.shortlist and shortlist_words(plan),
        search=_search(plan.search),
        launches=_launches(plan, flags),
        flags_words=_flags_words(plan),
        today=plan.today and before_after_section(plan.today, plan),
        sensitivity=sensitivity(plan, times),
        site=plan.provenance.site and site_rows(plan.provenance.site),
        provenance=_provenance(plan),
        settings=_settings(plan),
    )


def _headline(plan: ParallelPlan, layout: object) -> str:
    """The plan and how sure its step is, in one line."""
    step, known = format_seconds(plan.predicted.iteration_time_s), plan.uncertainty
    site, said = plan.provenance.site, f"{step} a step"
    if site is not None and known.median_s is not None:
        median = format_seconds(known.median_s)
        said = f"{median} a step by this site's calibration ({site.name}), {step} without it"
    return (
        f"{layout}: {said}; {ranged_words(known, plan.provenance.own_runs)}. Confidence "
        f"{confidence_words(known, site)}."
    )


def _verdict(plan: ParallelPlan) -> str:
    """What to beware of: a search that time ended, and memory that the certificate leaves out."""
    verdict = plan_verdict(plan)
    told = not verdict or proof(plan).startswith("May fit")
    memory = "" if told else f"In memory this layout {verdict}."
    early = f"{words}." if (words := early_words(plan.search)) else ""
    risk = risk_words(plan, "This layout")
    return " ".join(filter(None, (early, memory, risk)))


def _titles(plan: ParallelPlan) -> Mapping[str, str]:
    """The title of each section that the page has, by its name."""
    has = {"today": plan.today, "site": plan.provenance.site}
    return {name: title for name, title in _SECTIONS.items() if has.get(name, True)}


def _model_words(spec: TransformerSpec) -> str:
    """A model's shape in one line."""
    words = [f"{total_parameters(spec) / 1e9:.3g} billion parameters"]
    if spec.is_moe:
        words.append(f"{active_parameters(spec) / 1e9:.3g} billion of them active for a token")
    encoder = spec.encoder_num_layers
    layers = f"{encoder} layers of an encoder and {spec.num_layers} of a decoder"
    words.append(f"{spec.num_layers} layers" if encoder is None else layers)
    words.append(f"hidden size {spec.hidden_size:,}")
    if spec.is_moe:
        words.append(f"{spec.num_experts} experts, {spec.moe_router_topk} for each token")
    decoded = "" if encoder is None else f" and, in the decoder, of {spec.decoder_seq_length:,}"
    words.append(f"sequences of {spec.seq_length:,} tokens{decoded}")
    if spec.adapters is not None:
        words.append(f"all weights frozen but those of adapters ({spec.adapters.words()})")
    return ", ".join(words)


def _terms(plan: ParallelPlan) -> Sequence[Mapping[str, Any]]:
    predicted = plan.predicted
    return [
        {
            "name": TERM_WORDS.get(name, name),
            "value": format_seconds(seconds),
            "share": seconds / predicted.iteration_time_s,
            "colour": (colour := TERM_COLOURS.get(name, OTHER_COLOUR)),
            "ink": ink_on(colour),
        }
        for name, seconds in predicted.terms.items()
        if to_ticks(seconds) > 0
    ]


def _memory(plan: ParallelPlan) -> Mapping[str, Any]:
    """Bars of all pipeline ranks on one scale, and a table of them."""
    capacity = plan.predicted.capacity_bytes
    by_rank = [stage.memory_bytes for stage in plan.predicted.stages]
    peaks = [sum(each.values()) for each in by_rank]
    names = list(dict.fromkeys(name for each in by_rank for name in each))
    scale = 100 / max(capacity, *peaks)
    ranks = [
        {
            "total": format_gib(peak),
            "parts": [
                {**_memory_part(name), "value": _gib(size), "percent": scale * max(0, size)}
                for name, size in each.items()
            ],
        }
        for each, peak in zip(by_rank, peaks, strict=True)
    ]
    rows = [
        (str(rank), *(_gib(each.get(name, 0)) for name in names), _gib(peak))
        for rank, (each, peak) in enumerate(zip(by_rank, peaks, strict=True))
    ]
    chance = format_chance(plan.uncertainty.out_of_memory)
    return {
        "ranks": ranks,
        "legend": [_memory_part(name) for name in names],
        "limit_percent": scale * capacity,
        "chance": f"The chance to run out of memory is {chance}.",
        "head": ("rank", *(MEMORY_WORDS.get(name, name) for name in names), "together", "free"),
        "rows": [(*row, _gib(capacity - peak)) for row, peak in zip(rows, peaks, strict=True)],
    }


def _memory_part(name: str) -> Mapping[str, str]:
    colour = MEMORY_COLOURS.get(name, OTHER_COLOUR)
    return {"name": MEMORY_WORDS.get(name, name), "colour": colour}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _search(search: SearchRecord) -> Mapping[str, Any]:
    if search.certificate == "fixed" or not search.candidates:
        return {"steps": (), "words": certificate(search)}
    refused = {**search.infeasible, **{f"rule: {k}": v for k, v in search.illegal.items()}}
    return {
        "steps": [(name, f"{count:,}") for name, count in search_steps(search)],
        "refused": [(name, f"{count:,}") for name, count in refused.items()],
    }


def search_steps(search: SearchRecord) -> tuple[tuple[str, int], ...]:
    """How the search narrowed the candidates down, from all of them to the answer."""
    fitting = search.candidates - sum(search.infeasible.values())
    left = [("not refuted by memory", fitting)] if search.infeasible else []
    met = ", before time ran out" if search.certificate == "gap" else ""
    return (
        (f"legal combinations of degrees, batch, recompute, ZeRO{met}", search.candidates),
        *left,
        (f"not refuted by a bound: stage layouts searched{met}", search.solved),
        ("chosen", 1),
    )


def _flags_words(plan: ParallelPlan) -> str:
    """What flags are for that stand in the place of a launch command."""
    target = str(plan.provenance.settings.get("target", "megatron_lm"))
    if target.startswith("megatron_lm"):
        return "Flags of the layout, for the Megatron-LM command that starts the job:"
    return (
        f"The layout as Megatron-LM's flags, to compare: the plan is for {target}, whose "
        "configuration takes the fields under What the plan sets, and why."
    )


def _launches(plan: ParallelPlan, flags: Iterable[str]) -> Sequence[Mapping[str, Any]]:
    launches, notes = plan.launch.items(), plan.notes
    found = [(name, _command(plan, each), (*notes, *each.notes)) for name, each in launches]
    if not found:
        found = [("", command_lines([*flags], indent=""), notes)]
    return [
        {
            "name": name,
            "command": command,
            "layout": any(flag in command for flag in _LAYOUT_FLAGS),
            "notes": notes,
        }
        for name, command, notes in found
    ]


def _command(plan: ParallelPlan, command: LaunchCommand) -> str:
    """A shell command: what must not be set, the environment, torchrun, script and flags."""
    unset = [f"unset {name}" for name, value in command.environment.items() if value is None]
    given = [(name, value) for name, value in command.environment.items() if value is not None]
    return "\n".join([*unset, command_lines(launch_words(plan, command), given, indent="")])


def _provenance(plan: ParallelPlan) -> Sequence[tuple[str, str]]:
    """What the terminal says of it; assumptions have a table of their own."""
    rows = [row for row in provenance_rows(plan) if row[0] != "assumptions"]
    return [*rows, ("plan", plan_file.checksum(plan))]


def _settings(plan: ParallelPlan) -> Sequence[tuple[str, str, str]]:
    """Every setting of the cost model that says something of the model, value and meaning."""
    meanings = setting_meanings()
    return [
        (name, setting_value(name, value), meanings.get(name, "").replace("``", ""))
        for name, value in plan.provenance.settings.items()
        if plan.model.is_moe or name not in OF_EXPERTS
    ]


def setting_meanings() -> dict[str, str]:
    """What each setting of the cost model means, from its own documentation."""
    text = inspect.cleandoc(CostSettings.__doc__ or "")
    _, _, rest = text.partition("Args:\n")
    body = inspect.cleandoc("    " + rest.partition("\n\n")[0].lstrip())
    return {name: " ".join(words.split()) for name, words in _ENTRY.findall(body)}
