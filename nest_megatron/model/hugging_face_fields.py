"""Typed access to a parsed ``config.json``, and what its readers share."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.layer_pattern import MAX_LAYERS
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement

#: Likeness from which one name is taken for another that is misspelt.
_NEARLY = 0.85
_FULL = {"full_attention"}
#: Values of a key that say that there is no such thing.
UNSET: tuple[object, ...] = (None, False, "", [], {})
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
#: Words in the name of a key that describes a part of a model.
_ARCHITECTURE = frozenset(
    (
        *("attention", "attn", "conv", "conv1d", "dim", "expert", "experts", "heads", "layer"),
        *("layers", "linear", "lora", "mamba", "mamba2", "moe", "mrope", "mtp", "qk", "rope"),
        *("rotary", "rwkv", "size", "ssm", "state", "window"),
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


def model_types() -> frozenset[str]:
    """The ``model_type`` values whose defaults are known."""
    return frozenset(_tables())


class ConfigFields:
    """Typed access to a configuration, with errors that name the field.

    A field that is absent has the value that transformers' class gives it; one that is null has
    none, as in transformers.
    """

    __slots__ = ("_asked", "_config", "_defaults", "_name", "_weightless", "assumed")

    def __init__(self, config: Mapping[str, object], name: str, model_type: str = "") -> None:
        table = _tables().get(model_type, {})
        second = table.get("second_names", {})
        first = {second[key]: value for key, value in config.items() if key in second}
        self._config = first | {key: v for key, v in config.items() if key not in second}
        self._defaults: Mapping[str, object] = table.get("defaults", {})
        self._name = name
        self._asked: set[str] = set()
        self._weightless: set[str] = set()
        self.assumed: dict[str, object] = {}

    def get(self, key: str, default: object = None) -> object:
        """A field, or the default where it is null, or absent and unknown to transformers."""
        self._asked.add(key)
        value = self._config.get(key)
        if key not in self._config and key in self._defaults:
            value = self._defaults[key]
            if isinstance(value, int) and not isinstance(value, bool):
                self.assumed[key] = value
        return default if value is None else value

    def weightless(self, *keys: str) -> None:
        """Fields that are known, and change neither a weight nor the work."""
        self._weightless.update(keys)

    def unused(self) -> tuple[str, ...]:
        """Keys that are set and known, and that no weight and no work depends on, sorted."""
        known = (key for key in self._set() if key in self._weightless or is_harmless(key))
        return tuple(sorted({*known} - self._asked - {"model_type"}))

    def _set(self) -> list[str]:
        """Keys that have a value other than those that mean that there is none."""
        return [key for key, value in self._config.items() if value not in UNSET]

    def unread(self) -> tuple[str, ...]:
        """Keys that are set, that nobody has asked for, and that may say something of the shape.

        Raises:
            UserInputError: for one that is nearly a key that was asked for in vain.
            UnplannableModelError: for one that by its name describes a part of the model.
        """
        lacking = sorted(self._asked - self._config.keys())
        known = self._asked | self._weightless
        unread = sorted(
            key
            for key in self._set()
            if key not in known and not is_harmless(key)
            if not (key == "layer_types" and self._is_full(self._config[key]))
        )
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

    @staticmethod
    def _is_full(value: object) -> bool:
        return isinstance(value, list) and set(map(str, value)) == _FULL

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; required where no default is given.

        A list with the same number for each layer is that number.
        """
        value = self._of_all_layers(key, self.get(key, default))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
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
                "Describe the nearest model of equal layers in a file (docs/adding.md).",
                UnplannableModelError,
            )
        return value[0]

    def items(
        self, key: str, what: str, *, of_layers: bool = False
    ) -> list[Any] | tuple[Any, ...] | None:
        """A list of texts or numbers, or ``None`` where the field is absent or null.

        Args:
            of_layers: one for each of ``num_hidden_layers``.
        """
        value = self.get(key)
        if value is None:
            return None
        plain = isinstance(value, list | tuple) and all(isinstance(i, str | int) for i in value)
        if not isinstance(value, list | tuple) or not plain:
            raise self.wrong(key, f"it must be a list of {what}")
        if of_layers and len(value) != self.whole("num_hidden_layers"):
            raise self.wrong(key, "it must have one for each of num_hidden_layers")
        return value

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
        fix: str = "Check that this is the model's own config.json.",
        kind: type[UserInputError] = UserInputError,
    ) -> UserInputError:
        """The error for a field that cannot be used."""
        what = f"model {self._name}: config.json: {key}"
        return kind(what, value=self._config.get(key), limit=limit, fix=fix)


Shape = dict[str, Any]

_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
_FULL_ATTENTION, _SLIDING = "full_attention", "sliding_attention"


def joined(*shapes: Shape) -> Shape:
    """Parts of a description as one; the fields of their variants add up, biases too."""
    variant: Shape = {}
    for shape in shapes:
        found = shape.get("variant", {})
        biases = (*variant.get("biases", ()), *found.get("biases", ()))
        variant |= {**found, **({"biases": biases} if biases else {})}
    rest = {key: value for shape in shapes for key, value in shape.items() if key != "variant"}
    return rest | ({"variant": variant} if variant else {})


