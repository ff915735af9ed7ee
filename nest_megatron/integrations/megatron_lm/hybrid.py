"""Which layers a hybrid model of Mamba, attention, MLP and expert layers has, by its arguments.

0.16.1 builds one by ``pretrain_mamba.py`` alone, of ``--num-layers`` layers that
``--hybrid-override-pattern`` or shares of layers name. 0.20 names layers, stages and MTP depths in
``--hybrid-layer-pattern`` and keeps some of the old flags for old checkpoints
(``megatron/training/arguments.py:743-925``; ``hybrid_builders.py``).
"""

from __future__ import annotations

from pathlib import PurePath

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error, flag_of
from nest_megatron.model.layer_pattern import hybrid_kinds, pattern_from_ratios

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
    given = next((name for name in named if values.get(name)), None)
    if not by_script and (given is None or script):
        if given is not None:
            raise UnplannableModelError(
                flag_of(given),
                values[given],
                f"{script} builds no hybrid model of state-space layers",
                "Use pretrain_hybrid.py (0.16.1: pretrain_mamba.py), or drop the flag.",
            )
        return ""
    if by_script and (layers or not values.get("spec")):
        raise UnplannableModelError(
            "--spec",
            layers or None,
            "its layers are not megatron-core's hybrid_stack_spec",
            f"Give one of --spec {', --spec '.join(_STACKS[:2])}.",
        )
    old = version.startswith("0.16")
    pattern = _pattern_of_0_16(values) if old else _pattern(values)
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
    version = "0.20" if "hybrid_layer_pattern" in arguments else "0.16.1"
    return hybrid_pattern(arguments, "", version).replace("|", "")


def _pattern(values: Values) -> str:
    """Source: 0.20 arguments.py:743-786."""
    new, old = values.get("hybrid_layer_pattern"), values.get("hybrid_override_pattern")
    if new and old:
        raise flag_error(
            "hybrid_override_pattern",
            old,
            f"{flag_of('hybrid_layer_pattern')} is given as well",
            "Drop it.",
        )
    pattern, depths = str(new or old or ""), int(values.get("mtp_num_layers") or 0)
    depth = values.get("mtp_hybrid_override_pattern")
    if depth and depths and "/" not in pattern:
        pattern += depths * f"/{depth}"
    if not pattern:
        raise flag_error(
            "hybrid_layer_pattern",
            None,
            "a hybrid model's layers are named by it alone",
            "Add it to the command.",
        )
    if depths and "/" not in pattern:
        raise flag_error(
            "mtp_num_layers",
            depths,
            "a hybrid model names the layers of an MTP depth behind / in its pattern",
            "Write for example M*M*/*M in --hybrid-layer-pattern, or drop the flag.",
        )
    return pattern


def _pattern_of_0_16(values: Values) -> str:
    layers, pattern = values.get("num_layers"), values.get("hybrid_override_pattern")
    if not layers:
        raise flag_error(
            "num_layers", layers, "the model's shape needs it", "Add it to the command."
        )
    if values.get("mtp_num_layers"):
        raise flag_error(
            "mtp_num_layers",
            values["mtp_num_layers"],
            "a hybrid model of 0.16.1 has no MTP layers",
            "Drop it.",
        )
    shares = [float(values.get(f"hybrid_{name}_ratio") or 0) for name in ("attention", "mlp")]
    even = pattern_from_ratios(int(layers), *shares)
    if pattern is None:
        return even
    strange = set(pattern) - set("M*-E")
    if strange:
        raise UserInputError(
            "--hybrid-override-pattern",
            pattern,
            f"0.16.1 has the symbols M * - E, not {' '.join(sorted(strange))}",
            fix="Use 0.20.",
        )
    if any(shares) and sorted(pattern) != sorted(even):
        raise flag_error(
            "hybrid_override_pattern",
            pattern,
            f"the shares beside it make other numbers of layers ({even})",
            "Drop the shares.",
        )
    return str(pattern)
