"""``profiles list``, ``show``, ``export``, ``import`` and ``verify``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from nest_megatron.errors import BAD_INPUT, OK, ProfileError
from nest_megatron.plain import to_plain
from nest_megatron.profile.records import LayerProfile, fingerprint_of
from nest_megatron.profile.store import (
    Entry,
    all_entries,
    export_profile,
    faults,
    find_entry,
    import_profile,
    profiles_folder,
)
from nest_megatron.report.console import error_fields, say, show, show_json


def run_list(*, as_json: bool) -> int:
    """List the profiles of the store and those shipped; broken files are named, not listed."""
    entries = all_entries()
    sound: list[tuple[Entry, LayerProfile]] = []
    for entry in entries:
        with contextlib.suppress(ProfileError):
            sound.append((entry, entry.read()))
    broken = [entry.name for entry in entries if entry.name not in {e.name for e, _ in sound}]
    if as_json:
        documents = [_brief(entry, profile) for entry, profile in sound]
        folder = str(profiles_folder())
        show_json({"folder": folder, "profiles": documents, "broken": broken})
        return OK
    from nest_megatron.report.profile_tables import profiles_table

    if sound:
        show(profiles_table([(profile, entry.shipped) for entry, profile in sound]))
    else:
        say(f"There is no profile in {profiles_folder()}, and none is shipped.")
    for name in broken:
        say(f"{name} is broken; `nest-megatron profiles verify {name}` says why.")
    return OK


def run_show(name: str, *, as_json: bool) -> int:
    """Show one profile: machine, model, timings."""
    entry = find_entry(name)
    profile = entry.read()
    if as_json:
        show_json({**_brief(entry, profile), **to_plain(profile)})
        return OK
    from nest_megatron.report.profile_tables import profile_details

    show(profile_details(profile, fingerprint_of(profile)))
    return OK


def run_export(name: str, *, out: Path, as_json: bool) -> int:
    """Copy a profile to a file, for another machine."""
    profile = export_profile(name, out)
    if as_json:
        show_json({"exported": profile.name, "out": str(out)})
        return OK
    say(f"{profile.name} is written to {out}; `nest-megatron profiles import` takes it in.")
    return OK


def run_import(path: Path, *, name: str | None, as_json: bool) -> int:
    """Take in a profile that was measured elsewhere."""
    profile = import_profile(path, name=name)
    if as_json:
        show_json({"imported": profile.name, "folder": str(profiles_folder())})
        return OK
    say(
        f"{profile.name} is in {profiles_folder()}: {len(profile.timings)} timings on "
        f"{profile.machine.describe()}, below any that are measured here."
    )
    return OK


def run_verify(name: str | None, *, as_json: bool) -> int:
    """Read every profile, or one, and name those that are broken."""
    checked = faults(name)
    broken = [(entry, error) for entry, error in checked if error is not None]
    if as_json:
        documents = [{"name": entry.name, "error": error_fields(error)} for entry, error in broken]
        show_json({"checked": len(checked), "broken": documents})
        return BAD_INPUT if broken else OK
    for entry, error in broken:
        say(f"{entry.name}: {error}")
    say(f"{len(checked) - len(broken)} of {len(checked)} profiles are sound.")
    return BAD_INPUT if broken else OK


def _brief(entry: Entry, profile: LayerProfile) -> dict[str, Any]:
    """A profile without its timings."""
    return {
        "name": profile.name,
        "fingerprint": fingerprint_of(profile),
        "created": profile.created,
        "model": profile.model.name,
        "seq_length": profile.model.seq_length,
        "precision": profile.precision.value,
        "device": profile.machine.device_name,
        "implementation": profile.machine.implementation.value,
        "imported": profile.imported,
        "shipped": entry.shipped,
        "num_timings": len(profile.timings),
    }
