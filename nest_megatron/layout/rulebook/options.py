"""Options of the job that only go with some layouts: left in place, Megatron would refuse the two.

A plan prices none of them, so dropping one costs at most what the option would have gained; each is
named in the changes, with its reason.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping

from nest_megatron.cluster.records import Precision
from nest_megatron.documents import packaged
from nest_megatron.layout.cuda_graphs import Flags
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.layout.rulebook.devices import (
    AWARE,
    ELEMENTWISE_OPTIMIZERS,
    initializes_on_meta_device,
)
from nest_megatron.layout.rulebook.facts import (
    DEFAULT_VERSION,
    RELEASES,
    LaunchRequest,
    Rule,
    release_number,
    violations,
)
from nest_megatron.layout.rulebook.schedule import allows_interleaving
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Flags of activations, by name and gating; ``None`` for the one without a flag.
ACTIVATION_FLAGS = {
    ("gelu", False): None,
    ("silu", True): "swiglu",
    ("squared_relu", False): "squared_relu",
    ("quick_gelu", True): "quick_geglu",
}
#: Numbers of a job that has ``--bf16``.
_IN_BF16 = (Precision.BF16, Precision.FP8, Precision.NVFP4)
_ENGINE = "Use transformer_impl transformer_engine."


def has_activation_flag(spec: TransformerSpec) -> bool:
    """Whether Megatron-LM's command line can state the model's activation."""
    return (spec.activation, spec.gated_linear_unit) in ACTIVATION_FLAGS


def _position_types(spec: TransformerSpec, version: str) -> tuple[str, ...]:
    if spec.num_mtp_layers:
        return ("rope", "none")
    newer = ("yarn",) if release_number(version) >= (0, 18) else ()
    return ("learned_absolute", "rope", *newer, "relative", "none")


JOB_RULES = (
    Rule(
        "known_version",
        "arguments_data",
        lambda version: version in RELEASES,
        "version",
        "its flags are not recorded",
        f"Use one of {', '.join(RELEASES)}.",
        framework=MEGATRON_LM,
    ),
    Rule(
        "activation_flag",
        "arguments.py:1334-1348",
        has_activation_flag,
        "activation",
        "Megatron-LM's command line has no flag for it",
        "Launch through NeMo or Megatron-Bridge.",
        value=lambda spec: (spec.activation, spec.gated_linear_unit),
        framework=MEGATRON_LM,
    ),
    Rule(
        "variant",
        "core/models/gpt/gpt_layer_specs.py",
        lambda spec: not spec.variant.differences(),
        "variant.{field}",
        "Megatron-LM's own layers do not have it",
        "Plan for a framework that builds it.",
        value=lambda spec: next(iter(spec.variant.differences().values())),
        words={"field": lambda spec: next(iter(spec.variant.differences()))},
        framework=MEGATRON_LM,
    ),
    Rule(
        "position_type",
        "arguments.py:1231, :1645",
        lambda spec, version: spec.position_embedding_type in _position_types(spec, version),
        "position_embedding_type",
        "Megatron {version} takes {types} for this model",
        "Use rope.",
        words={"types": lambda spec, version: ", ".join(_position_types(spec, version))},
        framework=MEGATRON_LM,
    ),
    Rule(
        "sparse_attention",
        "experimental_attention_variant_module_specs.py",
        lambda spec: spec.experimental_attention_variant != "dsa",
        "experimental_attention_variant",
        "Megatron-LM builds no such layers before 0.18",
        "Use Megatron-LM 0.18.",
        until="0.17",
    ),
    Rule(
        "positions",
        "arguments.py:833",
        lambda spec: not 0 < (spec.max_position_embeddings or 0) < spec.seq_length,
        "max_position_embeddings",
        "it is at least seq_length ({seq_length})",
        "Raise it (model.max_position_embeddings={seq_length}), or shorten the sequence.",
        framework=MEGATRON_LM,
    ),
    Rule(
        "bert_layers",
        "bert_layer_specs.py",
        lambda spec: (
            spec.family is not ModelFamily.BERT
            or not (spec.num_experts or spec.num_mtp_layers or spec.multi_latent_attention)
        ),
        "family",
        "BERT's layer specification has no experts, latent attention or MTP",
        "Use family gpt.",
        value=lambda spec: spec.family.value,
    ),
    Rule(
        "grouped_gemm",
        "moe/experts.py:81",
        lambda moe_grouped_gemm, is_local: not (moe_grouped_gemm and is_local),
        "moe_grouped_gemm",
        "without Transformer Engine it needs the grouped_gemm package, in bf16",
        _ENGINE,
    ),
    Rule(
        "grouped_gemm_bf16",
        "0.15 arguments.py:877",
        lambda moe_grouped_gemm, precision: not moe_grouped_gemm or precision in _IN_BF16,
        "precision",
        "until Megatron-LM 0.15 experts in one kernel (moe_grouped_gemm) need bf16",
        "Train in bf16, or use Megatron-LM 0.16 or later.",
        reason="experts in one kernel are trained in bf16",
        until="0.15",
    ),
    Rule(
        "aware_optimizer_shards",
        "optimizer_config.py:434",
        lambda options, shards_optimizer: shards_optimizer or not options.get(AWARE),
        AWARE,
        "it needs --use-distributed-optimizer",
        "Add that flag, or drop this one.",
        value=lambda options: options[AWARE],
        until="0.19",
    ),
)

ENGINE_RULES = (
    Rule(
        "fp8_engine",
        "fp8_utils.py (run)",
        lambda precision, is_local: not (precision.is_quantized and is_local),
        "{number_format}_format",
        "only Transformer Engine computes in {precision}",
        _ENGINE,
        value=lambda precision: precision.value,
        words={"number_format": lambda precision: "fp8" if precision is Precision.FP8 else "fp4"},
    ),
)

#: Rules of options that Megatron refuses beside what a plan writes, and may take by themselves.
BESIDE_PLANS = (
    "option_fsdp_double_buffer",
    "option_hybrid_override_pattern",
    "option_init_model_with_meta_device",
    "option_moe_flex_dispatcher_backend",
    "option_moe_shared_expert_overlap",
    "option_use_cpu_initialization",
)
_INSTANCES = "num_distributed_optimizer_instances"


#: Sources of what Megatron-LM's own script checks, and nothing of megatron-core.
_OF_SCRIPT = re.compile(
    r"(0\.\d+ )?(args|training|determinism)(\.py)?[-\d:, ]+(\(run\))?|core/optimizer_param.*"
)
#: Megatron-Bridge checks some of it as well (``ConfigContainer.validate``).
_BRIDGE_TOO = f"{MEGATRON_LM}, Megatron-Bridge"


def _checked_by(source: str) -> str:
    """The only framework that checks what a source says; empty where megatron-core does."""
    return MEGATRON_LM if _OF_SCRIPT.fullmatch(source) else ""


def _option(
    what: str,
    source: str,
    holds: Callable[..., bool] | str,
    limit: str,
    *,
    id: str = "",
    framework: str = "",
    since: str = "",
    until: str = "",
    turns_off: bool = False,
) -> Rule:
    """A rule on an option by Megatron's name; of two of one option ``id`` tells the second."""
    return Rule(
        f"option_{id or what}",
        source,
        holds,
        what,
        limit,
        "Drop it, or change the layout.",
        value="option",
        option=True,
        framework=framework or _checked_by(source),
        since=since,
        until=until,
        turns_off=turns_off,
    )


