"""What Megatron accepts of a recomputation setting, whatever the layout: rules in words.

What goes with CUDA graphs, overlaps and offloading is in ``execution_checks``. Source lines are
those of Megatron-LM core_v0.16.1; ``tc`` is ``megatron/core/transformer/transformer_config.py``,
"(run)" is what its own validation lets pass.
"""

from __future__ import annotations

from collections.abc import Callable

from nest_megatron.cluster.records import Precision
from nest_megatron.parallel.launch_rule import Rule, Violation, violations
from nest_megatron.parallel.recompute import RecomputeModule
from nest_megatron.parallel.rules import LaunchRequest, cuts_anywhere

_NO_MODULES: frozenset[RecomputeModule] = frozenset()
_OF_EXPERTS = frozenset(
    {RecomputeModule.MOE, RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS}
)
#: Modules that only Transformer Engine's layers recompute.
_OF_ENGINE = frozenset(
    {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT, RecomputeModule.MLA_UP_PROJ}
)
#: Modules whose outputs delayed scaling keeps the largest values of.
_NOT_UNDER_DELAYED = frozenset({RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM})


def allows_recompute(request: LaunchRequest) -> bool:
    """Whether Megatron accepts what a request recomputes, its execution apart."""
    return not any(violations(request, RECOMPUTE_RULES))


def _absent(request: LaunchRequest) -> frozenset[RecomputeModule]:
    spec = request.spec
    absent = _NO_MODULES if spec.is_moe else _OF_EXPERTS
    if not spec.moe_shared_expert_intermediate_size:
        absent |= {RecomputeModule.SHARED_EXPERTS}
    return absent if spec.multi_latent_attention else absent | {RecomputeModule.MLA_UP_PROJ}


def _without_grouped_gemm(request: LaunchRequest) -> frozenset[RecomputeModule]:
    return _NO_MODULES if request.moe_grouped_gemm else frozenset({RecomputeModule.MOE_ACT})


def _not_local(request: LaunchRequest) -> frozenset[RecomputeModule]:
    if request.transformer_impl != "local":
        return _NO_MODULES
    return _OF_ENGINE | ({RecomputeModule.MLP} if request.spec.add_bias_linear else _NO_MODULES)


def _not_in_fp8(request: LaunchRequest) -> frozenset[RecomputeModule]:
    delayed = request.precision is Precision.FP8 and request.fp8_recipe == "delayed"
    return _NOT_UNDER_DELAYED if delayed else _NO_MODULES


def _modules_rule(
    name: str,
    source: str,
    forbidden: Callable[[LaunchRequest], frozenset[RecomputeModule]],
    limit: str,
) -> Rule:
    """A rule that forbids some modules."""

    def check(request: LaunchRequest) -> Violation | None:
        modules = request.recompute.modules
        found = sorted(set(modules) & forbidden(request)) if modules else ()
        if not found:
            return None
        names = [module.value for module in found]
        return Violation(what="recompute_modules", value=names, limit=limit, fix="Leave them out.")

    return Rule(name=name, source=source, check=check)


def _hybrid(request: LaunchRequest) -> Violation | None:
    if request.recompute.method is None or cuts_anywhere(request.spec, request.version):
        return None
    return Violation(
        what="recompute_granularity",
        value="full",
        limit="MambaStack of 0.16.1 recomputes no whole layers and says nothing",
        fix="Use selective, or Megatron-LM 0.20.",
    )


RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(name="hybrid_recompute", source="ssm/mamba_block.py (run, silent)", check=_hybrid),
    _modules_rule("recompute_modules", "tc:1219, modules", _absent, "the model has no such module"),
    _modules_rule(
        "recompute_moe_act", "tc:1214", _without_grouped_gemm, "it needs moe_grouped_gemm"
    ),
    _modules_rule(
        "recompute_local",
        "tensor_parallel/random.py:592 (run)",
        _not_local,
        "the local layers cannot recompute it",
    ),
    _modules_rule(
        "recompute_fp8", "tc:1242", _not_in_fp8, "delayed scaling of fp8 cannot recompute it"
    ),
)
