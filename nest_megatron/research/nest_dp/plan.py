"""A found pipeline in the words of the job: seconds, devices, layers by name."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.research.nest_dp.job import ResearchJob
from nest_megatron.research.nest_dp.records import FoundStage
from nest_megatron.research.nest_dp.search import RecurrenceSolution
from nest_megatron.units import Bytes, Seconds, to_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage, first to last.

    Args:
        layers: names of the first and the last one.
        first_device: within a replica.
        link_in: level of the network between it and the stage before it; empty for the first stage.
        time_s: of one micro batch, links included.
        sync_s: of the sum of its gradients over their copies.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchPlan:
    """A plan of the recurrence.

    Args:
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
    pipeline, problem = found.pipeline, found.problem
    return ResearchPlan(
        model=job.spec.name,
        cluster=job.cluster.name,
        num_gpus=job.cluster.num_gpus,
        num_devices=found.num_devices,
        pipeline_model_parallel_size=len(pipeline.stages),
        data_parallel_size=found.case.replicas.count,
        device_stride=found.case.replicas.stride,
        num_microbatches=problem.num_microbatches,
        schedule=str(problem.schedule),
        step_s=to_seconds(pipeline.total),
        slowest_stage_s=to_seconds(pipeline.bottleneck),
        sync_s=to_seconds(pipeline.sync),
        capacity_bytes=problem.capacity_bytes,
        stages=_stages(found),
        num_cases=found.num_cases,
        num_solved=found.num_solved,
    )


def _stages(found: RecurrenceSolution) -> tuple[PlannedStage, ...]:
    stages = enumerate(found.pipeline.stages)
    return tuple(_stage(found, stage, is_first=not at) for at, stage in stages)


def _stage(found: RecurrenceSolution, stage: FoundStage, *, is_first: bool) -> PlannedStage:
    strategy = found.problem.strategies[stage.strategy]
    option, nodes = strategy.options[stage.option], found.problem.downsets.dag.names
    return PlannedStage(
        layers=(nodes[stage.nodes[0]], nodes[stage.nodes[-1]]),
        num_layers=len(stage.nodes),
        strategy=strategy.label,
        zero_stage=int(option.zero_stage),
        zero_degree=option.zero_degree,
        recompute=strategy.policies[stage.policy].recompute,
        first_device=stage.first_device * found.unit,
        num_devices=option.num_devices * found.unit,
        link_in="" if is_first else found.level_names[stage.level_in],
        time_s=to_seconds(stage.time),
        sync_s=to_seconds(stage.sync),
        memory_bytes=stage.memory_bytes,
    )
