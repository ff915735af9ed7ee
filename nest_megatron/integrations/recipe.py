"""The job that a configuration of NeMo or Megatron-Bridge states: its model, memory and layout.

Fields are read by name from anything that has them: a built config, a provider, or the Fiddle
``Config`` that would build one. What is ``None`` there follows Megatron's own default rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import READ, memory_flags
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import UNPRICED, unplannable, unpriced
from nest_megatron.integrations.execution_fields import ExecutionPlaces, stated_execution, unforced
from nest_megatron.integrations.families import (
    family_fields,
    family_requirements,
    recomputes_layers,
    refuse_packs,
)
from nest_megatron.integrations.field_mapping import TAKEN_BACK
from nest_megatron.integrations.fields import (
    ABSENT,
    ConfigPaths,
    class_names,
    find,
    value_or,
    whole,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import stated_partition
from nest_megatron.integrations.megatron_lm.read import read_recompute, read_zero
from nest_megatron.integrations.restore import (
    Restored,
    closed_choices,
    data_requirements,
    packed_sequence_size,
    packs_sequences,
)
from nest_megatron.layout.batch_schedule import RAMPUP, BatchSchedule, read_schedule
from nest_megatron.layout.cuda_graphs import FIELDS as GRAPH_FIELDS
from nest_megatron.layout.cuda_graphs import cuda_graphs
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.arguments import (
    EXPERT_NAMES,
    LINEAR_NAMES,
    SAME_NAMES,
    spec_from_arguments,
)
from nest_megatron.model.sizes import LATENT_SIZES
from nest_megatron.model.spec import ModelFamily, TransformerSpec

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
#: Items of a plan whose names among Megatron-LM's arguments are others.
_ARGUMENTS = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_FIXED = ({*DEGREES} - {"sequence_parallel"}) | {"micro_batch_size", "use_tp_pp_dp_mapping"}
_OF_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
#: Name of an activation function -> the name in a ``TransformerSpec``.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "fast_gelu": "gelu",
    "openai_gelu": "gelu",
    "gelu_impl": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
}
#: What else the configuration of a model names as Megatron's arguments do.
_SHAPE = (
    "num_attention_heads",
    "num_query_groups",
    "layernorm_zero_centered_gamma",
    "window_size",
    "window_attn_skip_freq",
    "experimental_attention_variant",
    "linear_attention_freq",
    "no_rope_freq",
    "mtp_num_layers",
    "moe_layer_freq",
    *EXPERT_NAMES,
)
#: Megatron's name of a setting of memory -> other names for it in configurations.
_SPELLINGS = {
    "fp8_param_gather": ("fp8_param_gather", "fp8_params", "fp8_param"),
    "fp4_param_gather": ("fp4_param_gather", "fp4_param"),
}
_INSTANCES = "num_distributed_optimizer_instances"
#: Settings that follow from the number format, which each reader finds in a way of its own.
_OF_PRECISION = ("bf16", "fp16", "fp8", "fp8_recipe", "params_dtype")


def job_of_fields(
    root: Any,
    paths: ConfigPaths,
    places: ExecutionPlaces,
    *,
    spec: TransformerSpec,
    precision: tuple[Precision, str, str],
    memory: Mapping[str, Any],
    uses_fsdp: bool,
    restored: Restored | None,
    target: Target,
    num_gpus: int | None,
    gpus_per_node: int | None,
    notes: tuple[str, ...] = (),
) -> Job:
    """A job from a framework's configuration.

    Args:
        precision: number format, recipe of FP8, and format of the parameters.
    """
    config, data = find(root, paths.model), find(root, paths.data)
    micro = whole(root, paths.items["micro_batch_size"], called=paths.called)
    stated = _stated(root, paths.items)
    fixed = {
        _ARGUMENTS.get(item, item): value
        for item, value in stated.items()
        if item in _FIXED and value is not None and (spec.is_moe or item not in _OF_EXPERTS)
    }
    refuse_packs(config, paths.data, packed_sequence_size(data))
    execution = stated_execution(root, places)
    flags = memory_flags(
        {
            **{name: value for name, value in memory.items() if name not in TAKEN_BACK},
            **execution,
            "params_dtype": precision[2],
            "fp8_recipe": precision[1],
        }
    )
    version = DEFAULT_VERSION  # of Megatron-LM, whose rules hold for both frameworks
    required = {} if restored is None else restored.required(version)
    seen = () if restored is None else (restored.note(),)
    graphs = {name: value_or(config, name, None) for name in GRAPH_FIELDS}
    left_out = unpriced({name: value_or(config, name, None) for name in UNPRICED})
    return Job(
        spec=spec,
        target=target,
        version=version,
        global_batch_size=whole(root, paths.items["global_batch_size"], called=paths.called),
        batch_schedule=batch_schedule(root, paths, spec.seq_length, target),
        micro_batch_size=micro,
        precision=precision[0],
        fixed=MappingProxyType({**fixed, **execution}),
        required={
            **required,
            **data_requirements(root, paths, micro),
            **family_requirements(config, spec),
        },
        restored=restored,
        stated=MappingProxyType(
            {
                **_as_arguments(stated),
                **_overlapped(root, places),
                **graphs,
                "use_megatron_fsdp": uses_fsdp,
            }
        ),
        recompute=read_recompute(stated),
        zero=read_zero({**stated, "use_megatron_fsdp": uses_fsdp}) or ZeroStage.NONE,
        sharding=DataParallelSharding.MEGATRON_FSDP if uses_fsdp else DataParallelSharding.DDP,
        memory_flags=flags,
        on_blackwell=unforced(root, places),
        graphs=cuda_graphs(graphs),
        packs=packs_sequences(data),
        closed=closed_choices(data, config),
        full_recompute=recomputes_layers(config),
        can_state=places.can_state(root),
        fields=MappingProxyType({**places.choices(root), **paths.items}),
        use_distributed_optimizer=bool(stated.get("use_distributed_optimizer")),
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        notes=(*notes, *left_out, *seen, *time_notes(flags)),
    )


def batch_schedule(
    root: Any, paths: ConfigPaths, seq_length: int, target: Target
) -> BatchSchedule | None:
    """How the batch of a configuration grows; megatron-core 0.20 takes no notice of a ramp.

    Raises:
        UserInputError: for sizes that megatron-core refuses.
    """
    growth, steps = find(root, paths.rampup_batch_size), find(root, paths.iterations)
    if growth is ABSENT or not target.megatron_core.startswith("0.16"):
        return None
    is_known = isinstance(steps, int) and steps > 0
    return read_schedule(
        {RAMPUP: growth}.get,
        last=whole(root, paths.items["global_batch_size"], called=paths.called),
        seq_length=seq_length,
        iterations=steps if is_known else None,
        name=lambda name: (
            paths.rampup_batch_size if name == RAMPUP else paths.items.get(name, name)
        ),
    )


def _stated(root: Any, items: Mapping[str, str]) -> dict[str, Any]:
    found = {item: find(root, path) for item, path in items.items()}
    stated = {item: value for item, value in found.items() if value is not ABSENT}
    layout = "pipeline_model_parallel_layout"
    return {**stated, layout: layout_text(stated.get(layout))}


def _as_arguments(stated: Mapping[str, Any]) -> dict[str, Any]:
    """What is stated, by the names of Megatron-LM's arguments; a layout says the virtual stages."""
    virtual = "virtual_pipeline_model_parallel_size"
    derived = stated.get(virtual) == 1 or stated.get("pipeline_model_parallel_layout") is not None
    return {
        _ARGUMENTS.get(item, item): value
        for item, value in stated.items()
        if not (item == virtual and derived)
    }


