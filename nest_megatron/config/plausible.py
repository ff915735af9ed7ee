"""Numbers that no machine and no model has: mostly a wrong unit, seen before anything is priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError, require_at_least, typed_setting
from nest_megatron.model.spec import TransformerSpec

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What a number can be.

    Args:
        usual: factor of the unit that people write instead, to guess what was meant: a number below
            ``least`` is multiplied by it, one above ``most`` divided.
        usual_unit: that unit, as it is typed behind a number.
    """

    least: float
    most: float
    unit: str = ""
    usual: float = 1.0
    usual_unit: str = ""

    def shown(self, value: float) -> str:
        """A value in the unit that people write, without it."""
        return f"{value * self.usual if self.unit == 's' else value / self.usual:g}"


#: The least of what is counted: none, or fewer, are not implausible but wrong.
_COUNT = 1

# An order of magnitude or two beyond the fastest and the slowest parts that are sold.
_NUM_GPUS = Range(least=_COUNT, most=1e6)
_LEVEL = {
    "bandwidth_bytes_per_s": Range(
        least=1e8, most=1e14, unit="bytes/s", usual=_GB, usual_unit="GB/s"
    ),
    "latency_s": Range(least=0, most=0.01, unit="s", usual=1e6, usual_unit="us"),
    "startup_s": Range(least=0, most=0.1, unit="s", usual=1e6, usual_unit="us"),
    "ramp": Range(least=0, most=1e3),
}
_ACCELERATOR = {
    "memory_bytes": Range(least=2**28, most=2**45, unit="bytes", usual=2**30, usual_unit="GiB"),
    "memory_bandwidth_bytes_per_s": Range(
        least=1e9, most=1e15, unit="bytes/s", usual=_GB, usual_unit="GB/s"
    ),
    "kernel_floor_s": Range(least=0, most=0.01, unit="s", usual=1e6, usual_unit="us"),
}
_FLOPS = Range(least=1e9, most=1e18, unit="FLOP/s", usual=1e12, usual_unit="TFLOP/s")
_MODEL = {
    "hidden_size": Range(least=_COUNT, most=1e6),
    "ffn_hidden_size": Range(least=_COUNT, most=1e7),
    "num_attention_heads": Range(least=_COUNT, most=1e5),
    "kv_channels": Range(least=_COUNT, most=1e5),
    "seq_length": Range(least=_COUNT, most=1e8),
    "vocab_size": Range(least=_COUNT, most=1e8),
    "num_experts": Range(least=_COUNT, most=1e5),
}
_BATCH = Range(least=_COUNT, most=1e8)


def require_plausible(
    spec: TransformerSpec | None, cluster: Cluster | None, global_batch_size: int | None = None
) -> None:
    """Refuse a job with a number beyond everything that exists, naming what was probably meant."""
    for what, value, allowed in _numbers(spec, cluster, global_batch_size):
        if allowed.least <= value <= allowed.most:
            continue
        if allowed.least == _COUNT:
            require_at_least(what, value, _COUNT, "Give a whole number.")
        meant = value * allowed.usual if value < allowed.least else value / allowed.usual
        is_likely = allowed.usual != 1.0 and allowed.least <= meant <= allowed.most
        unit = allowed.usual_unit
        guess = f"Did you mean {allowed.shown(meant)}{unit}? " if is_likely else ""
        least, most = allowed.shown(allowed.least), allowed.shown(allowed.most)
        limit = f"it is not plausible: from {least} to {most} {unit or allowed.unit}"
        fix = f"{guess}If it is meant so, add {typed_setting('checks.plausibility')}=off."
        raise UserInputError(what, value=value, limit=limit.rstrip(), fix=fix)


def _numbers(
    spec: TransformerSpec | None, cluster: Cluster | None, batch: int | None
) -> Iterator[tuple[str, float, Range]]:
    for name, allowed in _MODEL.items():
        value = getattr(spec, name, None)
        if value is not None:
            yield f"model.{name}", value, allowed
    if batch is not None:
        yield "train.global_batch_size", batch, _BATCH
    if cluster is None:
        return
    yield "cluster.num_gpus", cluster.num_gpus, _NUM_GPUS
    for index, level in enumerate(cluster.levels):
        for name, allowed in _LEVEL.items():
            yield f"cluster.levels.{index}.{name}", getattr(level, name), allowed
    for name, allowed in _ACCELERATOR.items():
        yield f"cluster.accelerator.{name}", getattr(cluster.accelerator, name), allowed
    for precision, flops in cluster.accelerator.peak_flops_per_s.items():
        yield f"cluster.accelerator.peak_flops_per_s.{precision}", flops, _FLOPS
