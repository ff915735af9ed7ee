"""From Megatron's arguments to a model and a job.

Only what the user decided is read; what Megatron would derive (``ffn_hidden_size``, heads, kinds of
layers) follows its own default rules. Models that this planner does not support are refused by
name.

Source: ``megatron.training.arguments.validate_args`` and ``core_transformer_config_from_args``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import GATHER, Job, ReadCommand, Requirement
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import memory_flags, text
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.architecture import REFUSED, unpriced
from nest_megatron.integrations.megatron_lm.changed_command import with_checkpoint_arguments
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    REASONS,
    ROLES,
    STAGE_OPTIONS,
    Values,
    arguments_of,
    flag_error,
    flag_of,
    read_recompute,
    read_sharding,
    read_zero,
    states_stages,
)
from nest_megatron.integrations.megatron_lm.model_arguments import (
    HYBRID_ARGUMENTS,
    heterogeneous_kinds,
    hybrid_pattern,
    own_layers,
    with_images,
)
from nest_megatron.integrations.megatron_lm.parser import name_words, sees_images
from nest_megatron.integrations.vocabulary import vocab_size_of
from nest_megatron.layout.batch_schedule import RAMPUP, STEPS, BatchSchedule, read_schedule
from nest_megatron.layout.cuda_graphs import PACKED, cuda_graphs
from nest_megatron.layout.knobs import closed_fields
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.rulebook.devices import OPTIMIZER_RULES, overlaps_gradients
from nest_megatron.layout.rulebook.facts import (
    DEFAULT_VERSION,
    Facts,
    release_number,
    violations,
)
from nest_megatron.layout.rulebook.options import ACTIVATION_FLAGS, COMMAND_RULES
from nest_megatron.model.catalogue import spec_from_arguments
from nest_megatron.model.layer_pattern import hybrid_kinds
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Arguments of attention and experts that ``model.arguments`` reads.
_VARIANT_ARGUMENTS = arguments_of("of_variants")
#: What must be off, by the reason.
_REFUSED_ARGUMENTS = {
    name: reason
    for name, reason in {**REFUSED, **REASONS["refused"]}.items()
    if name not in (*HYBRID_ARGUMENTS, *_VARIANT_ARGUMENTS)
}
_REFUSED_SCRIPTS = arguments_of("refused_scripts")
#: Families of models that a script other than one for GPT builds, by a word of its name.
_FAMILIES = {"bert": ModelFamily.BERT, "t5": ModelFamily.T5}
#: The first that is given counts.
_PRECISIONS = {
    "fp8": Precision.FP8,
    "fp4": Precision.NVFP4,
    "bf16": Precision.BF16,
    "fp16": Precision.FP16,
}


def read_job(command: ReadCommand) -> Job:
    """The job of a command.

    What ``--use-checkpoint-args`` takes from a checkpoint is taken first.

    Raises:
        UnplannableModelError: for a model that this planner does not support.
        UserInputError: if the command lacks a size, or its sizes contradict each other.
    """
    command = with_checkpoint_arguments(command)
    require_options(command.values, command.version)
    job = job_of(command, command.values)
    if command.values.get("max_position_embeddings") is None:
        limit = "Megatron-LM does not start without it"
        raise flag_error("max_position_embeddings", None, limit, "Add it to the command.")
    return job


#: How options end whose values are types or members of enumerations.
_IN_WORDS = ("_dtype", "fp8_recipe", "attention_backend")


def require_options(values: Values, version: str) -> None:
    """Raise for options of the optimizer or the run's length that do not go together.

    Args:
        values: Megatron's arguments by destination, before or after its validation.

    Raises:
        UserInputError: naming the flag, and the one that it needs.
    """
    words = {n: text(value) for n, value in values.items() if value and n.endswith(_IN_WORDS)}
    options = {**values, "fp8_recipe": "delayed", **words}
    facts = Facts(options=options, version=version, framework=MEGATRON_LM)
    for _, broken in violations(facts, (*OPTIMIZER_RULES, *COMMAND_RULES)):
        raise flag_error(broken.what, broken.value, broken.limit, broken.fix)


def job_of(command: ReadCommand, values: Values) -> Job:
    """As ``read_job``, from values that stand for those of the command."""
    given = {
        flag: value or "given"
        for flag, _, value in (word.partition("=") for word in command.unknown)
    }
    refused = {d: given[flag_of(d)] for d in _REFUSED_ARGUMENTS if flag_of(d) in given}
    job = job_from_values(
        {**refused, **values},
        explicit=command.explicit,
        script=command.script,
        version=command.version,
    )
    return replace(
        job,
        num_gpus=command.ranks.num_ranks,
        command=command,
        passthrough=command.unknown,
        notes=(*command.notes, *job.notes),
    )


def job_from_values(
    values: Values,
    *,
    explicit: Collection[str],
    script: str = "",
    version: str = DEFAULT_VERSION,
) -> Job:
    """A job from Megatron's arguments by destination; ``explicit`` are those that the user sets."""
    refuse_unplannable(values, script)
    for name in (*PARALLEL_ARGUMENTS, "micro_batch_size", "global_batch_size"):
        value = values.get(name)
        if name.endswith("_size") and isinstance(value, int) and value < 1:
            # Megatron divides by it before it checks it
            raise flag_error(name, value, "it must be at least 1", "Correct it, or leave it out.")
    assumed: list[str] = []
    values = {**values, "hybrid_layer_pattern": hybrid_pattern(values, script, version)}
    spec = _spec(values, script, version, assumed)
    precision = _precision(values)
    if sees_images(script):
        spec = with_images(spec, values, precision)
    params = next(filter(values.get, ("bf16", "fp16")), "fp32")
    stated = {**values, "params_dtype": params}
    dispatcher = "moe_token_dispatcher_type"
    if dispatcher not in explicit and values.get(dispatcher) == "allgather":
        stated[dispatcher] = None  # Megatron's default, which a plan replaces
    packs = any(map(values.get, PACKED))
    schedule = schedule_of_values(values, spec.seq_length, version)
    flags = dict(memory_flags(stated))
    if not overlaps_gradients(str(values.get("optimizer") or "adam"), version):
        flags["overlap_grad_reduce"] = False
    if rounds := values.get(_ROUNDS):
        flags[_ROUNDS] = rounds
    if values.get(_OVERLAP_P2P) is False:
        flags[_OVERLAP_P2P] = False
    # options that stay and go without graphs (0.17 args:1515, 0.20 args:1858, :1898)
    unfused = values.get("add_qkv_bias") or not values.get("gradient_accumulation_fusion")
    delayed = values.get("delay_wgrad_compute") and (values.get("add_bias_linear") or unfused)
    threshold = values.get("inference_batch_times_seqlen_threshold") or -1
    return Job(
        spec=spec,
        version=version,
        target=target_named(f"megatron_lm_{version}"),
        script=script,
        global_batch_size=values.get("global_batch_size"),
        batch_schedule=schedule,
        micro_batch_size=values.get("micro_batch_size"),
        precision=precision,
        transformer_impl=values.get("transformer_impl") or "transformer_engine",
        fixed={
            name: values.get(name)
            for name in PARALLEL_ARGUMENTS
            if (name in explicit or name == "hybrid_layer_pattern")
            and (name not in STAGE_OPTIONS or states_stages(values, name))
        },
        recompute=read_recompute(values),
        zero=read_zero(values),
        sharding=read_sharding(values),
        graphs=cuda_graphs(values),
        capturable=not (schedule or packs or own_layers(values) or delayed or threshold >= 0),
        packs=packs,
        required=_needs_of_options(values, version),
        closed=closed_fields(values.get("deterministic_mode"), packs=packs) | _unfused(values),
        counts_on_host=any(map(values.get, _COUNTED_ON_HOST)),
        ckpt_format=values.get("ckpt_format") if "ckpt_format" in explicit else None,
        save_interval=values.get("save_interval") if values.get("save") else None,
        memory_flags=flags,
        use_distributed_optimizer=bool(values.get("use_distributed_optimizer")),
        notes=(*assumed, *_notes(values, script, version), *time_notes(flags)),
    )


