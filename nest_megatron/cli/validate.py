"""``nest-megatron validate`` and ``calibrate``; their work is in ``validation``."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    OUTPUT,
    PATH,
    command,
    flag,
    forced,
    json_option,
    option,
)
from nest_megatron.cost_model.site import Site, unseen_errors
from nest_megatron.cost_model.site_calibration import SiteCalibration, calibrations, unknown_names
from nest_megatron.cost_model.site_file import site_path, write_site
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import check_output, warn_once
from nest_megatron.history.store import VARIABLE, history_file, read
from nest_megatron.packages import import_from_checkout, require_checkout, require_package
from nest_megatron.report.console import say_written, show, show_json
from nest_megatron.report.site import site_report
from nest_megatron.units import counted

_paths = click.argument("paths", nargs=-1, required=True, type=PATH, metavar="FILE.CSV...")


@command(
    "nest-megatron validate throughput.csv comm_collectives.csv",
    "nest-megatron validate runs.csv --models models.csv --rows predicted.csv",
    "nest-megatron validate runs.csv --json",
    "nest-megatron validate throughput.csv memory_peak.csv --docs docs",
)
@_paths
@option("--models", "Shapes of models that the catalogue lacks (CSV).", PATH, multiple=True)
@option("--rows", "Write every row with its prediction here (CSV).", OUTPUT)
@option("--docs", "Write accuracy.md and its pictures into this folder (needs matplotlib).", FOLDER)
@flag("--left-out", "Predict each source with constants fitted to the other sources.")
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
@flag(
    "--site",
    "Learn from this site's own runs (`nest-megatron history`).",
    excludes=("FILE.CSV --cross-validation", "the history alone is read"),
)
@option(
    "--out",
    "Write the constants into this catalogue (hydra_configs); with --site, the file to write.",
    PATH,
)
@option(
    "--cross-validation/--no-cross-validation validate",
    "Leave out each source and each model in turn.",
    default=True,
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
    if site:
        return calibrate_site(out, force=forced(), as_json=as_json)
    if not paths:
        raise UserInputError(
            "calibrate", None, "no table is given", "Name tables of measured runs, or --site."
        )
    work = ("tools.calibration.command", "calibrate FILE.CSV")
    require_checkout(*work)
    limit = "constants are fitted by SciPy, which is not installed"
    require_package("scipy", "calibrate", "calibrate", limit, "; calibrate --site does without")
    run = import_from_checkout(*work).run_calibrate
    return int(run(paths, out=out, validate=validate, as_json=as_json))


def calibrate_site(out: Path | None, *, force: bool | None, as_json: bool) -> int:
    """Write a calibration for each kind of cluster of the history, and print what it says.

    Args:
        out: write the only one there, and not into the folder that plans look into.
        force: replace a file of somebody else's.

    Raises:
        UserInputError: if the history has no run that teaches anything, or runs on several kinds of
            clusters for one file, or a file cannot be written.
    """
    records = read()
    if later := sorted({name for each in records for name in unknown_names(each.predicted)}):
        words = ", ".join(later)
        warn_once(f"runs of a later nest-megatron say nothing of steps: {words} is not known here.")
    today = datetime.now(UTC).date().isoformat()
    found = [each for each in calibrations(records, today) if each.by_date]
    if not found:
        raise UserInputError(
            "history",
            str(history_file()),
            "it has no run on NVIDIA GPUs that finished, or ran out of memory, and whose "
            f"prediction is known ({counted(len(records), 'run')}, of which "
            f"{sum(each.device is None for each in records)} on no NVIDIA GPU)",
            f"Runs of planned jobs are recorded there; {VARIABLE} names another file.",
        )
    if out is not None and len(found) > 1:
        kinds = ", ".join(f"{each.cluster} ({each.accelerator})" for each in found)
        raise UserInputError(
            "--out",
            str(out),
            f"the history has runs on several kinds of clusters: {kinds}",
            "Leave --out out.",
        )
    files = [(each, out or site_path(each.cluster, each.accelerator)) for each in found]
    for each, path in files:
        if out is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            check_output("--out", path, force=force)
        write_site(each, path)
    if as_json:
        show_json({"calibrations": [_document(*pair) for pair in files]})
        return OK
    for each, path in files:
        show(site_report(Site(each, path.stem), unseen_errors(each)))
        say_written(path)
    return OK


def _document(calibration: SiteCalibration, path: Path) -> dict[str, object]:
    """For ``--json``."""
    errors = unseen_errors(calibration)
    return {
        "path": str(path),
        "cluster": calibration.cluster,
        "accelerator": calibration.accelerator,
        "gpus_per_node": calibration.gpus_per_node,
        "runs": calibration.num_runs,
        "jobs": calibration.num_jobs,
        "unusual": calibration.unusual,
        "mechanisms": [
            dataclasses.asdict(each) for each in Site(calibration, path.stem).mechanisms()
        ],
        "unseen_error_percent": None
        if errors is None
        else {"before": errors.before_percent, "after": errors.after_percent},
    }
