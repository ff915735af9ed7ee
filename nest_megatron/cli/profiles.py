"""``nest-megatron profiles``: measured layer times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import OUTPUT, PATH, group, json_option, option
from nest_megatron.cli.complete import completing, profile_names
from nest_megatron.errors import BAD_INPUT, OK, ProfileError
from nest_megatron.plain import to_plain
from nest_megatron.profile import store
from nest_megatron.profile.records import LayerProfile, fingerprint_of
from nest_megatron.report.console import (
    error_fields,
    say,
    say_written,
    show,
    show_json,
    show_or_json,
)


@group(
    "nest-megatron profiles list",
    "nest-megatron profiles show llama3_8b-h100",
    "nest-megatron profiles export llama3_8b-h100 --out profile.yaml",
    "nest-megatron profiles import profile.yaml --name from_ada",
    "nest-megatron profiles verify",
)
def profiles() -> None:
    """Measured layer times: list, show, export, import, verify.

    They are kept in your cache folder, or in the folder that NEST_MEGATRON_PROFILES names. Plans
    use those of the job's device and layers (profile.mode, profile.name).
    """


_name_argument = click.argument("name", shell_complete=completing(profile_names))


@profiles.subcommand("list", "nest-megatron profiles list --json")
@json_option
def list_profiles(*, as_json: bool) -> None:
    """List the profiles of this machine, and those that nest-megatron ships."""
    from nest_megatron.report.catalogue_tables import profiles_table

    found = list(store.read_all())
    sound = [(entry, read) for entry, read in found if isinstance(read, LayerProfile)]
    broken = [entry.name for entry, read in found if isinstance(read, ProfileError)]
    folder = str(store.profiles_folder())
    if as_json:
        documents = [_brief(entry, profile) for entry, profile in sound]
        show_json({"folder": folder, "profiles": documents, "broken": broken})
        return
    if sound:
        show(profiles_table([(profile, entry.shipped) for entry, profile in sound]))
    else:
        say(f"There is no profile in {folder}, and none is shipped.")
    for name in broken:
        say(f"{name} is broken; `nest-megatron profiles verify {name}` says why.")


@profiles.subcommand("show", "nest-megatron profiles show llama3_8b-h100")
@_name_argument
@json_option
def show_profile(name: str, *, as_json: bool) -> None:
    """Show a profile: its machine, its model, every timing."""
    from nest_megatron.report.catalogue_tables import profile_details

    entry = store.find_entry(name)
    profile = entry.read()
    show_or_json(
        lambda: {**_brief(entry, profile), **to_plain(profile)},
        lambda: [profile_details(profile, fingerprint_of(profile))],
        as_json=as_json,
    )


@profiles.subcommand("export", "nest-megatron profiles export llama3_8b-h100 --out profile.yaml")
@_name_argument
@option("--out", "The file to write.", OUTPUT, required=True)
@json_option
def export_profile(name: str, *, out: Path, as_json: bool) -> None:
    """Write a profile to a file, to plan with it on another machine."""
    profile = store.find_entry(name).read()
    store.write(profile, out)
    if as_json:
        show_json({"exported": profile.name, "out": str(out)})
    else:
        say_written(out)
        say("`nest-megatron profiles import` takes it in.")


@profiles.subcommand("import", "nest-megatron profiles import profile.yaml --name from_ada")
@click.argument("path", type=PATH, metavar="FILE")
@option("--name", "Store it under this name.")
@json_option
def import_profile(path: Path, *, name: str | None, as_json: bool) -> None:
    """Import a profile that was measured elsewhere.

    Times measured on this machine take precedence over it.
    """
    profile, folder = store.import_profile(path, name=name), str(store.profiles_folder())
    if as_json:
        show_json({"imported": profile.name, "folder": folder})
    else:
        about = f"{len(profile.timings)} timings on {profile.machine.describe()}"
        say(f"{profile.name} is in {folder}: {about}, below any that are measured here.")


@profiles.subcommand(
    "verify", "nest-megatron profiles verify", "nest-megatron profiles verify llama3_8b-h100"
)
@click.argument("name", required=False, shell_complete=completing(profile_names))
@json_option
def verify_profiles(name: str | None, *, as_json: bool) -> int:
    """Check the files of all profiles, or of one. Exits with 2 if one is broken."""
    checked = list(store.read_all(name))
    broken = [(entry.name, read) for entry, read in checked if isinstance(read, ProfileError)]
    if as_json:
        documents = [{"name": entry, "error": error_fields(error)} for entry, error in broken]
        show_json({"checked": len(checked), "broken": documents})
        return BAD_INPUT if broken else OK
    for entry, error in broken:
        say(f"{entry}: {error}")
    say(f"{len(checked) - len(broken)} of {len(checked)} profiles are sound.")
    return BAD_INPUT if broken else OK


def _brief(entry: store.Entry, profile: LayerProfile) -> dict[str, Any]:
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
