"""Where profiles are stored: one file each in the user's cache, and those shipped with the package.

Whoever adds timings reads, merges and writes under one lock, so ranks and jobs that finish at the
same time lose nothing. Readers need no lock: a file is replaced in one step. Files are YAML that
people read, with an exact round trip and checksums by field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.documents import parse_yaml
from nest_megatron.errors import ProfileError, UserInputError, nearest
from nest_megatron.files import expanded, read_text, user_folder, warn_once, write_text
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.profile.records import (
    SCHEMA,
    LayerProfile,
    fingerprint_of,
    require_name,
    shape_digest,
)
from nest_megatron.units import Seconds

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
    in_lines = ({"timings": timings}, {_CHECKSUM: _sums(profile)})
    return "".join(
        yaml.safe_dump(
            part, sort_keys=False, width=_WIDTH, allow_unicode=True, default_flow_style=style
        )
        for part, style in ((fields, False), *((part, None) for part in in_lines))
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
    if not isinstance(sums, Mapping):
        limit = "it is missing, so the file was cut short"
        raise ProfileError(f"{name}: {_CHECKSUM}", sums, limit, AGAIN)
    if differing := ", ".join(_differing(profile, derived, sums)):
        limit = "these fields do not match their checksums, so the file was edited or damaged"
        raise ProfileError(f"{name}: {_CHECKSUM}", differing, limit, AGAIN)
    return profile


def read_fields(text: str, name: str, what: str, newest: int) -> dict[str, Any]:
    """The fields of a profile's file, of a schema that this version reads.

    Raises:
        ProfileError: if it is no such file.
    """
    try:
        fields = parse_yaml(text, name)
    except UserInputError as error:
        raise ProfileError(name, None, error.limit, AGAIN) from error
    if not isinstance(fields, dict) or "schema" not in fields:
        raise ProfileError(
            what,
            name,
            f"it is no {what}, which is a mapping with the key 'schema'",
            "Name a file that nest-megatron has written.",
        )
    if "layout" in fields and "predicted" in fields:
        fix = f"Name the {what}; `nest-megatron explain {name}` shows the plan."
        raise ProfileError(what, name, "it is a plan file", fix)
    schema = fields.get("schema")
    if type(schema) is not int or not 1 <= schema <= newest:
        raise ProfileError(
            f"{name}: schema",
            schema,
            f"this version reads {what}s up to schema {newest}",
            "Upgrade nest-megatron, or measure again with this version.",
        )
    return fields


Record = TypeVar("Record")


def record_of(kind: type[Record], fields: dict[str, Any], name: str) -> Record:
    """The record that a file's fields make, with a ``ProfileError`` for what is wrong."""
    try:
        return from_plain(kind, fields)
    except UserInputError as error:
        raise ProfileError(f"{name}: {error.what}", error.value, error.limit, error.fix) from error
    except ArithmeticError as error:  # a number far outside what its type holds
        raise ProfileError(name, str(error), "a number is out of range", AGAIN) from error


#: What helps where a file is damaged.
AGAIN = "Remove the file and measure again, or copy it again from where it was measured."


def read(path: Path) -> LayerProfile:
    """Read a profile file; a ``ProfileError`` if it is no sound profile."""
    return load(read_text(path, "profile"), str(path))


def write(profile: LayerProfile, path: Path) -> None:
    """Write a profile file, whole or not at all."""
    write_text(path, dump(profile))


def _fields(profile: LayerProfile) -> dict[str, Any]:
    """All fields in the order of the file, those that are worked out behind the name."""
    plain = to_plain(profile)
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


