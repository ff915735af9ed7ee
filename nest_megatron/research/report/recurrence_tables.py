"""Plans of the recurrence as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns, word_columns
from nest_megatron.research.nest_dp.plan import PlannedStage, ResearchPlan
from nest_megatron.units import format_gib, format_seconds


def recurrence_report(plan: ResearchPlan) -> RenderableType:
    """A plan's time per step, its shape and its stages."""
    return Group(_headline(plan), _shape(plan), _sum(plan), stages_table(plan.stages))


def _headline(plan: ResearchPlan) -> Text:
    words = f"  {plan.model} on {plan.num_gpus} devices of {plan.cluster}"
    return Text.assemble((f"Step {format_seconds(plan.step_s)}", "bold"), words)


def _shape(plan: ResearchPlan) -> Text:
    strategies = list(dict.fromkeys(stage.strategy for stage in plan.stages))
    words = strategies[0] if len(strategies) == 1 else f"{len(strategies)} strategies"
    depth, replicas = plan.pipeline_model_parallel_size, plan.data_parallel_size
    shape = f"{depth} stage{_s(depth)}, {replicas} replica{_s(replicas)}"
    shape += f" {plan.device_stride} devices apart" if replicas > 1 else ""
    memory = format_gib(plan.capacity_bytes)
    return Text(f"  {shape}; {words}\n  {plan.num_devices} devices at work, {memory} to fill")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _sum(plan: ResearchPlan) -> Text:
    """The formula with its figures in place."""
    depth = plan.pipeline_model_parallel_size - 1
    steps = f"({plan.num_microbatches} micro batches + {depth})"
    sync = format_seconds(plan.sync_s)
    return Text(f"  = {format_seconds(plan.slowest_stage_s)} x {steps} + {sync} sum of gradients")


def stages_table(stages: Sequence[PlannedStage]) -> RenderableType:
    """A row for each stage, first to last."""
    mixed = len({stage.strategy for stage in stages}) > 1
    table = EdgelessTable(
        *figure_columns("Stage"),
        *word_columns("Layers", *(["Strategy"] if mixed else [])),
        *name_columns("Devices", "ZeRO", "Link in"),
        *figure_columns("Time", "Memory"),
    )
    slowest = max(stage.time_s for stage in stages)
    for number, stage in enumerate(stages):
        cells = [str(number), _layers(stage), *([stage.strategy] if mixed else [])]
        cells += [_devices(stage), _zero(stage), stage.link_in, format_seconds(stage.time_s)]
        cells.append(f"{format_gib(stage.memory_bytes)}{' r' if stage.recompute else ''}")
        table.add_row(*cells, style="bold" if stage.time_s == slowest else "")
    return Group(table, Text("  r: the forward pass is recomputed")) if _any(stages) else table


def _any(stages: Sequence[PlannedStage]) -> bool:
    return any(stage.recompute for stage in stages)


def _layers(stage: PlannedStage) -> str:
    first, last = stage.layers
    return first if stage.num_layers == 1 else f"{first} to {last}"


def _devices(stage: PlannedStage) -> str:
    last = stage.first_device + stage.num_devices - 1
    return str(last) if stage.num_devices == 1 else f"{stage.first_device} to {last}"


def _zero(stage: PlannedStage) -> str:
    return f"{stage.zero_stage} over {stage.zero_degree}" if stage.zero_degree > 1 else ""
