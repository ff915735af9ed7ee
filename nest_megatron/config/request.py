"""From a composed configuration to the records of the rooms below."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from nest_megatron.cluster.catalogue import cluster_from_mapping
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.choices import fields_of, has_fast_link, held_choices, stated_packages
from nest_megatron.config.compose import Composed
from nest_megatron.config.plausible import require_plausible
from nest_megatron.config.schema import ParallelConfig, PlanConfig
from nest_megatron.config.target import (
    NO_JOB,
    choice,
    fp8_recipe_of,
    read_execution,
    read_numeric_offers,
    read_settings,
    read_target,
)
from nest_megatron.cost_model.goodput import Reliability
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.knobs import Setting, always_on, open_values, unknown_packages
from nest_megatron.parallel.objective import Objective
from nest_megatron.parallel.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.planner import PlanRequest
from nest_megatron.planner.headroom import MOST_HEADROOM
from nest_megatron.planner.request import DEFAULT_HEADROOM, NumericOffer, Offer
from nest_megatron.profile.choose import Wanted, choose_times
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.space import DEGREES, SearchSpace

#: Sequences of one optimizer step where nobody says: with 8,192 tokens each, the 4 Mi tokens a step
#: that models of 70 B parameters and more are trained with.
DEFAULT_GLOBAL_BATCH_SIZE = 512

_GRID_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
)
_BATCH_DEGREES = ("data_parallel_size", "micro_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A job without its layout.

    Args:
        notes: what was assumed, one sentence each.
        profile_notes: those of them that say which profiles were used and which were not.
        not_modelled: flags of the job whose effect on memory is not known, as they are typed.
        execution: how its layers are carried out, as its flags and its target say.
        offer: another data-parallel sharding than the job's own.
        numeric_offers: choices that change numbers, to be priced beside the plan.
        choices: what decides which choices about speed there are; ``None`` leaves all as they are.
        version: the Megatron-LM release whose rules the job's framework has.
        save_interval: steps between checkpoints, where the job says.
        own: the user's own parallel settings, by Megatron's names.
    """

    spec: TransformerSpec
    cluster: Cluster
    global_batch_size: int
    settings: CostSettings
    notes: tuple[str, ...] = ()
    times: LayerTimes | None = None
    profile_notes: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    execution: Execution = PLAIN
    offer: Offer | None = None
    numeric_offers: tuple[NumericOffer, ...] = ()
    choices: Setting | None = None
    version: str = "0.16.1"
    save_interval: int | None = None
    own: Mapping[str, object] = field(default_factory=dict)


def read_inputs(composed: Composed) -> Inputs:
    """Model, cluster, batch, assumptions and layer times of a job.

    Raises:
        UserInputError: if one is missing or wrong.
    """
    config = composed.config
    batch, notes = config.train.global_batch_size, [*composed.notes]
    if batch is None:
        batch = DEFAULT_GLOBAL_BATCH_SIZE
        notes.append(f"train.global_batch_size is not given; {batch} sequences are assumed.")
    target = read_target(config)
    if config.target is None:
        notes.append(
            f"No framework is named; {target.framework} is assumed (target={target.name})."
        )
    elif target not in MEGATRON_LM:
        notes.append(f"The plan is for {target.framework}; docs/nemo.md says how recipes take it.")
    spec, cluster = read_spec(config), read_cluster(config)
    name, has_experts = cluster.accelerator.name, spec.is_moe
    settings = read_settings(config, NO_JOB, accelerator=name, has_experts=has_experts)
    inputs = Inputs(
        spec=spec,
        cluster=cluster,
        global_batch_size=batch,
        settings=settings,
        choices=Setting(
            spec=spec,
            accelerator=name,
            fp8_recipe=fp8_recipe_of(settings),
            packages=stated_packages(config),
            held=held_choices(config),
            has_fast_link=has_fast_link(cluster.accelerator),
            can_state=fields_of(target),
        ),
        version=target.megatron_core,
        execution=read_execution(config, NO_JOB, accelerator=name, has_experts=has_experts),
        numeric_offers=read_numeric_offers(
            config, NO_JOB, accelerator=name, has_experts=has_experts
        ),
        notes=tuple(notes),
    )
    return with_times(inputs, composed)


