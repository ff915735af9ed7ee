"""What is assumed of a model where an application says nothing, and fields that are not read."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.hydra.view import AppView, has_path

#: Likeness from which a field of the model is taken for another that is misspelt.
_NEARLY = 0.9
#: Any of these names says it -> what Megatron does where none does.
_DEFAULTS: Mapping[tuple[str, ...], str] = {
    ("position_embedding_type",): "learned positions",
    (
        "untie_embeddings_and_output_weights",
        "share_embeddings_and_output_weights",
    ): "embeddings shared with the output",
    ("normalization",): "LayerNorm",
    ("add_bias_linear", "bias"): "biases in linear layers",
    ("activation", "swiglu", "squared_relu", "quick_geglu"): "GELU without a gate",
    ("ffn_hidden_size",): "a feed-forward size of 4 times the hidden size, or of two thirds of it "
    "with a gate",
    ("num_query_groups",): "as many key-value heads as heads",
    ("hidden_dropout",): "a dropout of 0.1",
}


def require_known_fields(view: AppView, known: Collection[str], own: Collection[str]) -> None:
    """Refuse names in ``nest.fields`` that nothing reads, and misspelt fields of the model.

    Args:
        known: names that a plan reads or sets.
        own: those of them that describe a model.

    Raises:
        UserInputError: naming the field, and the one that is probably meant.
    """
    for name in view.settings.fields:
        if name not in known:
            raise UserInputError(
                f"nest.fields.{name}",
                value=view.settings.fields[name],
                limit="a plan neither reads nor sets such a field",
                fix=nearest(name, known),
            )
    unsaid = [name for name in own if not _is_said(view, name)]
    for name in _of_root(view):
        close = difflib.get_close_matches(name, unsaid, n=1, cutoff=_NEARLY)
        if close and name not in known:
            raise UserInputError(
                f"{view.settings.root}.{name}",
                value=view.at(f"{view.settings.root}.{name}"),
                limit=f"there is no such field, and {close[0]} is not given",
                fix=f"Write {close[0]}, or say where it lies: +nest.fields.{close[0]}=PATH.",
            )


def assumptions(view: AppView, known: Collection[str]) -> Iterator[str]:
    """What was assumed of the model, and what beside its fields was not read, as notes."""
    unsaid = [
        (names[0], default)
        for names, default in _DEFAULTS.items()
        if not any(_is_said(view, name) for name in names)
    ]
    if view.at("trainer.precision") is None and not any(
        _is_said(view, name) for name in ("precision", "bf16", "fp16")
    ):
        unsaid.append(("precision", "bf16"))
    if unsaid:
        listed = ", ".join(f"{name} ({default})" for name, default in unsaid)
        yield (
            f"The application leaves these open, and in brackets is what is assumed: {listed}. "
            "+nest.fields.NAME=PATH says where one lies."
        )
    if unread := sorted(_beside(view, known)):
        yield f"Fields beside those of the model that are not read: {', '.join(unread)}."


def _is_said(view: AppView, name: str) -> bool:
    prefix = f"{view.settings.root}." if view.settings.root else ""
    return name in view.settings.fields or has_path(view.raw, f"{prefix}{name}")


def _of_root(view: AppView) -> Mapping[str, Any]:
    node: Any = view.raw
    for step in filter(None, view.settings.root.split(".")):
        node = node.get(step) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _beside(view: AppView, known: Collection[str]) -> Iterator[str]:
    """Fields that are set in the nodes that ``nest.fields`` names, and that nothing reads."""
    mapped = set(view.settings.fields.values())
    root = view.settings.root
    for parent in {path.rpartition(".")[0] for path in mapped}:
        node: Any = view.raw
        for step in filter(None, parent.split(".")):
            node = node.get(step) if isinstance(node, Mapping) else None
        for name, value in node.items() if isinstance(node, Mapping) else ():
            path = f"{parent}.{name}" if parent else str(name)
            is_read = path in mapped or (parent == root and name in known)
            if not is_read and isinstance(value, bool | int | float | str) and value is not False:
                yield path
