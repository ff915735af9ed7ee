"""Heterogeneous layers of a command: ``--heterogeneous-layers-config-path``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nest_megatron.documents import parse_json
from nest_megatron.errors import UnplannableModelError
from nest_megatron.files import read_text
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error, flag_of
from nest_megatron.model.heterogeneous import read_heterogeneous_layers
from nest_megatron.model.layer_pattern import LayerKind

_PATH = "heterogeneous_layers_config_path"
_TEXT = "heterogeneous_layers_config_encoded_json"


def heterogeneous_kinds(values: Values) -> tuple[LayerKind, ...]:
    """The layers of a command's file; empty where it names none.

    Raises:
        UserInputError: for what Megatron cannot read, or arguments that contradict the file.
        UnplannableModelError: where Megatron builds plain layers and says nothing.

    Source: ``validate_model_config_args_from_heterogeneous_config`` and
    ``core_transformer_config_from_args`` of 0.16.1 and 0.20.
    """
    path, text = values.get(_PATH), values.get(_TEXT)
    if not path and not text:
        return ()
    if not path:
        raise UnplannableModelError(
            flag_of(_TEXT),
            "its text",
            f"without {flag_of(_PATH)} Megatron builds plain layers and says nothing",
            f"Add {flag_of(_PATH)}.",
        )
    try:
        text = text or read_text(Path(path), flag_of(_PATH))
        differing = list(_differing(values, parse_json(text, flag_of(_PATH), name=path)))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise flag_error(
            _PATH,
            path,
            f"Megatron cannot read it ({error!r})",
            "Give config.json of a Llama-Nemotron model, or one with the same keys.",
        ) from None
    for name, given, expected in differing:
        raise flag_error(
            name,
            given,
            f"{path} says {expected}, and Megatron ends with an error",
            "Give the same in both.",
        )
    names = ("hidden_size", "num_attention_heads", "num_query_groups")
    return read_heterogeneous_layers(
        text,
        None,
        flag_of,
        **{name: values[name] for name in names},
        ffn_hidden_size=values.get("ffn_hidden_size") or 4 * values["hidden_size"],
    )


def _differing(values: Values, file: Values) -> Iterator[tuple[str, object, object]]:
    """Arguments that Megatron compares with the file, and that differ from it."""
    in_group = [block["attention"]["n_heads_in_group"] for block in file["block_configs"]]
    sizes = [size for size in in_group if size is not None]
    if len(set(sizes)) > 1:
        raise ValueError("n_heads_in_group must be the same in all layers")
    if file["hidden_act"] != "silu":
        raise ValueError("hidden_act must be silu")
    expected = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "group_query_attention": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "use_rope_scaling": True,
        "use_rotary_position_embeddings": True,
        "num_layers": file["num_hidden_layers"],
        **{name: file[name] for name in ("hidden_size", "num_attention_heads")},
        "untie_embeddings_and_output_weights": not file["tie_word_embeddings"],
        "rotary_base": file["rope_theta"],
        "rope_scaling_factor": file["rope_scaling"]["factor"],
        "num_query_groups": file["num_attention_heads"] // sizes[0],
    }
    return ((n, values.get(n), wanted) for n, wanted in expected.items() if values.get(n) != wanted)
