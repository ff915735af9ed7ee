"""A user's own Megatron-LM command as a planning request: what they set stays, the rest is free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.choices import has_fast_link, held_choices, stated_packages
from nest_megatron.config.compose import Composed
from nest_megatron.config.plausible import require_plausible
from nest_megatron.config.request import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    Inputs,
    read_cluster,
    read_space,
    read_spec,
    with_seq_length,
    with_times,
)
from nest_megatron.config.target import (
    JobFlags,
    fp8_recipe_of,
    read_execution,
    read_numeric_offers,
    read_settings,
    read_target,
)
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.checkpoint import Requirement
from nest_megatron.integrations.megatron_lm.cuts import CUTS, stated_partition
from nest_megatron.integrations.megatron_lm.job import RECOMPUTE, VIRTUAL_STAGES, MegatronJob
from nest_megatron.integrations.megatron_lm.parser import ReadCommand, read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.rules import MODULES_OF_ENGINE
from nest_megatron.integrations.megatron_lm.sharding import (
    CHECKPOINT_NEEDS,
    IMPLEMENTATION,
    for_optimizer,
    loads,
    with_own_sharding,
)
from nest_megatron.integrations.megatron_lm.typed import LAYOUT, freed_flags, kept_flags
from nest_megatron.integrations.restore import Restored, restored_by_command
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.knobs import Setting
from nest_megatron.parallel.layout import parse_layout
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import RecomputeModule
from nest_megatron.solver.space import DEGREES, SearchSpace

_CONTEXT = "context_parallel_size"
_EXPERTS = "expert_model_parallel_size"
_PIPELINE = "pipeline_model_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command, and what to plan for it.

    Args:
        kept: choices of the user that the search holds fixed, by their names in ``LAYOUT``.
        kept_flags: destinations whose flags stay in the command as they are.
        restored: the checkpoint that it loads, where the plan is made before the launch.
    """

    command: ReadCommand
    job: MegatronJob
    inputs: Inputs
    space: SearchSpace
    kept: tuple[str, ...]
    kept_flags: frozenset[str] = frozenset()
    restored: Restored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What of a command may change.

    Args:
        free: parallel flags that the search may change, or ``all``.
        required: what a checkpoint or the data fixes, by the names of ``ParallelChoice``.
        option: how ``free`` is spelled where the user gave it, for messages.
        packages: those of a choice that were found where the job runs.
        can_state: fields of ``Execution`` that the job can be told; ``None`` is all.
    """

    free: Collection[str] = ()
    required: Mapping[str, Requirement] = field(default_factory=dict)
    option: str = "--free"
    packages: tuple[str, ...] = ()
    can_state: frozenset[str] | None = None


def read_request(
    text: str | Sequence[str], composed: Composed, *, free: Collection[str], version: str
) -> CommandRequest:
    """Read a command; settings on our own command line win over it.

    Args:
        free: parallel flags of the command that the search may change, or ``all``.

    Raises:
        UserInputError: for a command that cannot be read, or a wish that cannot be kept.
    """
    _refuse_model(composed)
    command = read_command(text, version)
    if not command.argv:
        raise UserInputError(
            "--from",
            value=command.script or text,
            limit="it has no flags, so it says nothing about the model",
            fix="Give the whole command in quotes, or - to read it from standard input.",
        )
    spec, job = read_job(command)
    tp = command.values["tensor_model_parallel_size"]
    cluster = command_cluster(composed, job)
    restored, wishes = restored_by_command(command.values), Wishes(free=free)
    if restored is not None:
        wishes = dataclasses.replace(wishes, required=restored.required(version))
        job = dataclasses.replace(job, notes=(*job.notes, restored.note()))
    request = request_for(command, (spec.with_padded_vocab(tp), job), cluster, composed, wishes)
    inputs = with_times(request.inputs, composed)
    return dataclasses.replace(request, inputs=inputs, restored=restored)


def read_model(
    composed: Composed, text: str | None, version: str
) -> tuple[TransformerSpec, Mapping[str, Any]]:
    """The model of a composed configuration, or of a command that stands for it.

    Args:
        text: the command; ``None`` where the configuration names the model.

    Returns:
        The model, and the values of the command's flags.

    Raises:
        UserInputError: for both or neither, or a command that cannot be read.
    """
    if text is None:
        return read_spec(composed.config), {}
    _refuse_model(composed)
    command = read_command(text, version)
    spec, _ = read_job(command)
    tp = command.values["tensor_model_parallel_size"]
    return spec.with_padded_vocab(tp), command.values


def _refuse_model(composed: Composed) -> None:
    if composed.config.model is not None:
        raise UserInputError(
            "model",
            value=composed.config.model.get("name"),
            limit="with --from the model comes from the command",
            fix="Leave model out, or change the command.",
        )


def command_cluster(composed: Composed, job: MegatronJob) -> Cluster:
    """The cluster of a command: as large as its launcher says, unless a size is given."""
    given = "cluster.num_gpus" in composed.given
    return read_cluster(composed.config, None if given else job.world_size)


def request_for(
    command: ReadCommand,
    model_and_job: tuple[TransformerSpec, MegatronJob],
    cluster: Cluster,
    composed: Composed,
    wishes: Wishes,
) -> CommandRequest:
    """What to plan for a command whose model is known.

    Raises:
        UserInputError: for a wish that cannot be kept.
    """
    inputs, space, kept = job_request(model_and_job, cluster, composed, wishes)
    freed = freed_flags(wishes.free, wishes.option)
    return CommandRequest(
        command=command,
        job=model_and_job[1],
        inputs=inputs,
        space=space,
        kept=kept,
        kept_flags=kept_flags(command.explicit, freed, composed, cut=space.partition is not None),
    )


def job_request(
    model_and_job: tuple[TransformerSpec, MegatronJob],
    cluster: Cluster,
    composed: Composed,
    wishes: Wishes,
) -> tuple[Inputs, SearchSpace, tuple[str, ...]]:
    """What to plan for a job, wherever it was read from.

    Returns:
        The job without its layout, what the search may choose, and what of the user's choices it
        holds fixed, by their names in ``LAYOUT``.

    Raises:
        UserInputError: for a wish that cannot be kept.
    """
    _, job = model_and_job
    freed = freed_flags(wishes.free, wishes.option)
    inputs = _inputs(composed, model_and_job, cluster, wishes, freed)
    fixed = {name: value for name, value in job.fixed.items() if name not in freed}
    space = _space(composed, inputs.spec, job, fixed, freed)
    space = dataclasses.replace(space, zero_stages=for_optimizer(space.zero_stages, job))
    if composed.config.parallel.zero_stage is None:
        space, offer = with_own_sharding(space, job, freed, wishes.option)
        if IMPLEMENTATION[0] in wishes.required:
            offer = None  # a checkpoint's sharding is not to be changed
        inputs = dataclasses.replace(inputs, offer=offer)
    space = _with_required(space, inputs.spec, wishes.required)
    kept = tuple(name for name, flags in LAYOUT.items() if any(map(fixed.get, flags)))
    return inputs, space, kept


def _with_required(
    space: SearchSpace, spec: TransformerSpec, required: Mapping[str, Requirement]
) -> SearchSpace:
    """The space as far as a checkpoint can follow; what it leaves unsaid is checked afterwards."""
    fixed = dict(space.fixed)
    for name, need in required.items():
        if name not in DEGREES or need.value is None:
            continue
        if fixed.setdefault(name, int(need.value)) != need.value:
            _refuse_kept(name, fixed[name], need)
    zeros = tuple(zero for zero in space.zero_stages if loads(zero, space.sharding, required))
    if not zeros:
        needs = [{name: required[name]} for name in CHECKPOINT_NEEDS if name in required]
        alone = [
            n for n in needs if not any(loads(z, space.sharding, n) for z in space.zero_stages)
        ]
        ((name, need),) = (alone or needs)[0].items()
        _refuse_kept(name, not need.value, need)
    partition = space.partition
    layout = required.get("pipeline_model_parallel_layout")
    if layout is not None and layout.value is not None:
        saved = parse_layout(str(layout.value), spec, fixed[_PIPELINE])
        if partition not in (None, saved):
            _refuse_kept("pipeline_model_parallel_layout", "as given", layout)
        partition = saved
    return dataclasses.replace(space, fixed=fixed, zero_stages=zeros, partition=partition)


def _refuse_kept(name: str, value: object, need: Requirement) -> NoReturn:
    raise UserInputError(
        f"--{name.replace('_', '-')}",
        value=value,
        limit=f"{need.who} needs {need.value}: {need.reason}",
        fix=f"Change it, or {need.fix}.",
    )


def _inputs(
    composed: Composed,
    model_and_job: tuple[TransformerSpec, MegatronJob],
    cluster: Cluster,
    wishes: Wishes,
    freed: Collection[str],
) -> Inputs:
    spec, job = model_and_job
    config = composed.config
    notes = list(job.notes)
    batch = config.train.global_batch_size or job.global_batch_size
    if batch is None:
        batch = _own_batch(job, cluster.num_gpus) or DEFAULT_GLOBAL_BATCH_SIZE
        notes.append(f"--global-batch-size is not given; {batch} sequences are assumed.")
    if config.checks.plausibility:
        require_plausible(spec, cluster, batch)
    if job.world_size not in (None, cluster.num_gpus):
        notes.append(
            f"The launcher starts {job.world_size} ranks, but the plan is for {cluster.num_gpus}."
        )
    said = JobFlags(precision=job.precision, flags=job.memory_flags, target=job.target)
    name = cluster.accelerator.name
    target = read_target(config, job.target)
    settings = read_settings(config, said, accelerator=name, has_experts=spec.is_moe)
    return Inputs(
        spec=with_seq_length(spec, config.train.seq_length),
        cluster=cluster,
        global_batch_size=batch,
        settings=settings,
        choices=Setting(
            spec=spec,
            accelerator=name,
            fp8_recipe=fp8_recipe_of(settings),
            packages=stated_packages(config, wishes.packages),
            held=held_choices(config, job.fixed, freed),
            has_engine=job.transformer_impl != "local",
            capturable=job.capturable,
            has_fast_link=has_fast_link(cluster.accelerator),
            counts_on_host=job.counts_on_host,
            can_state=wishes.can_state,
            closed=job.closed,
        ),
        version=target.megatron_core,
        execution=read_execution(config, said, accelerator=name, has_experts=spec.is_moe),
        numeric_offers=read_numeric_offers(config, said, accelerator=name, has_experts=spec.is_moe),
        notes=tuple(notes),
        not_modelled=job.not_modelled,
        save_interval=job.save_interval,
        own=_own_settings(job),
    )


def _own_settings(job: MegatronJob) -> dict[str, object]:
    """What the user says of the layout, the micro batch among it."""
    said = {**job.fixed, "micro_batch_size": job.micro_batch_size}
    return {name: value for name, value in said.items() if value is not None}


def _own_batch(job: MegatronJob, num_gpus: int) -> int | None:
    """Megatron's batch where none is given: one micro batch on each replica of the user's layout.

    Source: ``validate_args`` (0.16.1 :591).
    """
    if job.micro_batch_size is None or job.world_size is None:
        return None
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    one_replica = math.prod(
        int(job.fixed.get(name) or 1) for name in (*degrees, "context_parallel_size")
    )
    return job.micro_batch_size * max(1, num_gpus // one_replica)


def _space(
    composed: Composed,
    spec: TransformerSpec,
    job: MegatronJob,
    kept: Mapping[str, Any],
    freed: frozenset[str],
) -> SearchSpace:
    """The user's flags as bounds of the search, under what our own command line says."""
    own = read_space(composed.config)
    if job.transformer_impl == "local":
        own = _without_engine(own, spec)
    if job.graphs is not None:
        own = _with_graphs(own, spec, job, alone=not kept.get(_EXPERTS))
    fixed = {name: int(kept[name]) for name in DEGREES if kept.get(name) is not None}
    partition = _kept_cut(spec, kept, fixed, freed)
    if partition is not None:
        pp = partition.pipeline_model_parallel_size
        fixed |= {_PIPELINE: pp, _VIRTUAL: partition.num_chunks // pp}
    else:
        virtual = _virtual(kept, fixed, spec)
        fixed |= {} if virtual is None else {_VIRTUAL: virtual}
    orders, recompute = own.rank_orders, own.recompute
    if composed.config.parallel.rank_order is None and kept.get("use_tp_pp_dp_mapping"):
        orders = (RankOrder.TP_CP_EP_PP_DP,)
    if recompute is None and not freed.intersection(RECOMPUTE):
        recompute = job.recompute
    return dataclasses.replace(
        own,
        fixed={**fixed, **own.fixed},
        rank_orders=orders,
        recompute=recompute,
        batch_unit=job.batch_unit,
        partition=partition,
    )


def _without_engine(space: SearchSpace, spec: TransformerSpec) -> SearchSpace:
    """The space of Megatron's own layers, which split no sequence and recompute less."""
    without = MODULES_OF_ENGINE | ({RecomputeModule.MLP} if spec.add_bias_linear else set())
    limits = {_CONTEXT: 1, **space.limits}
    return dataclasses.replace(space, limits=limits, without_modules=frozenset(without))


def _with_graphs(
    space: SearchSpace, spec: TransformerSpec, job: MegatronJob, *, alone: bool
) -> SearchSpace:
    """The space of what may stand beside captured CUDA graphs.

    Args:
        alone: the expert-parallel size is not the user's own.
    """
    graphs, limits = job.graphs, dict(space.limits)
    assert graphs is not None
    if alone and not graphs.allows_experts(2, job.version):
        limits[_EXPERTS] = 1
    return dataclasses.replace(
        space,
        limits=limits,
        without_modules=space.without_modules | graphs.without_modules(spec),
        full_recompute=graphs.allows_full_recompute(),
    )


def _kept_cut(
    spec: TransformerSpec,
    kept: Mapping[str, Any],
    fixed: Mapping[str, int],
    freed: frozenset[str],
) -> StagePartition | None:
    """The user's own stages, where they state any."""
    stated = [name for name in CUTS if kept.get(name)]
    virtual = [name for name in VIRTUAL_STAGES if kept.get(name)]
    if virtual and not stated and not freed.intersection(CUTS):
        stated = virtual if _PIPELINE in fixed else []  # Megatron cuts evenly
    if stated and _PIPELINE in freed:
        raise UserInputError(
            f"--{stated[0].replace('_', '-')}",
            value=kept[stated[0]],
            limit="it cuts the model for one number of pipeline ranks, and that number is freed",
            fix="Free stage_layout as well, or keep the number.",
        )
    return stated_partition(spec, kept, fixed.get(_PIPELINE, 1)) if stated else None


def _virtual(
    kept: Mapping[str, Any], fixed: Mapping[str, int], spec: TransformerSpec
) -> int | None:
    """Virtual stages of a rank, from either of Megatron's two flags."""
    direct = kept.get("num_virtual_stages_per_pipeline_rank")
    if isinstance(direct, int):
        return direct
    layers = kept.get("num_layers_per_virtual_pipeline_stage")
    if not isinstance(layers, int):
        return None
    pp = fixed.get("pipeline_model_parallel_size")
    if pp is None or layers < 1 or spec.num_layers % (pp * layers):
        raise UserInputError(
            "--num-layers-per-virtual-pipeline-stage",
            value=layers,
            limit=f"with {pp or 'a free number of'} pipeline ranks it makes no whole number of "
            f"virtual stages of the {spec.num_layers} layers",
            fix=f"Add --free {_VIRTUAL}, or --pipeline-model-parallel-size.",
        )
    return spec.num_layers // (pp * layers)
