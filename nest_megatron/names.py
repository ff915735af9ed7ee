"""Enumerations of names."""

from __future__ import annotations

from enum import StrEnum


class Name(StrEnum):
    """An enumeration whose members hash as fast as the text they are.

    ``Enum`` hashes a member's name in Python; members are keys of dictionaries that a search looks
    up millions of times.
    """

    __hash__ = str.__hash__
