"""Models of Megatron-LM's functional tests, from the flags that their rows carry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.model.arguments import SAME_NAMES, spec_from_arguments
from nest_megatron.model.spec import ModelFamily
from nest_megatron.validation.model_names import HYBRID
from nest_megatron.validation.model_shapes import BERT_VOCAB, ModelMatch
from nest_megatron.validation.model_table import GPT2_VOCAB, whole
from nest_megatron.validation.rows import RefusedRowError

#: The collection cuts a row's flags at this many characters.
_FLAGS_CUT = 900
#: Vocabulary of ``nemotron_2_256k.model``, the tokenizer of the release tests.
_RELEASE_VOCAB = 256_000
_REFUSED: Mapping[str, str] = {
    "t5": "encoder and decoder",
    "hybrid": HYBRID,
    "mamba": HYBRID,
    "mimo": "more than a language model",
    "multimodal": "more than a language model",
}
#: Flags that are read; what columns state (``max_position_embeddings`` with ``seq``) is not.
_KNOWN = {*SAME_NAMES, "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias"}
_KNOWN |= {"apply_layernorm_1p"}
_KNOWN -= {"max_position_embeddings", "add_bias_linear"}
_REAL = ("layernorm_epsilon", "rotary_percent", "hidden_dropout", "attention_dropout")
_SWITCHES = {"True": True, "False": False}


def shape_of_test(row: Mapping[str, str]) -> ModelMatch:
    """The model of a functional test; Megatron's defaults stand where no flag is carried.

    Args:
        row: a row with ``family``, ``layers``, ``hidden``, ``ffn``, ``heads``, ``kv_groups``,
            ``swiglu``, ``experts``, ``topk``, ``moe_ffn``, ``moe_layer_freq``, ``mla``,
            ``mtp_layers``, ``seq``, ``vocab``, ``test_case`` and ``extra_args``.

    Raises:
        RefusedRowError: if the family is no GPT or BERT, or its shape is not stated.
    """
    flags = flags_of(row.get("extra_args", ""))
    _refuse_family(row, flags)
    style, notes = _style(row, flags)
    arguments = {**_arguments(row), **style, **_typed(flags)}
    if arguments["multi_latent_attention"]:
        arguments["group_query_attention"] = False
    fields = {name: arguments.pop(name) for name in _FIELDS if name in arguments}
    spec = spec_from_arguments(
        arguments,
        spelled=str,
        name=row.get("test_case") or "megatron_test",
        num_layers=whole(row["layers"]),
        hidden_size=whole(row["hidden"]),
        seq_length=whole(row["seq"]),
        family=ModelFamily.BERT if row.get("family") == "bert" else ModelFamily.GPT,
        source=f"{row.get('repo', '')} {row.get('path', '')}".strip(),
        **fields,
    )
    return ModelMatch(spec=spec, assumptions=notes)


#: Fields of the spec that no argument of Megatron names.
_FIELDS = ("vocab_size", "activation", "gated_linear_unit")


def flags_of(text: str) -> dict[str, str]:
    """Megatron's flags of a row, spelled as fields; the last may be cut and is then left out.

    >>> flags_of("kv-channels=128 offload-modules=[a b] swiglu=True moe-")
    {'kv_channels': '128', 'offload_modules': '[a b]', 'swiglu': 'True'}
    """
    whole_text = text if len(text) < _FLAGS_CUT else text.rpartition(" ")[0]
    pairs = re.findall(r"([\w-]+)=(\[[^\]]*\]|\S+)", whole_text)
    return {key.replace("-", "_"): value for key, value in pairs}


def _refuse_family(row: Mapping[str, str], flags: Mapping[str, str]) -> None:
    family, test = row.get("family", ""), row.get("test_case", "")
    for start, reason in _REFUSED.items():
        if family.startswith(start):
            raise RefusedRowError(reason, f"{family}: {test}")
    if any(flag.startswith(("hybrid", "mamba")) for flag in flags):
        raise RefusedRowError(HYBRID, f"{family}: {test}")
    if any(flag.startswith("heterogeneous") for flag in flags):
        raise RefusedRowError("layers of different shapes", test)
    if not all(whole(row.get(column)) for column in ("layers", "hidden", "heads", "seq")):
        raise RefusedRowError("shape not stated", test)


def _arguments(row: Mapping[str, str]) -> dict[str, Any]:
    """What the columns of a row say, by Megatron's arguments."""
    return {
        "ffn_hidden_size": whole(row.get("ffn")),
        "num_attention_heads": whole(row["heads"]),
        "group_query_attention": True,
        "num_query_groups": whole(row.get("kv_groups")),
        "max_position_embeddings": whole(row["seq"]),
        "mtp_num_layers": whole(row.get("mtp_layers")),
        "multi_latent_attention": row.get("mla") == "1",
        "swiglu": row.get("swiglu") == "1",
        "num_experts": whole(row.get("experts")),
        "moe_router_topk": whole(row.get("topk")) or 2,
        "moe_ffn_hidden_size": whole(row.get("moe_ffn")),
        "moe_layer_freq": row.get("moe_layer_freq") or None,
    }


