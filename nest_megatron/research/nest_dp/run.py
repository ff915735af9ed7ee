"""``nest plan``: the recurrence on a job of the catalogue, and the tables that it prints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.space import read_backend
from nest_megatron.errors import OK
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns, word_columns
from nest_megatron.report.terminal import notes_report
from nest_megatron.research.nest_artifact.run import tell_none
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.job import research_job, split_research
from nest_megatron.research.nest_dp.pipeline import has_kernel
from nest_megatron.research.nest_dp.plan import PlannedStage, ResearchPlan, described
from nest_megatron.research.nest_dp.search import solve
from nest_megatron.solver.backend import Backend
from nest_megatron.units import format_gib, format_seconds


def run_nest_plan(*, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> int:
    """Find the recurrence's best plan and print it."""
    own, given = split_research(overrides)
    settings = parse(own, config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    job, notes = research_job(composed, given)
    backend = read_backend(composed.config.search.backend)
    compiled = has_kernel() if backend is None else backend is Backend.KERNEL
    started = time.perf_counter()
    found = solve(job, compiled=compiled)
    seconds = time.perf_counter() - started
    if isinstance(found, NoSolution):
        return tell_none(found, as_json=as_json)
    plan = described(job, found)
    if as_json:
        used = Backend.KERNEL if compiled else Backend.REFERENCE
        show_json(
            {
                **to_plain(plan),
                "search": {"seconds": seconds, "backend": used.value},
                "choices": to_plain(job.choices),
                "notes": notes,
            }
        )
        return OK
    show(*_report(plan))
    say(
        f"\nSearched in {seconds:.2f} s: {plan.num_solved} of {plan.num_cases} pairs of strategy "
        "and replicas solved, the rest ruled out by bounds."
    )
    if notes:
        show(notes_report(notes))
    return OK


def _report(plan: ResearchPlan) -> Iterator[RenderableType]:
    """A plan's time per step, its shape and its stages."""
    words = f"  {plan.model} on {plan.num_gpus} devices of {plan.cluster}"
    yield Text.assemble((f"Step {format_seconds(plan.step_s)}", "bold"), words)
    strategies = list(dict.fromkeys(stage.strategy for stage in plan.stages))
    mixed = len(strategies) > 1
    words = f"{len(strategies)} strategies" if mixed else strategies[0]
    depth, replicas = plan.pipeline_model_parallel_size, plan.data_parallel_size
    shape = f"{depth} stage{_s(depth)}, {replicas} replica{_s(replicas)}"
    shape += f" {plan.device_stride} devices apart" if replicas > 1 else ""
    memory = format_gib(plan.capacity_bytes)
    yield Text(f"  {shape}; {words}\n  {plan.num_devices} devices at work, {memory} to fill")
    steps = f"({plan.num_microbatches} micro batches + {depth - 1})"
    slowest, sync = format_seconds(plan.slowest_stage_s), format_seconds(plan.sync_s)
    yield Text(f"  = {slowest} x {steps} + {sync} sum of gradients")
    yield _stages_table(plan.stages, mixed=mixed)
    if any(stage.recompute for stage in plan.stages):
        yield Text("  r: the forward pass is recomputed")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _stages_table(stages: Sequence[PlannedStage], *, mixed: bool) -> RenderableType:
    """A row for each stage, first to last."""
    table = EdgelessTable(
        *figure_columns("Stage"),
        *word_columns("Layers", *(["Strategy"] if mixed else [])),
        *name_columns("Devices", "ZeRO", "Link in"),
        *figure_columns("Time", "Memory"),
    )
    slowest = max(stage.time_s for stage in stages)
    for number, stage in enumerate(stages):
        last = stage.first_device + stage.num_devices - 1
        table.add_row(
            str(number),
            _span(*stage.layers),
            *([stage.strategy] if mixed else []),
            _span(str(stage.first_device), str(last)),
            f"{stage.zero_stage} over {stage.zero_degree}" if stage.zero_degree > 1 else "",
            stage.link_in,
            format_seconds(stage.time_s),
            f"{format_gib(stage.memory_bytes)}{' r' if stage.recompute else ''}",
            style="bold" if stage.time_s == slowest else "",
        )
    return table


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
