"""``nest-megatron calibrate --site``: what the history of a site teaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from nest_megatron.cost_model.site import Site, unseen_errors
from nest_megatron.cost_model.site_calibration import SiteCalibration, calibrations, unknown_names
from nest_megatron.cost_model.site_file import site_path, write_site
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import check_output, warn_once
from nest_megatron.history.records import RunRecord
from nest_megatron.history.store import VARIABLE, history_file, read
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.site import site_report
from nest_megatron.units import counted


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
    found = [each for each in calibrations(records, _today()) if each.by_date]
    _require(found, records, out)
    paths = [out or site_path(each.cluster, each.accelerator) for each in found]
    for each, path in zip(found, paths, strict=True):
        if out is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            check_output("--out", path, force=force)
        write_site(each, path)
    if as_json:
        pairs = zip(found, paths, strict=True)
        show_json({"calibrations": [_document(each, path) for each, path in pairs]})
        return OK
    for each, path in zip(found, paths, strict=True):
        show(site_report(Site(each, path.stem), unseen_errors(each)))
        say(f"Wrote {path}.")
    return OK


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _require(
    found: Sequence[SiteCalibration], records: Sequence[RunRecord], out: Path | None
) -> None:
    if not found:
        limit = (
            "it has no run on NVIDIA GPUs that finished, or ran out of memory, and whose "
            f"prediction is known ({counted(len(records), 'run')}, of which "
            f"{sum(each.device is None for each in records)} on no NVIDIA GPU)"
        )
        fix = f"Runs of planned jobs are recorded there; {VARIABLE} names another file."
        raise UserInputError("history", str(history_file()), limit, fix)
    if out is not None and len(found) > 1:
        kinds = ", ".join(f"{each.cluster} ({each.accelerator})" for each in found)
        limit = f"the history has runs on several kinds of clusters: {kinds}"
        raise UserInputError("--out", str(out), limit, fix="Leave --out out.")


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
