"""Which model a measured row is about, by its name and by its columns."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry, catalogue_names
from nest_megatron.documents import parse_json, read_csv
from nest_megatron.errors import UserInputError
from nest_megatron.model.catalogue import MEGATRON_DEFAULTS, spec_from_mapping
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.validation.model_names import (
    ModelName,
    candidates,
    key_of,
    read_name,
    refuse_by_name,
    size_in_billions,
)
from nest_megatron.validation.rows import RefusedRowError, Row, whole

NEEDED = ("name", "layers", "hidden", "heads")

_WHOLE: Mapping[str, str] = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab": "vocab_size",
    "seq": "seq_length",
    "experts": "num_experts",
    "topk": "moe_router_topk",
    "moe_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
}
#: Spellings in the ``extra`` column, a JSON object.
_EXTRA: Mapping[str, str] = {
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")},
    "qk_pos_emb_head_dim": "qk_pos_emb_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
}

#: Vocabulary of the GPT-2 tokenizer; Megatron pads it.
GPT2_VOCAB = 50_257


def read_table(path: Path) -> tuple[Row, ...]:
    """The rows of a table of architectures.

    Raises:
        UserInputError: if it cannot be read, or lacks a needed column.
    """
    columns, rows = read_csv(path, "model table")
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        raise UserInputError(
            str(path),
            ", ".join(missing),
            "a table of models needs these columns",
            f"Write at least {','.join(NEEDED)} in the first line.",
        )
    return tuple(rows)


def mapping_of(row: Row, base: Mapping[str, object] | None) -> dict[str, object]:
    """A model description from one row of a table.

    Args:
        row: column to text; an empty cell says nothing.
        base: the catalogue's description of the same model, for what the row leaves out.

    Raises:
        UserInputError: if a size is no whole number, or the ``extra`` column no JSON object.
    """
    gated = row.get("gated_mlp", "").lower() in ("true", "1")
    mapping = dict(base or ({} if gated else MEGATRON_DEFAULTS))
    for column, field in _WHOLE.items():
        value = _size(row, column)
        if value is not None:
            mapping[field] = value
    if row.get("gated_mlp"):
        mapping["gated_linear_unit"] = gated
    extra = _extra(row)
    if "tied" in extra:
        mapping["untie_embeddings_and_output_weights"] = not extra["tied"]
    if row.get("attention", "").lower() == "mla":
        mapping |= {_EXTRA[key]: extra[key] for key in extra if key in _EXTRA}
        mapping |= {"multi_latent_attention": True, "num_query_groups": None}
    mapping |= _expert_layers(row, extra)
    parts = filter(None, (row.get("repo"), row.get("path"), row.get("commit")))
    mapping |= {"name": row["name"], "source": " ".join(parts) or "a table of models"}
    return _completed(mapping)


def _completed(mapping: dict[str, object]) -> dict[str, object]:
    hidden, seq = mapping.get("hidden_size"), mapping.setdefault("seq_length", 2048)
    mapping.setdefault("vocab_size", GPT2_VOCAB)
    if isinstance(hidden, int):
        mapping.setdefault("ffn_hidden_size", 4 * hidden)
    longest = mapping.get("max_position_embeddings")
    if isinstance(seq, int) and (not isinstance(longest, int) or longest < seq):
        mapping["max_position_embeddings"] = seq
    return mapping


def _size(row: Row, column: str) -> int | None:
    try:
        return whole(row, column)
    except RefusedRowError as error:
        raise UserInputError(
            f"model {row['name']}: {column}",
            row[column],
            "it must be a whole number, which may be a product",
            "Write for example 4096, or 25256 * 8.",
        ) from error


def _extra(row: Row) -> Mapping[str, object]:
    text = row.get("extra") or "{}"
    try:
        fields = parse_json(text, "extra")
    except UserInputError:
        fields = None
    if not isinstance(fields, dict):
        raise UserInputError(
            f"model {row['name']}: extra",
            text,
            "it must be a JSON object",
            'Write for example {"tied": false}.',
        )
    return fields


def _expert_layers(row: Row, extra: Mapping[str, object]) -> dict[str, object]:
    pattern = extra.get("moe_layer_freq")
    layers, dense = _size(row, "layers"), _size(row, "dense_layers")
    if isinstance(pattern, int | list):
        return {"moe_layer_freq": pattern}
    if isinstance(pattern, str):
        return {"moe_layer_freq": re.sub(r"^.*lambda:|\)$|\s", "", pattern)}
    if layers is not None and dense is not None:
        return {"moe_layer_freq": [0] * dense + [1] * (layers - dense)}
    return {}


BERT_VOCAB = 30_522
MTP_ASSUMED = "the name does not say, so multi-token prediction is taken as on"
_LLAMA_LIKE = ("llama", "qwen", "mistral", "yi", "internlm", "baichuan", "deepseek", "aquila")


@frozen
class ModelMatch:
    """The model of a row, and what the row did not say of it."""

    spec: TransformerSpec
    assumptions: tuple[str, ...] = ()


def resized(match: ModelMatch, row: Row, name: ModelName) -> ModelMatch:
    """A known model with what the row says of its sizes.

    A model cut to fewer layers keeps the front of its pattern, and one dense layer only where more
    would leave at most half of the layers with experts. It has no multi-token prediction.
    """
    spec = match.spec
    layers = whole(row, "layers") or name.num_layers or spec.num_layers
    pattern, cut = _cut_pattern(spec.moe_layer_pattern, layers)
    mtp, predicted = _mtp(spec, name, cut=layers < spec.num_layers)
    spec = spec if mtp else spec.without_mtp()
    changes = {
        "num_layers": layers,
        "moe_layer_pattern": pattern,
        "mtp_num_layers": mtp,
        **_columns(spec, row),
    }
    if name.num_experts and spec.moe_router_topk:
        most = min(spec.moe_router_topk, name.num_experts)
        changes |= {"num_experts": name.num_experts, "moe_router_topk": most}
    return ModelMatch(
        spec=replace(spec, **changes),
        assumptions=(*match.assumptions, *filter(None, (cut, predicted))),
    )


def _columns(spec: TransformerSpec, row: Row) -> dict[str, Any]:
    named = {"ffn": "ffn_hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
    found = {field: whole(row, column) for column, field in named.items()}
    changes = {field: value for field, value in found.items() if value}
    groups = whole(row, "kv_heads")
    if groups and not spec.multi_latent_attention:
        changes["num_query_groups"] = groups
    seq = whole(row, "seq")
    if seq:
        longest = spec.max_position_embeddings or seq
        learned = spec.position_embedding_type == "learned_absolute"
        changes["seq_length"] = seq
        changes["max_position_embeddings"] = seq if learned else max(seq, longest)
    return changes


def _cut_pattern(pattern: tuple[int, ...], layers: int) -> tuple[tuple[int, ...], str]:
    if not pattern or layers == len(pattern):
        return pattern, ""
    if layers > len(pattern):
        return pattern + pattern[-1:] * (layers - len(pattern)), ""
    dense = pattern.index(1) if 1 in pattern else 0
    if 2 * dense < layers or dense < 2:
        return pattern[:layers], ""
    note = f"cut to {layers} layers, the first alone is dense (the whole model has {dense} such)"
    return (0,) + (1,) * (layers - 1), note


def _mtp(spec: TransformerSpec, name: ModelName, *, cut: bool) -> tuple[int | None, str]:
    if name.mtp is not None:
        return ((spec.mtp_num_layers or 1) if name.mtp else None), ""
    if not spec.num_mtp_layers:
        return spec.mtp_num_layers, ""
    if cut:
        return None, "a cut model has no multi-token prediction"
    return spec.mtp_num_layers, MTP_ASSUMED


def shape_of_columns(row: Row, name: ModelName) -> ModelMatch:
    """A model that only its sizes describe."""
    hidden, heads = whole(row, "hidden"), whole(row, "heads")
    if not hidden or not heads:
        anonymous = name.key.startswith(("gpt", "bert", "bloom")) or row.get("params_b")
        reason = "shape not stated" if anonymous else "unknown model"
        raise RefusedRowError(reason, f"{row.get('model', '')!r} hidden={hidden} heads={heads}")
    style, notes = _style(row, name)
    layers, note = _layers(row, name, hidden, int(style["vocab_size"]))
    mapping = {
        **style,
        "name": row.get("model") or name.key,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": whole(row, "kv_heads"),
        "ffn_hidden_size": whole(row, "ffn") or 4 * hidden,
        **_length(row, style),
        "source": f"columns of the row {row.get('row_id', '')}".strip(),
    }
    if hidden % heads:
        raise RefusedRowError("size of a head not stated", f"hidden={hidden} heads={heads}")
    spec, tied = _tied_or_not(spec_from_mapping(mapping), row)
    return ModelMatch(spec=spec, assumptions=(*notes, *filter(None, (note, tied))))


def _tied_or_not(spec: TransformerSpec, row: Row) -> tuple[TransformerSpec, str]:
    """Untied, if that makes the parameters that the row states where tied does not."""
    size = size_in_billions(row.get("params_b", "").replace(".", "p") + "b")
    if size is None:
        return spec, ""
    untied = replace(spec, untie_embeddings_and_output_weights=True)
    counts = {each: total_parameters(each) / 1e9 for each in (spec, untied)}
    if abs(counts[untied] - size) < abs(counts[spec] - size) / 2:
        return untied, f"embedding not tied, for {size:g} billion parameters"
    if abs(counts[spec] - size) > 0.1 * size:
        return spec, f"the sizes make {counts[spec]:.1f} billion parameters, the row says {size:g}"
    return spec, ""


def _length(row: Row, style: Mapping[str, Any]) -> dict[str, Any]:
    seq = whole(row, "seq")
    if not seq:
        if style.get("family") != "bert":
            raise RefusedRowError("sequence length not stated", row.get("model", ""))
        seq = 512
    return {"seq_length": seq, "max_position_embeddings": seq}


def _style(row: Row, name: ModelName) -> tuple[dict[str, Any], tuple[str, ...]]:
    vocab = whole(row, "vocab")
    if name.key.startswith(_LLAMA_LIKE):
        if not vocab or not whole(row, "ffn"):
            raise RefusedRowError("shape not stated", f"{row.get('model', '')!r}: ffn and vocab")
        return {"vocab_size": vocab}, ("a Llama-like layer: SwiGLU, RMSNorm, no biases, untied",)
    bert = name.key.startswith("bert")
    notes = ["a GPT-2-like layer: GELU, LayerNorm, biases, learned positions, tied, dropout 0.1"]
    if not vocab:
        vocab = BERT_VOCAB if bert else GPT2_VOCAB
        notes.append(f"a vocabulary of {vocab}")
    if not whole(row, "ffn"):
        notes.append("an MLP of four times the hidden size")
    family = "bert" if bert else "gpt"
    return {**MEGATRON_DEFAULTS, "vocab_size": vocab, "family": family}, tuple(notes)


def _layers(row: Row, name: ModelName, hidden: int, vocab: int) -> tuple[int, str]:
    """Number of layers as stated, or the one that makes the stated parameters to their last digit.

    A layer of four times the hidden size holds ``12 * hidden**2`` parameters.
    """
    if said := whole(row, "layers") or name.num_layers:
        return said, ""
    text = row.get("params_b") or ""
    size = size_in_billions(text.replace(".", "p") + "b")
    refused = RefusedRowError("number of layers not stated", f"{row.get('model', '')!r} of {text}B")
    if size is None or whole(row, "ffn") not in (None, 4 * hidden):
        raise refused
    each, rounding = 12 * hidden**2, 0.5e9 / 10 ** len(text.partition(".")[2])
    layers = round((size * 1e9 - vocab * hidden) / each)
    error = abs(layers * each + vocab * hidden - size * 1e9)
    if layers < 1 or error > rounding or layers % (whole(row, "pp") or 1):
        raise refused
    return layers, f"{layers} layers, the only number that makes {text} billion parameters"


#: How far the parameters of a model may lie from the size in its name.
_SIZE_TOLERANCE = 0.05
#: A catalogue file by its name.
_entry = functools.cache(functools.partial(catalogue_entry, "model"))


@frozen
class ModelBook:
    """The models that rows may name.

    Args:
        entries: key to the name of a catalogue entry.
        extra: key to a row of the user's tables, which come before the catalogue.
    """

    entries: Mapping[str, str]
    extra: Mapping[str, Row]

    @classmethod
    def load(cls, extra: Sequence[Path] = ()) -> ModelBook:
        """The installed catalogue, with a user's tables before it; the first of a name counts.

        Raises:
            UserInputError: if a table cannot be read.
        """
        tables: dict[str, Row] = {}
        for path in extra:
            for row in read_table(path):
                mapping_of(row, None)  # refuses what is unreadable before any run is predicted
                tables.setdefault(read_name(row["name"]).key, row)
        return cls(entries={key_of(name): name for name in catalogue_names("model")}, extra=tables)

    def spec(self, row: Row) -> ModelMatch:
        """The model of a row, with the sizes that the row states put in place.

        Args:
            row: a row with ``model``, and where known ``layers``, ``hidden``, ``ffn``, ``heads``,
                ``kv_heads``, ``vocab``, ``seq`` and ``params_b``.

        Raises:
            RefusedRowError: if the model is unknown, or no such transformer can be described.
        """
        text = row.get("model", "")
        refuse_by_name(text)
        name = read_name(text)
        try:
            found = self._named(name, row)
            if found is None:
                return shape_of_columns(row, name)
            return resized(found, row, name)
        except UserInputError as error:
            raise RefusedRowError("impossible shape", str(error)) from error

    def _named(self, name: ModelName, row: Row) -> ModelMatch | None:
        for key, assumed in () if _unreliable(name, row) else candidates(name):
            spec = self._at(key) or self._active(key)
            if spec is not None:
                return _agreeing(spec, assumed, row)
        *stem, last = name.words or ("",)
        size = size_in_billions(last)
        spec = self._at("".join(stem)) if size else None
        if not spec or not size:
            return None
        counts = [total_parameters(each) / 1e9 for each in (spec, spec.without_mtp())]
        near = any(abs(count - size) <= _SIZE_TOLERANCE * size for count in counts)
        return _agreeing(spec, "", row) if near else None

    def _at(self, key: str) -> TransformerSpec | None:
        row = self.extra.get(key)
        keys = [key] if row is None else [k for k, _ in candidates(read_name(row["name"]))]
        entry = next((_entry(self.entries[k]) for k in keys if k in self.entries), None)
        if row is not None:
            return spec_from_mapping(mapping_of(row, entry))
        return None if entry is None else spec_from_mapping(entry)

    def _active(self, key: str) -> TransformerSpec | None:
        """The one model whose name only adds the active parameters, as in 235B-A22B."""
        longer = [
            known
            for known in (*self.extra, *self.entries)
            if known.startswith(key + "a") and size_in_billions(known[len(key) + 1 :])
        ]
        return self._at(longer[0]) if len(set(longer)) == 1 else None


def _unreliable(name: ModelName, row: Row) -> bool:
    """Whether ``GPT-20B`` is just any GPT of that size, and not the one of NVIDIA's series."""
    if name.words[:1] != ("gpt",) or len(name.words) != 2 or whole(row, "hidden"):
        return False
    said = " ".join(row.get(column, "") for column in ("source", "repo", "framework")).lower()
    return not any(word in said for word in ("nemo", "nvidia-", "mlperf", "paxml"))


def _agreeing(spec: TransformerSpec, assumed: str, row: Row) -> ModelMatch | None:
    if whole(row, "hidden") not in (None, spec.hidden_size):
        return None
    notes = [assumed] if assumed else []
    if "derived" in spec.source:
        notes.append(f"part of the shape of {spec.name} is derived from its size")
    if not whole(row, "seq"):
        notes.append(f"a sequence of {spec.seq_length} tokens, as in the catalogue")
    return ModelMatch(spec=spec, assumptions=tuple(notes))