#: Micro batches that a virtual stage runs one after the other.
_ROUNDS = "microbatch_group_size_per_vp_stage"
#: Virtual stages send during their work.
_OVERLAP_P2P = "overlap_p2p_comm"
#: Arguments with which the host waits for numbers of tokens (0.16.1 tc:1771).
_COUNTED_ON_HOST = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
)


def _unfused(values: Values) -> frozenset[str]:
    """Choices for experts that do not do what options ask for.

    Source: 0.19 router.py:324, tc:2760; moe_utils.py ``topk_routing_with_score_function``; 0.20
    tc:3264.
    """
    balancing = values.get("moe_router_load_balancing_type") or ()
    found = {
        "moe_token_dispatcher_type": (budget := values.get("moe_expert_rank_capacity_factor")),
        "moe_flex_dispatcher_backend": budget,
        "moe_router_fusion": "quantile_balancing" in balancing
        or values.get("moe_enable_routing_replay"),
        "moe_permute_fusion": values.get("batch_invariant_mode"),
        "overlap_moe_expert_parallel_comm": values.get(
            "overlap_dispatch_backward_with_experts_wgrad"
        ),
    }
    return frozenset(filter(found.get, found))


def _needs_of_options(values: Values, version: str) -> Mapping[str, Requirement]:
    """What options beside a layout's fix of it, by the names of ``layout_arguments``.

    ``validate_args`` does not check packs. Since 0.19 those of a micro batch are joined
    (``flatten_batch_for_packed_sequences``). Parameters: 0.18 args:1297. Batches: 0.19 tc:2890.
    """
    found = {}
    if release_number(version) >= (0, 19) and values.get("batch_invariant_mode"):
        why, who = "attention is of whole sequences", "--batch-invariant-mode"
        found["context_parallel_size"] = Requirement(
            value=1, reason=why, fix=f"drop {who}", who=who
        )
    elif values.get("sft") and release_number(version) < (0, 19):
        why = "a micro batch is one pack of sequences"
        found["micro_batch_size"] = Requirement(
            value=1, reason=why, fix="train without --sft", who="--sft"
        )
    if values.get("save") and values.get("save_params_interval"):
        why, who = "weights are saved before they are gathered", "--save-params-interval"
        found[GATHER] = Requirement(value=False, reason=why, fix=f"drop {who}", who=who)
    return found


