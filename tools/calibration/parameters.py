"""Which constants of the cost model are fitted, from which rows, within which bounds.

A parameter belongs to a *generation* of devices (all A100s share theirs) or to a *framework*
(``Target.fitted``); none belongs to a row, a model or a source. Each has bounds that physics sets
and a prior from what was measured on its own, whose width says how far the rows may pull it away.
Where the rows gain nothing by pulling, it stays at its prior (``AT_PRIOR``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Accelerator, Cluster, Precision
from nest_megatron.cost_model.targets import EXECUTION
from nest_megatron.validation.job import RowJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One constant to fit.

    Args:
        owner: a generation of devices, or ``Target.fitted`` of a framework.
        name: field of ``Accelerator`` or of ``CostSettings``; ``gemm_efficiency`` with its format.
        prior: what separate measurements or a data sheet say.
        width: how far from the prior counts as one standard error.
        low, high: bounds.
    """

    owner: str
    name: str
    prior: float
    width: float
    low: float
    high: float

    @property
    def key(self) -> str:
        """Its name in tables and files."""
        return f"{self.owner}.{self.name}"

    def bounded(self, value: float) -> float:
        """A value, or the bound that it is beyond."""
        return min(max(value, self.low), self.high)


def _parameter(
    owner: str, name: str, prior: float, width: float, low: float, high: float
) -> Parameter:
    return Parameter(owner=owner, name=name, prior=prior, width=width, low=low, high=high)


def _rates(
    generation: str, gemm: tuple[float, float, float], fp8: float | None
) -> Iterator[Parameter]:
    """What one generation reaches of its peaks, which depends on its power.

    Args:
        gemm: prior of 16-bit GEMMs, and its bounds.
        fp8: prior of 8-bit GEMMs, if the generation has them.
    """
    prior, low, high = gemm
    yield _parameter(generation, "gemm_efficiency.bf16", prior, 0.06, low, high)
    if fp8 is not None:
        yield _parameter(generation, "gemm_efficiency.fp8", fp8, 0.02, 0.35, 0.85)


def _kernels(
    generation: str, memory: float, floor: float, attention: float, *, experts: bool = False
) -> Iterator[Parameter]:
    """What depends on the kernels and the kind of memory, which several generations share.

    Args:
        experts: models with experts were published.
    """
    yield _parameter(generation, "memory_efficiency", memory, 0.06, 0.5, 1.0)
    yield _parameter(generation, "kernel_floor_s", floor, 0.5 * floor, 1e-6, 4e-5)
    yield _parameter(generation, "attention_efficiency", attention, 0.1, 0.2, 0.95)
    if experts:
        yield _parameter(generation, "grouped_gemm_ramp_rows", 50.0, 200.0, 0.0, 4000.0)


#: Frameworks whose kernels differ from those of NeMo, which is taken as 1: prior and width. Those
#: that run Megatron's kernels may differ little.
_SLOWDOWNS = (
    ("megatron_core", 1.0, 0.05),
    ("megatron_lm", 1.0, 0.05),
    ("megatron_bridge", 1.0, 0.05),
    ("megatron_bridge_0.5", 1.0, 0.05),
    ("composer", 1.1, 0.15),
    ("pytorch_fsdp", 1.1, 0.15),
    ("pytorch_fused", 1.0, 0.15),
    ("internevo", 1.2, 0.15),
)

#: Frameworks that train with Megatron's loop; the time of a step that nothing hides is theirs:
#: gradient norm and overflow check, the first kernels of an empty queue, losses, logging, data.
_MEGATRON = ("nemo", "megatron_lm", "megatron_core", "megatron_bridge", "megatron_bridge_0.5")