OPTION_RULES = (
    *(_option(**row) for row in packaged(__package__, "layout_options.json")),
    _option(
        "inference_batch_times_seqlen_threshold",
        "args:1147",
        lambda option, is_pipelined: option < 0 or is_pipelined,
        "the layout has no pipeline",
    ),
    _option(
        "inference_cuda_graph_scope",
        "0.18 args:646",
        lambda option, execution: (
            getattr(option, "name", option) == "none" or execution.cuda_graph_impl == "local"
        ),
        "the layout has no local CUDA graphs",
    ),
    _option(
        "overlap_param_gather",
        "args:598-601",
        lambda options, shards_optimizer, overlap_grad_reduce: (
            overlap_grad_reduce and (shards_optimizer or options.get("optimizer") == "dist_muon")
        ),
        "it needs --overlap-grad-reduce and --use-distributed-optimizer",
    ),
    _option(
        "overlap_p2p_comm",
        "args:579",
        lambda pp, vpp: vpp == 1 or pp != 2,
        "virtual stages on two pipeline ranks need it",
        turns_off=True,
    ),
    _option(
        "overlap_param_gather_with_optimizer_step",
        "args:635-644",
        lambda options, is_interleaved, shards_optimizer: (
            is_interleaved and shards_optimizer and options.get("ckpt_format") == "torch"
        ),
        "it needs virtual stages, overlapped gathering of weights and --ckpt-format torch",
    ),
    _option(
        "microbatch_group_size_per_vp_stage",
        "schedules.py:995-1015 (run)",
        lambda option, pp, vpp, batch_sizes, micro_batch_size, dp: all(
            allows_interleaving(pp, vpp, size // (micro_batch_size * dp), option)
            for size in batch_sizes
        ),
        "the layout's rounds of micro batches are of another size",
    ),
    _option(
        "hierarchical_context_parallel_sizes",
        "args:405",
        lambda option, cp: math.prod(map(int, option)) == cp,
        "the layout has another context-parallel size",
        framework=_BRIDGE_TOO,
    ),
    _option(
        "cp_comm_type",
        "args:407, tc:1929",
        lambda option, spec, cp, has_command: (
            isinstance(option, str) or len(option) in (has_command, spec.num_layers)
            if cp > 1
            else "a2a+p2p" not in option
        ),
        "without context parallelism nothing goes in two levels, and with it each layer has one or "
        "all have the same",
    ),
    _option(
        "moe_expert_rank_capacity_factor",
        "0.18 tc:1521",
        lambda execution: execution.moe_flex_dispatcher_backend in ("hybridep", "ncclep"),
        "the layout sends tokens by another backend",
    ),
    *(
        _option(
            what,
            "moe/token_dispatcher.py:1346",
            lambda option, spec, experts_alone: (
                option in ("allgather", "alltoall") or not (spec.is_moe and experts_alone)
            ),
            "the flex dispatcher exchanges tokens among several ranks",
        )
        for what in (
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
            "moe_enable_deepep",
        )
    ),
    _option(
        _INSTANCES,
        "parallel_state.py:833, 0.20 layer_wise_optimizer.py:538",
        lambda option, options, spec, cp, dp, expert_replicas, shards_optimizer: (
            option <= 1
            or (
                shards_optimizer
                and options.get("optimizer", "adam") in ELEMENTWISE_OPTIMIZERS
                and dp * cp % option == 0
                and not (spec.is_moe and expert_replicas % option)
            )
        ),
        "it does not divide the replicas, or the optimizer has no instances",
    ),
    _option(
        _INSTANCES,
        "mcore_fsdp_adapter.py:206-221, megatron_fsdp.py:246",
        lambda option, uses_megatron_fsdp, one_expert_rank: (
            option <= 1 or not uses_megatron_fsdp or one_expert_rank
        ),
        "Megatron-FSDP of 0.16 has no groups of experts within an instance",
        id="instances_of_fsdp",
        until="0.16",
    ),
    *(
        _option(
            what,
            "0.19 args:694",
            lambda options, global_batch_size, micro_batch_size, world_size, tp, pp, cp: (
                (options.get("eval_global_batch_size") or global_batch_size)
                * (inside := tp * pp * (options.get("eval_context_parallel_size") or cp))
                % ((options.get("eval_micro_batch_size") or micro_batch_size) * world_size)
                == world_size % inside
                == 0
            ),
            "the replicas do not divide the batch of evaluation",
            framework=_BRIDGE_TOO,
            since="0.18",
        )
        for what in (
            "eval_global_batch_size",
            "eval_micro_batch_size",
            "eval_context_parallel_size",
        )
    ),
    _option(
        "ckpt_format",
        "args:690, :1042",
        lambda option, options, uses_megatron_fsdp, uses_torch_fsdp2, tp, has_command: (
            {
                "fsdp_dtensor": uses_megatron_fsdp,
                "torch_dcp": not has_command or (uses_torch_fsdp2 and tp == 1),
            }.get(option, not uses_megatron_fsdp)
            or not (has_command or options.get("save"))
        ),
        "the data-parallel sharding does not save that way",
        framework=_BRIDGE_TOO,
    ),
    *(
        _option(
            what,
            "args:1100",
            lambda options, shards_optimizer: (
                not (shards_optimizer and options.get("ckpt_format") == "torch")
            ),
            "replicas divide states, which --ckpt-format torch collects over Gloo",
            framework=_BRIDGE_TOO,
            turns_off=True,
        )
        for what in ("enable_gloo_process_groups", "use_gloo_process_groups")
    ),
    _option(
        "init_model_with_meta_device",
        "training.py:1266 (run)",
        lambda uses_megatron_fsdp, uses_torch_fsdp2: uses_megatron_fsdp or uses_torch_fsdp2,
        "without Megatron-FSDP weights of the meta device keep whatever memory holds",
    ),
    _option(
        "use_cpu_initialization",
        "param_and_grad_buffer.py:2198 (run)",
        lambda spec, uses_megatron_fsdp: (
            not (uses_megatron_fsdp and initializes_on_meta_device(spec))
        ),
        "Megatron-FSDP makes the weights from the meta device, and cannot make the embedding's "
        "there with it",
    ),
    _option(
        "check_weight_hash_across_dp_replicas_interval",
        "args:684",
        lambda uses_megatron_fsdp, zero: not uses_megatron_fsdp or zero is not ZeroStage.WEIGHTS,
        "no replica holds all weights",
        framework=_BRIDGE_TOO,
    ),
    _option(
        "virtual_pipeline_model_parallel_size",  # Megatron-LM's flag is another
        "0.19 tc:1973",
        lambda option, vpp, is_pipelined: option == vpp or not is_pipelined,
        "the layout of the stages has another number",
        framework="Megatron-Bridge, NeMo",
    ),
)


#: Arguments by the names of their flags, where those differ; ``no_`` turns one off.
DESTINATIONS = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "no_rope_fusion": "no_apply_rope_fusion",
    "disable_bias_linear": "no_add_bias_linear",
    "no_position_embedding": "no_add_position_embedding",
}


