"""Which of Megatron's choices about speed a plan may make for a job."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterable
from pathlib import Path

from nest_megatron.cluster.records import Accelerator
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, NEMO
from nest_megatron.cost_model.target_limits import NEMO_LACKS, OF_THE_JOB
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.parallel.execution_argv import EXECUTION_ARGUMENTS
from nest_megatron.parallel.knobs import KNOBS, Package, choices_of_execution

#: Module of DeepEP whose presence tells that it has HybridEP's kernels as well. Source:
#: deepseek-ai/DeepEP, branch hybrid-ep, deep_ep/hybrid_ep_buffer.py.
_HYBRID_EP = "hybrid_ep_buffer.py"
#: Above PCIe of the fifth generation (63 GB/s), below NVLink-C2C.
_FAST_LINK = 1e11


def held_choices(
    config: PlanConfig, typed: Collection[str] = (), freed: Collection[str] = ()
) -> frozenset[str]:
    """Choices that stay as the job has them.

    Args:
        typed: Megatron's arguments that the user set.
        freed: those of them that a plan may change.

    Raises:
        UserInputError: for a name that is no choice.
    """
    names = {*choices_of_execution(), "all"}
    for name in config.search.keep:
        if name not in names:
            raise UserInputError(
                "search.keep",
                value=name,
                limit="it is no choice of docs/knobs.md",
                fix=nearest(name, names),
            )
    if "all" in config.search.keep:
        return frozenset(choices_of_execution())
    own = set(typed) - set(freed)
    stated = (name for name, flags in EXECUTION_ARGUMENTS.items() if own.intersection(flags))
    return frozenset((*config.search.keep, *stated))


def stated_packages(config: PlanConfig, installed: Iterable[str] = ()) -> frozenset[str]:
    """Packages that are known to be where the job runs.

    Args:
        installed: those that were found there.

    Raises:
        UserInputError: for a name that no choice needs.
    """
    known = [package.value for package in Package]
    for name in config.search.packages:
        if name not in known:
            raise UserInputError(
                "search.packages",
                value=name,
                limit="no choice needs such a package",
                fix=nearest(name, known),
            )
    return frozenset((*config.search.packages, *installed))


def fields_of(target: Target) -> frozenset[str] | None:
    """Fields of ``Execution`` that a job of a framework can be told; ``None`` is all.

    Of NeMo those of its performance recipes, which have ``MegatronCommOverlapCallback``.
    """
    if target in MEGATRON_LM:
        return None
    lacks = NEMO_LACKS if target is NEMO else {}
    return frozenset(knob.name for knob in KNOBS) - {*lacks, *OF_THE_JOB}


def has_fast_link(accelerator: Accelerator) -> bool:
    """Whether activations can wait on the host: over NVLink-C2C, not over PCIe."""
    return accelerator.host_bandwidth_bytes_per_s >= _FAST_LINK


def installed_packages() -> tuple[str, ...]:
    """Packages of this environment that a choice needs; nothing is imported."""
    return (*_exchanges(), *_engines())


def _exchanges() -> tuple[Package, ...]:
    found = importlib.util.find_spec(Package.DEEP_EP.value)
    if found is None:
        return ()
    folders = map(Path, found.submodule_search_locations or ())
    hybrid = any(folder.joinpath(_HYBRID_EP).exists() for folder in folders)
    return (Package.DEEP_EP, Package.HYBRID_EP) if hybrid else (Package.DEEP_EP,)


def _engines() -> tuple[Package, ...]:
    try:
        release = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return ()
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    return (Package.ENGINE_2_9,) if numbers >= [2, 9] else ()
