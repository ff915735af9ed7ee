"""What divides states among the replicas, and the optimizers that run under it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.layout.rulebook.rule import Rule
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.spec import ModelFamily, TransformerSpec

_STRATEGY = "data_parallel_sharding_strategy"
#: Optimizers that keep state by element; Muon, SOAP and Lion are Megatron's emerging ones.
ELEMENTWISE_OPTIMIZERS = ("adam", "sgd")


#: Options of the optimizer: the switch that others need, and number formats of its states.
AWARE = "use_precision_aware_optimizer"
STATE_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_OFFLOADS = "optimizer_cpu_offload"


def _narrow_states(options: Mapping[str, Any]) -> dict[str, object]:
    """Options that need the optimizer to be aware of precision."""
    narrow = {name: options.get(name) or "fp32" for name in STATE_FORMATS}
    found = {name: word for name, word in narrow.items() if word != "fp32"}
    return {**found, **({_OFFLOADS: True} if options.get(_OFFLOADS) else {})}


def initializes_on_meta_device(spec: TransformerSpec) -> bool:
    """``--init-model-with-meta-device`` gives every weight the values that the model asks for.

    ``reset_parameters`` of ``torch.nn.Embedding`` (learned positions, BERT's token types) draws
    with a deviation of 1 instead: on gloo, a first step's gradient norm fell from 1.636 to 0.343.
    """
    learned = spec.position_embedding_type == "learned_absolute"
    return not learned and spec.family is ModelFamily.GPT


def overlaps_gradients(optimizer: str, version: str) -> bool:
    """Before 0.18 Muon's gradients are reduced after the backward pass (0.16.1 args:1181)."""
    return optimizer in ELEMENTWISE_OPTIMIZERS or release_number(version) >= (0, 18)


def allows_optimizer(optimizer: str, zero: ZeroStage, version: str) -> bool:
    """Emerging optimizers take whole matrices: no FSDP, before 0.18 no distributed optimizer.

    Source: 0.16.1 args:1184-1186; 0.20 args:1144, :1739.
    """
    if optimizer in ELEMENTWISE_OPTIMIZERS:
        return True
    before = release_number(version) < (0, 18)
    return zero < (ZeroStage.OPTIMIZER if before else ZeroStage.GRADIENTS)


SHARDING_RULES = (
    Rule(
        "encoder_zero",
        "fsdp units are TransformerLayers; an encoder's are not planned",
        lambda spec, is_fsdp: not is_fsdp or spec.vision is None,
        _STRATEGY,
        "a model with an encoder of images is not planned with FSDP",
        "Use the distributed optimizer.",
        value="zero_name",
    ),
    Rule(
        "fsdp_no_pipeline",
        "mcore_fsdp_adapter.py:369 (run), args:606",
        lambda is_fsdp, sharding, pp: (
            pp == 1 or not (is_fsdp or sharding not in (None, DataParallelSharding.DDP))
        ),
        _STRATEGY,
        "the device mesh of FSDP has no pipeline dimension",
        "Use pipeline_model_parallel_size 1, or the distributed optimizer.",
        value="zero_name",
    ),
    Rule(
        "fsdp_experts",
        "0.15 megatron_fsdp.py:238 (run)",
        lambda is_fsdp, uses_torch_fsdp2, ep: not is_fsdp or uses_torch_fsdp2 or ep == 1,
        _STRATEGY,
        "Megatron-FSDP of 0.15 asks for a group of experts that it does not have",
        "Use expert_model_parallel_size 1, the distributed optimizer, or Megatron-LM 0.16.",
        value="zero_name",
        until="0.15",
    ),
    Rule(
        "fsdp_gradients_in_bf16",
        "0.15 param_and_grad_buffer.py:2895 (run)",
        lambda is_fsdp, uses_torch_fsdp2, gradient_bytes: (
            not is_fsdp or uses_torch_fsdp2 or gradient_bytes > 2
        ),
        _STRATEGY,
        "Megatron-FSDP of 0.15 scales 16-bit gradients in another buffer than it reduces: losses "
        "are wrong, without a word",
        "Leave grad_reduce_in_bf16 out, use the distributed optimizer, or Megatron-LM 0.16.",
        value="zero_name",
        until="0.15",
    ),
    Rule(
        "fsdp_meta_device",
        "training.py:1258, param_and_grad_buffer.py:2221 (run)",
        lambda spec, is_fsdp, sharding: (
            not is_fsdp or sharding is not None or initializes_on_meta_device(spec)
        ),
        _STRATEGY,
        "Megatron-FSDP needs --init-model-with-meta-device, or every GPU first holds the whole "
        "model; learned positions and token types would then start with a deviation of 1",
        "Use rotary positions (rope), or parallel.zero_stage=1.",
        value="zero_name",
    ),
    Rule(
        "optimizer_zero",
        "args:1184-1186",
        allows_optimizer,
        "optimizer",
        "Megatron-LM {version} does not divide its state (ZeRO-{zero:d})",
        "Use parallel.zero_stage=0, or adam.",
    ),
)

OPTIMIZER_RULES = (
    Rule(
        "fp8_offload",
        "args:1190, :1195 (0.20 :1884, :1889)",
        lambda options: (
            not (options.get(_OFFLOADS) and options.get("fp8_param_gather"))
            or options.get("fp8_recipe", "delayed") == "delayed"
        ),
        "fp8_recipe",
        "with --fp8-param-gather Megatron-LM {version} offloads the optimizer under delayed "
        "scaling alone",
        "Use --fp8-recipe delayed, or drop --optimizer-cpu-offload.",
        value=lambda options: options["fp8_recipe"],
    ),
    Rule(
        "precision_aware_optimizer",
        "optimizer_config.py:416 (0.20 :470)",
        lambda options: options.get(AWARE) or not _narrow_states(options),
        "{field}",
        "Megatron-LM {version} refuses it without --use-precision-aware-optimizer",
        "Add --use-precision-aware-optimizer and --use-distributed-optimizer, or drop it.",
        value=lambda options: next(iter(_narrow_states(options).values())),
        words={"field": lambda options: next(iter(_narrow_states(options)))},
    ),
)