def with_times(
    inputs: Inputs,
    composed: Composed,
    *,
    prefix: str = "",
    versions: Mapping[str, str] | None = None,
) -> Inputs:
    """The job with the layer times that it asks for.

    Args:
        prefix: what stands before ``profile.mode`` where the user types it.
        versions: of the running job; ``None`` on a laptop, where none are known.

    Raises:
        UserInputError: if the profile asked for cannot be used.
    """
    asked = composed.config.profile
    wanted = Wanted(
        spec=inputs.spec,
        accelerator=inputs.cluster.accelerator,
        precision=inputs.settings.precision,
        versions=versions or {},
        prefix=prefix,
        command=(
            "--from <your script and its flags>"
            if prefix
            else f"model={inputs.spec.name} cluster={inputs.cluster.name}"
        ),
    )
    mode = choice(f"{prefix}profile.mode", asked.mode, ProfileMode)
    require_seconds(f"{prefix}profile.max_seconds", asked.max_seconds)
    chosen = choose_times(wanted, mode, asked.name)
    return dataclasses.replace(
        inputs,
        times=chosen.times,
        notes=(*inputs.notes, *chosen.notes),
        profile_notes=chosen.notes,
    )


def require_seconds(what: str, value: float) -> float:
    """A time for something, if it is one.

    Raises:
        UserInputError: if it is not above 0, or has no end.
    """
    if 0 < value < math.inf:
        return value
    raise UserInputError(
        what, value=value, limit="it must be above 0 and finite", fix="Give seconds, such as 120."
    )


def read_spec(config: PlanConfig) -> TransformerSpec:
    """The model, at the sequence length that was asked for.

    Raises:
        UserInputError: if none is given, or its description is wrong.
    """
    if config.model is None:
        raise UserInputError(
            "model",
            value=None,
            limit="no model is given",
            fix="Add for example model=llama3_70b (`nest-megatron models` lists them), or "
            "--from with your command.",
        )
    spec = with_seq_length(spec_from_mapping(config.model), config.train.seq_length)
    if config.checks.plausibility:
        require_plausible(spec, None)
    return spec


def with_seq_length(spec: TransformerSpec, seq_length: int | None) -> TransformerSpec:
    """The model on sequences of another length; rotary positions reach as far as is needed."""
    if seq_length is None:
        return spec
    if seq_length < 1:
        raise UserInputError(
            "train.seq_length", value=seq_length, limit="it must be at least 1", fix="Give tokens."
        )
    longest = spec.max_position_embeddings
    if longest is not None and spec.position_embedding_type == "rope":
        longest = max(longest, seq_length)
    return dataclasses.replace(spec, seq_length=seq_length, max_position_embeddings=longest)


def read_cluster(config: PlanConfig, num_gpus: int | None = None) -> Cluster:
    """The cluster.

    Args:
        num_gpus: size of the job; the configuration's if not given.

    Raises:
        UserInputError: if none is given, or its description is wrong.
    """
    if config.cluster is None:
        raise UserInputError(
            "cluster",
            value=None,
            limit="no cluster is given",
            fix="Add for example cluster=dgx_h100 cluster.num_gpus=64 (`nest-megatron clusters` "
            "lists them).",
        )
    cluster = cluster_from_mapping(config.cluster, num_gpus=num_gpus)
    if config.checks.plausibility:
        require_plausible(None, cluster, config.train.global_batch_size)
    return cluster


def read_space(config: PlanConfig) -> SearchSpace:
    """What the search may choose.

    Raises:
        UserInputError: for a bad degree, or a choice that only ``estimate`` takes.
    """
    _refuse_estimate_only(config.parallel)
    limits = {name: getattr(config.search, f"max_{name}") for name in DEGREES}
    return SearchSpace(
        fixed=fixed_degrees(config),
        limits={name: value for name, value in limits.items() if value is not None},
        rank_orders=_one_or_all(read_rank_order(config.parallel), RankOrder),
        zero_stages=_one_or_all(read_zero(config.parallel), ZeroStage),
        recompute=read_recompute(config.parallel),
        use_all_gpus=config.search.use_all_gpus,
    )


