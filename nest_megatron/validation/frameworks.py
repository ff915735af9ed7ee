"""The target of a row: its framework, at its release, on its GPU.

Rules are keyed by framework, release and GPU, never by who published a row. The first rule of
``RULES`` that matches counts; the last one matches everything. Targets that plans are made for
stand in ``cost_model/target_defaults.py``; here are other frameworks and old releases, in the same
record. ``docs/accuracy.md`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nest_megatron.cost_model.target_defaults import NEMO, TARGETS
from nest_megatron.cost_model.targets import Default, Target

#: Arguments of Megatron, or settings of the cost model, with their values.
Flags = Mapping[str, object]


class FrameworkRule(NamedTuple):
    """The target of the frameworks and GPUs that two patterns match, from a release on.

    Args:
        since: first release (year, month); a framework without a printed release is taken as new.
        splits_local_batch: a row's micro batch is what a pipeline divides over its ranks.
        balances_weights: stages hold equal weights, those of the head among them.
        flash_attention_2: attention runs on FlashAttention 2, on any GPU.
    """

    framework: str
    target: Target
    gpu: str = ""
    since: tuple[int, int] = (0, 0)
    splits_local_batch: bool = False
    balances_weights: bool = False
    flash_attention_2: bool = False

    def matches(self, framework: str, gpu: str) -> bool:
        """Whether it is for a framework, at its release, on a GPU."""
        release = release_of(framework) or _NEWEST
        named = re.search(self.framework, framework, re.IGNORECASE)
        return bool(named and re.search(self.gpu, gpu, re.IGNORECASE)) and release >= self.since

    def kernels(self, accelerator: str) -> Mapping[str, float]:
        """Fields of ``CostSettings`` for kernels that are not the fastest on a device."""
        hopper = re.match(r"H\d|GH", accelerator) is not None
        slow = self.flash_attention_2 and hopper
        return {"attention_slowdown": FLASH_ATTENTION_2_ON_HOPPER} if slow else {}


#: Time of FlashAttention 2 over that of kernels written for Hopper: where its 121 runs on H100 are
#: missed least (llm-foundry's 72, of 512 to 65,536 tokens, alone at 2.7, torchtitan's at 2.4). The
#: kernels by themselves are 1.5 to 2.0 times as slow (abstract of arXiv:2407.08608); that they run
#: 1.5 times as fast as on A100 (arXiv:2307.08691, section 4) makes it 3.2.
FLASH_ATTENTION_2_ON_HOPPER = 2.7


def _defaults(source: str, flags: Flags, gpu: str = "") -> tuple[Default, ...]:
    return tuple(
        Default(argument=argument, value=value, source=source, gpu=gpu)
        for argument, value in flags.items()
    )


def _over(target: Target, *defaults: Default, **changes: Any) -> Target:
    return replace(target, defaults=(*defaults, *target.defaults), **changes)


def _target(
    name: str,
    reason: str,
    source: str,
    flags: Flags,
    cost: Flags | None = None,
) -> Target:
    return Target(
        name=name,
        framework=name,
        reason=reason,
        fitted=name,
        defaults=_defaults(source, flags),
        cost=cost or {},
    )


#: Rank-local expert tensors, ZeRO-1 and sequence parallelism: what every framework of today sets.
_MODERN: Flags = {
    "use_distributed_optimizer": True,
    "sequence_parallel": True,
    "expert_tensor_parallel_size": 1,
}

_LEGACY = _target(
    "megatron_legacy",
    "code of 2021 and 2022: unfused attention, 16-bit gradients reduced after the backward pass, "
    "tensor-parallel traffic in the open",
    "Megatron-LM v3.0: megatron/arguments.py, megatron/model/distributed.py",
    {
        "attention_backend": "unfused",
        "use_distributed_optimizer": False,
        "sequence_parallel": False,
        "expert_tensor_parallel_size": None,
        "overlap_grad_reduce": False,
        "grad_reduce_in_bf16": True,
    },
    {"async_tensor_traffic": False, "scatter_between_stages": True},
)

_DEEPSPEED_PIPELINE = replace(
    _LEGACY,
    reason=_LEGACY.reason + "; ZeRO-1 keeps its share of the gradients in float32 too",
    cost={**_LEGACY.cost, "optimizer_bytes": 16, "keeps_stage_outputs": True},
)

_DEEPSPEED = _target(
    "deepspeed",
    "ZeRO-3 of 2021: weights gathered one by one, nothing overlapped",
    "DeepSpeed 0.3: deepspeed/runtime/zero/stage3.py",
    {
        "attention_backend": "unfused",
        "data_parallel_sharding_strategy": "optim_grads_params",
        "sequence_parallel": False,
        "expert_tensor_parallel_size": 1,
        "overlap_grad_reduce": False,
        "grad_reduce_in_bf16": True,
    },
)


def _fully_sharded(name: str, source: str, loss_bytes: int, loss_traffic_bytes: int) -> Target:
    return _target(
        name,
        "weights, gradients and states sharded over all replicas",
        source,
        {
            **_MODERN,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "grad_reduce_in_bf16": False,
            "fp8_wgrad": False,
        },
        {
            "loss_bytes": loss_bytes,
            "loss_traffic_bytes": loss_traffic_bytes,
            "optimizer_bytes": 10,  # with the weight's 2: float32 weights, and two moments
            "torch_fsdp2": True,
            "recompute_stops_early": True,
        },
    )


#: Composer's cross entropy turns logits into gradients in place (``fused_crossentropy``): it reads
#: them, then reads and writes them.
_COMPOSER = _fully_sharded(
    "composer",
    "llm-foundry 0.7: llmfoundry/models/mpt/modeling_mpt.py",
    loss_bytes=2,
    loss_traffic_bytes=6,
)
#: Logits, their float32 copy, its log-softmax and the gradient of that live at once: a cast (6
#: bytes), a log-softmax that reads twice (12), and back a gradient that is zero but for the target
#: (4), that of the log-softmax (12) and a cast (6).
_FSDP = _fully_sharded(
    "pytorch_fsdp",
    "torchtitan 0.1: torchtitan/components/loss.py",
    loss_bytes=14,
    loss_traffic_bytes=40,
)
#: With kernels that a compiler fuses.
_FSDP_COMPILED_LAYERS = replace(_FSDP, fitted="pytorch_fused")
#: Compiled, the loss keeps its 16-bit logits and makes their 16-bit gradient, nothing else: it
#: reads them twice, then reads them and writes the gradient.
_FSDP_COMPILED = replace(
    _FSDP_COMPILED_LAYERS, cost={**_FSDP.cost, "loss_bytes": 4, "loss_traffic_bytes": 8}
)
#: Weights are loaded in 16 bits, and torch's Adam keeps gradients and moments as wide.
_NARROW: Flags = {**_FSDP.cost, "gradient_bytes": 2, "optimizer_bytes": 4}
#: SFT's loss works in chunks of tokens (``loss_type="chunked_nll"``); transformers checkpoints
#: whole layers (``use_reentrant``).
_TRL = replace(
    _FSDP,
    name="trl",
    framework="TRL",
    cost={
        **_NARROW,
        "loss_chunk_tokens": 256,
        "fused_activation": False,
        "recompute_stops_early": False,
    },
)
#: ms-swift on DeepSpeed: the loss of a long sequence works in chunks (``CELOSS_PARALLEL_SIZE``).
_SWIFT = replace(
    _TRL,
    name="ms_swift",
    framework="ms-swift on DeepSpeed",
    cost={**_TRL.cost, "loss_chunk_tokens": 2048},
)
#: NeMo AutoModel: PyTorch's FSDP2 under Transformer Engine's layers, DeepEP or HybridEP.
_AUTOMODEL = _over(
    _FSDP,
    *_defaults(
        "NeMo AutoModel: examples/llm_benchmark/deepseek/*_gb200.yaml",
        {"moe_flex_dispatcher_backend": "hybridep"},
        gpu="GB",
    ),
    *_defaults(
        "NeMo AutoModel 0.2: nemo_automodel/components/moe/layers.py",
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    ),
    name="automodel",
    framework="NeMo AutoModel",
    fitted="pytorch_fused",
    # a log-softmax of 16-bit logits and its gradient (``MaskedCrossEntropy`` without an upcast)
    cost={**_NARROW, "loss_bytes": 8, "loss_traffic_bytes": 14},
)
#: Its dense models before they were compiled, whose loss is cast to float32.
_AUTOMODEL_EAGER = replace(
    _AUTOMODEL, fitted=_FSDP.fitted, cost={**_AUTOMODEL.cost, "loss_traffic_bytes": 40}
)
_JAX = _fully_sharded(
    "jax", "MaxText of 2024: MaxText/max_utils.py", loss_bytes=14, loss_traffic_bytes=28
)

#: Releases before NeMo 25.07 have no precision-aware optimizer.
_NEMO_OLD = replace(
    NEMO,
    name="nemo",
    framework="NeMo before 25.07",
    defaults=tuple(
        each for each in NEMO.defaults if each.argument != "use_precision_aware_optimizer"
    ),
)

#: NeMo 1's distributed Adam keeps of a float32 weight the 16 bits that the bf16 weight lacks
#: (nemo/collections/nlp/models/language_modeling/megatron_base_model.py ``setup_optimization``:
#: ``store_param_remainders``). NeMo 2, of which the pages from 24.09 on are, has Megatron's.
_NEMO_1 = replace(
    _NEMO_OLD,
    name="nemo_1",
    framework="NeMo 1",
    cost={**_NEMO_OLD.cost, "optimizer_bytes": 10},
)

_NANOTRON = _target(
    "nanotron",
    "plain PyTorch modules under ZeRO-1, flash attention",
    "nanotron 0.4: src/nanotron/optim/zero.py, src/nanotron/models/llama.py",
    _MODERN,
    # The 16-bit gradients of a backward pass are added to the float32 ones at its end
    # (``FP32GradientAccumulator.backward``), or stay in the buckets of PyTorch's DDP.
    {"fused_activation": False, "loss_bytes": 14, "keeps_narrow_gradients": True},
)
_INTERNEVO = _target(
    "internevo",
    "plain PyTorch modules under ZeRO-1 in 16-bit gradients, flash attention and its loss",
    "InternEvo 0.2: internlm/solver/optimizer/hybrid_zero_optim.py, internlm/model/loss.py",
    {**_MODERN, "grad_reduce_in_bf16": True},
    # A rank's share of the gradients is unscaled in float32 (``_unscale_and_clip_grads``); logits
    # are cast to float32, which flash attention's loss reads, then reads and writes.
    {
        "fused_activation": False,
        "loss_bytes": 6,
        "loss_traffic_bytes": 24,
        "optimizer_bytes": 16,
    },
)
#: Of the runs and tests that its developers publish.
MEGATRON_CORE = _over(
    TARGETS["megatron_lm_0.16"],
    *_defaults(
        "Megatron-LM README of 2024-07: weak scaling of GPT models",
        {
            "tp_comm_overlap": True,
            "moe_permute_fusion": True,
            "moe_shared_expert_overlap": True,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
    ),
    name="megatron_core",
    framework="megatron-core's developers' own runs",
    reason="user buffers, interleaved pipelines",
    fitted="megatron_core",
)


#: Transformer Engine's cross entropy.
_ENGINE_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}


def _recipes_for_experts(source: str) -> Iterator[Default]:
    """The cross entropy of the developers' recipes for expert models, and dispatchers by device."""
    yield from _defaults(source, _ENGINE_LOSS)
    for gpu, backend in (("GB[23]00", "hybridep"), ("H[12]00|B[23]00", "deepep")):
        flags = {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": backend,
            "moe_permute_fusion": True,
            "moe_router_fusion": True,
        }
        yield from _defaults(source, flags, gpu)


