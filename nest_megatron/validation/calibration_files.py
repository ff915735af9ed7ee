"""Writes fitted constants into the catalogue: ``calibration/`` and the accelerators' own files."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.documents import parse_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.files import write_text
from nest_megatron.validation.calibrate import Fit, HeldOut, Sample, constants_without
from nest_megatron.validation.calibration import PARAMETERS, Values, generation_of
from nest_megatron.validation.calibration_store import write_record

_HEAD = """\
# values: fitted constants; prior: where each is pulled to. rows: measured runs that
# were fitted, by source. mape_pct: their mean absolute error. left_out_pct: rows predicted by a fit
# that has not seen their source (or model), mean absolute error.
"""
_LEFT_OUT_HEAD = """\
# By source: the constants that a fit to all other sources has, where they differ from those of
# devices.yaml and frameworks.yaml by more than 0.3 %. `nest-megatron validate --left-out` takes
# them.
"""
#: Constants that move by less than this share are not written.
_MOVED = 0.003
#: Constants that an accelerator's file states one a line.
_LINES = (
    *("attention_efficiency", "memory_efficiency", "kernel_floor_s", "grouped_gemm_share"),
    *("scan_share", "host_kernel_s"),
)


def catalogue_values() -> Values:
    """The constants of the catalogue, by parameter key: where a new fit starts."""
    return {
        f"{owner}.{field}": value
        for name in ("devices", "frameworks")
        for owner, entry in catalogue_entry("calibration", name).items()
        for field, value in entry["values"].items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Fitted constants, their runs, and errors by what was left out (``source``, ``model``)."""

    fit: Fit
    samples: Sequence[Sample]
    left_out: Mapping[str, Sequence[HeldOut]]

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "rows": len(self.samples),
            "values": dict(self.fit.values),
            "mape_pct": {source: self.fit.mape_pct(source) for source in self.fit.errors},
            "left_out": {
                by: [dataclasses.asdict(each) for each in unseen]
                for by, unseen in self.left_out.items()
            },
        }

    def write(self, out: Path) -> Iterator[Path]:
        """Write them into a catalogue (``hydra_configs``), if there were runs; the files written.

        Raises:
            UserInputError: if the folder is no catalogue.
        """
        if not self.samples:
            return
        if not (out / "accelerator").is_dir():
            raise UserInputError(
                "--out",
                str(out),
                limit="it is no catalogue: it has no accelerator/ inside",
                fix="Name the hydra_configs directory of a source checkout.",
            )
        folder = out / "calibration"
        folder.mkdir(exist_ok=True)
        names = {generation_of(s.job.cluster.accelerator.name) for s in self.samples}
        owners = sorted({p.owner for p in PARAMETERS if p.key in self.fit.values})
        for name, is_device in (("frameworks", False), ("devices", True)):
            mine = [owner for owner in owners if (owner in names) is is_device]
            yield write_record(folder, name, _HEAD, {each: self._entry(each) for each in mine})
        yield from _write_accelerators(out / "accelerator", self.fit.values)
        if self.left_out.get("source"):
            yield write_record(folder, "left_out", _LEFT_OUT_HEAD, self._moved())

    def _entry(self, owner: str) -> dict[str, object]:
        mine = [sample for sample in self.samples if owner in sample.owners]
        parameters = [p for p in PARAMETERS if p.owner == owner]
        sources = Counter(sample.source for sample in mine)
        shown = {"source": set(sources), "model": {sample.model for sample in mine}}
        return {
            "values": {p.name: float(f"{self.fit.values[p.key]:.4g}") for p in parameters},
            "prior": {p.name: p.prior for p in parameters},
            "rows": dict(sources.most_common()),
            "mape_pct": {name: round(self.fit.mape_pct(name), 1) for name in sources},
            "left_out_pct": {
                by: {h.name: round(h.unseen_pct, 1) for h in unseen if h.name in shown[by]}
                for by, unseen in self.left_out.items()
            },
        }

    def _moved(self) -> dict[str, dict[str, float]]:
        whole = self.fit.values
        found = {
            source: {
                key: float(f"{value:.4g}")
                for key, value in sorted(values.items())
                if abs(value - whole[key]) > _MOVED * abs(whole[key])
            }
            for source, values in sorted(constants_without(self.fit, "source").items())
        }
        return {source: values for source, values in found.items() if values}


def _write_accelerators(folder: Path, values: Values) -> Iterator[Path]:
    for path in sorted(folder.glob("*.yaml")):
        old = path.read_text(encoding="utf-8")
        generation = generation_of(str(parse_yaml(old, "accelerator")["name"]))
        if generation is None or f"{generation}.memory_efficiency" not in values:
            continue
        new = updated(old, generation, values)
        if new != old:
            write_text(path, new)
            yield path


def updated(text: str, generation: str, values: Values) -> str:
    """An accelerator's file with its generation's constants, everything else as it stands."""
    old = dict(parse_yaml(text, "accelerator")["gemm_efficiency"])
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