def makes_stages_of(root: Any, plan: ParallelPlan, paths: ConfigPaths) -> bool:
    """Whether the fields of a configuration state the stages of a plan already."""
    stated = _as_arguments(_stated(root, paths.items))
    pp = plan.layout.dims.pipeline_model_parallel_size
    if stated.get("pipeline_model_parallel_size") != pp:
        return False
    try:
        return stated_partition(plan.model, stated, pp) == plan.layout.partition
    except UserInputError:
        return False


def _overlapped(root: Any, places: ExecutionPlaces) -> dict[str, bool]:
    """What overlap settings make of the traffic between replicas: both kinds overlap.

    Source: ``_get_optimizer_overlap_cfgs`` of both frameworks; what is set there itself wins.
    """
    names = ("overlap_grad_reduce", "overlap_param_gather") if places.overlap else ()
    said = {name: [find(root, f"{path}.{name}") for path in places.overlap] for name in names}
    return {name: False not in values for name, values in said.items()}


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


def lightning_precision(stated: object, where: str) -> Precision:
    """The number format that Lightning's word for one (``bf16-mixed``) means, if there is one."""
    short = str(stated).removesuffix("-mixed").removesuffix("-true")
    short = {"16": "fp16", "32": "fp32"}.get(short, short)
    if short not in ("bf16", "fp16", "fp32"):
        limit, fix = "number formats of training are bf16, fp16 and 32", "Use bf16-mixed."
        raise UserInputError(where, stated, limit, fix)
    return Precision(short)


