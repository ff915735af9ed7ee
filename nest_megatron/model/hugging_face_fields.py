"""Typed access to a parsed ``config.json``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from nest_megatron.errors import UnplannableModelError, UserInputError

#: Likeness from which one name is taken for another that is misspelt.
_NEARLY = 0.85
#: Keys of ``PretrainedConfig`` and of the families read here that change no shape: names, starting
#: values, generation, losses, numerics, and layers that are the same with and without them.
_HARMLESS = frozenset(
    (
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bad_words_ids",
        "batch_size",
        "begin_suppress_tokens",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "directionality",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "dual_chunk_attention_config",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "ep_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "flash_attention",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "length_penalty",
        "max_batch_size",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_type",
        "n_ctx",
        "n_group",
        "neftune_noise_alpha",
        "no_repeat_ngram_size",
        "norm_topk_prob",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "output_scores",
        "predict_special_tokens",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",  # of DeepSeek: the sum of two that are read
        "quantization_config",
        "query_pre_attn_scalar",
        "remove_invalid_values",
        "reorder_and_upcast_attn",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "rope_interleave",
        "rope_interleaved",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "scale_attn_weights",
        "scoring_func",
        "seq_aux",
        "suppress_tokens",
        "swiglu_limit",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "topk_group",
        "topk_method",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "type_vocab_size",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_bidirectional_attention",
        "use_cache",
        "use_flash_attention",
        "use_flash_attention_2",
        "use_flash_attn",
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


def _all_full(kinds: object) -> bool:
    return isinstance(kinds, list) and set(kinds) == {"full_attention"}


def is_harmless(key: str) -> bool:
    """Whether a key is known to change no shape.

    >>> is_harmless("bos_token_id"), is_harmless("num_hidden_layer")
    (True, False)
    """
    endings = ("_token_id", "_token_ids", "_token_index")
    starts = ("_", "pooler_", "summary_", "initializer", "scale_attn_by")
    return key in _HARMLESS or key.endswith(endings) or key.startswith(starts)


class ConfigFields:
    """Typed access to a configuration, with errors that name the field."""

    __slots__ = ("_asked", "_config", "_name")

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self._config = config
        self._name = name
        self._asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        """A field, or the default where it is absent or null."""
        self._asked.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def unread(self) -> tuple[str, ...]:
        """Keys that are set, that nobody has asked for, and that may say something of the shape.

        Raises:
            UserInputError: for one that is nearly a key that was asked for in vain.
            UnplannableModelError: for one that by its name describes a part of the model.
        """
        lacking = sorted(self._asked - self._config.keys())
        unread = sorted(
            key
            for key, value in self._config.items()
            if value not in (None, False, "", [], {}) and key not in self._asked
            if not is_harmless(key) and not (key == "layer_types" and _all_full(value))
        )
        for key in unread:
            if close := difflib.get_close_matches(key, lacking, n=1, cutoff=_NEARLY):
                raise UserInputError(
                    f"model {self._name}: config.json: {key}",
                    value=self._config[key],
                    limit="there is no such field",
                    fix=f"Write {close[0]}.",
                )
            if not _ARCHITECTURE.isdisjoint(key.split("_")):
                raise UnplannableModelError(
                    f"model {self._name}: config.json: {key}",
                    value=self._config[key],
                    limit=f"model_type {self._config.get('model_type')} is planned without it",
                    fix="Take it out if the model has no such part.",
                )
        return tuple(unread)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; required where no default is given."""
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"it must be a whole number of at least {least}")
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

    def wrong(self, key: str, limit: str) -> UserInputError:
        """The error for a field that cannot be used."""
        return UserInputError(
            f"model {self._name}: config.json: {key}",
            value=self._config.get(key),
            limit=limit,
            fix="Check that this is the model's own config.json.",
        )
