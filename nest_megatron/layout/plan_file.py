"""Plan files: YAML that people read and review, with an exact round trip and a checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.documents import parse_yaml
from nest_megatron.errors import PlanFileError, UserInputError
from nest_megatron.files import read_text, write_text
from nest_megatron.layout.plan import SCHEMA, ParallelPlan
from nest_megatron.plain import from_plain, to_plain

#: Field of ``provenance`` in a file that covers everything else in it.
_CHECKSUM = "checksum"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types here
    """Writes lists of numbers in one line, and quotes what YAML 1.2 alone reads as a number.

    That is ``1e-05``, a text in PyYAML's YAML 1.1.
    """


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)
_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=all(isinstance(item, int) for item in items)
    ),
)


def digest(value: object) -> str:
    """A short hash of a record's contents, the same on every machine."""
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checksum(plan: ParallelPlan) -> str:
    """What tells a plan from all others: the checksum that its file holds."""
    return str(fields_of(plan)["provenance"][_CHECKSUM])


def fields_of(plan: ParallelPlan) -> dict[str, Any]:
    """A plan as plain data with its checksum, as its file holds it."""
    fields: dict[str, Any] = to_plain(plan)
    fields["provenance"][_CHECKSUM] = ""
    fields["provenance"][_CHECKSUM] = digest(fields)
    return fields


def dump(plan: ParallelPlan) -> str:
    """The text of a plan file."""
    return written(fields_of(plan))


def written(fields: Mapping[str, Any]) -> str:
    """Plain data as the YAML of plan files."""
    return str(yaml.dump(fields, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True))


def load(text: str, name: str = "plan") -> ParallelPlan:
    """Read the text of a plan file.

    Raises:
        PlanFileError: if it is truncated, edited, of another schema, or not a plan.
    """
    return from_fields(parse(text, name), name)


def parse(text: str, name: str) -> dict[str, Any]:
    """The fields of a plan file's text.

    Raises:
        PlanFileError: if it is not YAML, or no mapping with a schema.
    """
    try:
        fields = parse_yaml(text, name)
    except UserInputError as error:
        raise PlanFileError(
            name, None, error.limit, "Name a plan file; one that was cut short is planned again."
        ) from error
    if not isinstance(fields, dict) or "schema" not in fields:
        raise PlanFileError(
            "plan",
            name,
            "it is no plan file",
            "Name a file written by nest-megatron plan.",
        )
    return fields


def from_fields(fields: Mapping[str, Any], name: str) -> ParallelPlan:
    """The plan of a plan file's fields.

    Raises:
        PlanFileError: as ``load``.
    """
    schema = fields.get("schema")
    if schema != SCHEMA:
        limit, fix = f"this version reads plans of schema {SCHEMA}", "Plan again with this version."
        if not isinstance(schema, int) or schema > SCHEMA:
            fix = "Upgrade nest-megatron, plan again with this version, or name a plan file."
        raise PlanFileError(f"{name}: schema", schema, limit, fix)
    recorded, origin = "", fields.get("provenance")
    if isinstance(origin, Mapping):
        recorded = origin.get(_CHECKSUM, "")
        rest = {key: value for key, value in origin.items() if key != _CHECKSUM}
        fields = {**fields, "provenance": rest}
    try:
        plan = from_plain(ParallelPlan, fields)
    except UserInputError as error:
        raise PlanFileError(f"{name}: {error.what}", error.value, error.limit, error.fix) from error
    if checksum(plan) != recorded:
        raise PlanFileError(
            f"{name}: provenance.checksum",
            recorded,
            "it does not match the contents, so the file was cut short or edited",
            "Write it again with nest-megatron plan; what you want fixed goes on that command.",
        )
    return plan


def write(plan: ParallelPlan, path: Path) -> None:
    """Write a plan file, whole or not at all."""
    write_text(path, dump(plan))


def read(path: Path) -> ParallelPlan:
    """Read a plan file.

    Raises:
        UserInputError: if it cannot be read; ``PlanFileError`` if it is not a sound plan.
    """
    return load(read_text(path, "plan"), str(path))