def memory_fields(*holders: Any) -> Mapping[str, Any]:
    """Settings that memory depends on beside the layout, by Megatron's names.

    The frameworks keep them in several objects: the recipe of mixed precision, the model's, the
    optimizer's and data parallelism's configuration. The first holder's word counts: the one whose
    settings the framework copies over the others'; ``None`` is passed over.
    """
    names = [name for name in READ if name not in _OF_PRECISION]
    stated = {name: next(_said(holders, name), None) for name in names}
    stated[_INSTANCES] = max((int(each) for each in _said(holders, _INSTANCES)), default=None)
    wide = next(_said(holders, "grad_reduce_in_fp32"), None)
    if wide is not None:
        stated["accumulate_allreduce_grads_in_fp32"] = bool(wide)
        stated["grad_reduce_in_bf16"] = not wide
    return MappingProxyType({name: value for name, value in stated.items() if value is not None})


def _said(holders: tuple[Any, ...], name: str) -> Iterator[Any]:
    for holder in holders:
        for spelled in _SPELLINGS.get(name, (name,)):
            if (value := value_or(holder, spelled, None)) is not None:
                yield value


#: Families of models by a word of their configuration's class.
_FAMILIES = {"Bert": ModelFamily.BERT, "T5": ModelFamily.T5}


def _family(config: Any) -> ModelFamily:
    names = " ".join(class_names(config))
    return next((family for word, family in _FAMILIES.items() if word in names), ModelFamily.GPT)


def spec_from_transformer_config(
    config: Any, *, seq_length: int, vocab_size: int, vocab_is_padded: bool
) -> TransformerSpec:
    """The shape of a model that is known to be supported, but for its activation.

    Args:
        config: megatron-core's ``TransformerConfig`` with what the frameworks add to it.
        seq_length: tokens of one training sample, which the data decides.
        vocab_size: rows of the embedding; before padding, unless ``vocab_is_padded``.

    Source: ``megatron.core.transformer.transformer_config``, NeMo's ``GPTConfig``,
    Megatron-Bridge's ``GPTModelProvider``.
    """
    kind = value_or(config, "position_embedding_type", "rope")
    longest = max(seq_length, value_or(config, "seq_length", 0))
    values = {
        **{name: value_or(config, name, None) for name in (*SAME_NAMES, *LINEAR_NAMES, *_SHAPE)},
        "group_query_attention": True,
        "num_experts": value_or(config, "num_moe_experts", None),
        "position_embedding_type": kind,
        "max_position_embeddings": longest if kind == "learned_absolute" else None,
        "rotary_base": value_or(config, "rotary_base", 10_000),
    }
    own = family_fields(config, seq_length)
    values |= {name: value for name, value in own.items() if name in values}
    values["rotary_base"] = int(values["rotary_base"])
    if not values["multi_latent_attention"]:
        values |= dict.fromkeys(LATENT_SIZES)
    shared = value_or(config, "share_embeddings_and_output_weights", True)
    family = _family(config)
    stacks: dict[str, Any] = {}
    if family is ModelFamily.T5:
        values["max_position_embeddings"] = value_or(config, "max_position_embeddings", longest)
        stacks["encoder_num_layers"] = value_or(config, "encoder_num_layers", None)
        stacks["decoder_seq_length"] = value_or(config, "seq_length_dec", None)
    return spec_from_arguments(
        values,
        "model.{}".format,
        name=class_names(config)[0],
        family=family,
        **stacks,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=value_or(config, "ffn_hidden_size", 4 * config.hidden_size),
        seq_length=seq_length,
        vocab_size=vocab_size,
        vocab_is_padded=vocab_is_padded,
        activation=own.pop("activation", None) or _activation(config),
        gated_linear_unit=value_or(config, "gated_linear_unit", False),
        untie_embeddings_and_output_weights=not shared,
        source="the framework's own configuration",
        **{name: value for name, value in own.items() if name not in values},
    )


def _activation(config: Any) -> str:
    function = value_or(config, "activation_func", "gelu")
    function = getattr(function, "func", function)  # functools.partial(gelu, approximate=...)
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in _ACTIVATIONS:
        supported = ", ".join(sorted(_ACTIVATIONS))
        raise unplannable("model.activation_func", name, f"supported are {supported}")
    return _ACTIVATIONS[name]
