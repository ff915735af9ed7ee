"""Models that more than sizes describe: of hybrid or heterogeneous layers, or that see images.

0.16.1 builds a hybrid model by ``pretrain_mamba.py`` alone, of ``--num-layers`` layers that
``--hybrid-override-pattern`` or shares of layers name. 0.20 names layers, stages and MTP depths in
``--hybrid-layer-pattern`` and keeps some of the old flags for old checkpoints
(``megatron/training/arguments.py:743-925``; ``hybrid_builders.py``).

A model that sees images has what ``pretrain_vlm.py`` builds in front of a language model: one image
a sequence, the encoder and the projector of the language model's own sizes and on the first
pipeline rank; all patches become tokens of the language model (``model_provider``,
``add_vlm_extra_args``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

from nest_megatron.cluster.records import Precision
from nest_megatron.documents import parse_json
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.files import read_text
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error, flag_of
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.heterogeneous import read_heterogeneous_layers
from nest_megatron.model.layer_pattern import LayerKind, hybrid_kinds, pattern_from_ratios
from nest_megatron.model.spec import TransformerSpec

#: Arguments that only hybrid models have.
HYBRID_ARGUMENTS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "mtp_hybrid_override_pattern",
    "is_hybrid_model",
)
_SCRIPTS = ("mamba", "hybrid")
#: ``--spec`` of megatron-core's own layers.
_STACKS = (
    "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
    "megatron.core.models.hybrid.hybrid_layer_specs mamba_stack_spec",
)


def own_layers(values: Values) -> str:
    """The layers that ``--spec`` names; empty for megatron-core's own hybrid layers."""
    named = " ".join(map(str, values.get("spec") or ()))
    return "" if named in _STACKS else named


def hybrid_pattern(values: Values, script: str, version: str) -> str:
    """A hybrid model's layers as ``--hybrid-layer-pattern`` of 0.20 states them; empty for others.

    Raises:
        UserInputError: for a pattern that Megatron cannot read, or that its script ignores.
        UnplannableModelError: for layers that are not megatron-core's own.
    """
    by_script = any(word in PurePath(script).stem.split("_") for word in _SCRIPTS)
    layers = own_layers(values)
    named = HYBRID_ARGUMENTS if layers else (*HYBRID_ARGUMENTS, "spec")
    given = next(filter(values.get, named), None)
    if not by_script and (given is None or script):
        if given is not None:
            raise UnplannableModelError(
                flag_of(given),
                values[given],
                f"{script} is not known to build hybrid models of state-space layers",
                "Use pretrain_hybrid.py (before 0.18 pretrain_mamba.py), or drop the flag.",
            )
        return ""
    if by_script and (layers or not values.get("spec")):
        raise UnplannableModelError(
            "--spec",
            layers or None,
            "its layers are not megatron-core's hybrid_stack_spec",
            f"Give one of --spec {', --spec '.join(_STACKS[:2])}.",
        )
    old = release_number(version) < (0, 17)
    pattern = _pattern_and_shares(values) if old else _pattern(values)
    kinds, *_ = hybrid_kinds(pattern)
    if old and len(kinds) != values["num_layers"]:
        raise flag_error(
            "hybrid_override_pattern",
            pattern,
            f"it names {len(kinds)} layers and --num-layers is {values['num_layers']}",
            "Give the same number in both.",
        )
    return pattern


def saved_pattern(arguments: Values) -> str:
    """The layers of the hybrid model that a checkpoint's arguments describe; empty for others.

    Raises: as ``hybrid_pattern``.
    """
    return hybrid_pattern(
        arguments, "", "0.17" if "hybrid_layer_pattern" in arguments else "0.16"
    ).replace("|", "")


