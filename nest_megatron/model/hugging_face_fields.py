"""Typed access to a parsed ``config.json``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.frequency import MAX_LAYERS

#: Likeness from which one name is taken for another that is misspelt.
_NEARLY = 0.85
_FULL = {"full_attention"}
#: Values of a key that say that there is no such thing.
UNSET: tuple[object, ...] = (None, False, "", [], {})
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
#: Keys of ``PretrainedConfig`` and of the families read here that change no shape.
_HARMLESS = frozenset(
    (
        # names and origin
        *("architectures", "auto_map", "batch_size", "finetuning_task", "id2label", "is_decoder"),
        *("is_encoder_decoder", "is_llama_config", "label2id", "model_type", "num_labels"),
        *("prefix", "problem_type", "task_specific_params", "tie_encoder_decoder"),
        *("tokenizer_class", "torchscript", "transformers.js_config", "transformers_version"),
        *("unsloth_fixed", "unsloth_version"),
        # generation and what a forward pass returns
        *("bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty"),
        *("do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "length_penalty", "max_batch_size", "max_length"),
        *("max_sequence_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"),
        *("output_past", "output_router_logits", "output_scores", "predict_special_tokens"),
        *("remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate"),
        *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "use_cache"),
        # dropout, starting values, losses
        *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "aux_loss_alpha"),
        *("classifier_dropout", "embd_pdrop", "hidden_dropout", "hidden_dropout_prob"),
        *("initializer_range", "neftune_noise_alpha", "resid_pdrop", "router_aux_loss_coef"),
        *("router_jitter_noise", "seq_aux", "tf_legacy_loss"),
        # numerics and implementation
        *("attn_implementation", "chunk_size_feed_forward", "dtype", "ep_size", "flash_attention"),
        *("gradient_checkpointing", "layer_norm_eps", "layer_norm_epsilon", "pretraining_tp"),
        *("quantization_config", "reorder_and_upcast_attn", "swiglu_limit", "torch_dtype"),
        *("use_bfloat16", "use_flash_attention", "use_flash_attention_2", "use_flash_attn"),
        # positions, scaling, routing and masks, which weigh nothing
        *("directionality", "dual_chunk_attention_config", "initial_context_length", "n_ctx"),
        *("n_group", "norm_topk_prob", "original_max_position_embeddings"),
        *("query_pre_attn_scalar", "rope_interleave", "rope_interleaved", "rope_local_base_freq"),
        *("rope_parameters", "rope_scaling", "routed_scaling_factor", "scale_attn_weights"),
        *("scoring_func", "topk_group", "topk_method", "type_vocab_size"),
        "use_bidirectional_attention",
        # of DeepSeek: the sum of two that are read
        "qk_head_dim",
    )
)
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
    return key in _HARMLESS or key.endswith(endings) or key.startswith(starts)


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
                limit = f"model_type {self._config.get('model_type')} is planned without it"
                fix = "Take it out if the model has no such part."
                raise self.wrong(key, limit, fix, UnplannableModelError)
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

    def _of_all_layers(self, key: str, value: object) -> object:
        """The one value of a list that has it for each layer; what else it is, unchanged."""
        layers = self._config.get("num_hidden_layers")
        if not isinstance(value, list) or key in _LAYERS or len(value) != layers:
            return value
        if any(type(each) is not int or each != value[0] for each in value):
            limit = "layers that differ in it are not read"
            fix = "Describe the nearest model of equal layers in a file (docs/adding.md)."
            raise self.wrong(key, limit, fix, UnplannableModelError)
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
