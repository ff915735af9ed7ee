"""What a training framework does where a row of measurements does not say.

Every rule is keyed by framework, release and GPU, never by who published a row. The first rule of
``RULES`` that matches counts; the last one matches everything. ``docs/accuracy.md`` lists them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.model.execution import (
    PLAIN,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.parallel.zero import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a framework does unless told otherwise.

    Args:
        name: for the list of assumptions, and in ``calibration/frameworks.yaml``, which holds the
            fitted fields of ``CostSettings``.
        reason: why this is assumed.
        flash_attention: fused attention that keeps no score matrix.
        zero: ZeRO stage without a word about it.
        sequence_parallel: on exactly where tensor parallelism is.
        experts_follow_tensor: expert-tensor size is the tensor size unless stated (else 1).
        keeps_dense: dense models run without recomputation unless it is stated.
        splits_local_batch: a row's micro batch is what a pipeline divides over its ranks.
        interleaves: pipelines have one layer in each virtual stage unless stated.
        execution: what carries the work out.
        cost: fields of ``CostSettings`` and of its ``traits`` that differ from their defaults.
    """

    name: str
    reason: str
    flash_attention: bool = True
    zero: ZeroStage = ZeroStage.OPTIMIZER
    sequence_parallel: bool = True
    experts_follow_tensor: bool = False
    keeps_dense: bool = False
    splits_local_batch: bool = False
    interleaves: bool = False
    execution: Execution = PLAIN
    cost: Mapping[str, object] = field(default_factory=dict)

    def settings(self, **fields: object) -> CostSettings:
        """The cost model's settings under these habits."""
        fitted = calibrated().get(self.name, {})
        return cost_settings({**self.cost, **fitted, **fields})


def cost_settings(fields: Mapping[str, object]) -> CostSettings:
    """Settings from fields of ``CostSettings`` and of ``ExecutionTraits`` together."""
    names = {field.name for field in dataclasses.fields(ExecutionTraits)}
    traits = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    return CostSettings(traits=ExecutionTraits(**traits), **others)  # type: ignore[arg-type]