def refuse_unplannable(values: Values, script: str) -> None:
    """Raise for models that this planner does not support, naming the flag."""
    fix = "Launch this job without nest."
    of_stacks = _family(script) is ModelFamily.T5 or sees_images(script)
    for name, reason in _REFUSED_ARGUMENTS.items():
        if values.get(name) and not (of_stacks and name in _OF_STACKS):
            raise UnplannableModelError(flag_of(name), values[name], reason, fix)
    words = name_words(script)
    layer_spec = own_layers(values)
    others = {*ROLES["refused_scripts"]["others"].split()}.intersection(layer_spec.split("."))
    found = next((w for w in _REFUSED_SCRIPTS if w in words or w in others), None)
    if found:
        limit = "only models like GPT, BERT, T5 and those of pretrain_vlm.py are supported"
        if found in ROLES["refused_scripts"]["other_jobs"].split():
            limit = "it runs another job than the training of a language model on sequences"
        raise UnplannableModelError(
            "training script", script if found in words else layer_spec, limit, fix
        )


def _spec(
    values: Values,
    script: str,
    version: str,
    notes: list[str],
) -> TransformerSpec:
    family = _family(script)
    pattern = (values.get("hybrid_layer_pattern") or "").replace("|", "")
    kinds, _, mtp = hybrid_kinds(pattern) if pattern else ((), (), values.get("mtp_num_layers"))
    stated = (kind for kind, flag in ACTIVATION_FLAGS.items() if flag and values.get(flag))
    activation, gated = next(stated, ("gelu", False))
    rotary = {"position_embedding_type": "rope"}
    return spec_from_arguments(
        {
            **values,
            **(rotary if values.get("use_rotary_position_embeddings") else {}),
            "mtp_num_layers": mtp,
        },
        flag_of,
        name=PurePath(script).stem or family.value,
        family=family,
        **(_stacks(values, notes) if family is ModelFamily.T5 else {}),
        num_layers=len(kinds) or _required(values, "num_layers", "encoder_num_layers"),
        hybrid_layer_pattern=pattern,
        heterogeneous_layers=heterogeneous_kinds(values),
        hidden_size=_required(values, "hidden_size"),
        num_attention_heads=_required(values, "num_attention_heads"),
        seq_length=_required(values, "seq_length", "encoder_seq_length"),
        vocab_size=vocab_size_of(values, family, version, notes),
        vocab_is_padded=bool(values.get("padded_vocab_size")),
        activation=activation,
        gated_linear_unit=gated,
        source="Megatron-LM arguments",
    )


