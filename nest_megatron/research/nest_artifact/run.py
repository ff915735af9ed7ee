"""``nest solve`` and ``nest evaluate``, and the tables that they print."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from nest_megatron.errors import NOTHING_FITS, OK, UserInputError
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, say_written, show, show_json
from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns
from nest_megatron.report.terminal import notes_report
from nest_megatron.research.nest_artifact.files import (
    named_baseline,
    read_instance,
    read_placement,
    write_placement,
)
from nest_megatron.research.nest_artifact.price import (
    SWITCHES,
    ArtifactRule,
    Instance,
    Price,
    StagePlacement,
    StagePrice,
    price,
    rule_without,
)
from nest_megatron.research.nest_artifact.search import NoSolution, solve
from nest_megatron.units import format_gib


def run_solve(path: Path, *, out: Path | None, without: Sequence[str], as_json: bool) -> int:
    """Search an instance for its fastest plan."""
    rule = rule_without(without)
    instance = read_instance(path)
    started = time.perf_counter()
    found = solve(instance, rule)
    seconds = time.perf_counter() - started
    if isinstance(found, NoSolution):
        return tell_none(found, as_json=as_json)
    if as_json:
        plain = _plain(instance, found.placement, found.price, rule)
        show_json({**plain, "search_seconds": seconds, "written": out and str(out)})
    else:
        show(*_report(instance, found.placement, found.price, rule))
        say(f"\nSearched in {1e3 * seconds:.2f} ms.")
    if out is not None:
        write_placement(out, instance, found.placement, found.price.time)
        if not as_json:
            say_written(out)
    return OK


def tell_none(found: NoSolution, *, as_json: bool) -> int:
    """Say why there is no plan."""
    if as_json:
        show_json({"no_plan": to_plain(found)})
    else:
        say(f"No plan: {found.reason}.")
    return NOTHING_FITS


def run_evaluate(
    path: Path,
    placement_path: Path | None,
    *,
    baseline: str | None,
    without: Sequence[str],
    as_json: bool,
) -> int:
    """Price a plan."""
    rule = rule_without(without)
    instance = read_instance(path)
    placement, written = _placement(instance, placement_path, baseline, rule)
    priced = price(instance, placement, rule)
    code = NOTHING_FITS if priced.refusals else OK
    if as_json:
        plain = _plain(instance, placement, priced, rule)
        show_json({**plain, "refusals": priced.refusals, "given_time_per_batch": written})
        return code
    show(*_report(instance, placement, priced, rule))
    if written is not None:
        say(f"\nIts file gives {written:.10g}; this is {priced.time / written:.10g} times that.")
    return code


def _placement(
    instance: Instance, path: Path | None, baseline: str | None, rule: ArtifactRule
) -> tuple[StagePlacement, float | None]:
    """The one plan that the user names, and the time that its file gives."""
    if path is not None and baseline is None:
        return read_placement(path, instance, rule)
    if baseline is not None and path is None:
        return named_baseline(instance, baseline, rule), None
    value, fix = path and str(path), "Give either a file or --baseline NAME."
    raise UserInputError("placement", value, "one plan is priced, of a file or a baseline", fix)


def _plain(
    instance: Instance, placement: StagePlacement, priced: Price, rule: ArtifactRule
) -> dict[str, Any]:
    """What programs read; a time that no run can have is null."""
    return {
        "time_per_batch": priced.time_per_batch,
        "degrees": {
            "pipeline_model_parallel_size": len(placement.stages),
            "data_parallel_size": placement.data_parallel_size,
            "tensor_model_parallel_size": placement.tensor_model_parallel_size,
            "expert_model_parallel_size": instance.expert_model_parallel_size,
            "context_parallel_size": instance.context_parallel_size,
        },
        "terms": {
            "slowest_stage": priced.slowest_stage,
            "num_micro_batches": priced.num_micro_batches,
            "sync": priced.sync,
        },
        "stages": [to_plain(stage) for stage in priced.stages],
        "rule": to_plain(rule),
        "notes": instance.notes,
    }


def _report(
    instance: Instance, placement: StagePlacement, priced: Price, rule: ArtifactRule
) -> Iterator[RenderableType]:
    """A plan's time per batch, degrees and stages, and what is wrong with it, if anything is."""
    words = "  (cannot run)" if priced.refusals else ""
    yield Text.assemble((f"Time per batch {priced.time:.10g}", "bold"), words)
    stages, replicas = placement.stages, placement.data_parallel_size
    used = replicas * sum(stage.num_devices for stage in stages)
    yield Text(
        f"  stages {len(stages)}, replicas {replicas}, "
        f"tensor {placement.tensor_model_parallel_size}, "
        f"expert {instance.expert_model_parallel_size}, context {instance.context_parallel_size}; "
        f"{used} of {instance.num_devices} devices of {format_gib(instance.memory_bytes)}"
    )
    steps = f"({priced.num_micro_batches} micro batches + {len(stages) - 1})"
    yield Text(f"  = {priced.slowest_stage:.8g} x {steps} + {priced.sync:.4g} sum of gradients")
    off = [name for name in SWITCHES if not getattr(rule, name)]
    if off:
        yield Text(f"  Off: {', '.join(off)}")
    yield from (Text(f"  Cannot run: {reason}.", style="red") for reason in priced.refusals)
    yield _stages_table(priced.stages)
    if instance.notes:
        yield notes_report(instance.notes)


def span(first: object, last: object) -> str:
    """From the first to the last of what one stage has, by name or number."""
    return str(first) if first == last else f"{first} to {last}"


def _stages_table(stages: Sequence[StagePrice]) -> RenderableType:
    """A row for each stage, first to last; links as network levels, 0 the innermost."""
    table = EdgelessTable(
        *figure_columns("Stage"),
        *name_columns("Nodes"),
        *figure_columns("Devices", "Time", "Memory", "Link in", "Link out"),
    )
    slowest = max(stage.time for stage in stages)
    for number, stage in enumerate(stages):
        levels = (stage.link_before, stage.link_after)
        table.add_row(
            str(number),
            span(stage.node_ids[0], stage.node_ids[-1]),
            str(stage.num_devices),
            f"{stage.time:.6g}",
            f"{format_gib(stage.memory_bytes)}{'' if stage.fits else ' !'}",
            *("" if level is None else str(level) for level in levels),
            style="bold" if stage.time == slowest else "",
        )
    return table