def _pattern(values: Values) -> str:
    """That of releases since 0.17. Source: 0.20 arguments.py:743-786."""
    pattern = str(values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern") or "")
    depths = int(values.get("mtp_num_layers") or 0)
    depth = values.get("mtp_hybrid_override_pattern")
    if depth and depths and "/" not in pattern:
        pattern += depths * f"/{depth}"
    if not pattern:
        raise flag_error(
            "hybrid_layer_pattern",
            None,
            "a hybrid model's layers are named by it alone since Megatron-LM 0.17",
            "Add it to the command, or plan for an older one: target=megatron_lm_0.16.",
        )
    if depths and "/" not in pattern:
        raise flag_error(
            "mtp_num_layers",
            depths,
            "a hybrid model names the layers of an MTP depth behind / in its pattern",
            "Write for example M*M*/*M in --hybrid-layer-pattern, or drop the flag.",
        )
    return pattern


def _pattern_and_shares(values: Values) -> str:
    layers = values.get("num_layers")
    pattern = values.get("hybrid_override_pattern")
    if not layers:
        raise flag_error(
            "num_layers", layers, "the model's shape needs it", "Add it to the command."
        )
    if values.get("mtp_num_layers"):
        raise flag_error(
            "mtp_num_layers",
            values["mtp_num_layers"],
            "a hybrid model has no MTP layers before 0.17",
            "Drop it.",
        )
    shares = [float(values.get(f"hybrid_{name}_ratio") or 0) for name in ("attention", "mlp")]
    even = pattern_from_ratios(int(layers), *shares)
    if pattern is None:
        return even
    if strange := set(pattern) - set("M*-E"):
        raise UserInputError(
            "--hybrid-override-pattern",
            pattern,
            f"before 0.17 the symbols are M * - E, not {' '.join(sorted(strange))}",
            "G, | and / are known since 0.17, D since 0.18, + since 0.19.",
        )
    if any(shares) and sorted(pattern) != sorted(even):
        raise flag_error(
            "hybrid_override_pattern",
            pattern,
            f"the shares beside it make other numbers of layers ({even})",
            "Drop the shares.",
        )
    return str(pattern)


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
    text = text or read_text(Path(path), flag_of(_PATH))
    file = parse_json(text, flag_of(_PATH), name=path)
    try:
        differing = list(_differing(values, file))
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
    return read_heterogeneous_layers(
        text,
        None,
        flag_of,
        **{n: values[n] for n in ("hidden_size", "num_attention_heads", "num_query_groups")},
        ffn_hidden_size=values.get("ffn_hidden_size") or 4 * values["hidden_size"],
    )


def _differing(values: Values, file: Values) -> Iterator[tuple[str, object, object]]:
    """Arguments that Megatron compares with the file, and that differ from it."""
    sizes = [
        size
        for block in file["block_configs"]
        if (size := block["attention"]["n_heads_in_group"]) is not None
    ]
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


_COLOURS = 3


def with_images(spec: TransformerSpec, values: Values, precision: Precision) -> TransformerSpec:
    """A language model with the encoder that the script puts in front of it.

    Raises:
        UnplannableModelError: for a language model that is not trained, or layers in 8 or 4 bits.
        UserInputError: if the patches do not divide the image.
    """
    if precision.is_quantized:
        raise UnplannableModelError(
            "precision",
            precision.value,
            "an encoder of images is priced in 16 bits",
            "Use --bf16 alone.",
        )
    if values.get("freeze_LM"):
        raise UnplannableModelError(
            "--freeze-LM",
            True,
            "only its encoder or projector would be trained",
            "Launch without nest.",
        )
    height = values["img_h"]
    width = values["img_w"]
    patch = values["patch_dim"]
    for name, size in (("img_h", height), ("img_w", width)):
        if patch < 1 or size < 1 or size % patch:
            raise flag_error(
                name,
                size,
                f"it must be at least one --patch-dim ({patch}), and a multiple of it",
                "Use whole patches.",
            )
    patches = height // patch * (width // patch)
    tokens = patches + (not values.get("disable_vision_class_token"))
    text = values.get("dataloader_seq_length") or spec.seq_length
    shared = {each.name for each in dataclasses.fields(EncoderSpec)} - {"num_layers"}
    shared &= {each.name for each in dataclasses.fields(spec)}
    stated = values.get("encoder_num_layers") or values.get("num_layers")
    return replace(
        spec,
        num_layers=values.get("decoder_num_layers") or spec.num_layers,
        seq_length=text + tokens,
        max_position_embeddings=max(spec.max_position_embeddings or 0, text + tokens),
        untie_embeddings_and_output_weights=True,  # LLaVAModel's default, which the script leaves
        vision=EncoderSpec(
            **{name: getattr(spec, name) for name in shared},
            num_layers=stated or spec.num_layers,
            num_patches=patches,
            num_class_tokens=1,
            num_projected_tokens=tokens,
            patch_features=_COLOURS * patch * patch,
            projector_ffn_hidden_size=spec.ffn_hidden_size,
            norm_before=True,
            frozen=bool(values.get("freeze_ViT")),
        ),
    )
