"""``nest-megatron profile`` and ``profiles``; their work is in ``cli/profile.py`` and beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import FOLDER, NEXT, OUTPUT, Command, Group, json_option
from nest_megatron.cli.complete import complete_override, complete_profile


@click.command(
    cls=Command,
    examples=(
        "nest-megatron profile model=llama3_8b train.seq_length=128 --max-seconds 5",
        "torchrun --nproc-per-node 8 -m nest_megatron.profile model=llama3_70b cluster=dgx_h100"
        + NEXT
        + "cluster.num_gpus=64",
    ),
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
@click.option("--config-dir", type=FOLDER, help="A folder with your own model/ or cluster/ files.")
@click.option(
    "--max-seconds",
    type=float,
    default=120.0,
    show_default=True,
    help="Budget; shapes that the best plans need come first, the rest is interpolated.",
)
@click.option(
    "--implementation",
    type=click.Choice(["local", "transformer_engine"]),
    help="Megatron's --transformer-impl; Transformer Engine's where it is installed.",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Time on the CPU, although there is a GPU.")
@click.option("--again", is_flag=True, help="Time what is stored already, too.")
@click.option(
    "--collectives/--no-collectives",
    default=True,
    help="With several ranks: time the network between them, with a quarter of the budget.",
)
@click.option("--network-out", type=OUTPUT, help="Write the network's figures here.")
@json_option
def profile(**options: Any) -> int:
    """Time a model's layers on the devices that are here, and the network between them.

    In one process, or under torchrun: each rank times its share of the shapes on its own GPU.
    Timings are stored (`nest-megatron profiles`) and used by plans for the same device and layers.
    """
    from nest_megatron.cli.profile import run_profile

    return run_profile(**options)


@click.group(
    cls=Group,
    examples=(
        "nest-megatron profiles list",
        "nest-megatron profiles show llama3_8b-h100",
        "nest-megatron profiles export llama3_8b-h100 --out profile.yaml",
        "nest-megatron profiles import profile.yaml --name from_ada",
        "nest-megatron profiles verify",
    ),
)
def profiles() -> None:
    """Measured layer times: list, show, export, import, verify.

    They are kept in the user's cache folder, or in the one that NEST_MEGATRON_PROFILES names. Plans
    use those of the job's device and layers (profile.mode, profile.name).
    """


@profiles.command("list", cls=Command, examples=("nest-megatron profiles list --json",))
@json_option
def list_profiles(*, as_json: bool) -> int:
    """List the profiles of this machine's store, and those shipped."""
    from nest_megatron.cli.profiles import run_list

    return run_list(as_json=as_json)


@profiles.command("show", cls=Command, examples=("nest-megatron profiles show llama3_8b-h100",))
@click.argument("name", shell_complete=complete_profile)
@json_option
def show_profile(name: str, *, as_json: bool) -> int:
    """Show a profile: its machine, its model, every timing."""
    from nest_megatron.cli.profiles import run_show

    return run_show(name, as_json=as_json)


@profiles.command(
    "export",
    cls=Command,
    examples=("nest-megatron profiles export llama3_8b-h100 --out profile.yaml",),
)
@click.argument("name", shell_complete=complete_profile)
@click.option("--out", type=OUTPUT, required=True, help="The file to write.")
@json_option
def export_profile(name: str, *, out: Path, as_json: bool) -> int:
    """Write a profile to a file, to plan with it on another machine."""
    from nest_megatron.cli.profiles import run_export

    return run_export(name, out=out, as_json=as_json)


@profiles.command(
    "import",
    cls=Command,
    examples=("nest-megatron profiles import profile.yaml --name from_ada",),
)
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--name", help="Another name for it.")
@json_option
def import_profile(path: Path, *, name: str | None, as_json: bool) -> int:
    """Take in a profile that was measured elsewhere.

    Times measured here come before it, interpolated ones too.
    """
    from nest_megatron.cli.profiles import run_import

    return run_import(path, name=name, as_json=as_json)


@profiles.command(
    "verify",
    cls=Command,
    examples=("nest-megatron profiles verify", "nest-megatron profiles verify llama3_8b-h100"),
)
@click.argument("name", required=False, shell_complete=complete_profile)
@json_option
def verify_profiles(name: str | None, *, as_json: bool) -> int:
    """Check the files of all profiles, or of one; exits with 2 where one is broken."""
    from nest_megatron.cli.profiles import run_verify

    return run_verify(name, as_json=as_json)
