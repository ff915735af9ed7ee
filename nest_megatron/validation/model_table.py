"""Architectures of a user's table, as mappings that the catalogue reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nest_megatron.documents import parse_json, read_csv
from nest_megatron.errors import UserInputError
from nest_megatron.model.arguments import MEGATRON_DEFAULTS

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
    "q_lora": "q_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "qk_pos_emb_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}

#: Vocabulary of the GPT-2 tokenizer; Megatron pads it.
GPT2_VOCAB = 50_257


def read_table(path: Path) -> tuple[Mapping[str, str], ...]:
    """The rows of a table of architectures.

    Raises:
        UserInputError: if it cannot be read, or lacks a needed column.
    """
    columns, rows = read_csv(path, "model table")
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        raise UserInputError(
            str(path),
            value=", ".join(missing),
            limit="a table of models needs these columns",
            fix=f"Write at least {','.join(NEEDED)} in the first line.",
        )
    return tuple(rows)


def whole(text: str | None) -> int | None:
    """A whole number of a table, which may be written as a float or a product.

    >>> whole("128256"), whole("51200.0"), whole("25256 * 8"), whole("")
    (128256, 51200, 202048, None)
    """
    factors = re.split(r"\s*\*\s*", (text or "").strip())
    if not all(re.fullmatch(r"\d{1,18}(\.0*)?", factor) for factor in factors):
        return None
    product = 1
    for factor in factors:
        product *= int(float(factor))
    return product


def mapping_of(row: Mapping[str, str], base: Mapping[str, object] | None) -> dict[str, object]:
    """A model description from one row of a table.

    Args:
        row: column to text; an empty cell says nothing.
        base: the catalogue's description of the same model, for what the row leaves out.

    Raises:
        UserInputError: if the ``extra`` column is no JSON object.
    """
    mapping: dict[str, object] = dict(base or _style(row))
    for column, field in _WHOLE.items():
        value = whole(row.get(column))
        if value is not None:
            mapping[field] = value
    if row.get("gated_mlp"):
        mapping["gated_linear_unit"] = row["gated_mlp"].lower() in ("true", "1")
    mapping |= _extra_fields(row, _extra(row))
    mapping |= {"name": row["name"], "source": _source(row)}
    return _completed(mapping)


def _style(row: Mapping[str, str]) -> Mapping[str, object]:
    gated = row.get("gated_mlp", "").lower() in ("true", "1")
    return {} if gated else MEGATRON_DEFAULTS


def _completed(mapping: dict[str, object]) -> dict[str, object]:
    hidden, seq = mapping.get("hidden_size"), mapping.setdefault("seq_length", 2048)
    mapping.setdefault("vocab_size", GPT2_VOCAB)
    if isinstance(hidden, int):
        mapping.setdefault("ffn_hidden_size", 4 * hidden)
    longest = mapping.get("max_position_embeddings")
    if isinstance(seq, int) and (not isinstance(longest, int) or longest < seq):
        mapping["max_position_embeddings"] = seq
    return mapping


def _source(row: Mapping[str, str]) -> str:
    parts = (row.get("repo"), row.get("path"), row.get("commit"))
    return " ".join(part for part in parts if part) or "a table of models"


def _extra(row: Mapping[str, str]) -> Mapping[str, object]:
    text = row.get("extra") or "{}"
    try:
        fields = parse_json(text, "extra")
    except UserInputError:
        fields = None
    if not isinstance(fields, dict):
        raise UserInputError(
            f"model {row['name']}: extra",
            value=text,
            limit="it must be a JSON object",
            fix='Write for example {"tied": false}.',
        )
    return fields


def _extra_fields(row: Mapping[str, str], extra: Mapping[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {}
    if "tied" in extra:
        fields["untie_embeddings_and_output_weights"] = not extra["tied"]
    if row.get("attention", "").lower() == "mla":
        fields |= {_EXTRA[key]: extra[key] for key in extra if key in _EXTRA}
        fields |= {"multi_latent_attention": True, "num_query_groups": None}
    return fields | _expert_layers(row, extra)


def _expert_layers(row: Mapping[str, str], extra: Mapping[str, object]) -> dict[str, object]:
    stated = extra.get("moe_layer_freq")
    layers, dense = whole(row.get("layers")), whole(row.get("dense_layers"))
    if isinstance(stated, int | list):
        return {"moe_layer_freq": stated}
    if isinstance(stated, str):
        return {"moe_layer_freq": re.sub(r"^.*lambda:|\)$|\s", "", stated)}
    if layers is not None and dense is not None:
        return {"moe_layer_freq": [0] * dense + [1] * (layers - dense)}
    return {}