_MEGATRON_CORE_DEV = _over(
    MEGATRON_CORE,
    *_recipes_for_experts("Megatron-MoE-ModelZoo of 2026-05: best_practice"),
    name="megatron_core_dev",
    framework="megatron-core's developers' own runs, dev branch",
)
#: The guide prints single optimizations, the dispatcher among them, one by one.
_MEGATRON_CORE_GUIDE = _over(
    MEGATRON_CORE,
    *_defaults(
        "Megatron-LM's guide to DeepSeek-V3 on GB200, step 6",
        {**_ENGINE_LOSS, "moe_router_fusion": True},
    ),
    name="megatron_core_guide",
    framework="megatron-core's developers' own runs on GB200",
)
_MEGATRON_LM_DEV = _over(
    TARGETS["megatron_lm_0.20"],
    *_recipes_for_experts("Megatron-LM dev of 2026-08: examples/moe_recipes"),
    name="megatron_lm_dev",
    framework="Megatron-LM, dev branch",
)
#: The page's table of overlaps has runs with "zero overlap" next to those that other tables repeat.
_PAI = _over(
    TARGETS["megatron_lm_0.16"],
    *_defaults(
        "Pai-Megatron-Patch @2b201af as InternLM/xtuner ran it: docs/en/benchmark/"
        "megatron_moe_benchmark.md @79f2136",
        {
            **_ENGINE_LOSS,
            "moe_permute_fusion": True,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        },
    ),
    name="pai_megatron_patch",
    framework="Pai-Megatron-Patch",
)
_MEGATRON_FSDP = _over(
    TARGETS["megatron_lm_0.20"],
    *_defaults(
        "Megatron-LM main at 0.20: megatron/core/distributed/fsdp/src/README.md, "
        "distributed_data_parallel_config.py",
        {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "megatron_fsdp_main_grads_dtype": "auto",
        },
    ),
    name="megatron_fsdp",
    framework="Megatron-LM 0.20 with --use-megatron-fsdp",
)
_MEGATRON_FSDP_BUFFERS = _over(
    _MEGATRON_FSDP,
    *_defaults("the framework's name in the row", {"nccl_ub": True, "fsdp_double_buffer": True}),
)
#: The container of 2026 that most submissions of GPT-OSS run holds Megatron-Bridge.
_MLPERF_2026 = _over(
    TARGETS["megatron_bridge_0.4"],
    *_defaults(
        "MLPerf training v6.0: NVIDIA/benchmarks/gpt_oss_20b/implementations/nemo",
        {"cuda_graph_impl": "transformer_engine"},
    ),
    name="mlperf_2026",
    framework="MLPerf's submissions of 2026 on NeMo",
)
_OTHER = _target(
    "other",
    "the distributed optimizer with its overlaps, kernels as fast as NeMo's",
    "assumed: nothing is known of the framework",
    _MODERN,
)