def _differing(
    profile: LayerProfile, derived: Mapping[str, object], sums: Mapping[object, object]
) -> list[str]:
    expected, fields = _sums(profile), _fields(profile)
    timings, written = expected.pop("timings"), sums.get("timings")
    wrong = [key for key, value in derived.items() if value != fields[key]]
    wrong += [key for key, value in expected.items() if sums.get(key) != value]
    if not isinstance(written, list) or len(written) != len(timings):
        wrong.append("timings")
    else:
        wrong += [f"timings[{i}]" for i in range(len(timings)) if timings[i] != written[i]]
    wrong += [str(key) for key in sums if key not in (*expected, "timings")]
    return list(dict.fromkeys(wrong))


#: Names another folder than the user's cache; jobs on many hosts share one on a shared disk.
FOLDER_VARIABLE = "NEST_MEGATRON_PROFILES"
_SHIPPED = "profile"
_SUFFIX = ".yaml"
_LOCK = ".lock"
#: A merge takes milliseconds; whoever waits longer than this waits for a process that hangs.
LOCK_TIMEOUT_S = 60.0


@frozen
class Entry:
    """A profile file that has not been read: in the store, or shipped with the package."""

    name: str
    path: Traversable
    shipped: bool

    def line(self, key: str) -> str | None:
        """What the file says of one of its first keys, found without reading all of it."""
        found = re.search(rf"^{key}: '?(\w+)'?$", self.text(), re.MULTILINE)
        return None if found is None else found[1]

    def text(self) -> str:
        """The text of the file; a ``ProfileError`` if it cannot be read."""
        try:
            if isinstance(self.path, Path):
                return read_text(self.path, "profile")
            return self.path.read_text(encoding="utf-8")
        except UserInputError as error:
            raise _unusable(str(self.path), error.limit) from error

    def read(self) -> LayerProfile:
        """The profile; a shipped one was measured elsewhere, so it counts as imported.

        Raises:
            ProfileError: if it is no sound profile, or not the one that its file is named for.
        """
        profile = load(self.text(), str(self.path))
        if profile.name != self.name:
            raise _unusable(str(self.path), f"it holds the profile {profile.name!r}")
        return dataclasses.replace(profile, imported=True) if self.shipped else profile


def profiles_folder() -> Path:
    """The folder of the store; it need not exist."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return expanded(Path(named), FOLDER_VARIABLE)
    return user_folder("cache") / "profiles"


def stored_entries() -> tuple[Entry, ...]:
    """The files of the store by name."""
    return _entries(profiles_folder(), shipped=False)


def all_entries() -> tuple[Entry, ...]:
    """The store's files, then those shipped whose name the store has not taken."""
    stored = stored_entries()
    shipped = _entries(catalogue_root().joinpath(_SHIPPED), shipped=True)
    taken = {entry.name for entry in stored}
    return (*stored, *(entry for entry in shipped if entry.name not in taken))


def _entries(folder: Traversable, *, shipped: bool) -> tuple[Entry, ...]:
    try:
        files = sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else []
    except OSError as error:  # a container's home, often
        warn_once(f"no profile is used: {folder} cannot be read ({error.strerror or error}).")
        return ()
    return tuple(
        Entry(name=path.name.removesuffix(_SUFFIX), path=path, shipped=shipped)
        for path in files
        if path.name.endswith(_SUFFIX) and not path.name.startswith(".")
    )


def find_entry(name: str) -> Entry:
    """The profile file of a name; a ``UserInputError`` with the nearest names if there is none."""
    entries = {entry.name: entry for entry in all_entries()}
    if name in entries:
        return entries[name]
    raise UserInputError(
        "profile",
        name,
        f"there is no such profile, neither shipped nor in {profiles_folder()}",
        nearest(name, entries)
        if entries
        else "Measure one with torchrun -m nest_megatron.profile, or import one.",
    )


def record(profile: LayerProfile) -> LayerProfile:
    """Put timings into the store; safe for many ranks and jobs at once.

    Timings join the stored profile of the same fingerprint, whatever its name; where both have a
    shape, those of the newer profile stay.

    Returns:
        The profile as it is stored now.

    Raises:
        ProfileError: if the name is taken by a profile of something else, the stored one is broken,
            or the store cannot be locked or written to.
    """
    with _locked(LOCK_TIMEOUT_S) as folder:
        before = _same_profile(profile)
        after = profile if before is None else merged(before, profile)
        path = folder / f"{require_name(after.name)}{_SUFFIX}"
        try:
            write(after, path)
        except UserInputError as error:
            raise _unwritable(folder, error) from error
        return after


