"""Writes the result of a fit as ``hydra_configs/calibration/links.yaml``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from nest_megatron.files import write_text
from nest_megatron.validation.fit_collectives import PARAMETERS, Fit
from nest_megatron.validation.links import PARAMETERS as FIELDS
from nest_megatron.validation.links import Link

_HEAD = """\
# Link technologies: what each reaches of its rate. Written by links_file.py of
# nest_megatron/validation from a fit to the public rows of messages of 1 MB and more
# (fit_collectives.py); read by links.py. The parameters are fields of NetworkLevel.
# fitted: parameters that the rows determine, some shared with other technologies; note tells of
# the others, and a new fit keeps it. error: mean of |predicted / measured - 1| over the rows that
# cross the technology; cross_validated: the same, each source by a fit to the other sources.
"""


def write_links(path: Path, fit: Fit) -> None:
    """Replace the file, notes kept."""
    old: Mapping[str, Mapping[str, object]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    notes = {name: str(entry.get("note", "")) for name, entry in old.items()}
    blocks = ["\n".join(_entry(link, fit, notes[link.name])) for link in fit.links.values()]
    write_text(path, _HEAD + "\n".join(blocks) + "\n")


def _entry(link: Link, fit: Fit, note: str) -> Iterator[str]:
    yield f"{link.name}:"
    for field in FIELDS:
        value = getattr(link, field)
        if value not in (None, ()):
            yield f"  {field}: {_text(value)}"
    sources, (error, left_out) = fit.sources_of(link.name), fit.by_link(link.name)
    fitted = [p.field for p in PARAMETERS if link.name in p.links]
    if sources or fitted:
        yield f"  fitted: [{', '.join(fitted)}]"
        yield f"  rows: {_text(sources)}"
    if not math.isnan(error):
        yield f"  error: {error:.3f}"
    if not math.isnan(left_out):
        yield f"  cross_validated: {left_out:.3f}"
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