#: Relations of the first option of a row to the second, with which Megatron refuses it.
_RELATIONS: Mapping[str, Callable[..., object]] = {
    "beside": lambda *_: True,
    "above": operator.gt,
    "at or above": operator.ge,
    "as no multiple of": operator.mod,
}


def _stated(name: str, options: Flags) -> object:
    """An option's value; members of an enumeration, as Megatron's parser makes them, by name."""
    name = DESTINATIONS.get(name, name)
    value = options.get(f"{name}_deprecated") or options.get(
        name, options.get(name.removeprefix("no_")) is False
    )
    if isinstance(value, list):
        return [getattr(each, "name", each) for each in value]
    return getattr(value, "name", value)


def _is_met(condition: str, options: Flags) -> bool:
    name, _, values = condition.removeprefix("!").partition("=")
    value = _stated(name, options)
    words = set(map(str, value if isinstance(value, list) else [value]))
    found = not words.isdisjoint(values.split("|")) if values else bool(value)
    return found is not condition.startswith("!")


def _condition_words(condition: str, relation: str) -> str:
    name, _, values = condition.removeprefix("!").partition("=")
    flag = f"--{name.replace('_', '-')} {values.replace('|', ' or ')}".rstrip()
    return f"without {flag}" if condition.startswith("!") else f"{relation} {flag}"


