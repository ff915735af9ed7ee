"""A user's own Megatron-LM command as a planning request: what they set stays, the rest is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nest_megatron.config.compose import Composed
from nest_megatron.config.request import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    Inputs,
    read_cluster,
    read_settings,
    read_space,
    with_seq_length,
)
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.launchers.megatron_lm.job import (
    PARALLEL_ARGUMENTS,
    MegatronJob,
    OptimizerSettings,
)
from nest_megatron.launchers.megatron_lm.parser import ReadCommand, read_command
from nest_megatron.launchers.megatron_lm.read import read_job
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.solver.space import DEGREES, SearchSpace

_VIRTUAL = "virtual_pipeline_model_parallel_size"
_VIRTUAL_FLAGS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
#: Flags that state where the stages are cut, which is the search's own business.
_CUTS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_RECOMPUTE = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_layer_recompute",
)
_ZERO = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
)
#: Names that free several flags at once.
_FAMILIES = {
    "all": PARALLEL_ARGUMENTS,
    _VIRTUAL: _VIRTUAL_FLAGS,
    "recompute": _RECOMPUTE,
    "zero_stage": _ZERO,
    "rank_order": ("use_tp_pp_dp_mapping",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command, and what to plan for it."""

    command: ReadCommand
    job: MegatronJob
    inputs: Inputs
    space: SearchSpace


def read_request(
    text: str | Sequence[str], composed: Composed, *, free: Collection[str], version: str
) -> CommandRequest:
    """Read a command; settings on our own command line win over it.

    Args:
        free: parallel flags of the command that the search may change, or ``all``.

    Raises:
        UserInputError: for a command that cannot be read, or a wish that cannot be kept.
    """
    if composed.config.model is not None:
        raise UserInputError(
            "model",
            value=composed.config.model.get("name"),
            limit="with --from the model comes from the command",
            fix="Leave model out, or change the command.",
        )
    command = read_command(text, version)
    if not command.argv:
        raise UserInputError(
            "--from",
            value=command.script or text,
            limit="it has no flags, so it says nothing about the model",
            fix="Give the whole command in quotes, or - to read it from standard input.",
        )
    spec, job = read_job(command)
    freed = _freed(free)
    inputs = _inputs(composed, spec, job)
    space = _space(composed, inputs.spec, job, freed)
    return CommandRequest(command=command, job=job, inputs=inputs, space=space)


def _freed(free: Collection[str]) -> frozenset[str]:
    known = {**{name: (name,) for name in PARALLEL_ARGUMENTS}, **_FAMILIES}
    names: set[str] = set()
    for name in free:
        plain = name.strip().lstrip("-").replace("-", "_")
        if plain not in known:
            raise UserInputError(
                "--free",
                value=name,
                limit="it is no flag that a plan sets",
                fix=nearest(plain, known),
            )
        names.update(known[plain])
    return frozenset(names)


def _inputs(composed: Composed, spec: TransformerSpec, job: MegatronJob) -> Inputs:
    config = composed.config
    notes = list(job.notes)
    batch = config.train.global_batch_size or job.global_batch_size
    if batch is None:
        batch = DEFAULT_GLOBAL_BATCH_SIZE
        notes.append(f"--global-batch-size is not given; {batch} sequences are assumed.")
    if job.optimizer != OptimizerSettings():
        notes.append("The optimizer's own number formats are not modelled; float32 is assumed.")
    given = "cluster.num_gpus" in composed.given
    cluster = read_cluster(config, None if given else job.world_size)
    if given and job.world_size not in (None, cluster.num_gpus):
        notes.append(
            f"The launcher starts {job.world_size} ranks, but the plan is for {cluster.num_gpus}."
        )
    return Inputs(
        spec=with_seq_length(spec, config.train.seq_length),
        cluster=cluster,
        global_batch_size=batch,
        settings=read_settings(config, job.precision),
        notes=tuple(notes),
    )


def _space(
    composed: Composed, spec: TransformerSpec, job: MegatronJob, freed: frozenset[str]
) -> SearchSpace:
    """The user's flags as bounds of the search, under what our own command line says."""
    own = read_space(composed.config)
    kept = {name: value for name, value in job.fixed.items() if name not in freed}
    _refuse_cuts(kept)
    fixed = {name: int(kept[name]) for name in DEGREES if kept.get(name) is not None}
    virtual = _virtual(kept, fixed, spec)
    if virtual is not None:
        fixed[_VIRTUAL] = virtual
    orders, zeros, recompute = own.rank_orders, own.zero_stages, own.recompute
    if composed.config.parallel.rank_order is None and kept.get("use_tp_pp_dp_mapping"):
        orders = (RankOrder.TP_CP_EP_PP_DP,)
    said_zero = composed.config.parallel.zero_stage is not None
    if job.zero is not None and not said_zero and not freed.intersection(_ZERO):
        zeros = (job.zero,)
    if recompute is None and not freed.intersection(_RECOMPUTE):
        recompute = job.recompute
    return dataclasses.replace(
        own,
        fixed={**fixed, **own.fixed},
        rank_orders=orders,
        zero_stages=zeros,
        recompute=recompute,
        batch_unit=job.batch_unit,
    )


def _refuse_cuts(kept: dict[str, object]) -> None:
    for name in _CUTS:
        if kept.get(name):
            raise UserInputError(
                f"--{name.replace('_', '-')}",
                value=kept[name],
                limit="the search chooses the stages' layers itself and cannot hold them fixed",
                fix=f"Add --free {name}, or price your layout with `nest-megatron estimate`.",
            )


def _virtual(kept: dict[str, object], fixed: dict[str, int], spec: TransformerSpec) -> int | None:
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
