"""What the recipes behind rows of LoRA set, where rows leave it out (``finetuning.toml``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.model.encoder import Adapters
from nest_megatron.validation.rows import Row

_RECIPES = packaged(__package__, "finetuning.toml")["recipes"]
_LORA = re.compile(r"lora|peft", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """What a row's recipe says of fine-tuning.

    Args:
        adapters: ``None`` where all weights are trained.
        columns: what the row leaves out, as it would say it.
        own, words: flags by Megatron's names; a plan keeps the former and chooses the latter.
        assumption: where no recipe is known.
    """

    adapters: Adapters | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    assumption: str = ""


def trains_adapters(row: Row) -> bool:
    """Whether a row names LoRA or PEFT."""
    return _LORA.search(f"{row.get('task', '')} {row.get('model', '')}") is not None


def fine_tuning(row: Row) -> FineTuning:
    """What is known of a row's adapters; the frameworks' defaults where nothing is."""
    if not trains_adapters(row):
        return FineTuning()
    found = next(recipe for recipe in _RECIPES if _holds(recipe["where"], row))
    fields = dict(found["adapters"])
    fields["target_modules"] = tuple(fields.get("target_modules", ()))
    adapters = Adapters(**fields)
    columns = found.get("columns", {})
    return FineTuning(
        adapters=adapters,
        columns={name: text for name, text in columns.items() if not row.get(name, "").strip()},
        own=found.get("own", {}),
        words=found.get("words", {}),
        assumption="" if found["file"] else f"{adapters.words()} assumed",
    )


def _holds(where: Mapping[str, str], row: Row) -> bool:
    return all(re.search(pattern, row.get(column, "")) for column, pattern in where.items())
