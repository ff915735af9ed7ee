"""The model and the cluster that settings name, and numbers that none has: mostly a wrong unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Cluster, cluster_from_mapping
from nest_megatron.config.compose import Settings, catalogue_cluster, compose
from nest_megatron.config.overrides import check_choice, choice, is_path, parse
from nest_megatron.config.schema import stated_values
from nest_megatron.errors import UserInputError, require_at_least, typed_setting
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.encoder import Adapters, PeftScheme
from nest_megatron.model.spec import TransformerSpec


def named_model(name: str) -> tuple[TransformerSpec, tuple[str, ...]]:
    """A model by its name or its file, and what was not read of the file.

    Raises:
        UserInputError: if there is none, or it is wrong.
    """
    if is_path(name):
        settings = compose(parse([f"model={name}"]))
        return read_spec(settings), settings.notes
    check_choice("model", name, None)
    return spec_from_mapping(catalogue_entry("model", name)), ()


def named_cluster(name: str) -> Cluster:
    """A cluster by its name or its file, at the size that its description gives; errors alike."""
    if is_path(name):
        return read_cluster(compose(parse([f"cluster={name}"])))
    check_choice("cluster", name, None)
    return catalogue_cluster(name)


def read_spec(settings: Settings) -> TransformerSpec:
    """The model, at the sequence length that was asked for; ``UserInputError`` if there is none."""
    if settings.model is None:
        limit = "no model is given"
        fix = (
            "Add for example model=llama3_70b (`nest-megatron models` lists them); plan, "
            "estimate, tune and whatif read your command, too (--from)."
        )
        if settings.flags is not None:
            limit += f" that has {settings.flags}"
            fix = "Name one: model=NAME, or add --from with your command."
        raise UserInputError("model", None, limit, fix)
    spec = with_seq_length(spec_from_mapping(settings.model), settings.train.seq_length)
    spec = replace(spec, adapters=read_adapters(settings) or spec.adapters)
    if settings.checks.plausibility:
        require_plausible(spec, None, typed=settings.given)
    return spec


def with_seq_length(spec: TransformerSpec, seq_length: int | None) -> TransformerSpec:
    """The model on sequences of another length; only learned positions end before it."""
    if seq_length is None:
        return spec
    require_at_least("train.seq_length", seq_length, 1, "Give tokens.")
    longest = spec.max_position_embeddings
    if longest is not None and spec.position_embedding_type != "learned_absolute":
        longest = max(longest, seq_length)
    return replace(spec, seq_length=seq_length, max_position_embeddings=longest)


def read_cluster(settings: Settings, num_gpus: int | None = None) -> Cluster:
    """The cluster, at the size of the job or its own; ``UserInputError`` if there is none."""
    if settings.cluster is None:
        raise UserInputError(
            "cluster",
            None,
            "no cluster is given",
            "Add for example cluster=dgx_h100 cluster.num_gpus=64 (`nest-megatron clusters` "
            "lists them).",
        )
    cluster = cluster_from_mapping(settings.cluster, num_gpus=num_gpus)
    if settings.checks.plausibility:
        require_plausible(None, cluster, settings.train.global_batch_size, typed=settings.given)
    return cluster


def read_adapters(settings: Settings) -> Adapters | None:
    """What is trained beside frozen weights; ``None`` where all weights are."""
    given = stated_values(settings.peft)
    scheme = given.pop("scheme", None)
    if scheme is None:
        for name, value in given.items():
            raise UserInputError(
                f"peft.{name}", value, "it needs a scheme", "Add for example peft.scheme=lora."
            )
        return None
    given["target_modules"] = tuple(given.get("target_modules", ()))
    return Adapters(scheme=choice("peft.scheme", scheme, PeftScheme), **given)


_GB = 1e9


class Range(NamedTuple):
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
_NUM_GPUS = Range(_COUNT, 1e6)
_LEVEL = {
    "bandwidth_bytes_per_s": Range(1e8, 1e14, "bytes/s", _GB, "GB/s"),
    "latency_s": Range(0, 0.01, "s", 1e6, "us"),
    "startup_s": Range(0, 0.1, "s", 1e6, "us"),
    "ramp": Range(0, 1e3),
}
_ACCELERATOR = {
    "memory_bytes": Range(2**28, 2**45, "bytes", 2**30, "GiB"),
    "memory_bandwidth_bytes_per_s": Range(1e9, 1e15, "bytes/s", _GB, "GB/s"),
    "kernel_floor_s": Range(0, 0.01, "s", 1e6, "us"),
}
_FLOPS = Range(1e9, 1e18, "FLOP/s", 1e12, "TFLOP/s")
_MODEL = {
    "hidden_size": Range(_COUNT, 1e6),
    "ffn_hidden_size": Range(_COUNT, 1e7),
    "num_attention_heads": Range(_COUNT, 1e5),
    "kv_channels": Range(_COUNT, 1e5),
    "seq_length": Range(_COUNT, 1e8),
    "vocab_size": Range(_COUNT, 1e8),
    "num_experts": Range(_COUNT, 1e5),
}
_BATCH = Range(_COUNT, 1e8)


def require_plausible(
    spec: TransformerSpec | None,
    cluster: Cluster | None,
    global_batch_size: int | None = None,
    *,
    typed: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Refuse a job with a number beyond everything that exists, naming what was probably meant.

    Args:
        typed: values as the user typed them, by setting, which the error repeats.
    """
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
        limit = f"it is implausible: expected are {least} to {most} {unit or allowed.unit}"
        fix = f"{guess}If it is right, add {typed_setting('checks.plausibility')}=off."
        raise UserInputError(what, typed.get(what) or value, limit.rstrip(), fix)


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
