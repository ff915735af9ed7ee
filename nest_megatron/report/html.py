"""The HTML report of a plan: what each section of ``templates/plan.html`` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

from nest_megatron.cost_model.settings import OF_EXPERTS, CostSettings
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import plan_values, reason
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan, SearchRecord, launch_words
from nest_megatron.layout.rank_order import GroupKind, group_of_rank, group_shape
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.before_after import before_after_section
from nest_megatron.report.console import LINE, command_lines
from nest_megatron.report.html_sensitivity import reached_levels, sensitivity
from nest_megatron.report.memory_words import memory_level, plan_verdict, risk_words
from nest_megatron.report.page import render_page
from nest_megatron.report.runners_up import (
    as_alternative,
    degree_cells,
    shortlist_words,
    term_differences,
)
from nest_megatron.report.schedule_view import schedule_view
from nest_megatron.report.site import site_rows
from nest_megatron.report.terminal import provenance_rows, summary_rows
from nest_megatron.report.timeline import schedule
from nest_megatron.report.words import (
    block_name,
    certificate,
    confidence_words,
    early_words,
    incomplete_ranking,
    narrow_words,
    proof,
    range_words,
    ranged_words,
    setting_value,
    stage_legend,
    term_words,
    ties,
)
from nest_megatron.units import GB, to_ticks

#: Of the summary, what the page shows as figures at its top.
_FIGURES = ("Step", "Range")
_LAYOUT = "pipeline_model_parallel_layout"
#: Kinds of groups: short name, word for people, kind.
_GROUPS = (
    ("tp", "tensor", GroupKind.TP),
    ("cp", "context", GroupKind.CP),
    ("ep", "expert", GroupKind.EP),
    ("pp", "pipeline", GroupKind.PP),
    ("dp", "data", GroupKind.DP_CP),
    ("expert_dp", "expert data", GroupKind.EDP),
)
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
    rows, meanings = summary_rows(plan), setting_meanings()
    return render_page(
        "plan.html",
        f"{plan.model.name} on {plan.cluster.describe()}",
        script="plan.js",
        plan=plan,
        layout=dict(rows)["Layout"],
        ranged=ranged_words(plan.uncertainty, plan.provenance.own_runs),
        confidence=confidence_words(plan.uncertainty, plan.provenance.site),
        model=_model_words(plan.model),
        range_words=range_words,
        verdict=_verdict(plan),
        certificate=proof(plan),
        letters=f"Letters of a stage layout: {stage_legend(plan.model)}.",
        has_layout=bool(plan.arguments.get(_LAYOUT)),
        level=memory_level(plan, plan.search.not_modelled)
        or ("warning" if incomplete_ranking(plan.search) else ""),
        facts=[row for row in rows if row[0] not in _FIGURES],
        kinds=[kind_of_layers(plan, kind, 1) for kind in dict.fromkeys(plan.model.layer_kinds())],
        chunks=partial(chunks, plan),
        terms={name: s for name, s in plan.predicted.terms.items() if to_ticks(s) > 0},
        schedule=schedule(plan, schedule_view(plan, times)),
        groups=groups(plan),
        choices=choices(plan),
        runners_up=runners_up(plan, times),
        shortlist=plan.shortlist and shortlist_words(plan),
        search=certificate(plan.search),
        search_steps=search_steps(plan.search),
        launches=[  # of a plan without a command its flags
            (name, _command(plan, each), (*plan.notes, *each.notes))
            for name, each in plan.launch.items()
        ]
        or [("", command_lines([*flags], indent="", width=LINE), plan.notes)],
        today=plan.today and before_after_section(plan.today, plan),
        sensitivity=sensitivity(plan, times),
        site=plan.provenance.site and site_rows(plan.provenance.site),
        provenance=[
            *(row for row in provenance_rows(plan) if row[0] != "assumptions"),
            ("plan", plan_file.checksum(plan)),
        ],
        settings=[
            (name, setting_value(name, value), meanings.get(name, "").replace("``", ""))
            for name, value in plan.provenance.settings.items()
            if plan.model.is_moe or name not in OF_EXPERTS  # which say nothing of the model
        ],
    )


def _verdict(plan: ParallelPlan) -> str:
    """What to beware of: a search that time ended, and memory that the certificate leaves out."""
    verdict = plan_verdict(plan)
    told = not verdict or proof(plan).startswith("May fit")
    memory = "" if told else f"In memory this layout {verdict}."
    early = f"{words}." if (words := early_words(plan.search)) else ""
    risk = risk_words(plan, "This layout")
    return " ".join(filter(None, (early, memory, risk)))


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


def _command(plan: ParallelPlan, command: LaunchCommand) -> str:
    """A shell command: what must not be set, the environment, torchrun, script and flags."""
    unset = [f"unset {name}" for name, value in command.environment.items() if value is None]
    words = launch_words(plan, command)
    return "\n".join(
        [*unset, command_lines(words, command.environment.items(), indent="", width=LINE)]
    )


def setting_meanings() -> dict[str, str]:
    """What each setting of the cost model means, from its own documentation."""
    text = inspect.cleandoc(CostSettings.__doc__ or "")
    _, _, rest = text.partition("Args:\n")
    body = inspect.cleandoc("    " + rest.partition("\n\n")[0].lstrip())
    return {name: " ".join(words.split()) for name, words in _ENTRY.findall(body)}


def choices(plan: ParallelPlan) -> Sequence[tuple[str, str, str]]:
    """Every parallel field with its value and the reason."""
    return [(name, _shown(value), reason(plan, name)) for name, value in plan_values(plan).items()]


def _shown(value: object) -> str:
    """A field's value as text; an unset one is a dash."""
    plain = to_plain(value)
    if plain is None or plain == []:
        return "–"
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return ", ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def kind_of_layers(plan: ParallelPlan, kind: LayerKind, count: int) -> Mapping[str, Any]:
    """Neighbouring layers of one kind."""
    letter, name = kind.letter, " and ".join(map(block_name, kind.blocks)) or "nothing"
    count *= plan.model.num_mtp_layers if kind is LayerKind.MTP else 1
    classes = " ".join(f"u-{block.base}" for block in kind.blocks)
    return {"classes": classes, "letter": letter, "name": name, "count": count}