#: What switches of ``Execution`` do, whichever framework sets them. Priors: user buffers pipeline
#: all but a GEMM's first and last part; parts of an all-to-all are of unequal size in training;
#: DeepEP and HybridEP are taken as one and a half times as fast as NCCL's all-to-all, an estimate;
#: fp8 has twice the peak of 16 bits in attention.
_MECHANISMS = (
    ("tp_overlap", 0.7, 0.15, 0.0, 1.0),
    ("ep_overlap", 0.85, 0.1, 0.0, 1.0),
    ("alltoall_slowdown", 1.15, 0.05, 0.5, 4.0),
    ("flex_slowdown", 0.65, 0.05, 0.4, 3.0),
    ("count_sync_launches", 8.0, 4.0, 0.0, 200.0),
    ("fp8_attention_speedup", 1.4, 0.2, 1.0, 2.0),
)

#: Priors: kernels of truth/kernel_efficiency.csv and best GEMMs of truth/hardware.csv.
CONSTANTS: tuple[Parameter, ...] = (
    *_rates("volta", (0.65, 0.35, 0.9), None),
    *_kernels("volta", 0.85, 5e-6, 0.4),
    *_rates("ampere", (0.8, 0.5, 0.88), None),
    *_kernels("ampere", 0.86, 5e-6, 0.5),
    *_rates("hopper", (0.72, 0.5, 0.81), 0.65),
    *_kernels("hopper", 0.91, 4e-6, 0.65, experts=True),
    *_rates("b200", (0.55, 0.4, 0.79), 0.6),
    *_rates("gb200", (0.6, 0.4, 0.79), 0.6),
    *_rates("blackwell_ultra", (0.65, 0.4, 0.79), 0.65),
    *_kernels("blackwell", 0.8, 4e-6, 0.6, experts=True),
    *(_parameter(host, "host_kernel_s", 3e-5, 1e-5, 1e-6, 1e-4) for host in ("x86", "grace")),
    _parameter("triton", "scan_share", 1.0, 0.5, 0.02, 1.0),
    *(_parameter(EXECUTION, *each) for each in _MECHANISMS),
    _parameter("megatron_legacy", "host_kernel_s", 4e-5, 3e-5, 0.0, 2e-4),
    _parameter("nemo_cudnn_8", "attention_slowdown", 1.4, 0.2, 0.0, 2.5),
    *(_parameter(name, "compute_slowdown", at, std, 0.8, 2.5) for name, at, std in _SLOWDOWNS),
    *(_parameter(name, "iteration_floor_s", 0.015, 0.01, 0.0, 0.1) for name in _MEGATRON),
    _parameter("deepspeed", "dp_slowdown", 4.0, 3.0, 1.0, 20.0),
)

#: Those without which a fit loses less than 0.1 points of the runs that they act on, the one that
#: loses least taken out first. One more loses as little: without A100's share of the memory's
#: bandwidth the runs of Megatron's papers are missed by more than their goal (``tests/published``).
_NOT_FITTED = frozenset(
    {
        "volta.memory_efficiency",
        "volta.kernel_floor_s",
        "volta.attention_efficiency",
        "ampere.kernel_floor_s",
        "hopper.kernel_floor_s",
        "hopper.gemm_efficiency.bf16",
        "hopper.gemm_efficiency.fp8",
        "hopper.attention_efficiency",
        "gb200.gemm_efficiency.bf16",
        "blackwell_ultra.gemm_efficiency.bf16",
        "blackwell.kernel_floor_s",
        "blackwell.attention_efficiency",
        "blackwell.grouped_gemm_ramp_rows",
        "x86.host_kernel_s",
        "execution.ep_overlap",
        "execution.flex_slowdown",
        "execution.count_sync_launches",
        "execution.fp8_attention_speedup",
        "megatron_bridge_0.5.compute_slowdown",
        "nemo.iteration_floor_s",
        "megatron_lm.iteration_floor_s",
        "megatron_core.iteration_floor_s",
        "megatron_bridge.iteration_floor_s",
        "megatron_bridge_0.5.iteration_floor_s",
    }
)
#: What they are, by parameter key.
AT_PRIOR: Mapping[str, float] = {p.key: p.prior for p in CONSTANTS if p.key in _NOT_FITTED}
#: Those that are fitted.
PARAMETERS = tuple(p for p in CONSTANTS if p.key not in _NOT_FITTED)
#: What they belong to.
OWNERS = frozenset(parameter.owner for parameter in PARAMETERS)


