"""The job that a configuration of NeMo or Megatron-Bridge states."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import memory_flags
from nest_megatron.cost_model.targets import Target
from nest_megatron.integrations.execution_fields import ExecutionPlaces, stated_execution, unforced
from nest_megatron.integrations.fields import ABSENT, find, value_or, whole
from nest_megatron.integrations.finetuning import closed_choices, data_requirements
from nest_megatron.integrations.megatron_lm.read import read_recompute, read_zero
from nest_megatron.integrations.overlap import TAKEN_BACK
from nest_megatron.integrations.restore import Restored
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.cuda_graphs import FIELDS as GRAPH_FIELDS
from nest_megatron.parallel.cuda_graphs import cuda_graphs
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
#: The release of Megatron-LM whose rules hold for both frameworks.
_VERSION = "0.16.1"
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


def job_of_fields(
    root: Any,
    table: Mapping[str, str],
    places: ExecutionPlaces,
    *,
    spec: TransformerSpec,
    data: str,
    precision: tuple[Precision, str, str],
    memory: Mapping[str, Any],
    uses_fsdp: bool,
    restored: Restored | None,
    notes: tuple[str, ...],
    target: Target,
    num_gpus: int | None,
    gpus_per_node: int | None,
    called: str = "",
) -> Job:
    """A job from a framework's configuration.

    Args:
        root: the configuration.
        table: item of a plan -> path in it.
        places: where it says how layers are carried out.
        data: path of the data's configuration.
        precision: number format, recipe of FP8, and format of the parameters.
        memory: settings of memory, by Megatron's names (``memory_fields.memory_fields``).
        called: what the configuration is called in errors, in front of a path.

    Raises:
        UserInputError: for a setting that is none.
    """
    config = find(root, places.model)
    micro = whole(root, table["micro_batch_size"], called=called)
    stated = _stated(root, table)
    fixed = {
        _ARGUMENTS[item]: value
        for item, value in stated.items()
        if item in _ARGUMENTS and value is not None
        if spec.is_moe or item not in _OF_EXPERTS
    }
    execution = stated_execution(root, places)
    own = {name: value for name, value in memory.items() if name not in TAKEN_BACK}
    own |= {**execution, "params_dtype": precision[2], "fp8_recipe": precision[1]}
    flags = memory_flags(own)
    required = {} if restored is None else restored.required(_VERSION)
    seen = () if restored is None else (restored.note(),)
    return Job(
        spec=spec,
        target=target,
        version=_VERSION,
        global_batch_size=whole(root, table["global_batch_size"], called=called),
        micro_batch_size=micro,
        precision=precision[0],
        fp8_recipe=precision[1],
        fixed=MappingProxyType({**fixed, **execution}),
        required={
            **required,
            **data_requirements(root, data, micro, places.model),
        },
        restored=restored,
        recompute=read_recompute(stated),
        zero=read_zero({**stated, "use_megatron_fsdp": uses_fsdp}) or ZeroStage.NONE,
        sharding=DataParallelSharding.MEGATRON_FSDP if uses_fsdp else DataParallelSharding.DDP,
        memory_flags=flags,
        on_blackwell=unforced(root, places),
        graphs=cuda_graphs({name: value_or(config, name, None) for name in GRAPH_FIELDS}),
        closed=closed_choices(find(root, data), config),
        can_state=places.can_state(root),
        use_distributed_optimizer=bool(stated.get("use_distributed_optimizer")),
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        notes=(*notes, *seen, *time_notes(flags)),
    )


def _stated(root: Any, table: Mapping[str, str]) -> dict[str, Any]:
    """What a configuration says of the items of a plan."""
    found = {item: find(root, path) for item, path in table.items()}
    stated = {item: value for item, value in found.items() if value is not ABSENT}
    layout = "pipeline_model_parallel_layout"
    return {**stated, layout: layout_text(stated.get(layout))}


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
