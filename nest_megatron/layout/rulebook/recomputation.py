"""Settings of recomputation, whatever the layout; what goes with overlaps is in ``execution``."""

from __future__ import annotations

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.recompute import RecomputeModule
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.rulebook.rule import Rule, violations
from nest_megatron.model.spec import TransformerSpec

_MODULES, _LEAVE_OUT = "recompute_modules", "Leave them out."
#: Modules that only Transformer Engine's layers recompute.
_OF_ENGINE = frozenset(
    {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT, RecomputeModule.MLA_UP_PROJ}
)
#: Modules whose outputs delayed scaling keeps the largest values of.
_NOT_UNDER_DELAYED = frozenset({RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM})


def _absent(spec: TransformerSpec, modules: frozenset[RecomputeModule]) -> list[str]:
    shared = bool(spec.moe_shared_expert_intermediate_size)
    there = {
        RecomputeModule.MOE: spec.is_moe,
        RecomputeModule.MOE_ACT: spec.is_moe,
        RecomputeModule.SHARED_EXPERTS: spec.is_moe and shared,
        RecomputeModule.MLA_UP_PROJ: spec.multi_latent_attention,
    }
    return sorted(module.value for module in modules if not there.get(module, True))


def _of_engine(spec: TransformerSpec, modules: frozenset[RecomputeModule]) -> list[str]:
    biased = {RecomputeModule.MLP} if spec.add_bias_linear else frozenset()
    return sorted(module.value for module in modules & (_OF_ENGINE | biased))


RECOMPUTE_RULES = (
    Rule(
        "hybrid_recompute",
        "ssm/mamba_block.py (run, silent)",
        lambda spec, recomputes_layers: not (recomputes_layers and spec.hybrid_layer_pattern),
        "recompute_granularity",
        "MambaStack of 0.16.1 recomputes no whole layers and says nothing",
        "Use selective, or Megatron-LM 0.20.",
        value=lambda: "full",
        release="0.16",
    ),
    Rule(
        "recompute_modules",
        "tc:1219, modules",
        lambda spec, modules: not (modules and _absent(spec, modules)),
        _MODULES,
        "the model has no such module",
        _LEAVE_OUT,
        value=_absent,
    ),
    Rule(
        "recompute_moe_act",
        "tc:1214",
        lambda modules, moe_grouped_gemm: (
            moe_grouped_gemm or RecomputeModule.MOE_ACT not in modules
        ),
        _MODULES,
        "it needs moe_grouped_gemm",
        _LEAVE_OUT,
        value=lambda: [RecomputeModule.MOE_ACT.value],
    ),
    Rule(
        "recompute_local",
        "tensor_parallel/random.py:592 (run)",
        lambda spec, modules, is_local: not (is_local and _of_engine(spec, modules)),
        _MODULES,
        "the local layers cannot recompute it",
        _LEAVE_OUT,
        value=_of_engine,
    ),
    Rule(
        "recompute_fp8",
        "tc:1242",
        lambda modules, precision, fp8_recipe: (
            modules.isdisjoint(_NOT_UNDER_DELAYED)
            or precision is not Precision.FP8
            or fp8_recipe != "delayed"
        ),
        _MODULES,
        "delayed scaling of fp8 cannot recompute it",
        _LEAVE_OUT,
        value=lambda modules: sorted(module.value for module in modules & _NOT_UNDER_DELAYED),
    ),
)


def allows_recompute(request: LaunchRequest) -> bool:
    """Whether Megatron accepts what a request recomputes, its execution apart."""
    return not any(violations(request.facts, RECOMPUTE_RULES))