@functools.cache
def calibrated() -> Mapping[str, Mapping[str, float]]:
    """Fitted settings of each framework, from the catalogue."""
    text = catalogue_root().joinpath("calibration", "frameworks.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text) or {}
    return {name: entry["values"] for name, entry in entries.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Habits of the frameworks and GPUs that two patterns match, from a release on.

    Args:
        since: first release (year, month); a framework without a printed release is taken as new.
    """

    framework: re.Pattern[str]
    gpu: re.Pattern[str]
    habits: Habits
    since: tuple[int, int] = (0, 0)


def _rule(
    framework: str, habits: Habits, *, gpu: str = "", since: tuple[int, int] = (0, 0)
) -> Rule:
    return Rule(
        framework=re.compile(framework, re.IGNORECASE),
        gpu=re.compile(gpu, re.IGNORECASE),
        habits=habits,
        since=since,
    )


_LEGACY = Habits(
    name="megatron_legacy",
    reason=(
        "code of 2021 and 2022: unfused attention, fp16 gradients reduced after the backward pass,"
        " tensor-parallel traffic in the open"
    ),
    flash_attention=False,
    zero=ZeroStage.NONE,
    sequence_parallel=False,
    experts_follow_tensor=True,
    cost={
        "dp_overlap": 0.0,
        "async_tensor_traffic": False,
        "scatter_between_stages": True,
        "gradient_bytes": 2,
    },
)

_DEEPSPEED_PIPELINE = dataclasses.replace(
    _LEGACY,
    reason=_LEGACY.reason + "; ZeRO-1 keeps its share of the gradients in float32 too",
    cost={**_LEGACY.cost, "optimizer_bytes": 16, "keeps_stage_outputs": True},
)


def _fully_sharded(name: str, loss_bytes: int) -> Habits:
    return Habits(
        name=name,
        reason="weights, gradients and states sharded over all replicas",
        zero=ZeroStage.WEIGHTS,
        splits_local_batch=True,
        cost={
            "gradient_bytes": 4,
            "loss_bytes": loss_bytes,
            "fp8_inputs": False,
            "optimizer_bytes": 10,  # with the weight's 2: float32 weights, and two moments
            "gathered_in_pipeline": True,
        },
    )


def _narrow_states(**cost: object) -> Habits:
    """Weights are loaded in 16 bits, and torch's Adam keeps gradients and moments as wide."""
    habits = _fully_sharded("pytorch_fsdp", loss_bytes=14)
    return dataclasses.replace(
        habits, cost={**habits.cost, "gradient_bytes": 2, "optimizer_bytes": 4, **cost}
    )


_RECIPES: Mapping[str, object] = {"gradient_bytes": 2, "fp8_weights": True}
_USER_BUFFERS = Execution(
    tp_comm_overlap=True, moe_permute_fusion=True, moe_shared_expert_overlap=True
)
_HYBRID_EP = Execution(
    tp_comm_overlap=True,
    moe_permute_fusion=True,
    moe_router_fusion=True,
    moe_token_dispatcher_type=TokenDispatcher.FLEX,
    moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
)
_WHOLE_STEP = dataclasses.replace(
    _HYBRID_EP,
    cuda_graph_impl=GraphImpl.FULL_ITERATION,
    overlap_moe_expert_parallel_comm=True,
    delay_wgrad_compute=True,
)

_BRIDGE = Habits(
    name="megatron_bridge",
    reason="recipes: bf16 gradients, fp8 weights, user buffers",
    keeps_dense=True,
    execution=_USER_BUFFERS,
    cost=_RECIPES,
)
_NODE_LIMITED = dataclasses.replace(
    _BRIDGE,
    reason=_BRIDGE.reason + "; HybridEP between nodes of eight",
    execution=_HYBRID_EP,
)

RULES: tuple[Rule, ...] = (
    _rule(r"megatron-?deepspeed", _DEEPSPEED_PIPELINE),
    _rule(r"megatron-lm(?!.*\bTE\b)", _LEGACY, gpu=r"^(V100|A100)"),
    _rule(
        r"^deepspeed",
        Habits(
            name="deepspeed",
            reason="ZeRO-3 of 2021: weights gathered one by one, nothing overlapped",
            flash_attention=False,
            zero=ZeroStage.WEIGHTS,
            sequence_parallel=False,
            cost={"dp_overlap": 0.0, "gradient_bytes": 2},
        ),
    ),
    _rule(
        r"^megatron-bridge",
        Habits(
            name="megatron_bridge_2026",
            reason="recipes since 26.06: HybridEP, whole steps in CUDA graphs, exchange overlapped",
            keeps_dense=True,
            execution=_WHOLE_STEP,
            cost=_RECIPES,
        ),
        since=(26, 6),
    ),
    _rule(r"^megatron-bridge", _NODE_LIMITED, gpu=r"^B[23]00", since=(26, 4)),
    _rule(r"^megatron-bridge", _BRIDGE),
    _rule(r"automodel", _narrow_states(loss_bytes=8)),
    # SFT's loss works in chunks of tokens (``loss_type="chunked_nll"``).
    _rule(r"\btrl\b", _narrow_states(loss_bytes=14, loss_chunk_tokens=256, fused_activation=False)),
    _rule(
        r"nemo|mlperf",  # MLPerf's submissions of language models run on NeMo
        Habits(
            name="nemo",
            reason="recipes: bf16 gradients, fp8 weights, user buffers, distributed optimizer",
            experts_follow_tensor=True,
            keeps_dense=True,
            interleaves=True,
            execution=_USER_BUFFERS,
            cost=_RECIPES,
        ),
    ),
    # Composer's cross entropy turns logits into gradients in place (``fused_crossentropy``).
    _rule(r"composer", _fully_sharded("composer", loss_bytes=2)),
    # Logits, their float32 copy, its log-softmax and the gradient of that live at once.
    # Compiled, the loss keeps its 16-bit logits and makes their 16-bit gradient, nothing else.
    _rule(r"torchtitan.*torch\.compile", _fully_sharded("pytorch_fsdp", loss_bytes=4)),
    _rule(r"fsdp|torchtitan", _fully_sharded("pytorch_fsdp", loss_bytes=14)),
    _rule(r"maxtext|paxml", _fully_sharded("jax", loss_bytes=14)),
    _rule(
        r"nanotron",
        Habits(
            name="nanotron",
            reason="plain PyTorch modules under ZeRO-1, flash attention",
            cost={"fused_activation": False, "loss_bytes": 14},
        ),
    ),
    _rule(
        r"^megatron-core",
        Habits(
            name="megatron_core",
            reason="its developers' own runs: user buffers, interleaved pipelines",
            interleaves=True,
            execution=_USER_BUFFERS,
        ),
    ),
    _rule(
        r"^megatron-lm",
        Habits(
            name="megatron_lm",
            reason="plain Megatron-LM with Transformer Engine, as this planner launches it",
        ),
    ),
    _rule(
        "",
        Habits(
            name="other",
            reason="the distributed optimizer with its overlaps, kernels as fast as NeMo's",
        ),
    ),
)


def habits_of(framework: str, gpu: str) -> Habits:
    """The habits of a framework on a GPU.

    >>> habits_of("NeMo 24.07", "H100-80GB").name
    'nemo'
    >>> habits_of("Megatron-Bridge/MCore 26.08 NeMo Container", "GB200").name
    'megatron_bridge_2026'
    """
    release = _release(framework)
    for rule in RULES:
        if rule.framework.search(framework) and rule.gpu.search(gpu) and release >= rule.since:
            return rule.habits
    raise AssertionError("the last rule matches everything")


def _release(framework: str) -> tuple[int, int]:
    """Year and month in a framework's name; one without them is taken as new.

    >>> _release("NeMo v25.02"), _release("Megatron-Bridge")
    ((25, 2), (99, 0))
    """
    found = re.search(r"\b\D{0,8}?(2\d)\.(0[1-9]|1[0-2])\b", framework)
    return (int(found[1]), int(found[2])) if found else (99, 0)
