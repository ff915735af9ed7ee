"""A NeMo or Megatron-Bridge job as it was read: its model, its size, and what it sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import memory_flags
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.execution_fields import ExecutionPlaces, stated_execution, unforced
from nest_megatron.integrations.fields import ABSENT, find
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.megatron_lm.checkpoint import Requirement
from nest_megatron.integrations.megatron_lm.job import MegatronJob
from nest_megatron.integrations.overlap import TAKEN_BACK
from nest_megatron.integrations.restore import Restored
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.cuda_graphs import CudaGraphs
from nest_megatron.parallel.plan import STRATEGIES
from nest_megatron.parallel.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage

#: Items that megatron-core's ``ModelParallelConfig`` or a strategy around it holds.
DEGREES = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
#: Items that its ``TransformerConfig`` holds.
RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
#: Item of a plan -> name of the same choice among Megatron-LM's arguments.
_ARGUMENTS = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "use_tp_pp_dp_mapping": "use_tp_pp_dp_mapping",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
}
_OF_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_STRATEGIES = {strategy: zero for zero, strategy in STRATEGIES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a planner needs of a job.

    Args:
        num_gpus: ranks of the whole job; ``None`` where only its launcher knows.
        gpus_per_node: ``None`` where only its launcher knows.
        degrees: the layout's items that the job sets, factory's defaults and user's wishes alike.
        job: the same job in the words of Megatron-LM, as the planner's door takes it.
        restored: the checkpoint that it starts from, if any.
        required: what the data fixes of a layout, by the names of its degrees.
        can_state: fields of ``Execution`` that a plan can write there.
        on_blackwell: flags of the job that have other values there, by Megatron's names.
        notes: what was assumed, one sentence each.
    """

    spec: TransformerSpec
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    num_gpus: int | None
    gpus_per_node: int | None
    precision: Precision
    degrees: Mapping[str, Any]
    job: MegatronJob
    restored: Restored | None = None
    required: Mapping[str, Requirement] = field(default_factory=dict)
    can_state: frozenset[str] = frozenset()
    on_blackwell: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def job_on(self, accelerator: str) -> MegatronJob:
        """The job as it runs on a device, by its name."""
        if not (self.on_blackwell and is_blackwell(accelerator)):
            return self.job
        flags = {**self.job.memory_flags, **self.on_blackwell}
        return dataclasses.replace(self.job, memory_flags=MappingProxyType(flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFields:
    """Sizes that a framework keeps in places of its own.

    Args:
        memory_fields: by Megatron's names (``memory_fields.memory_fields``, and ``params_dtype``).
        places: where it says how layers are carried out.
        closed: fields of ``Execution`` that it leaves no room for.
        target: the framework, at its release.
    """

    global_batch_size: int
    micro_batch_size: int
    num_gpus: int | None
    gpus_per_node: int | None
    precision: Precision
    fp8_recipe: str
    uses_fsdp: bool
    memory_fields: Mapping[str, Any]
    places: ExecutionPlaces
    closed: frozenset[str]
    target: Target
    graphs: CudaGraphs | None = None
    restored: Restored | None = None
    required: Mapping[str, Requirement] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def recipe_of(
    root: Any, spec: TransformerSpec, sizes: JobFields, table: Mapping[str, str]
) -> Recipe:
    """Put a job together.

    Args:
        root: the framework's configuration.
        table: item -> path of the framework.

    Raises:
        UserInputError: for a setting that is none.
    """
    stated = {item: find(root, path) for item, path in table.items()}
    stated = {item: value for item, value in stated.items() if value is not ABSENT}
    stated["pipeline_model_parallel_layout"] = layout_text(
        stated.get("pipeline_model_parallel_layout")
    )
    degrees = {item: value for item, value in stated.items() if value not in (None, False)}
    return Recipe(
        spec=spec,
        global_batch_size=sizes.global_batch_size,
        micro_batch_size=sizes.micro_batch_size,
        seq_length=spec.seq_length,
        num_gpus=sizes.num_gpus,
        gpus_per_node=sizes.gpus_per_node,
        precision=sizes.precision,
        degrees=MappingProxyType(degrees),
        job=_job(root, spec, sizes, stated),
        restored=sizes.restored,
        required=sizes.required,
        can_state=sizes.places.can_state(root),
        on_blackwell=unforced(root, sizes.places),
        notes=sizes.notes,
    )


def layout_text(layout: Any) -> str | None:
    """A pipeline layout as text, from any form that megatron-core takes.

    >>> layout_text([["embedding", "decoder"], ["decoder", "loss"]])
    'Et|tL'
    """
    layout = getattr(layout, "input_data", layout)  # megatron-core's own parsed form
    if layout is None or isinstance(layout, str):
        return layout
    return "|".join(
        "".join(_LETTERS[str(getattr(unit, "name", unit)).strip().lower()] for unit in stage)
        for stage in layout
    )


def _job(
    root: Any, spec: TransformerSpec, sizes: JobFields, stated: Mapping[str, Any]
) -> MegatronJob:
    fixed = {
        _ARGUMENTS[item]: value
        for item, value in stated.items()
        if item in _ARGUMENTS and value is not None
        if spec.is_moe or item not in _OF_EXPERTS
    }
    execution = stated_execution(root, sizes.places)
    kept = {k: v for k, v in sizes.memory_fields.items() if k not in TAKEN_BACK}
    flags = memory_flags({**kept, **execution, "fp8_recipe": sizes.fp8_recipe})
    return MegatronJob(
        version="0.16.1",
        target=sizes.target,
        script="",
        global_batch_size=sizes.global_batch_size,
        batch_unit=None,
        micro_batch_size=sizes.micro_batch_size,
        seq_length=spec.seq_length,
        precision=sizes.precision,
        fp8_recipe=sizes.fp8_recipe,
        transformer_impl="transformer_engine",
        attention_backend="auto",
        fixed=MappingProxyType({**fixed, **execution}),
        recompute=_recompute(stated),
        zero=_zero(stated, uses_fsdp=sizes.uses_fsdp),
        graphs=sizes.graphs,
        closed=sizes.closed,
        sharding=(
            DataParallelSharding.MEGATRON_FSDP if sizes.uses_fsdp else DataParallelSharding.DDP
        ),
        memory_flags=flags,
        use_distributed_optimizer=bool(stated.get("use_distributed_optimizer")),
        overlap_grad_reduce=bool(stated.get("overlap_grad_reduce")),
        overlap_param_gather=bool(stated.get("overlap_param_gather")),
        moe_grouped_gemm=spec.is_moe,
        world_size=sizes.num_gpus,
        passthrough=(),
        notes=(*sizes.notes, *time_notes(flags)),
    )


def _recompute(stated: Mapping[str, Any]) -> Recompute | None:
    granularity = stated.get("recompute_granularity")
    if granularity is None:
        return None
    if granularity != RecomputeGranularity.FULL:
        return selective_recompute(stated.get("recompute_modules") or ["core_attn"])
    method = stated.get("recompute_method")
    if method is None:
        raise UserInputError(
            "recompute_method",
            value=None,
            limit="full recomputation needs one",
            fix="Set uniform or block, or free recompute.",
        )
    return Recompute(
        granularity=RecomputeGranularity.FULL,
        method=RecomputeMethod(method),
        num_layers=stated.get("recompute_num_layers"),
    )


def _zero(stated: Mapping[str, Any], *, uses_fsdp: bool) -> ZeroStage:
    if uses_fsdp:
        return _STRATEGIES[stated.get("data_parallel_sharding_strategy") or "no_shard"]
    return ZeroStage.OPTIMIZER if stated.get("use_distributed_optimizer") else ZeroStage.NONE
