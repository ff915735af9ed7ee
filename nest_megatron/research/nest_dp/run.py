"""``nest plan``: the recurrence on a job of the catalogue, its plan in words and tables."""

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
from nest_megatron.plain import frozen, to_plain
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns, word_columns
from nest_megatron.report.terminal import notes_report
from nest_megatron.research.nest_artifact.run import span, tell_none
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.job import ResearchJob, research_job, split_research
from nest_megatron.research.nest_dp.records import FoundStage
from nest_megatron.research.nest_dp.search import RecurrenceSolution, has_kernel, solve
from nest_megatron.solver.backend import Backend
from nest_megatron.units import Bytes, Seconds, counted, format_gib, format_seconds, to_seconds


def run_nest_plan(*, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> int:
    """Find the recurrence's best plan and print it."""
    of_job, choices = split_research(overrides)
    settings = parse(of_job)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    job, notes = research_job(composed, choices)
    backend = read_backend(composed.search.backend)
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
    shape = f"{counted(depth, 'stage')}, {counted(replicas, 'replica')}"
    shape += f" {plan.device_stride} devices apart" if replicas > 1 else ""
    memory = format_gib(plan.capacity_bytes)
    yield Text(f"  {shape}; {words}\n  {plan.num_devices} devices at work, {memory} to fill")
    steps = f"({plan.num_microbatches} micro batches + {depth - 1})"
    slowest, sync = format_seconds(plan.slowest_stage_s), format_seconds(plan.sync_s)
    yield Text(f"  = {slowest} x {steps} + {sync} sum of gradients")
    yield _stages_table(plan.stages, mixed=mixed)
    if any(stage.recompute for stage in plan.stages):
        yield Text("  r: the forward pass is recomputed")


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
            span(*stage.layers),
            *([stage.strategy] if mixed else []),
            span(stage.first_device, last),
            f"{stage.zero_stage} over {stage.zero_degree}" if stage.zero_degree > 1 else "",
            stage.link_in,
            format_seconds(stage.time_s),
            f"{format_gib(stage.memory_bytes)}{' r' if stage.recompute else ''}",
            style="bold" if stage.time_s == slowest else "",
        )
    return table


@frozen
class PlannedStage:
    """One stage, first to last.

    Args:
        layers: names of the first and the last one.
        first_device: within a replica.
        link_in: level of the network between it and the stage before it; empty for the first stage.
        time_s, sync_s: of one micro batch, links included; of the sum of its gradients.
    """

    layers: tuple[str, str]
    num_layers: int
    strategy: str
    zero_stage: int
    zero_degree: int
    recompute: bool
    first_device: int
    num_devices: int
    link_in: str
    time_s: Seconds
    sync_s: Seconds
    memory_bytes: Bytes


@frozen
class ResearchPlan:
    """A plan of the recurrence.

    Args:
        num_devices: at work, over all replicas.
        num_microbatches: of one replica.
        device_stride: devices from one replica's first to the next one's.
        num_cases, num_solved: as in ``RecurrenceSolution``.
    """

    model: str
    cluster: str
    num_gpus: int
    num_devices: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    device_stride: int
    num_microbatches: int
    schedule: str
    step_s: Seconds
    slowest_stage_s: Seconds
    sync_s: Seconds
    capacity_bytes: Bytes
    stages: tuple[PlannedStage, ...]
    num_cases: int
    num_solved: int


def described(job: ResearchJob, found: RecurrenceSolution) -> ResearchPlan:
    """The plan of a solution."""
    pipeline, problem, replicas = found.pipeline, found.problem, found.case.replicas
    stages = tuple(_stage(found, stage) for stage in pipeline.stages)
    return ResearchPlan(
        model=job.spec.name,
        cluster=job.cluster.name,
        num_gpus=job.cluster.num_gpus,
        num_devices=replicas.count * sum(stage.num_devices for stage in stages),
        pipeline_model_parallel_size=len(stages),
        data_parallel_size=replicas.count,
        device_stride=replicas.stride,
        num_microbatches=problem.num_microbatches,
        schedule=str(problem.schedule),
        step_s=to_seconds(pipeline.total),
        slowest_stage_s=to_seconds(pipeline.bottleneck),
        sync_s=to_seconds(pipeline.sync),
        capacity_bytes=problem.capacity_bytes,
        stages=stages,
        num_cases=found.num_cases,
        num_solved=found.num_solved,
    )


def _stage(found: RecurrenceSolution, stage: FoundStage) -> PlannedStage:
    strategy, is_first = found.problem.strategies[stage.strategy], stage is found.pipeline.stages[0]
    option, nodes = strategy.options[stage.option], found.problem.downsets.dag.names
    return PlannedStage(
        layers=(nodes[stage.nodes[0]], nodes[stage.nodes[-1]]),
        num_layers=len(stage.nodes),
        strategy=strategy.label,
        zero_stage=int(option.zero_stage),
        zero_degree=option.zero_degree,
        recompute=strategy.policies[stage.policy].recompute,
        first_device=stage.first_device * found.problem.unit,
        num_devices=option.num_devices * found.problem.unit,
        link_in="" if is_first else found.problem.level_names[stage.level_in],
        time_s=to_seconds(stage.time),
        sync_s=to_seconds(stage.sync),
        memory_bytes=stage.memory_bytes,
    )
