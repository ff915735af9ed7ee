"""Shapes from the columns of a measured row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.model.arguments import MEGATRON_DEFAULTS
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.validation.model_names import ModelName, size_in_billions
from nest_megatron.validation.model_table import GPT2_VOCAB, whole
from nest_megatron.validation.rows import RefusedRowError

BERT_VOCAB = 30_522
_LLAMA_LIKE = ("llama", "qwen", "mistral", "yi", "internlm", "baichuan", "deepseek", "aquila")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMatch:
    """The model of a row, and what the row did not say of it."""

    spec: TransformerSpec
    assumptions: tuple[str, ...] = ()


def resized(match: ModelMatch, row: Mapping[str, str], name: ModelName) -> ModelMatch:
    """A known model with what the row says of its sizes.

    A model cut to fewer layers keeps the front of its pattern, and one dense layer only where more
    would leave at most half of the layers with experts. It has no multi-token prediction.
    """
    spec = match.spec
    layers = whole(row.get("layers")) or name.num_layers or spec.num_layers
    pattern, cut = _cut_pattern(spec.moe_layer_pattern, layers)
    mtp, predicted = _mtp(spec, name, cut=layers < spec.num_layers)
    changes: dict[str, Any] = {
        "num_layers": layers,
        "moe_layer_pattern": pattern,
        "mtp_num_layers": mtp,
        **_columns(spec, row),
    }
    return ModelMatch(
        spec=dataclasses.replace(spec, **changes),
        assumptions=(*match.assumptions, *filter(None, (cut, predicted))),
    )


def _columns(spec: TransformerSpec, row: Mapping[str, str]) -> dict[str, Any]:
    named = {"ffn": "ffn_hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
    found = {field: whole(row.get(column)) for column, field in named.items()}
    changes: dict[str, Any] = {field: value for field, value in found.items() if value}
    groups = whole(row.get("kv_heads"))
    if groups and not spec.multi_latent_attention:
        changes["num_query_groups"] = groups
    seq = whole(row.get("seq"))
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
    return spec.mtp_num_layers, "the name does not say, so multi-token prediction is taken as on"


def shape_of_columns(row: Mapping[str, str], name: ModelName) -> ModelMatch:
    """A model that only its sizes describe.

    Raises:
        RefusedRowError: if the sizes do not determine it.
    """
    hidden, heads = whole(row.get("hidden")), whole(row.get("heads"))
    if not hidden or not heads:
        anonymous = name.key.startswith(("gpt", "bert", "bloom")) or row.get("params_b")
        reason = "shape not stated" if anonymous else "unknown model"
        raise RefusedRowError(reason, f"{row.get('model', '')!r} hidden={hidden} heads={heads}")
    style, notes = _style(row, name)
    layers, note = _layers(row, name, hidden, int(style["vocab_size"]))
    mapping: dict[str, Any] = {
        **style,
        "name": row.get("model") or name.key,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": whole(row.get("kv_heads")),
        "ffn_hidden_size": whole(row.get("ffn")) or 4 * hidden,
        **_length(row, style),
        "source": f"columns of the row {row.get('row_id', '')}".strip(),
    }
    if hidden % heads:
        raise RefusedRowError("size of a head not stated", f"hidden={hidden} heads={heads}")
    spec, tied = _tied_or_not(spec_from_mapping(mapping), row)
    return ModelMatch(spec=spec, assumptions=(*notes, *filter(None, (note, tied))))


def _tied_or_not(spec: TransformerSpec, row: Mapping[str, str]) -> tuple[TransformerSpec, str]:
    """Untied, if that makes the parameters that the row states where tied does not."""
    size = size_in_billions(row.get("params_b", "").replace(".", "p") + "b")
    if size is None:
        return spec, ""
    untied = dataclasses.replace(spec, untie_embeddings_and_output_weights=True)
    counts = {each: total_parameters(each) / 1e9 for each in (spec, untied)}
    if abs(counts[untied] - size) < abs(counts[spec] - size) / 2:
        return untied, f"embedding not tied, for {size:g} billion parameters"
    if abs(counts[spec] - size) > 0.1 * size:
        return spec, f"the sizes make {counts[spec]:.1f} billion parameters, the row says {size:g}"
    return spec, ""


def _length(row: Mapping[str, str], style: Mapping[str, Any]) -> dict[str, Any]:
    seq = whole(row.get("seq"))
    if not seq:
        if style.get("family") != "bert":
            raise RefusedRowError("sequence length not stated", row.get("model", ""))
        seq = 512
    return {"seq_length": seq, "max_position_embeddings": seq}


def _style(row: Mapping[str, str], name: ModelName) -> tuple[dict[str, Any], tuple[str, ...]]:
    vocab = whole(row.get("vocab"))
    if name.key.startswith(_LLAMA_LIKE):
        if not vocab or not whole(row.get("ffn")):
            raise RefusedRowError("shape not stated", f"{row.get('model', '')!r}: ffn and vocab")
        return {"vocab_size": vocab}, ("a Llama-like layer: SwiGLU, RMSNorm, no biases, untied",)
    bert = name.key.startswith("bert")
    notes = ["a GPT-2-like layer: GELU, LayerNorm, biases, learned positions, tied, dropout 0.1"]
    if not vocab:
        vocab = BERT_VOCAB if bert else GPT2_VOCAB
        notes.append(f"a vocabulary of {vocab}")
    if not whole(row.get("ffn")):
        notes.append("an MLP of four times the hidden size")
    family = "bert" if bert else "gpt"
    return {**MEGATRON_DEFAULTS, "vocab_size": vocab, "family": family}, tuple(notes)


def _layers(row: Mapping[str, str], name: ModelName, hidden: int, vocab: int) -> tuple[int, str]:
    """Number of layers as stated, or the one that makes the stated parameters to their last digit.

    A layer of four times the hidden size holds ``12 * hidden**2`` parameters.
    """
    stated = whole(row.get("layers")) or name.num_layers
    if stated:
        return stated, ""
    text = row.get("params_b") or ""
    size = size_in_billions(text.replace(".", "p") + "b")
    refused = RefusedRowError("number of layers not stated", f"{row.get('model', '')!r} of {text}B")
    if size is None or whole(row.get("ffn")) not in (None, 4 * hidden):
        raise refused
    each, rounding = 12 * hidden**2, 0.5e9 / 10 ** len(text.partition(".")[2])
    layers = round((size * 1e9 - vocab * hidden) / each)
    error = abs(layers * each + vocab * hidden - size * 1e9)
    if layers < 1 or error > rounding or layers % (whole(row.get("pp")) or 1):
        raise refused
    return layers, f"{layers} layers, the only number that makes {text} billion parameters"