def read_reliability(config: PlanConfig, save_interval: int | None = None) -> Reliability | None:
    """How often the job fails, where the configuration says.

    Args:
        save_interval: the job's own.

    Raises:
        UserInputError: for a value out of range, or one that says nothing without
            ``reliability.mtbf_hours``.
    """
    given = dataclasses.asdict(config.reliability)
    said = {name: value for name, value in given.items() if value is not None}
    if config.reliability.mtbf_hours is None:
        for name, value in said.items():
            raise UserInputError(
                f"reliability.{name}",
                value=value,
                limit="it needs the mean time between failures",
                fix="Add for example reliability.mtbf_hours=50000, of one GPU.",
            )
        return None
    if save_interval is not None:
        said.setdefault("save_interval", save_interval)
    return Reliability(**said)


def request_of(composed: Composed) -> PlanRequest:
    """The layout of a composed job as a question, with nothing to say of it in between."""
    inputs = with_own_choices(read_inputs(composed))
    return plan_request(composed.config, inputs, read_space(composed.config))


def with_own_choices(inputs: Inputs) -> Inputs:
    """The job with its layers carried out as its framework does by itself."""
    return dataclasses.replace(inputs, choices=None)


def plan_request(config: PlanConfig, inputs: Inputs, space: SearchSpace) -> PlanRequest:
    """The request that the planner takes.

    Raises:
        UserInputError: if what is fixed cannot be laid over the GPUs or the batch.
    """
    search = config.search
    _check_products(inputs, space)
    space = dataclasses.replace(space, execution=inputs.execution, version=inputs.version)
    if inputs.choices is not None:
        space = dataclasses.replace(
            space,
            execution=always_on(inputs.execution, inputs.choices),
            executions=open_values(inputs.choices),
        )
    if search.num_alternatives < 0:
        raise UserInputError(
            "search.num_alternatives",
            value=search.num_alternatives,
            limit="it must be at least 0",
            fix="Give the runners-up to list.",
        )
    return PlanRequest(
        spec=inputs.spec,
        cluster=inputs.cluster,
        global_batch_size=inputs.global_batch_size,
        settings=inputs.settings,
        space=space,
        max_seconds=search.max_seconds,
        num_alternatives=search.num_alternatives,
        backend=read_backend(search.backend),
        times=inputs.times,
        not_modelled=inputs.not_modelled,
        offer=inputs.offer,
        packages={} if inputs.choices is None else unknown_packages(inputs.choices),
        numeric_offers=inputs.numeric_offers,
        reliability=read_reliability(config, inputs.save_interval),
        objective=choice("search.objective", search.objective, Objective),
        tie_percent=search.tie_percent,
        max_out_of_memory_percent=search.max_out_of_memory_percent,
        failed_start_percent=search.failed_start_percent,
        own=inputs.own,
        headroom=(headroom := read_headroom(config)),
        priced_headroom=read_priced_headroom(config, headroom),
    )


def read_headroom(config: PlanConfig) -> float:
    """Share of each device that plans leave free which are compared with the fastest of all."""
    return DEFAULT_HEADROOM if config.memory.margin is None else config.memory.margin


def read_priced_headroom(config: PlanConfig, headroom: float) -> float | None:
    """A larger share whose price is searched.

    Raises:
        UserInputError: if it is no larger, or leaves nothing of a device.
    """
    priced = config.memory.priced_margin
    if priced is None or headroom < priced <= MOST_HEADROOM:
        return priced
    raise UserInputError(
        "memory.priced_margin",
        value=priced,
        limit=f"it lies above what plans leave free, {headroom:g}, and up to {MOST_HEADROOM:g}",
        fix=f"For example memory.priced_margin={min(MOST_HEADROOM, headroom + 0.1):g}.",
    )


def _check_products(inputs: Inputs, space: SearchSpace) -> None:
    """Say it at once where fixed degrees and the GPUs, or the batch, have no whole quotient."""
    gpus, batch = inputs.cluster.num_gpus, inputs.global_batch_size
    if space.use_all_gpus:
        _check_divides(space, _GRID_DEGREES, gpus, f"the {gpus} GPUs, which all take part")
    if batch > 0:
        _check_divides(space, _BATCH_DEGREES, batch, f"the global batch of {batch} sequences")


