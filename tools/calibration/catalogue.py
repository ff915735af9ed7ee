"""Writes fitted constants into the catalogue: ``calibration/`` and the accelerators' own files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.documents import parse_yaml, read_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.files import write_text
from nest_megatron.validation.machines import LINK_FIELDS, LinkTechnology
from tools.calibration.constants import Evidence, Fit, HeldOut, Sample, constants_without
from tools.calibration.links import LINK_PARAMETERS, LinkFit
from tools.calibration.parameters import (
    AT_PRIOR,
    CONSTANTS,
    GENERATIONS,
    Values,
    generations_of,
)

_WRITTEN = "# Written by `nest-megatron calibrate` (tools/calibration); do not edit.\n"


def write_record(folder: Path, name: str, head: str, record: Mapping[str, object]) -> Path:
    """Write a file of a catalogue's ``calibration/``, under comments that say what its keys are."""
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(record, sort_keys=False, width=100, default_flow_style=None)
    write_text(path, f"{_WRITTEN}{head}{text}")
    return path


_HEAD = """\
# values: constants; prior: where each is pulled to, and stays unless it is fitted. acts_on: runs
# whose prediction moves with a fitted one; loses_pct: points of their mean error that a fit loses
# with it at its prior. rows: measured runs that were fitted, by source. mape_pct: their mean
# absolute error. left_out_pct: rows predicted by a fit that has not seen their source (or model),
# mean absolute error.
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
    *("attention_efficiency", "memory_efficiency", "kernel_floor_s", "grouped_gemm_ramp_rows"),
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
    """Fitted constants, their runs, and errors by what was left out (``source``, ``model``).

    Args:
        evidence: what speaks for each constant; none if that was not asked for.
    """

    fit: Fit
    samples: Sequence[Sample]
    left_out: Mapping[str, Sequence[HeldOut]]
    evidence: Mapping[str, Evidence]

    @property
    def values(self) -> Values:
        """All constants, those at their prior as well."""
        return {**AT_PRIOR, **self.fit.values}

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "rows": len(self.samples),
            "values": dict(self.fit.values),
            "loses_pct": {key: each.loses_pct for key, each in self.evidence.items()},
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
        owners = sorted({p.owner for p in CONSTANTS if p.key in self.values})
        for name, is_device in (("frameworks", False), ("devices", True)):
            mine = [owner for owner in owners if (owner in GENERATIONS) is is_device]
            yield write_record(folder, name, _HEAD, {each: self._entry(each) for each in mine})
        yield from _write_accelerators(out / "accelerator", self.values)
        if self.left_out.get("source"):
            yield write_record(folder, "left_out", _LEFT_OUT_HEAD, self._moved())

    def _entry(self, owner: str) -> dict[str, object]:
        mine = [sample for sample in self.samples if owner in sample.owners]
        parameters = [p for p in CONSTANTS if p.owner == owner and p.key in self.values]
        spoken_for = {p.name: self.evidence[p.key] for p in parameters if p.key in self.evidence}
        sources = Counter(sample.source for sample in mine)
        shown = {"source": set(sources), "model": {sample.model for sample in mine}}
        return {
            "values": {p.name: float(f"{self.values[p.key]:.4g}") for p in parameters},
            "prior": {p.name: p.prior for p in parameters},
            "acts_on": {name: each.rows for name, each in spoken_for.items()},
            "loses_pct": {name: round(each.loses_pct, 2) for name, each in spoken_for.items()},
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
        new = old
        for generation in generations_of(str(parse_yaml(old, "accelerator")["name"])):
            new = updated(new, generation, values)
        if new != old:
            write_text(path, new)
            yield path


def updated(text: str, generation: str, values: Values) -> str:
    """An accelerator's file with a generation's constants, everything else as it stands."""
    old = dict(parse_yaml(text, "accelerator")["gemm_efficiency"])
    shares = dict(old)
    for precision in old:
        key = "fp8" if precision in ("fp8", "nvfp4") else "bf16"
        share = values.get(f"{generation}.gemm_efficiency.{key}")
        if share is not None:
            # NVFP4 is known as a multiple of fp8 alone
            scale = old["nvfp4"] / old["fp8"] if precision == "nvfp4" else 1.0
            shares[precision] = float(f"{share * scale:.4g}")
    if shares != old:
        inside = ", ".join(f"{name}: {value}" for name, value in shares.items())
        text = _with_line(text, "gemm_efficiency", f"{{{inside}}}")
    for name in _LINES:
        value = values.get(f"{generation}.{name}")
        if value is not None:
            text = _with_line(text, name, _number(value))
    return text


def _number(value: float) -> str:
    """Four digits, as YAML reads them: 3e-05 is a text to it.

    >>> _number(3e-5), _number(0.65001)
    ('3.0e-05', '0.65')
    """
    return str(yaml.safe_dump(float(f"{value:.4g}"))).split()[0]


def _with_line(text: str, name: str, value: str) -> str:
    line = f"{name}: {value}   # calibration/devices.yaml"
    pattern = re.compile(rf"^{name}:.*$", re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(line, text)
    return text.rstrip("\n") + f"\n{line}\n"


_CLUSTERS_HEAD = """\
# Collectives of 1 MB and more by the cluster that they were measured on. error_pct: mean absolute
# error; left_out_pct: by a fit that has not seen the cluster.
"""
_LINKS_HEAD = """\
# Link technologies: what each reaches of its rate. Written by `nest-megatron calibrate`
# from a fit to the public rows (tools/calibration/links.py); read by
# nest_megatron/validation/machines.py. The parameters are fields of NetworkLevel.
# fitted: parameters that the rows determine, some shared with other technologies; note tells of
# the others, and a new fit keeps it. error: mean of |predicted / measured - 1| over the rows of
# 1 MB and more that cross the technology; cross_validated: the same, each cluster by a fit to the
# other clusters.
"""

#: The lines below the comment that names a technology, down to the level's source.
_FIGURES = re.compile(
    r"(?P<head>^(?P<indent> +)# .*links\.yaml, (?P<name>\w+)\.\n)(?:(?! +source:).*\n)*",
    re.MULTILINE,
)


def write_links_of(out: Path, fit: LinkFit) -> Iterator[Path]:
    """Write a fit into a catalogue, with the old notes on technologies; the files written."""
    yield write_links(out / "calibration" / "links.yaml", fit)
    yield from write_clusters(out / "cluster", fit.links)
    if math.isnan(fit.overall().left_out):
        return
    record = {
        name: {
            "rows": errors.rows,
            "error_pct": round(100 * errors.fitted, 1),
            "left_out_pct": round(100 * errors.left_out, 1),
        }
        for name, errors in {**fit.by("cluster"), "all": fit.overall()}.items()
    }
    yield write_record(out / "calibration", "collectives", _CLUSTERS_HEAD, record)


def write_links(path: Path, fit: LinkFit) -> Path:
    """Replace the file of technologies, with its old notes."""
    old: Mapping[str, Mapping[str, object]] = read_yaml(path, "links")
    blocks = []
    for link in fit.links.values():
        blocks += [f"{link.name}:", *_entry(link, fit, str(old[link.name].get("note", "")))]
    write_text(path, _LINKS_HEAD + "\n".join(blocks) + "\n")
    return path


def write_clusters(folder: Path, links: Mapping[str, LinkTechnology]) -> Iterator[Path]:
    """Put the figures into the clusters of a catalogue, wherever a level names its technology."""
    for path in sorted(folder.glob("*.yaml")):
        old = path.read_text(encoding="utf-8")
        new = _FIGURES.sub(lambda found: _figures(found, links), old)
        if new != old:
            write_text(path, new)
            yield path


def _figures(found: re.Match[str], links: Mapping[str, LinkTechnology]) -> str:
    link, indent = links[found["name"]], found["indent"]
    lines = [found["head"]]
    for field in LINK_FIELDS:
        value = getattr(link, field)
        if value in (None, ()) or (field == "chain_share" and value == 1):
            continue
        between = f"\n{indent}  " if field == "efficiency" else " "
        lines.append(f"{indent}{field}:{between}{_text(value)}\n")
    return "".join(lines)


def _entry(link: LinkTechnology, fit: LinkFit, note: str) -> Iterator[str]:
    for field in LINK_FIELDS:
        value = getattr(link, field)
        if value not in (None, ()):
            yield f"  {field}: {_text(value)}"
    sources, errors = fit.sources_of(link.name), fit.by_link(link.name)
    fitted = [p.field for p in LINK_PARAMETERS if link.name in p.links]
    if sources or fitted:
        yield f"  fitted: [{', '.join(fitted)}]"
        yield f"  rows: {_text(sources)}"
    if not math.isnan(errors.fitted):
        yield f"  error: {errors.fitted:.3f}"
    if not math.isnan(errors.left_out):
        yield f"  cross_validated: {errors.left_out:.3f}"
    if note:
        yield f'  note: "{note}"'


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if not isinstance(value, float):
        return str(value)
    if value >= 0.01:
        return f"{value:.3f}"
    return f"{value:.2e}"