def chunks(plan: ParallelPlan, rank: int) -> list[list[Mapping[str, Any]]]:
    """The layers of a pipeline rank, chunk by chunk, neighbours of one kind together."""
    kinds = plan.model.layer_kinds()
    return [
        [
            kind_of_layers(plan, kind, len(list(run)))
            for kind, run in groupby(kinds[unit] for unit in units)
        ]
        for units in plan.layout.partition.chunks_of_rank(rank)
    ]


def groups(plan: ParallelPlan) -> Mapping[str, Any]:
    """For each kind of group, how its members spread over the network levels."""
    dims, cluster = plan.layout.dims, plan.cluster
    levels, sizes, reached = cluster.levels, cluster.group_sizes(), reached_levels(cluster)
    rows: list[dict[str, Any]] = []
    for name, words, kind in _GROUPS:
        if "expert" in words and plan.model.num_experts is None:
            continue
        shape, size = group_shape(dims, kind, sizes), len(group_of_rank(dims, kind, 0))
        far = plan.placement.group_levels[name] if size > 1 else "no communication"
        reach = [_reach(level, shape) for level in reached]
        links = [level for level in reached if shape[level] > 1]
        rows.append({"name": words, "size": size, "levels": reach, "links": links, "farthest": far})
    rates = [
        f"{sizes[i]:,} GPUs, {levels[i].bandwidth_bytes_per_s / GB:g} GB/s per GPU" for i in reached
    ]
    columns = [f"{levels[i].name}: {said}" for i, said in zip(reached, rates, strict=True)]
    drawn = [
        {
            "name": levels[i].name,
            "words": rates[place],
            "gpus": sizes[i],
            "inside": f"{sizes[i] // sizes[reached[place - 1]]:,}" if place else "",
            "groups": [
                f"{row['name']} {row['levels'][place][0]}" for row in rows if i in row["links"]
            ],
        }
        for place, i in enumerate(reached)
    ]
    return {"drawn": drawn[::-1], "columns": columns, "rows": rows}


def _reach(level: int, shape: tuple[int, ...]) -> tuple[str, bool]:
    """Members of a group inside one group of a level, and whether the level links them."""
    inner, fan_out = prod(shape[:level]), shape[level]
    if inner == prod(shape):
        return "–", False
    if fan_out == 1 or level == 0:
        return str(inner * fan_out), False
    return f"{fan_out} × {inner}", True


def runners_up(plan: ParallelPlan, times: LayerTimes | None = None) -> Mapping[str, Any] | None:
    """The plan and its runners-up, what they lose, and the columns in which they differ."""
    if not plan.alternatives:
        return None
    plans = [as_alternative(plan), *plan.alternatives]
    cells = [
        degree_cells(each) | {"Stages": _shown(layout_arguments(plan.model, each.layout)[_LAYOUT])}
        for each in plans
    ]
    lost = [
        term_words(terms, most=3) if terms else "priced otherwise by this version"
        for terms in term_differences(plan, times)
    ]
    known = [each.uncertainty for each in plans if each.uncertainty is not None]
    narrow = narrow_words(plan.provenance.own_runs) if known else ""
    said = (
        "Other layouts at their best. What differs is marked, what all share is left out.",
        narrow and f"Ranges are {narrow}.",
        ties(plan),
        incomplete_ranking(plan.search),
    )
    return {
        "rows": list(zip(range(len(plans)), plans, cells, ("", *lost), strict=True)),
        "differ": [name for name in cells[0] if len({each[name] for each in cells}) > 1],
        "chances": any(other.chance_slower is not None for other in plan.alternatives),
        "lowest": min((each.low_s for each in known), default=None),
        "highest": max((each.high_s for each in known), default=None),
        "caption": " ".join(filter(None, said)),
    }