def activation(f: ConfigFields, key: str = "hidden_act", default: str = "silu") -> str:
    """Megatron's name of an activation."""
    value = f.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise f.wrong(key, f"known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def rotary(f: ConfigFields, default: int = 10_000, partial: float = 1.0) -> Shape:
    """Base and share of the rotary embedding; transformers 5 nests them in ``rope_parameters``."""
    nested = f.get("rope_parameters")
    inner = ConfigFields(nested if isinstance(nested, Mapping) else {}, "rope_parameters")
    base = f.whole("rope_theta", default)
    share = f.number("partial_rotary_factor", partial)
    share = inner.number("partial_rotary_factor", share)
    if not 0 < share <= 1:
        raise f.wrong("partial_rotary_factor", "it must be above 0 and at most 1")
    return {
        "rotary_base": inner.whole("rope_theta", base),
        **({"rotary_percent": share} if share != 1 else {}),
    }


def attention(f: ConfigFields, *, own_size: bool = True) -> Shape:
    """Heads, query groups (if fewer) and head size (if not the quotient).

    Args:
        own_size: the family has a ``head_dim``.
    """
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups = f.whole("num_key_value_heads", heads)
    size = f.whole("head_dim", hidden // heads) if own_size else hidden // heads
    return {
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if size * heads == hidden else size,
    }


def decoder(
    f: ConfigFields,
    act: str = "hidden_act",
    *,
    own_size: bool = True,
    ffn: str = "intermediate_size",
) -> Shape:
    """What all Llama-like decoders share.

    Args:
        act: the key that names their activation.
        own_size: as of ``attention``.
        ffn: the key of the inner size of their MLP.
    """
    return {
        "num_layers": f.whole("num_hidden_layers"),
        "hidden_size": f.whole("hidden_size"),
        "ffn_hidden_size": f.whole(ffn),
        **attention(f, own_size=own_size),
        "max_position_embeddings": f.whole("max_position_embeddings"),
        "vocab_size": f.whole("vocab_size"),
        **rotary(f),
        "layernorm_epsilon": f.number("rms_norm_eps", 1e-6),
        "activation": activation(f, act),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
    }


def layer_norm(
    f: ConfigFields, key: str = "layer_norm_eps", learned: NormParameters = NormParameters.ALL
) -> Shape:
    """A LayerNorm, with the key of its epsilon."""
    shape: Shape = {"normalization": "LayerNorm", "layernorm_epsilon": f.number(key, 1e-5)}
    return shape | ({} if learned is NormParameters.ALL else variant(norm_parameters=learned))


def variant(**fields: Any) -> Shape:
    """A description of what Megatron's layers do not have."""
    return {"variant": fields}


def norms(placement: NormPlacement) -> Shape:
    """Norms that do not stand before their blocks alone."""
    return variant(norm_placement=placement)


def side_by_side(norm: NormPlacement = NormPlacement.SHARED) -> Shape:
    """Attention and MLP that read the same hidden states, behind one norm or one each."""
    return variant(parallel_attention=True, norm_placement=norm)


def wide_qk_norm() -> Shape:
    """Norms of queries and keys over all heads."""
    return {"qk_layernorm": True, **variant(qk_norm_full_width=True)}


def linear_biases(
    *, qkv: bool = False, projection: bool = False, mlp: bool = False, routed: bool = False
) -> Shape:
    """Biases of the projections, in Megatron's switch where it says them all.

    Args:
        routed: the model has a router without one, which Megatron's switch would give it.
    """
    if qkv and projection and mlp and not routed:
        return {"add_bias_linear": True}
    outputs = own_biases(Bias.PROJECTION, where=projection)
    return joined({"add_qkv_bias": qkv}, outputs, own_biases(Bias.MLP, where=mlp))


def same_biases(everywhere: bool, *, routed: bool = False) -> Shape:
    """Biases of all projections, or of none; ``routed`` as of ``linear_biases``."""
    return linear_biases(qkv=everywhere, projection=everywhere, mlp=everywhere, routed=routed)


def own_biases(*biases: Bias, where: bool = True) -> Shape:
    """Biases that no switch of Megatron's gives; none where the model has them not."""
    return variant(biases=biases) if where else {}


def windows(f: ConfigFields, slides: Callable[[int], bool]) -> Shape:
    """Sliding windows by ``layer_types``, or where it is silent by the family's own rule.

    A window as long as the longest context changes nothing and is left out.
    """
    size = f.count("sliding_window") or None
    layers = range(f.whole("num_hidden_layers"))
    kinds = f.items("layer_types", "text")
    if kinds is None:
        marked = [slides(layer) for layer in layers]
    else:
        if len(kinds) != len(layers) or not {*kinds} <= {_FULL_ATTENTION, _SLIDING}:
            raise f.wrong(
                "layer_types",
                f"it must name {_FULL_ATTENTION} or {_SLIDING} for each of the {len(layers)} "
                "layers",
            )
        marked = [kind == _SLIDING for kind in kinds]
    if size is None or not any(marked) or size >= f.whole("max_position_embeddings", size + 1):
        return {}
    return {"window_size": size, "window_attn_skip_freq": frequency(marked)}


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


def experts(f: ConfigFields, number: str, size: str, top: str = "num_experts_per_tok") -> Shape:
    """Routed experts; the keys that a family has for their number, size and share."""
    return {
        "num_experts": f.whole(number),
        "moe_ffn_hidden_size": f.whole(size),
        "moe_router_topk": f.whole(top),
    }


def expert_layers(f: ConfigFields, routes: Callable[[int], bool]) -> Shape:
    """Which layers route tokens to experts."""
    return {"moe_layer_freq": [int(routes(i)) for i in range(f.whole("num_hidden_layers"))]}


def shared_experts(size: int) -> Shape:
    """Shared experts of this inner size together, if any."""
    return {"moe_shared_expert_intermediate_size": size or None}