def _family(script: str) -> ModelFamily:
    return next((_FAMILIES[w] for w in name_words(script) if w in _FAMILIES), ModelFamily.GPT)


#: Arguments that a script for two stacks alone reads.
_OF_STACKS = ("encoder_num_layers", "decoder_num_layers")


def _stacks(values: Values, notes: list[str]) -> dict[str, int]:
    """What a T5-like model has besides its encoder's sizes, which stand for the model's.

    Both stacks have ``--encoder-num-layers``: the script builds the decoder with ``num_layers``,
    which ``validate_args`` sets to it.
    """
    layers = _required(values, "encoder_num_layers", "num_layers")
    stated = values.get("decoder_num_layers")
    if stated not in (None, layers):
        notes.append(
            f"--decoder-num-layers {stated} has no effect: pretrain_t5.py gives the decoder the "
            f"{layers} layers of the encoder."
        )
    return {
        "encoder_num_layers": layers,
        "decoder_seq_length": _required(values, "decoder_seq_length"),
    }


def _required(values: Values, *names: str) -> int:
    given = next((values[name] for name in names if values.get(name) is not None), None)
    if given is not None:
        return int(given)
    raise flag_error(names[0], None, "the model's shape needs it", "Add it to the command.")


def _precision(values: Values) -> Precision:
    stated = (precision for name, precision in _PRECISIONS.items() if values.get(name))
    precision = next(stated, Precision.FP32)
    if precision.is_quantized and not (values.get("bf16") or values.get("fp16")):
        name = "fp8_format" if values.get("fp8") else "fp4_format"
        raise flag_error(
            name,
            values[name.removesuffix("_format")],
            "without --bf16 Megatron keeps weights and activations in 32 bits, which is not priced",
            "Add --bf16.",
        )
    return precision


def _notes(values: Values, script: str, version: str) -> Iterator[str]:
    if values.get(RAMPUP) and release_number(version) >= (0, 18):
        yield f"Megatron-LM {version} ignores {flag_of(RAMPUP)}: the batch does not grow."
    if values.get("skip_train"):
        yield "--skip-train: nothing is trained; times and memory are those of training."
    unfused = text(values.get("attention_backend") or "auto") in ("unfused", "local")
    if unfused or values.get("transformer_impl") == "local":
        yield "Attention is priced with its score matrices kept, as what you run keeps them."
    if pipeline_limits(values, script, version):
        yield (
            "--sft: before 0.17 stages of pretrain_gpt.py between the first and the last attend "
            "across the sequences of a pack; pipelines above 2 and virtual stages are taken only "
            "where you state them."
        )
    yield from unpriced(values)


def schedule_of_values(values: Values, seq_length: int, version: str) -> BatchSchedule | None:
    """How the batch grows; 0.20 takes no notice of ``--rampup-batch-size``."""
    stated = {STEPS: values.get(STEPS)} if release_number(version) >= (0, 18) else values
    return read_schedule(
        stated.get,
        last=values.get("global_batch_size"),
        seq_length=seq_length,
        samples=values.get("train_samples"),
        iterations=values.get("train_iters"),
        name=flag_of,
    )


def pipeline_limits(values: Values, script: str, version: str) -> Mapping[str, int]:
    """Largest pipelines that know where the sequences of a pack begin.

    Before 0.17 ``pretrain_gpt.py`` tells it to the first and to the last virtual stage alone: those
    between attend across sequences (``get_batch``, and ``get_batch_on_this_tp_rank`` of
    ``megatron/training/utils.py``).
    """
    lost = values.get("sft") and release_number(version) < (0, 17) and "mamba" not in script
    limits = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}
    return limits if lost else {}
