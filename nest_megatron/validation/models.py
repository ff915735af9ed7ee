"""Which model a measured row is about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.catalogue_files import catalogue_entry, catalogue_names
from nest_megatron.errors import UserInputError
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.validation.model_names import (
    ModelName,
    candidates,
    key_of,
    read_name,
    refuse_by_name,
    size_in_billions,
)
from nest_megatron.validation.model_shapes import (
    ModelMatch,
    mapping_of,
    read_table,
    resized,
    shape_of_columns,
    whole_of,
)
from nest_megatron.validation.rows import RefusedRowError

#: How far the parameters of a model may lie from the size in its name.
_SIZE_TOLERANCE = 0.05
#: A catalogue file by its name.
_entry = functools.cache(functools.partial(catalogue_entry, "model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBook:
    """The models that rows may name.

    Args:
        entries: key to the name of a catalogue entry.
        extra: key to a row of the user's tables, which come before the catalogue.
    """

    entries: Mapping[str, str]
    extra: Mapping[str, Mapping[str, str]]

    @classmethod
    def load(cls, extra: Sequence[Path] = ()) -> ModelBook:
        """The installed catalogue, with a user's tables before it; the first of a name counts.

        Raises:
            UserInputError: if a table cannot be read.
        """
        tables: dict[str, Mapping[str, str]] = {}
        for path in extra:
            for row in read_table(path):
                tables.setdefault(read_name(row["name"]).key, row)
        return cls(entries={key_of(name): name for name in catalogue_names("model")}, extra=tables)

    def spec(self, row: Mapping[str, str]) -> ModelMatch:
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

    def _named(self, name: ModelName, row: Mapping[str, str]) -> ModelMatch | None:
        for key, assumed in () if _unreliable(name, row) else candidates(name):
            spec = self._at(key) or self._active(key)
            if spec is not None:
                return _agreeing(spec, assumed, row)
        *stem, last = name.words or ("",)
        size = size_in_billions(last)
        spec = self._at("".join(stem)) if size else None
        return _agreeing(spec, "", row) if spec and size and _has_size(spec, size) else None

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


def _unreliable(name: ModelName, row: Mapping[str, str]) -> bool:
    """Whether ``GPT-20B`` is just any GPT of that size, and not the one of NVIDIA's series."""
    if name.words[:1] != ("gpt",) or len(name.words) != 2 or whole_of(row.get("hidden")):
        return False
    said = " ".join(row.get(column, "") for column in ("source", "repo", "framework")).lower()
    return not any(word in said for word in ("nemo", "nvidia-", "mlperf", "paxml"))


def _agreeing(spec: TransformerSpec, assumed: str, row: Mapping[str, str]) -> ModelMatch | None:
    if whole_of(row.get("hidden")) not in (None, spec.hidden_size):
        return None
    notes = [assumed] if assumed else []
    if "derived" in spec.source:
        notes.append(f"part of the shape of {spec.name} is derived from its size")
    if not whole_of(row.get("seq")):
        notes.append(f"a sequence of {spec.seq_length} tokens, as in the catalogue")
    return ModelMatch(spec=spec, assumptions=tuple(notes))


def _has_size(spec: TransformerSpec, size: float) -> bool:
    plain = dataclasses.replace(spec, mtp_num_layers=None)
    return any(
        abs(total_parameters(each) / 1e9 - size) <= _SIZE_TOLERANCE * size for each in (spec, plain)
    )