def _typed(flags: Mapping[str, str]) -> dict[str, Any]:
    """Flags that a reader of shapes knows, as the values that Megatron makes of them."""
    known = {name: text for name, text in flags.items() if name in _KNOWN}
    found: dict[str, Any] = {
        name: _SWITCHES.get(text, text if whole(text) is None else whole(text))
        for name, text in known.items()
    }
    found |= {name: float(flags[name]) for name in _REAL if name in flags}
    if flags.get("disable_bias_linear") == "True":
        found["add_bias_linear"] = False
    if flags.get("squared_relu") == "True":
        found["activation"] = "squared_relu"
    return found


def _style(
    row: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    release, bert = "release" in row.get("test_case", ""), row.get("family") == "bert"
    style: dict[str, Any] = {"vocab_size": whole(row.get("vocab"))}
    notes = []
    if style["vocab_size"] is None:
        style["vocab_size"] = BERT_VOCAB if bert else _RELEASE_VOCAB if release else GPT2_VOCAB
        notes.append(f"a vocabulary of {style['vocab_size']}")
    if row.get("swiglu") == "1" or flags.get("swiglu") == "True":
        style |= {"activation": "silu", "gated_linear_unit": True}
    elif release and not row.get("experts") and whole(row["hidden"]) == 6144:
        style |= {"activation": "squared_relu", "apply_layernorm_1p": True, "rotary_percent": 0.5}
        notes.append("the release test of 15B trains a Nemotron: squared ReLU, layernorm 1p")
    without, note = _dropout(row, flags, release=release)
    ranks, cut = _cut_flags(row, flags)
    return style | without | ranks, (*notes, note, *([cut] if cut else []))


def _dropout(
    row: Mapping[str, str], flags: Mapping[str, str], *, release: bool
) -> tuple[dict[str, Any], str]:
    """Rows do not carry the flags of dropout.

    The tests of newer models set it to 0, and those of context parallelism without deterministic
    kernels.
    """
    newer = release or flags.get("normalization") == "RMSNorm" or bool(row.get("mtp_layers"))
    newer = newer or (row.get("cp") not in ("", "1", None) and row.get("deterministic") == "0")
    if newer:
        return {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "no dropout"
    return {}, "Megatron's dropout of 0.1"


def _cut_flags(row: Mapping[str, str], flags: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The tests' ranks of latent attention, where the row's flags end before them."""
    if len(row.get("extra_args", "")) < _FLAGS_CUT:
        return {}, ""
    if row.get("mla") != "1" or "kv_lora_rank" in flags:
        return {}, "flags beyond 900 characters are not known"
    hidden = whole(row["hidden"]) or 0
    q, kv = (1536, 512) if hidden >= 1024 else (256, 128)
    note = f"flags beyond 900 characters are not known: latent attention of ranks {q} and {kv}"
    return {"q_lora_rank": q, "kv_lora_rank": kv}, note