def _refused_together(
    options: str,
    source: str,
    relation: str = "beside",
    unless: str = "",
    framework: str = "",
    since: str = "",
    until: str = "",
) -> Rule:
    """The rule of a row of ``refused_options.json``.

    Args:
        options: the first is refused beside the others, without those behind a ``!``; with ``=``
            where one has one of some values. What turns something off begins with ``no_`` or
            ``disable_``.
        relation: of the first to the second, where those are numbers.
        unless: the option beside which it is not, since 0.17.
        framework: the only ones that refuse it, where the source does not tell it.
    """
    framework = framework or _checked_by(source)
    option, *others = options.split()
    name = option.partition("=")[0]
    words = [_condition_words(each, relation if each == others[0] else "beside") for each in others]
    fix = "Drop one of the two" if others else "Leave it out"
    for lacking in reversed(words):
        if lacking.startswith("without"):
            fix = f"Add{lacking.removeprefix('without')}, or drop it"
    return Rule(
        re.sub(r"\W+", "_", options),
        source,
        lambda options, release: (
            not all(_is_met(each, options) for each in (option, *others))
            or not _RELATIONS[relation](*map(options.get, [name, *others][:2]))
            or (release >= (0, 17) and bool(options.get(unless)))
        ),
        name,
        f"{'{launcher}' if framework else '{core}'} refuses it {' and '.join(words)}".rstrip(),
        f"{fix}, or use a release before {since}." if since else f"{fix}.",
        value=lambda options: _stated(name, options),
        framework=framework,
        since=since,
        until=until,
    )


_ROWS = packaged(__package__, "refused_options.json")
#: Of a job by itself, whatever its layout.
COMMAND_RULES = tuple(_refused_together(**row) for row in _ROWS)
#: Options that rules read -> the field of a configuration of each.
OPTIONS = {
    name: DESTINATIONS.get(name, name).removeprefix("no_")
    for name in (
        *(rule.what for rule in OPTION_RULES),
        *(word for row in _ROWS for word in re.findall(r"(\w+)(?:=\S+)?", row["options"])),
    )
}


def fields_of_options(fields: Mapping[str, str]) -> dict[str, str]:
    """The field of each option that rules read, with the value that means it.

    >>> fields_of_options({"add_bias_linear": "model.add_bias_linear"})
    {'disable_bias_linear': 'model.add_bias_linear=False'}
    """
    return {
        name: fields[field] + "=False" * DESTINATIONS.get(name, name).startswith("no_")
        for name, field in OPTIONS.items()
        if field in fields
    }


def contradicted(
    plan: ParallelPlan, options: Flags, version: str = DEFAULT_VERSION
) -> dict[str, str]:
    """Options among the user's that the plan contradicts, with the reason for each."""
    request = LaunchRequest.of(
        plan.model,
        plan.layout,
        version=version,
        options=options,
        sharding=plan.layout.sharding,
        execution=plan.layout.execution,
        batch_schedule=plan.train.batch_schedule,
    )
    return {rule.what: found.limit for rule, found in violations(request.facts, OPTION_RULES)}
