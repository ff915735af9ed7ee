"""Writes the result of a fit as ``hydra_configs/calibration/links.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nest_megatron.documents import read_yaml
from nest_megatron.files import write_text
from nest_megatron.validation.calibration_store import PARAMETERS as FIELDS
from nest_megatron.validation.calibration_store import LinkTechnology, write_record
from nest_megatron.validation.fit_collectives import PARAMETERS, LinkFit

_CLUSTERS_HEAD = """\
# Collectives of 1 MB and more by the cluster that they were measured on. error_pct: mean absolute
# error; left_out_pct: by a fit that has not seen the cluster.
"""
_HEAD = """\
# LinkTechnology technologies: what each reaches of its rate. Written by links_file.py of
# nest_megatron/validation from a fit to the public rows (fit_collectives.py); read by
# calibration_store.py. The parameters are fields of NetworkLevel.
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


def write_fit(out: Path, fit: LinkFit) -> Iterator[Path]:
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
    write_text(path, _HEAD + "\n".join(blocks) + "\n")
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
    for field in FIELDS:
        value = getattr(link, field)
        if value in (None, ()) or (field == "chain_share" and value == 1):
            continue
        between = f"\n{indent}  " if field == "efficiency" else " "
        lines.append(f"{indent}{field}:{between}{_text(value)}\n")
    return "".join(lines)


def _entry(link: LinkTechnology, fit: LinkFit, note: str) -> Iterator[str]:
    for field in FIELDS:
        value = getattr(link, field)
        if value not in (None, ()):
            yield f"  {field}: {_text(value)}"
    sources, errors = fit.sources_of(link.name), fit.by_link(link.name)
    fitted = [p.field for p in PARAMETERS if link.name in p.links]
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
