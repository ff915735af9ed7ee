"""Which frameworks and releases take a model: what they build, and what a command line states."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.config.space import require_buildable
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, TARGETS
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.write import model_argv
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rulebook.facts import LaunchRequest, violations
from nest_megatron.layout.rulebook.options import JOB_RULES
from nest_megatron.model.spec import TransformerSpec


def refusals(spec: TransformerSpec) -> Mapping[str, str]:
    """Why each target does not take a model, by its name; empty where it does."""
    return {name: refusal(spec, target) for name, target in TARGETS.items()}


def refusal(spec: TransformerSpec, target: Target) -> str:
    """Why a framework at a release does not take a model; empty where it does.

    Asked are what the framework builds, what Megatron-LM's command line has flags for, and the
    rules that hold for a model whatever its layout.
    """
    try:
        require_buildable(spec, target)
        if target in MEGATRON_LM:
            model_argv(spec, version=target.megatron_core)
    except UserInputError as error:
        return _words(error)
    one_gpu = LaunchRequest(
        spec=spec,
        dims=ParallelDims(),
        global_batch_size=1,
        micro_batch_size=1,
        version=target.megatron_core,
    )
    framework = target.framework.partition(" ")[0]
    rules = [rule for rule in JOB_RULES if rule.framework in ("", framework)]
    return next((_words(error) for _, error in violations(one_gpu.facts, rules)), "")


def _words(error: UserInputError) -> str:
    part = error.what.rpartition(" ")[2].removeprefix("variant.")
    return f"{part} {error.value}: {error.limit}"