def _check_divides(space: SearchSpace, names: Iterable[str], whole: int, words: str) -> None:
    fixed = {name: space.fixed[name] for name in names if name in space.fixed}
    product = math.prod(fixed.values())
    if whole % product:
        raise UserInputError(
            " * ".join(fixed),
            value=product,
            limit=f"it must divide {words}",
            fix="Change one of them, or leave one out to have it searched.",
        )


def fixed_degrees(config: PlanConfig) -> dict[str, int]:
    """Degrees that the configuration fixes, the micro batch among them."""
    values = {name: getattr(config.parallel, name, None) for name in DEGREES}
    values["micro_batch_size"] = config.train.micro_batch_size
    micro = config.train.micro_batch_size
    if micro is not None and micro < 1:
        raise UserInputError(
            "train.micro_batch_size",
            value=micro,
            limit="it must be a whole number of at least 1",
            fix="Give the sequences of one micro batch, or leave it out to search it.",
        )
    return {name: value for name, value in values.items() if value is not None}


def read_rank_order(parallel: ParallelConfig) -> RankOrder | None:
    """The rank order, if fixed."""
    name = parallel.rank_order
    return None if name is None else choice("parallel.rank_order", name, RankOrder)


def read_zero(parallel: ParallelConfig) -> ZeroStage | None:
    """The ZeRO stage, if fixed."""
    stage = parallel.zero_stage
    if stage is None:
        return None
    if stage not in tuple(ZeroStage):
        raise UserInputError(
            "parallel.zero_stage", value=stage, limit="it is 0, 1, 2 or 3", fix="Give one of them."
        )
    return ZeroStage(stage)


def read_recompute(parallel: ParallelConfig) -> Recompute | None:
    """The recomputation, if fixed.

    Raises:
        UserInputError: if its parts do not belong together.
    """
    rest = (parallel.recompute_method, parallel.recompute_num_layers, parallel.recompute_modules)
    if parallel.recompute_granularity is None:
        if any(part is not None for part in rest):
            raise UserInputError(
                "parallel.recompute_granularity",
                value=None,
                limit="the other recompute settings need it",
                fix="Add parallel.recompute_granularity=full or selective.",
            )
        return None
    method, modules = parallel.recompute_method, parallel.recompute_modules or []
    return Recompute(
        granularity=choice(
            "parallel.recompute_granularity", parallel.recompute_granularity, RecomputeGranularity
        ),
        method=method
        if method is None
        else choice("parallel.recompute_method", method, RecomputeMethod),
        num_layers=parallel.recompute_num_layers,
        modules=_modules(modules),
    )


def _modules(names: Iterable[str]) -> tuple[RecomputeModule, ...]:
    wanted = {choice("parallel.recompute_modules", name, RecomputeModule) for name in names}
    return tuple(module for module in RecomputeModule if module in wanted)


def read_backend(name: str | None) -> Backend | None:
    """The solver's backend, if asked for by name."""
    known = [backend.value for backend in Backend]
    if name is not None and name not in known:
        raise UserInputError(
            "search.backend",
            value=name,
            limit=f"it is one of {', '.join(known)}",
            fix=nearest(name, known),
        )
    return None if name is None else Backend(name)


def _refuse_estimate_only(parallel: ParallelConfig) -> None:
    if parallel.pipeline_model_parallel_layout is not None:
        raise UserInputError(
            "parallel.pipeline_model_parallel_layout",
            value=parallel.pipeline_model_parallel_layout,
            limit="plan finds the fastest layout itself",
            fix="Leave it out, or use `nest-megatron estimate` to price this one.",
        )
    if parallel.sequence_parallel is False and parallel.tensor_model_parallel_size != 1:
        raise UserInputError(
            "parallel.sequence_parallel",
            value=False,
            limit="plan uses it wherever tensor parallelism is on: same time, less memory",
            fix="Leave it out, or use `nest-megatron estimate` to price a layout without it.",
        )


Value = TypeVar("Value")


def _one_or_all(value: Value | None, every: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(every) if value is None else (value,)
