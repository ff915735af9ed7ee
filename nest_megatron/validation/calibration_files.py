"""Writes fitted constants into the catalogue: ``calibration/`` and the accelerators' own files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.errors import UserInputError
from nest_megatron.files import write_text
from nest_megatron.validation.calibrate import Fit, HeldOut, Sample
from nest_megatron.validation.calibration import PARAMETERS, Values, generation_of

_HEAD = """\
# Written by `nest-megatron calibrate` (nest_megatron/validation/calibrate.py); do not edit.
# values: fitted constants; prior: where each is pulled to. rows: measured runs that
# were fitted, by source. mape_pct: their mean absolute error. left_out_pct: rows predicted by a fit
# that has not seen their source (or model), mean absolute error.
"""
#: Constants that an accelerator's file states one a line.
_LINES = (
    "attention_efficiency",
    "memory_efficiency",
    "kernel_floor_s",
    "grouped_gemm_share",
    "host_kernel_s",
)


def catalogue_values() -> Values:
    """The constants of the catalogue, by parameter key: where a new fit starts."""
    found: dict[str, float] = {}
    for name in ("devices", "frameworks"):
        path = catalogue_root().joinpath("calibration", f"{name}.yaml")
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        for owner, entry in entries.items():
            found |= {f"{owner}.{field}": value for field, value in entry["values"].items()}
    return found


def write_calibration(
    folder: Path, fit: Fit, samples: Sequence[Sample], left_out: Mapping[str, Sequence[HeldOut]]
) -> list[Path]:
    """Write a fit into a catalogue.

    Args:
        folder: the catalogue (``hydra_configs``), with ``calibration/`` and ``accelerator/``.
        left_out: results of cross-validation by what was left out: ``source``, ``model``.

    Returns:
        The files that were written.

    Raises:
        UserInputError: if the folder is no catalogue.
    """
    if not (folder / "accelerator").is_dir():
        raise UserInputError(
            "--out",
            value=str(folder),
            limit="it is no catalogue: it has no accelerator/ inside",
            fix="Name the hydra_configs directory of a source checkout.",
        )
    (folder / "calibration").mkdir(exist_ok=True)
    frameworks = folder / "calibration" / "frameworks.yaml"
    devices = folder / "calibration" / "devices.yaml"
    names = {generation_of(s.job.cluster.accelerator.name) for s in samples} - {None}
    owners = {p.owner for p in PARAMETERS if p.key in fit.values}
    write_text(frameworks, _document(sorted(owners - names), fit, samples, left_out))
    write_text(devices, _document(sorted(owners & names), fit, samples, left_out))
    return [frameworks, devices, *_write_accelerators(folder / "accelerator", fit.values)]


def _document(
    owners: Sequence[str],
    fit: Fit,
    samples: Sequence[Sample],
    left_out: Mapping[str, Sequence[HeldOut]],
) -> str:
    entries = {owner: _entry(owner, fit, samples, left_out) for owner in owners}
    text = yaml.safe_dump(entries, sort_keys=False, width=100, default_flow_style=None)
    return f"{_HEAD}{text}"


def _entry(
    owner: str,
    fit: Fit,
    samples: Sequence[Sample],
    left_out: Mapping[str, Sequence[HeldOut]],
) -> dict[str, object]:
    mine = [sample for sample in samples if owner in sample.owners]
    parameters = [p for p in PARAMETERS if p.owner == owner]
    sources = Counter(sample.source for sample in mine)
    models = {sample.model for sample in mine}
    shown = {"source": set(sources), "model": models}
    return {
        "values": {p.name: float(f"{fit.values[p.key]:.4g}") for p in parameters},
        "prior": {p.name: p.prior for p in parameters},
        "rows": dict(sources.most_common()),
        "mape_pct": {name: round(fit.mape_pct(name), 1) for name in sources},
        "left_out_pct": {
            by: {h.name: round(h.unseen_pct, 1) for h in held if h.name in shown[by]}
            for by, held in left_out.items()
        },
    }


def _write_accelerators(folder: Path, values: Values) -> Iterator[Path]:
    for path in sorted(folder.glob("*.yaml")):
        old = path.read_text(encoding="utf-8")
        generation = generation_of(str(yaml.safe_load(old)["name"]))
        if generation is None or f"{generation}.memory_efficiency" not in values:
            continue
        new = updated(old, generation, values)
        if new != old:
            write_text(path, new)
            yield path


def updated(text: str, generation: str, values: Values) -> str:
    """An accelerator's file with its generation's constants, everything else as it stands."""
    old = dict(yaml.safe_load(text)["gemm_efficiency"])
    shares = dict(old)
    for precision in old:
        key = "fp8" if precision in ("fp8", "nvfp4") else "bf16"
        share = values.get(f"{generation}.gemm_efficiency.{key}")
        if share is not None:
            # NVFP4 is known as a multiple of fp8 alone
            scale = old["nvfp4"] / old["fp8"] if precision == "nvfp4" else 1.0
            shares[precision] = float(f"{share * scale:.4g}")
    inside = ", ".join(f"{name}: {value}" for name, value in shares.items())
    text = _with_line(text, "gemm_efficiency", f"{{{inside}}}")
    for name in _LINES:
        value = values.get(f"{generation}.{name}")
        if value is not None:
            text = _with_line(text, name, f"{value:.4g}")
    return text


def _with_line(text: str, name: str, value: str) -> str:
    line = f"{name}: {value}   # fitted: calibration/devices.yaml"
    pattern = re.compile(rf"^{name}:.*$", re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(line, text)
    return text.rstrip("\n") + f"\n{line}\n"
