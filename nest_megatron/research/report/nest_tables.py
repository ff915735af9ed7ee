"""Plans of the artifact mode as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns
from nest_megatron.research.nest_artifact.price import Price, StagePrice
from nest_megatron.research.nest_artifact.records import Instance, StagePlacement
from nest_megatron.research.nest_artifact.rule import AS_ARTIFACT, SWITCHES, ArtifactRule
from nest_megatron.units import format_gib


def nest_report(
    instance: Instance, placement: StagePlacement, price: Price, rule: ArtifactRule
) -> RenderableType:
    """A plan's time per batch, degrees and stages, and what is wrong with it, if anything is."""
    parts: list[RenderableType] = [_headline(price), _degrees(instance, placement), _sum(price)]
    if rule != AS_ARTIFACT:
        parts.append(Text(f"  Off: {', '.join(switched_off(rule))}"))
    parts.extend(Text(f"  Cannot run: {reason}.", style="red") for reason in price.refusals)
    return Group(*parts, stages_table(price.stages))


def switched_off(rule: ArtifactRule) -> list[str]:
    """Peculiarities of the artifact's formula that a rule leaves out."""
    return [name for name in SWITCHES if not getattr(rule, name)]


def _headline(price: Price) -> Text:
    words = "" if price.time_per_batch is not None else "  (cannot run)"
    return Text.assemble(("Time per batch ", "bold"), (f"{price.time:.10g}", "bold"), words)


def _degrees(instance: Instance, placement: StagePlacement) -> Text:
    stages, replicas = placement.stages, placement.data_parallel_size
    used = replicas * sum(stage.num_devices for stage in stages)
    degrees = {
        "stages": len(stages),
        "replicas": replicas,
        "tensor": placement.tensor_model_parallel_size,
        "expert": instance.expert_model_parallel_size,
        "context": instance.context_parallel_size,
    }
    shown = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
    memory = format_gib(instance.memory_bytes)
    return Text(f"  {shown}; {used} of {instance.num_devices} devices of {memory}")


def _sum(price: Price) -> Text:
    """The formula with its figures in place."""
    depth = len(price.stages) - 1
    steps = f"({price.num_micro_batches} micro batches + {depth})"
    return Text(f"  = {price.slowest_stage:.8g} x {steps} + {price.sync:.4g} sum of gradients")


def stages_table(stages: Sequence[StagePrice]) -> RenderableType:
    """A row for each stage, first to last; links as network levels, 0 the innermost."""
    table = EdgelessTable(
        *figure_columns("Stage"),
        *name_columns("Nodes"),
        *figure_columns("Devices", "Time", "Memory", "Link in", "Link out"),
    )
    slowest = max(stage.time for stage in stages)
    for number, stage in enumerate(stages):
        table.add_row(
            str(number),
            _run(stage.node_ids),
            str(stage.num_devices),
            f"{stage.time:.6g}",
            f"{format_gib(stage.memory_bytes)}{'' if stage.fits else ' !'}",
            _level(stage.link_before),
            _level(stage.link_after),
            style="bold" if stage.time == slowest else "",
        )
    return table


def _run(node_ids: Sequence[int]) -> str:
    """A run of the chain by its ends.

    >>> _run((-1, 0, 1)), _run((7,))
    ('-1 to 1', '7')
    """
    return str(node_ids[0]) if len(node_ids) == 1 else f"{node_ids[0]} to {node_ids[-1]}"


def _level(level: int | None) -> str:
    return "" if level is None else str(level)
