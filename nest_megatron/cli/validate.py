"""``nest-megatron validate`` and ``calibrate``; their work is in ``validation``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import FOLDER, OUTPUT, PATH, command, forced, json_option
from nest_megatron.errors import UserInputError
from nest_megatron.packages import import_from_checkout, require_package

_paths = click.argument("paths", nargs=-1, required=True, type=PATH, metavar="FILE.CSV...")


@command(
    "nest-megatron validate throughput.csv comm_collectives.csv",
    "nest-megatron validate runs.csv --models models.csv --rows predicted.csv",
    "nest-megatron validate runs.csv --json",
    "nest-megatron validate throughput.csv memory_peak.csv --docs docs",
)
@_paths
@click.option(
    "--models", type=PATH, multiple=True, help="Shapes of models that the catalogue lacks (CSV)."
)
@click.option("--rows", type=OUTPUT, help="Write every row with its prediction here (CSV).")
@click.option(
    "--docs",
    type=FOLDER,
    help="Write accuracy.md and its pictures into this folder (needs matplotlib).",
)
@click.option(
    "--left-out",
    is_flag=True,
    help="Predict each source with constants fitted to the other sources.",
)
@json_option
def validate(paths: tuple[Path, ...], **options: Any) -> int:
    """Compare predictions with measured runs: errors, ranking of layouts, memory.

    Reads throughput, peak memory, Megatron's golden values and collectives, and recognizes each by
    its columns (docs/accuracy.md). Scores each source and regime twice: with the settings that a
    plan would assume, and with those that the row states. Rows that cannot be predicted are
    counted by reason.
    """
    from nest_megatron.validation.commands import run_validate

    return run_validate(paths, **options, force=forced())


@command(
    "nest-megatron calibrate --site",
    "nest-megatron calibrate throughput.csv memory_peak.csv --out hydra_configs",
    "nest-megatron calibrate comm_collectives.csv --no-cross-validation",
)
@click.argument("paths", nargs=-1, type=PATH, metavar="[FILE.CSV]...")
@click.option(
    "--site", is_flag=True, help="Learn from this site's own runs (`nest-megatron history`)."
)
@click.option(
    "--out",
    type=PATH,
    help="Write the constants into this catalogue (hydra_configs); with --site, the file to write.",
)
@click.option(
    "--cross-validation/--no-cross-validation",
    "validate",
    default=True,
    help="Leave out each source and each model in turn.",
)
@json_option
def calibrate(
    paths: tuple[Path, ...], *, site: bool, out: Path | None, validate: bool, as_json: bool
) -> int:
    """Fit the cost model's constants to measured runs, and its links to measured collectives.

    Prints the constants, the errors of the fit, and the errors on sources and models that were
    left out of it. With --site it learns from this site's own runs and keeps the constants as
    prior; later plans on the same kind of cluster use the result (docs/uncertainty.md).
    """
    if site == bool(paths):
        limit = "--site reads the history, and no tables" if site else "no table is given"
        fix = "Leave one of the two out." if site else "Name tables of measured runs, or --site."
        raise UserInputError("calibrate", [*map(str, paths)], limit, fix)
    if site:
        from nest_megatron.cli.site import calibrate_site

        return calibrate_site(out, force=forced(), as_json=as_json)
    limit = "constants are fitted by SciPy, which is not installed"
    require_package("scipy", "calibrate", "calibrate", limit, "; calibrate --site does without")
    work = import_from_checkout("tools.calibration.command", "calibrate FILE.CSV")
    return int(work.run_calibrate(paths, out=out, validate=validate, as_json=as_json))
