"""Profile files: YAML that people read, with an exact round trip and checksums by field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nest_megatron.documents import parse_yaml
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.files import read_text, write_text
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile.records import (
    SCHEMA,
    LayerProfile,
    fingerprint_of,
    shape_digest,
)

#: Lines that are worked out from the others, so that a reader can pass over a file it has no use
#: for without reading all of it.
FINGERPRINT, LAYERS = "fingerprint", "layers"
_DERIVED = (FINGERPRINT, LAYERS)
_CHECKSUM = "checksum"
_DIGITS = 8
_WIDTH = 100


def dump(profile: LayerProfile) -> str:
    """The text of a profile file: one block a record, timings in a few lines each."""
    fields = _fields(profile)
    timings = fields.pop("timings")
    sums = {_CHECKSUM: _sums(profile)}
    return "".join(
        yaml.safe_dump(part, sort_keys=False, width=_WIDTH, allow_unicode=True, **style)
        for part, style in (
            (fields, {}),
            ({"timings": timings}, {"default_flow_style": None}),
            (sums, {"default_flow_style": None}),
        )
    )


def load(text: str, name: str = "profile") -> LayerProfile:
    """Read the text of a profile file.

    Raises:
        ProfileError: if it is cut short, edited, from a newer schema, or no profile, naming the
            field or the fields whose checksums differ.
    """
    fields = read_fields(text, name, "profile", SCHEMA)
    sums = fields.pop(_CHECKSUM, None)
    derived = {key: fields.pop(key, None) for key in _DERIVED}
    profile = record_of(LayerProfile, fields, name)
    _check_sums(profile, derived, sums, name)
    return profile


def read_fields(text: str, name: str, what: str, newest: int) -> dict[str, Any]:
    """The fields of a profile's file, of a schema that this version reads.

    Raises:
        ProfileError: if it is no such file.
    """
    try:
        fields = parse_yaml(text, name)
    except UserInputError as error:
        raise ProfileError(name, None, limit=error.limit, fix=AGAIN) from error
    if not isinstance(fields, dict):
        raise ProfileError(
            name,
            type(fields).__name__,
            limit=f"a {what} is a mapping with the key 'schema'",
            fix="Name a file that nest-megatron has written.",
        )
    schema = fields.get("schema")
    if type(schema) is not int or not 1 <= schema <= newest:
        raise ProfileError(
            f"{name}: schema",
            schema,
            limit=f"this version reads {what}s up to schema {newest}",
            fix="Upgrade nest-megatron, or measure again with this version.",
        )
    return fields


Record = TypeVar("Record")


def record_of(kind: type[Record], fields: dict[str, Any], name: str) -> Record:
    """The record that a file's fields make, with a ``ProfileError`` for what is wrong."""
    try:
        return from_plain(kind, fields)
    except UserInputError as error:
        raise ProfileError(
            f"{name}: {error.what}", error.value, limit=error.limit, fix=error.fix
        ) from error
    except ArithmeticError as error:  # a number far outside what its type holds
        raise ProfileError(name, str(error), limit="a number is out of range", fix=AGAIN) from error


#: What helps where a file is damaged.
AGAIN = "Remove the file and measure again, or copy it again from where it was measured."


def read(path: Path) -> LayerProfile:
    """Read a profile file; a ``ProfileError`` if it cannot be read or is no sound profile."""
    try:
        text = read_text(path, "profile")
    except UserInputError as error:
        raise ProfileError(error.what, error.value, limit=error.limit, fix=error.fix) from error
    return load(text, str(path))


def write(profile: LayerProfile, path: Path) -> None:
    """Write a profile file, whole or not at all."""
    write_text(path, dump(profile))


def _fields(profile: LayerProfile) -> dict[str, Any]:
    """All fields in the order of the file, those that are worked out behind the name."""
    plain: dict[str, Any] = to_plain(profile)
    head = {key: plain.pop(key) for key in ("schema", "name")}
    derived = {
        FINGERPRINT: fingerprint_of(profile),
        LAYERS: shape_digest(profile.model, profile.precision),
    }
    return {**head, **derived, **plain}


def _sums(profile: LayerProfile) -> dict[str, str | list[str]]:
    """A short hash of each field, of ``timings`` one for each."""
    return {
        key: [digest(timing)[:_DIGITS] for timing in value]
        if key == "timings"
        else digest(value)[:_DIGITS]
        for key, value in _fields(profile).items()
    }


def _check_sums(
    profile: LayerProfile, derived: Mapping[str, object], sums: object, name: str
) -> None:
    limit = "it is missing, so the file was cut short"
    value: object = sums
    if isinstance(sums, Mapping):
        limit = "these fields do not match their checksums, so the file was edited or damaged"
        value = ", ".join(_differing(profile, derived, sums))
        if not value:
            return
    raise ProfileError(f"{name}: {_CHECKSUM}", value, limit, fix=AGAIN)


def _differing(
    profile: LayerProfile, derived: Mapping[str, object], sums: Mapping[object, object]
) -> list[str]:
    expected, fields = _sums(profile), _fields(profile)
    own, told = expected.pop("timings"), sums.get("timings")
    wrong = [key for key, value in derived.items() if value != fields[key]]
    wrong += [key for key, value in expected.items() if sums.get(key) != value]
    if not isinstance(told, list) or len(told) != len(own):
        wrong.append("timings")
    else:
        wrong += [f"timings[{i}]" for i in range(len(own)) if own[i] != told[i]]
    wrong += [str(key) for key in sums if key not in (*expected, "timings")]
    return list(dict.fromkeys(wrong))