#: Generations of devices, those on which scans were measured (kernels in Triton), and kinds of
#: hosts, by the first word of the accelerator's name.
GENERATIONS = {
    "volta": r"^V100",
    "ampere": r"^A[18]00",
    "hopper": r"^(H100|H200|H800|GH200)",
    "b200": r"^B200",
    "gb200": r"^GB200",
    "blackwell_ultra": r"^(GB300|B300)",
    "blackwell": r"^G?B[23]00",
    "triton": r"^(H[128]00|GH200|G?B[23]00)",
    "x86": r"^(H[128]00|B[23]00)",
    "grace": r"^G[BH]",
}


def generations_of(accelerator: str) -> tuple[str, ...]:
    """The generations that a device belongs to, by its name; none for what is not fitted.

    >>> generations_of("GB200-NVL72-186GB"), generations_of("MI300X")
    (('gb200', 'blackwell', 'grace'), ())
    """
    return tuple(name for name, start in GENERATIONS.items() if re.match(start, accelerator))


#: Values by parameter key.
Values = Mapping[str, float]


def with_values(job: RowJob, values: Values, clusters: dict[int, Cluster]) -> RowJob:
    """A job under other constants; ``clusters``: the changed ones by the identity of the old."""
    cluster = clusters.get(id(job.cluster))
    if cluster is None:
        device = device_values(job.cluster.accelerator, values)
        cluster = dataclasses.replace(job.cluster, accelerator=device)
        clusters[id(job.cluster)] = cluster
    fields: dict[str, Any] = {**_of(EXECUTION, values), **_of(job.target.fitted, values)}
    return dataclasses.replace(
        job, cluster=cluster, settings=dataclasses.replace(job.settings, **fields)
    )


def device_values(accelerator: Accelerator, values: Values) -> Accelerator:
    """A device under other constants of its generations."""
    fields: dict[str, object] = {}
    for generation in generations_of(accelerator.name):
        fields |= _of(generation, values)
    shares = dict(accelerator.gemm_efficiency)
    for name in [name for name in fields if name.startswith("gemm_efficiency.")]:
        share = fields.pop(name)
        for precision in _FORMATS[name]:
            if precision in shares:
                shares[precision] = share  # type: ignore[assignment]
    return dataclasses.replace(accelerator, gemm_efficiency=shares, **fields)  # type: ignore[arg-type]


_FORMATS = {
    "gemm_efficiency.bf16": (Precision.BF16, Precision.FP16),
    "gemm_efficiency.fp8": (Precision.FP8,),
}


def _of(owner: str, values: Values) -> dict[str, float]:
    start = f"{owner}."
    return {key.removeprefix(start): v for key, v in values.items() if key.startswith(start)}


@dataclass(frozen=True, slots=True)
class LeftOutConstants:
    """Jobs under the constants of a fit without their source, so that no figure was fitted."""

    by_source: Mapping[str, Values]
    _clusters: dict[str, dict[int, Cluster]] = field(default_factory=dict)
    _known: list[Cluster] = field(default_factory=list)  # keeps them, and so their identity

    def __call__(self, source: str, job: RowJob) -> RowJob:
        """A job of a source; as it is where the source was not fitted."""
        values = self.by_source.get(source)
        if not values:
            return job
        clusters = self._clusters.setdefault(source, {})
        if id(job.cluster) not in clusters:
            self._known.append(job.cluster)
        return with_values(job, values, clusters)


def shipped_left_out() -> LeftOutConstants:
    """The catalogue's (``calibration/left_out.yaml``)."""
    return LeftOutConstants(catalogue_entry("calibration", "left_out"))
