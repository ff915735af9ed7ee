"""The framework and release that a job runs on: what it sets unasked, and how fast its kernels are.

The job's own flags over the framework's defaults (``cost_model/targets.toml``), with the
constants that were fitted to measured runs of it (``calibration/frameworks.yaml``), give the cost
model's settings of plans, estimates and the scores of ``validate`` alike.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_of, execution_traits
from nest_megatron.cost_model.formats import fp8_layouts
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.layout.cuda_graphs import Flags
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

#: Entry of ``calibration/frameworks.yaml`` for what switches of ``Execution`` do in all of them.
EXECUTION = "execution"

_NO_FLAGS: Flags = MappingProxyType({})


@frozen
class Default:
    """What a framework sets where a job does not say: an argument of ``targets.toml``.

    Args:
        source: the file of the framework, at a release, that sets it.
        value: ``None`` where Megatron's own holds.
        gpu: pattern that the accelerator's name begins with.
        precision, experts, mamba: of the jobs that it is for, with or without such layers;
            ``None`` is all.
        also: arguments that it brings along, by name.
    """

    argument: str
    source: str
    value: object
    gpu: str = ""
    precision: str | None = None
    experts: bool | None = None
    mamba: bool | None = None
    also: Mapping[str, Sequence[str]] = field(default_factory=dict)


def _holds(
    default: Default, accelerator: str, precision: Precision, spec: TransformerSpec | None
) -> bool:
    """Whether a job on such a device, in such a format, of such a model is given a default."""
    experts = spec is not None and spec.is_moe
    mamba = spec is not None and "M" in spec.hybrid_layer_pattern
    return (
        re.match(default.gpu, accelerator, re.IGNORECASE) is not None
        and default.precision in (None, precision)
        and default.experts in (None, experts)
        and default.mamba in (None, mamba)
    )


def default_words(default: Default) -> str:
    """A default as a list shows it.

    >>> default_words(Default(argument="fp8_recipe", value="mxfp8", source="", gpu="B200"))
    'fp8_recipe mxfp8 (B200)'
    """
    value: Any = default.value
    value = {True: "on", False: "off", None: "as Megatron"}.get(value, value)
    also = "".join(f" with {k} {','.join(map(str, v))}" for k, v in default.also.items())
    kinds = {"experts": default.experts, "Mamba layers": default.mamba}
    parts = [f"{'with' if v else 'without'} {k}" for k, v in kinds.items() if v is not None]
    when = ", ".join(filter(None, (default.gpu, default.precision, *parts)))
    return f"{default.argument} {value}{also}" + (f" ({when})" if when else "")


@frozen
class Target:
    """A framework at a release.

    Args:
        framework: in words, with its release.
        reason: what marks it, for lists.
        fitted: its entry in ``calibration/frameworks.yaml``, whose values are fields of
            ``CostSettings``; one that is not there has the cost model's own.
        defaults: the first that holds counts.
        megatron_core: the release whose rules it has.
        packages: releases of what its container holds, where they are published.
        builds: fields of ``ModelVariant`` that its own models have, and ``vision``.
        cost: fields of ``CostSettings`` and ``ExecutionTraits`` that no argument of Megatron says.
    """

    name: str
    framework: str
    reason: str
    fitted: str
    defaults: tuple[Default, ...] = ()
    megatron_core: str = DEFAULT_VERSION
    builds: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    cost: Mapping[str, object] = field(default_factory=dict)

    def flags(
        self,
        accelerator: str,
        precision: Precision,
        said: Flags = _NO_FLAGS,
        spec: TransformerSpec | None = None,
    ) -> dict[str, Any]:
        """The arguments of a job that says some of them itself, by Megatron's names.

        What comes along with a default does not where the job has said otherwise.
        """
        found = {name: value for name, value in said.items() if value is not None}
        for default in self.defaults:
            name = default.argument
            if name not in found and _holds(default, accelerator, precision, spec):
                found = {**default.also, **found, name: default.value}
        return found

    def settings(
        self,
        accelerator: str,
        precision: Precision,
        flags: Flags = _NO_FLAGS,
        spec: TransformerSpec | None = None,
        **fields: object,
    ) -> CostSettings:
        """The cost model's settings of a job that runs on it.

        ``flags`` are what the job itself says, by Megatron's names; ``fields`` of ``CostSettings``
        and ``ExecutionTraits`` count over everything else.
        """
        both = self.flags(accelerator, precision, flags, spec)
        fields = {**fitted_values(EXECUTION), **self.cost, **fitted_values(self.fitted), **fields}
        names = {each.name for each in dataclasses.fields(ExecutionTraits)}
        of_traits: dict[str, Any] = {k: v for k, v in fields.items() if k in names}
        read = execution_traits(both, precision)
        of_traits.setdefault("fp8_weight_copies", fp8_layouts(accelerator, read.fp8_recipe))
        traits = dataclasses.replace(read, **of_traits)
        others: dict[str, Any] = {"optimizer_bytes_per_parameter": traits.optimizer_traffic_bytes}
        if not both.get("overlap_grad_reduce", True):
            others["dp_overlap"] = 0.0
        others |= {k: v for k, v in fields.items() if k not in names}
        return CostSettings(target=self.name, precision=precision, traits=traits, **others)

    def execution(
        self,
        accelerator: str,
        precision: Precision,
        flags: Flags = _NO_FLAGS,
        spec: TransformerSpec | None = None,
    ) -> Execution:
        """How a job that runs on it carries its layers out; arguments as of ``settings``."""
        return execution_of(self.flags(accelerator, precision, flags, spec))


def fitted_values(entry: str) -> Mapping[str, float]:
    """Constants that were fitted to runs of a framework, by fields of ``CostSettings``."""
    return _calibration().get(entry, {})


@functools.cache
def _calibration() -> Mapping[str, Mapping[str, float]]:
    entries = catalogue_entry("calibration", "frameworks")
    return {name: entry["values"] for name, entry in entries.items()}
