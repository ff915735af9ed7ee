"""What a layer profile holds: blocks of a layer timed on a machine, and what makes two alike."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from datetime import datetime

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import ProfileError
from nest_megatron.layout.dims import LAYER_DEGREES
from nest_megatron.layout.plan_file import digest
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import LATENT_SIZES, TransformerSpec
from nest_megatron.plain import Name, frozen, is_added, set_field, written_as
from nest_megatron.units import Bytes, Seconds, format_gib

#: Version of the file format; a reader refuses newer ones.
SCHEMA = 1
#: Provenance of a plan whose times all come from data sheets; no profile may be called so.
ANALYTIC_NAME = "analytic"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,120}")
#: Rows of the vocabulary are compared in steps of this many: Megatron pads them to a multiple of
#: 128 times the tensor-parallel size, so one model has several sizes.
_VOCABULARY_STEP = 1024


def require_number(
    what: str, value: object, *, whole: bool = False, above_zero: bool = False, fix: str
) -> float:
    """A number that may stand in a profile; a subclass of float (NumPy's) as the plain one.

    Raises:
        ProfileError: if it is no number, not finite, or below 0.
    """
    if (
        isinstance(value, int if whole else int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (value > 0 or (value == 0 and not above_zero))
    ):
        return int(value) if whole else float(value)
    number = "whole number" if whole else "finite number"
    limit = f"it must be a {number} {'above' if above_zero else 'of at least'} 0"
    raise ProfileError(what, value, limit, fix)


class Source(Name):
    """Where a block's time comes from, the most trusted first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    IMPORTED = "imported"
    ANALYTIC = "analytic"


@frozen
class Timing:
    """One block in one shape, on one rank, for one micro batch.

    Times are of the device's work alone: collectives are taken out while measuring, because the
    cost model prices them by where the group lies. The sequence length is that of the profile's
    model.

    Args:
        recompute_s: a forward pass without its activations and the forward pass again, for
            comparison: the cost model derives it from ``forward_s``.
        spread: relative inter-quartile range of one forward and backward pass.
        peak_memory_bytes: peak over what was allocated before; 0 where the device does not say.
    """

    block: LayerBlock = written_as("piece")
    tensor_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool
    micro_batch_size: int
    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    optimizer_s: Seconds
    spread: float
    repetitions: int
    parameters: int
    saved_bytes: Bytes
    peak_memory_bytes: Bytes

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type in _NUMBERS:
                number = require_number(
                    f"{self.block}: {field.name}",
                    getattr(self, field.name),
                    whole=field.type in ("int", "Bytes"),
                    above_zero=field.name not in _MAY_BE_ZERO,
                    fix="Measure the block again.",
                )
                set_field(self, field.name, number)

    @property
    def shape(self) -> tuple[object, ...]:
        """What tells two timings of a profile apart."""
        return (self.block, *(getattr(self, name) for name in SHAPE))


_NUMBERS = ("int", "float", "Bytes", "Seconds")
_MAY_BE_ZERO = frozenset(
    {"recompute_s", "optimizer_s", "spread", "parameters", "saved_bytes", "peak_memory_bytes"}
)
#: What tells two timings of a block apart.
SHAPE = (*LAYER_DEGREES, "micro_batch_size", "sequence_parallel")


@frozen
class Machine:
    """What the blocks ran on; ``None`` is not installed, or not known.

    Args:
        graphics_mhz, memory_mhz: clocks as they were found; shown, never compared.
    """

    device_name: str
    memory_bytes: Bytes
    driver: str | None
    torch: str
    megatron_core: str
    transformer_engine: str | None
    nccl: str | None
    graphics_mhz: int | None
    memory_mhz: int | None
    implementation: Implementation
    is_cpu: bool

    def __post_init__(self) -> None:
        if not self.device_name:
            raise _bad_field("machine.device_name", self.device_name, "it must not be empty")
        what, fix = "machine.memory_bytes", "Measure the profile again."
        require_number(what, self.memory_bytes, whole=True, above_zero=True, fix=fix)
        for name in _TEXTS:
            if getattr(self, name) is not None:  # torch's version is no plain text
                set_field(self, name, str(getattr(self, name)))

    def describe(self) -> str:
        """The device in a few words: ``NVIDIA H200 (139.8 GiB)``."""
        return f"{self.device_name} ({format_gib(self.memory_bytes)})"


_TEXTS = ("device_name", "driver", "torch", "megatron_core", "transformer_engine", "nccl")


@frozen
class LayerProfile:
    """The timings of one model's layers on one machine.

    Args:
        created: when the newest timing was taken, in ISO 8601 with its time zone.
        imported: it was measured elsewhere and brought here.
    """

    schema: int = SCHEMA
    name: str
    created: str
    imported: bool = False
    precision: Precision
    note: str = ""
    machine: Machine
    model: TransformerSpec
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        require_name(self.name)
        try:
            has_zone = datetime.fromisoformat(self.created).tzinfo is not None
        except ValueError:
            has_zone = False
        if not has_zone:
            raise _bad_field("created", self.created, "it must be an ISO 8601 time with its zone")
        shapes = [timing.shape for timing in self.timings]
        for index, shape in enumerate(shapes):
            if shape in shapes[:index]:
                raise _bad_field(f"timings[{index}]", shape, "this shape is there already")


def require_name(name: str) -> str:
    """The name, if it makes a file name and does not mean that there is no profile."""
    if not _NAME.fullmatch(name) or name == ANALYTIC_NAME:
        raise ProfileError(
            "profile name",
            name,
            f"it is made of letters, digits and . _ + -, and is not {ANALYTIC_NAME!r}",
            "For example llama3_8b-h200.",
        )
    return name


def layer_shape(spec: TransformerSpec) -> Mapping[str, object]:
    """The fields of a model that decide how long one of its layers takes.

    How many layers there are and which of them have experts, names, sources, position limits and
    numerical constants change no layer. Fields that Megatron derives are compared as derived; those
    of experts and of latent attention count only where the model has them.
    """
    shape = {name: getattr(spec, name) for name in _SHAPING}
    for field in dataclasses.fields(spec):  # what came after the first profiles
        value = getattr(spec, field.name)
        if is_added(field) and value != field.default and field.name not in _NOT_SHAPING:
            shape[field.name] = value
    rows = spec.padded_vocab_size(1)
    shape["vocab_size"] = -(-rows // _VOCABULARY_STEP) * _VOCABULARY_STEP
    shape["mtp_num_layers"] = spec.num_mtp_layers
    if spec.num_experts is not None:
        shape |= {name: getattr(spec, name) for name in _OF_EXPERTS}
        shape["moe_ffn_hidden_size"] = spec.expert_ffn_hidden_size
    if spec.multi_latent_attention:
        shape |= {name: getattr(spec, name) for name in LATENT_SIZES}
    else:
        shape |= {"num_query_groups": spec.query_groups, "kv_channels": spec.head_dim}
    return shape


#: Fields that came later and say where layers stand, not what they do.
_NOT_SHAPING = frozenset(
    {"no_rope_freq", "linear_attention_freq", "hybrid_layer_pattern", "heterogeneous_layers"}
)
_SHAPING = (
    "family",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "position_embedding_type",
    "normalization",
    "activation",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "softmax_type",
    "hidden_dropout",
    "attention_dropout",
    "window_size",
    "window_attn_skip_freq",
    "multi_latent_attention",
)
_OF_EXPERTS = ("num_experts", "moe_router_topk", "moe_shared_expert_intermediate_size")
#: Fields of a machine that two profiles must share to be one; clocks are only shown.
COMPARED = (
    "device_name",
    "memory_bytes",
    "driver",
    "torch",
    "megatron_core",
    "transformer_engine",
    "nccl",
    "implementation",
)


def shape_digest(spec: TransformerSpec, precision: Precision) -> str:
    """A short hash of what decides a layer's work: its shape and the number format."""
    return digest([layer_shape(spec), precision])


def fingerprint(machine: Machine, spec: TransformerSpec, precision: Precision) -> str:
    """A short hash of all that a timing depends on besides how the layer is divided."""
    found = {name: getattr(machine, name) for name in COMPARED}
    return digest([found, layer_shape(spec), precision])


def fingerprint_of(profile: LayerProfile) -> str:
    """The fingerprint of a profile's timings."""
    return fingerprint(profile.machine, profile.model, profile.precision)


def default_name(machine: Machine, spec: TransformerSpec, precision: Precision) -> str:
    """A name for a profile that nobody has named: model, device, format, fingerprint."""
    words = (spec.name, machine.device_name.removeprefix("NVIDIA "), precision)
    plain = (re.sub(r"[^A-Za-z0-9._+]+", "_", word).strip("_.") for word in words)
    tail = fingerprint(machine, spec, precision)[:6]
    return "-".join(("-".join(filter(None, plain))[:100], tail))


def _bad_field(name: str, value: object, limit: str) -> ProfileError:
    return ProfileError(name, value, limit, "Measure the profile again.")


class ProfileMode(Name):
    """Where layer times may come from.

    ``auto`` takes a stored profile if there is one, else data sheets; ``measure`` measures what is
    missing first; ``require`` refuses a plan with a block that no timing speaks for; ``analytic``
    uses data sheets alone.
    """

    AUTO = "auto"
    MEASURE = "measure"
    REQUIRE = "require"
    ANALYTIC = "analytic"
