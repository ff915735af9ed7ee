"""Typed access to a parsed ``config.json``, and what its readers share."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.layer_pattern import MAX_LAYERS
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement

#: Likeness from which one name is taken for another that is misspelt.
_NEARLY = 0.85
_FULL_ATTENTION, _SLIDING = "full_attention", "sliding_attention"
#: Values of a key that say that there is no such thing.
UNSET: tuple[object, ...] = (None, False, "", [], {})
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
#: Words in the name of a key that describes a part of a model.
_ARCHITECTURE = frozenset(
    (
        "attention",
        "attn",
        "conv",
        "conv1d",
        "dim",
        "expert",
        "experts",
        "heads",
        "layer",
        "layers",
        "linear",
        "lora",
        "mamba",
        "mamba2",
        "moe",
        "mrope",
        "mtp",
        "qk",
        "rope",
        "rotary",
        "rwkv",
        "size",
        "ssm",
        "state",
        "window",
    )
)


def is_harmless(key: str) -> bool:
    """Whether a key is known to change no shape.

    >>> is_harmless("bos_token_id"), is_harmless("num_hidden_layer")
    (True, False)
    """
    endings = ("_token_id", "_token_ids", "_token_index")
    starts = ("_", "pooler_", "summary_", "initializer", "scale_attn_by")
    known = key in _weightless()["everywhere"]
    return known or key.endswith(endings) or key.startswith(starts)


def weightless_keys(kind: str) -> Sequence[str]:
    """Keys that change neither a weight nor the work of a ``model_type``, or of an encoder."""
    keys: Sequence[str] = _weightless()["kinds"].get(kind, ())
    return keys


@functools.cache
def _weightless() -> Mapping[str, Any]:
    found = packaged(__package__, "hugging_face_weightless.json")
    return {**found, "everywhere": {*itertools.chain(*found["everywhere"].values())}}


@functools.cache
def _tables() -> Mapping[str, Any]:
    """What transformers takes where a file is silent, and its second names, by model type.

    The types of release 4.57, and those that came with release 5.
    """
    names = ("hugging_face_defaults.json", "hugging_face_defaults_5.json")
    return {k: row for name in names for k, row in packaged(__package__, name)["types"].items()}


class ConfigFields:
    """Typed access to a configuration, with errors that name the field.

    A field that is absent has the value that transformers' class gives it; one that is null has
    none, as in transformers.
    """

    __slots__ = ("_config", "_defaults", "_queried", "_weightless", "assumed", "name", "notes")

    def __init__(self, config: Mapping[str, object], name: str, model_type: str = "") -> None:
        table = _tables().get(model_type, {})
        second = table.get("second_names", {})
        first = {second[key]: value for key, value in config.items() if key in second}
        self._config = first | {key: v for key, v in config.items() if key not in second}
        self._defaults: Mapping[str, object] = table.get("defaults", {})
        self.name = name
        self._queried: set[str] = set()
        self._weightless: set[str] = set()
        self.assumed: dict[str, object] = {}
        self.notes: list[str] = []

    def get(self, key: str, default: object = None) -> object:
        """A field, or the default where it is null, or absent and unknown to transformers."""
        self._queried.add(key)
        value = self._config.get(key)
        if key not in self._config and key in self._defaults:
            value = self._defaults[key]
            if type(value) is int:
                self.assumed[key] = value
        return default if value is None else value

    def weightless(self, *keys: str) -> None:
        """Fields that are known, and change neither a weight nor the work."""
        self._weightless.update(keys)

    def unused(self) -> tuple[str, ...]:
        """Keys that are set and known, and that no weight and no work depends on, sorted."""
        known = (key for key in self._set() if key in self._weightless or is_harmless(key))
        return tuple(sorted({*known} - self._queried - {"model_type"}))

    def _set(self) -> list[str]:
        """Keys that have a value other than those that mean that there is none."""
        return [key for key, value in self._config.items() if value not in UNSET]

    def unread(self) -> tuple[str, ...]:
        """Keys that are set, that no reader has read, and that may say something of the shape.

        Raises:
            UserInputError: for one that is nearly a key that was read in vain.
            UnplannableModelError: for one that by its name describes a part of the model.
        """
        lacking = sorted(self._queried - self._config.keys())
        known, kinds = self._queried | self._weightless, self._config.get("layer_types")
        if isinstance(kinds, list) and {*map(str, kinds)} == {_FULL_ATTENTION}:
            known.add("layer_types")
        unread = sorted(key for key in self._set() if key not in known and not is_harmless(key))
        for key in unread:
            if close := difflib.get_close_matches(key, lacking, n=1, cutoff=_NEARLY):
                raise self.wrong(key, "there is no such field", f"Write {close[0]}.")
            if not _ARCHITECTURE.isdisjoint(key.split("_")):
                raise self.wrong(
                    key,
                    f"model_type {self._config.get('model_type')} is planned without it",
                    "Take it out if the model has no such part.",
                    UnplannableModelError,
                )
        return tuple(unread)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; required where no default is given.

        A list with the same number for each layer is that number.
        """
        value = self._of_all_layers(key, self.get(key, default))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise self.wrong(key, f"it must be a whole number of at least {least}")
        if key in _LAYERS and value > MAX_LAYERS:
            raise self.wrong(key, f"it must be at most {MAX_LAYERS:,}")
        return value

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is where it is absent and unknown to transformers."""
        return self.whole(key, 0, least=0)

    def _of_all_layers(self, key: str, value: object) -> object:
        """The one value of a list that has it for each layer; what else it is, unchanged."""
        layers = self._config.get("num_hidden_layers")
        if not isinstance(value, list) or key in _LAYERS or len(value) != layers:
            return value
        if any(type(each) is not int or each != value[0] for each in value):
            raise self.wrong(
                key,
                "layers that differ in it are not read",
                kind=UnplannableModelError,
            )
        return value[0]

    def items(
        self, key: str, what: str, *, of_layers: bool = False
    ) -> list[Any] | tuple[Any, ...] | None:
        """A list of texts or numbers, or ``None`` where the field is absent or null.

        Args:
            of_layers: one for each of ``num_hidden_layers``; none are as absent.
        """
        value = self.get(key)
        if value is None or (of_layers and value == []):
            return None
        plain = isinstance(value, list | tuple) and all(isinstance(i, str | int) for i in value)
        if not isinstance(value, list | tuple) or not plain:
            raise self.wrong(key, f"it must be a list of {what}")
        if of_layers and len(value) != self.whole("num_hidden_layers"):
            raise self.wrong(key, "it must have one for each of num_hidden_layers")
        return value

    def marked_layers(self, marked: str, rule: Callable[[int], bool]) -> list[bool]:
        """Layers that ``layer_types`` names so, others in full; by a rule where it is silent."""
        layers, kinds = self.whole("num_hidden_layers"), self.items("layer_types", "text")
        if kinds is None:
            return [rule(layer) for layer in range(layers)]
        if len(kinds) != layers or not {*kinds} <= {_FULL_ATTENTION, marked}:
            raise self.wrong(
                "layer_types",
                f"it must name {_FULL_ATTENTION} or {marked} for each of the {layers} layers",
            )
        return [kind == marked for kind in kinds]

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "it must be a number")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def wrong(
        self,
        key: str,
        limit: str,
        fix: str = "",
        kind: type[UserInputError] = UserInputError,
    ) -> UserInputError:
        """The error for a field that cannot be used."""
        what = f"model {self.name}: config.json: {key}"
        value = self._config.get(key)
        quoted = json.dumps(value) if isinstance(value, str) else value  # "16" is no number
        return kind(what, value=quoted, limit=limit, fix=fix or _FIXES[kind])


#: What helps where a value is wrong, and where it is right and cannot be planned.
_FIXES: Mapping[type[UserInputError], str] = {
    UserInputError: "Check that this is the model's own config.json.",
    UnplannableModelError: "Describe the nearest model in a file (docs/adding.md).",
}


Shape = dict[str, Any]
Reader = Callable[[ConfigFields], Shape]
#: A part of a description, or what reads it.
Part = Shape | Reader
Parts = tuple[Part, ...]
#: What a type is, and the parts of its description; of a field that several have the last counts.
Family = tuple[str, Parts]

_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}


def joined(f: ConfigFields, *parts: Part) -> Shape:
    """Parts of a description as one; the fields of their variants add up, biases too."""
    found: Shape = {}
    variants: Shape = {}
    for part in parts:
        shape = part(f) if callable(part) else part
        more = shape.get("variant", {})
        biases = (*variants.get("biases", ()), *more.get("biases", ()))
        variants |= more
        if biases:
            variants["biases"] = biases
        found |= shape
    if variants:
        found["variant"] = variants
    return found


def where(key: str, part: Part) -> Reader:
    """A part of models in which a switch is on; it is read of the others too."""

    def read(f: ConfigFields) -> Shape:
        shape = joined(f, part)
        return shape if f.flag(key) else {}

    return read


def activation(key: str = "hidden_act", default: str = "silu") -> Reader:
    """An activation by Megatron's name."""

    def read(f: ConfigFields) -> Shape:
        value = f.get(key, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise f.wrong(key, f"known activations are {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS[value]}

    return read


def rotary(
    partial: float = 1.0, key: str = "partial_rotary_factor", base: str = "rope_theta"
) -> Reader:
    """Base and share of the rotary embedding; transformers 5 nests them in ``rope_parameters``.

    Args:
        key, base: those of the share and of the base, beside transformers' usual ones.
    """

    def read(f: ConfigFields) -> Shape:
        nested = f.get("rope_parameters")
        nested = nested if isinstance(nested, Mapping) else {}
        inner = ConfigFields(nested, f"{f.name}: rope_parameters")
        theta = 10_000.0
        for fields, name in ((f, base), (f, "rope_theta"), (inner, "rope_theta")):
            theta = fields.number(name, theta)
            if not 1 <= theta < math.inf:
                raise fields.wrong(name, "it must be a number of at least 1")
        if theta != round(theta):
            limit = "Megatron-LM's --rotary-base is a whole number"
            f.notes.append(f"{f.name}: rope_theta {theta} is taken as {round(theta)}: {limit}.")
        share = f.number("partial_rotary_factor", f.number(key, partial))
        share = inner.number("partial_rotary_factor", share)
        if not 0 < share <= 1:
            raise f.wrong("partial_rotary_factor", "it must be above 0 and at most 1")
        found: Shape = {"rotary_base": round(theta)}
        if share != 1:
            found["rotary_percent"] = share
        return found

    return read


def sizes(*names: str, **keys: str) -> Reader:
    """Fields of a description by the key that a family has for each, if not by the same name."""
    keys = {**dict(zip(names, names, strict=True)), **keys}
    return lambda f: {field: f.whole(key) for field, key in keys.items()}


def switches(**keys: str) -> Reader:
    """The same of fields that are true or false."""
    return lambda f: {field: f.flag(key) for field, key in keys.items()}


def repeats(**values: object) -> Reader:
    """Keys that may only say what is known without them; another value is refused.

    Args:
        values: what is known, or what reads it of the other keys.
    """

    def read(f: ConfigFields) -> Shape:
        for key, value in values.items():
            known = value(f) if callable(value) else value
            if f.get(key, known) != known:
                raise f.wrong(key, f"other keys, or the family, say {known}")
        return {}

    return read


def head_size(f: ConfigFields) -> int:
    """Channels of one head."""
    return f.whole("head_dim", f.whole("hidden_size") // f.whole("num_attention_heads"))


def fewer_groups(groups: int, heads: int) -> int | None:
    """Query groups where they are fewer than the heads."""
    return None if groups == heads else groups


def decoder(
    f: ConfigFields,
    act: str = "hidden_act",
    *,
    has_head_dim: bool = True,
    ffn: str = "intermediate_size",
) -> Shape:
    """What all Llama-like decoders share; query groups if fewer, head size if not the quotient.

    Args:
        act: the key that names their activation.
        has_head_dim: the family has a ``head_dim``.
        ffn: the key of the inner size of their MLP.
    """
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    size = head_size(f) if has_head_dim else hidden // heads
    return joined(
        f,
        sizes(num_layers="num_hidden_layers", hidden_size="hidden_size", ffn_hidden_size=ffn),
        {
            "num_attention_heads": heads,
            "num_query_groups": fewer_groups(f.whole("num_key_value_heads", heads), heads),
            "kv_channels": None if size * heads == hidden else size,
        },
        sizes("max_position_embeddings", "vocab_size"),
        rotary(),
        {"layernorm_epsilon": f.number("rms_norm_eps", 1e-6)},
        activation(act),
        untied(f),
    )


def untied(f: ConfigFields, default: bool = True) -> Shape:
    """Whether the output layer is another matrix than the word embedding."""
    return {"untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", default)}


def layer_norm(key: str = "layer_norm_eps", learned: NormParameters = NormParameters.ALL) -> Reader:
    """A LayerNorm, with the key of its epsilon."""
    of_variant = {} if learned is NormParameters.ALL else variant(norm_parameters=learned)
    return lambda f: {
        "normalization": "LayerNorm",
        "layernorm_epsilon": f.number(key, 1e-5),
        **of_variant,
    }


def variant(**fields: Any) -> Shape:
    """A description of what Megatron's layers do not have."""
    return {"variant": fields}


def side_by_side(norm: NormPlacement = NormPlacement.SHARED) -> Shape:
    """Attention and MLP that read the same hidden states, behind one norm or one each."""
    return variant(parallel_attention=True, norm_placement=norm)


#: Norms behind the blocks alone, and around them; norms of queries and keys over all heads.
POST_NORM = variant(norm_placement=NormPlacement.POST)
SANDWICH_NORM = variant(norm_placement=NormPlacement.SANDWICH)
WIDE_QK_NORM: Shape = {"qk_layernorm": True, **variant(qk_norm_full_width=True)}


def qk_norm(f: ConfigFields) -> Shape:
    """Norms of queries and keys in all models of a family."""
    return {"qk_layernorm": True, **repeats(use_qk_norm=True)(f)}


UNGATED: Shape = {"gated_linear_unit": False}
#: Whether there is something, or the key that says so.
Switch = bool | str


def linear_biases(
    *, qkv: Switch = False, projection: Switch = False, mlp: Switch = False, routed: bool = False
) -> Reader:
    """Biases of the projections, in Megatron's switch where it says them all.

    Args:
        routed: the model has a router without one, which Megatron's switch would give it.
    """

    def read(f: ConfigFields) -> Shape:
        of_qkv, *others = (
            f.flag(each) if isinstance(each, str) else each for each in (qkv, projection, mlp)
        )
        if of_qkv and all(others) and not routed:
            return {"add_bias_linear": True}
        pairs = zip((Bias.PROJECTION, Bias.MLP), others, strict=True)
        return {"add_qkv_bias": of_qkv, **extra_biases(*(bias for bias, has in pairs if has))}

    return read


def same_biases(everywhere: Switch, *, routed: bool = False) -> Reader:
    """Biases of all projections, or of none; ``routed`` as of ``linear_biases``."""
    return linear_biases(qkv=everywhere, projection=everywhere, mlp=everywhere, routed=routed)


#: ``attention_bias`` of all four projections of attention, ``mlp_bias`` of the MLP's.
ALL_BIASES = linear_biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias")
#: ``attention_bias`` next to a router without one.
ROUTED_BIASES = linear_biases(qkv="attention_bias", projection="attention_bias", routed=True)


def extra_biases(*biases: Bias) -> Shape:
    """Biases that no switch of Megatron's gives."""
    return variant(biases=biases) if biases else {}


def windows(f: ConfigFields, slides: Callable[[int], bool] = lambda _: True) -> Shape:
    """Sliding windows by ``layer_types``, or where it is silent by the family's own rule.

    A window as long as the longest context changes nothing and is left out.
    """
    size = f.count("sliding_window") or None
    marked = f.marked_layers(_SLIDING, slides)
    if size is None or not any(marked) or size >= f.whole("max_position_embeddings", size + 1):
        return {}
    return {"window_size": size, "window_attn_skip_freq": frequency(marked)}


def windows_but_every(period: int, *keys: str) -> Reader:
    """Windows on all layers but every n-th.

    Args:
        keys: that may say the period, the first that does counts.
    """

    def read(f: ConfigFields) -> Shape:
        every = period
        for key in reversed(keys):
            every = f.whole(key, every)
        return windows(f, lambda layer: (layer + 1) % every != 0)

    return read


def frequency(marked: Sequence[bool]) -> int | list[int] | None:
    """Marked layers in Megatron's notation: none for all, all but every n-th, or a flag each.

    >>> frequency([True, True, False, True, True, False])
    3
    """
    plain = [layer for layer, is_marked in enumerate(marked, start=1) if not is_marked]
    if not plain:
        return None
    if plain == list(range(plain[0], len(marked) + 1, plain[0])):
        return plain[0]
    return [int(is_marked) for is_marked in marked]