def merged(one: LayerProfile, other: LayerProfile) -> LayerProfile:
    """Both profiles' timings under the first one's name; the newer profile's win."""
    older, newer = sorted((one, other), key=lambda p: datetime.fromisoformat(p.created))
    timings = {timing.shape: timing for profile in (older, newer) for timing in profile.timings}
    return dataclasses.replace(
        newer,
        name=one.name,
        note=newer.note or older.note,
        imported=one.imported,
        timings=tuple(sorted(timings.values(), key=lambda timing: repr(timing.shape))),
    )


def import_profile(path: Path, *, name: str | None = None) -> LayerProfile:
    """Copy a profile that was measured elsewhere into the store, marked as imported.

    Raises:
        ProfileError: if the file is no sound profile, or the name is taken.
    """
    found = read(path)
    return record(dataclasses.replace(found, name=name or found.name, imported=True))


def read_all(name: str | None = None) -> Iterator[tuple[Entry, LayerProfile | ProfileError]]:
    """Every file, or the one named, with its profile, or with what is wrong with it."""
    for entry in all_entries() if name is None else (find_entry(name),):
        try:
            yield entry, entry.read()
        except ProfileError as error:
            yield entry, error


def _same_profile(profile: LayerProfile) -> LayerProfile | None:
    """The stored profile that a new one's timings join; measured and imported stay apart."""
    wanted = fingerprint_of(profile)
    for entry in sorted(stored_entries(), key=lambda entry: entry.name != profile.name):
        if entry.name != profile.name and entry.line(FINGERPRINT) != wanted:
            continue
        found = entry.read()
        if (fingerprint_of(found), found.imported) == (wanted, profile.imported):
            return found
        if entry.name == profile.name:
            raise ProfileError(
                "profile name",
                profile.name,
                "the store has a profile of this name from another device, version, layer or "
                "origin",
                f"Give another name, or remove {profiles_folder() / (profile.name + _SUFFIX)}.",
            )
    return None


@contextlib.contextmanager
def timing_alone(gpu: str) -> Iterator[None]:
    """Be the only process that times on a GPU; a ``ProfileError`` where another does so now."""
    held = ProfileError(
        "GPU",
        gpu,
        "another process times layers on it, and each would slow the other",
        "Start one process for each GPU with torchrun, or wait until that one ends.",
    )
    with _locked(0.0, f".gpu-{gpu}{_LOCK}", held):
        yield


@contextlib.contextmanager
def _locked(
    timeout_s: Seconds, name: str = _LOCK, held: ProfileError | None = None
) -> Iterator[Path]:
    """Hold a lock of the store, whose folder exists then; ``held`` is raised where it is taken."""
    from filelock import FileLock, Timeout

    folder = profiles_folder()
    lock = FileLock(folder / name, timeout=timeout_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise held or ProfileError(
            "profile store",
            str(folder / name),
            f"another process has held the lock for {timeout_s:g} s",
            f"End that process, or use another folder with {FOLDER_VARIABLE}.",
        ) from error
    except (OSError, NotImplementedError) as error:  # a disk without locks
        raise _unwritable(folder, error) from error
    try:
        yield folder
    finally:
        lock.release()


def _unwritable(folder: Path, error: Exception) -> ProfileError:
    return ProfileError(
        "profile store",
        str(folder),
        f"it cannot be written to: {error}",
        f"Name a folder that you may write to with {FOLDER_VARIABLE}.",
    )


def _unusable(path: str, limit: str) -> ProfileError:
    return ProfileError("profile", path, limit, "Rename, import or remove the file.")