#: How MLPerf's systems name the container of NVIDIA's submission, which is NeMo on Megatron.
_CONTAINER = r"nvidia release|hugectr"

#: Releases before 24.05, whose attention is cuDNN 8's.
_NEMO_CUDNN_8 = replace(_NEMO_1, name="nemo_cudnn_8", fitted="nemo_cudnn_8")

RULES: tuple[FrameworkRule, ...] = (
    FrameworkRule(r"megatron-?deepspeed", _DEEPSPEED_PIPELINE),
    FrameworkRule(r"megatron-lm(?!.*\bTE\b)", _LEGACY, gpu=r"^(V100|A100)"),
    FrameworkRule(r"^deepspeed", _DEEPSPEED),
    FrameworkRule(r"^megatron-bridge", TARGETS["megatron_bridge_0.6"], since=(26, 8)),
    FrameworkRule(r"^megatron-bridge", TARGETS["megatron_bridge_0.5"], since=(26, 6)),
    FrameworkRule(r"^megatron-bridge", TARGETS["megatron_bridge_0.4"], since=(26, 4)),
    FrameworkRule(r"^megatron-bridge", TARGETS["megatron_bridge_0.3"]),
    FrameworkRule(r"automodel.*eager", _AUTOMODEL_EAGER, splits_local_batch=True),
    FrameworkRule(r"automodel", _AUTOMODEL, splits_local_batch=True),
    FrameworkRule(r"\btrl\b", _TRL, splits_local_batch=True),
    FrameworkRule(r"ms-swift (deepspeed|zero)", _SWIFT),
    FrameworkRule(r"^nemo / megatron-core", _MLPERF_2026, since=(26, 4)),
    # MLPerf's submissions of language models run on NeMo
    FrameworkRule(rf"nemo|mlperf|{_CONTAINER}", NEMO, since=(25, 7)),
    FrameworkRule(rf"nemo|mlperf|{_CONTAINER}", _NEMO_OLD, since=(24, 9)),
    FrameworkRule(rf"nemo|mlperf|{_CONTAINER}", _NEMO_1, since=(24, 5)),
    FrameworkRule(r"nemo", _NEMO_CUDNN_8),
    FrameworkRule(rf"mlperf|{_CONTAINER}", _NEMO_OLD),
    # llm-foundry's ``attn_impl: flash``; PyTorch's ``scaled_dot_product_attention``; nanotron.
    FrameworkRule(r"composer", _COMPOSER, splits_local_batch=True, flash_attention_2=True),
    *(
        FrameworkRule(
            rf"torchtitan.*{words}", target, splits_local_batch=True, flash_attention_2=True
        )
        for words, target in (
            ("compiled layers", _FSDP_COMPILED_LAYERS),
            (r"torch\.compile", _FSDP_COMPILED),
        )
    ),
    FrameworkRule(r"^megatron-fsdp.*user buffers", _MEGATRON_FSDP_BUFFERS),
    FrameworkRule(r"^megatron-fsdp", _MEGATRON_FSDP),
    FrameworkRule(r"fsdp|torchtitan", _FSDP, splits_local_batch=True, flash_attention_2=True),
    FrameworkRule(r"maxtext|paxml", _JAX, splits_local_batch=True),
    FrameworkRule(r"nanotron", _NANOTRON, balances_weights=True, flash_attention_2=True),
    FrameworkRule(r"internevo", _INTERNEVO, flash_attention_2=True),
    FrameworkRule(r"^megatron-core (moe_)?(dev|main)", _MEGATRON_CORE_DEV),
    FrameworkRule(r"^megatron-core", _MEGATRON_CORE_GUIDE, gpu=r"^GB"),
    FrameworkRule(r"^megatron-core", MEGATRON_CORE),
    FrameworkRule(r"^megatron-lm dev", _MEGATRON_LM_DEV),
    FrameworkRule(r"pai-megatron-patch", _PAI),
    FrameworkRule(r"^megatron", TARGETS["megatron_lm_0.16"]),
    FrameworkRule("", _OTHER),
)


def rule_of(framework: str, gpu: str) -> FrameworkRule:
    """The rule for a framework on a GPU.

    >>> rule_of("NeMo 24.07", "H100-80GB").target.name
    'nemo_1'
    >>> rule_of("Megatron-Bridge/MCore 26.08 NeMo Container", "GB200").target.name
    'megatron_bridge_0.6'
    >>> rule_of("NeMo / Megatron-Core (26.04 container)", "GB300").target.name
    'mlperf_2026'
    """
    return next(rule for rule in RULES if rule.matches(framework, gpu))


#: A framework without a printed release is taken as new.
_NEWEST = (99, 0)


def release_of(framework: str) -> tuple[int, int] | None:
    """Year and month in a framework's name.

    >>> release_of("NeMo v25.02"), release_of("Megatron-Bridge")
    ((25, 2), None)
    """
    found = re.search(r"(?<!\d)(2\d)\.(0[1-9]|1[0-2])\b", framework)
    return (int(found[1]), int(found[2])) if found else None
