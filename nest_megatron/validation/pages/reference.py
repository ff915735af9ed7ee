"""Fitted constants and targets in ``accuracy.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.cost_model.targets import Target, fitted_values
from nest_megatron.validation import row_settings
from nest_megatron.validation.calibration import PARAMETERS, Parameter
from nest_megatron.validation.calibration_store import read_record
from nest_megatron.validation.frameworks import RULES
from nest_megatron.validation.rows import SETTINGS_FILE

Entries = Mapping[str, Mapping[str, Any]]
#: A constant this close to a bound, in shares of its range, is marked.
_AT_BOUND = 0.005


def reference() -> dict[str, object]:
    """What the page says of constants, links, targets and columns, whatever the files are."""
    devices, frameworks = read_record("devices"), read_record("frameworks")
    both = {**devices, **frameworks}
    return {
        "constants": list(_constants(both)),
        "fitted_sources": list(_sources(devices, both)),
        "unseen_models": _left_out(both, "model"),
        "links": read_record("links"),
        "collectives": read_record("collectives"),
        "rules": [(rule, _settings(rule.target)) for rule in RULES],
        "targets": TARGETS,
        "settings_file": SETTINGS_FILE,
        "settings_columns": row_settings.COLUMNS,
    }


def _constants(entries: Entries) -> Iterator[tuple[Parameter, float, int, bool]]:
    """Each fitted constant, its value, the rows behind it, and whether it is at a bound."""
    for p in PARAMETERS:
        entry = entries.get(p.owner, {})
        value = entry.get("values", {}).get(p.name)
        if value is not None:
            near = min(value - p.low, p.high - value) < _AT_BOUND * (p.high - p.low)
            yield p, value, sum(entry.get("rows", {}).values()), near


def _sources(devices: Entries, both: Entries) -> Iterator[tuple[str, int, float, float | None]]:
    rows: Counter[str] = Counter()
    # a run has one generation, but its framework may have no constants
    for entry in devices.values():
        rows.update(entry.get("rows", {}))
    seen = {name: value for e in both.values() for name, value in e.get("mape_pct", {}).items()}
    unseen = _left_out(both, "source")
    for name in sorted(seen):
        yield name, rows[name], seen[name], unseen.get(name)


def _left_out(entries: Entries, by: str) -> dict[str, float]:
    left_out = [entry.get("left_out_pct", {}).get(by, {}) for entry in entries.values()]
    return {name: value for each in left_out for name, value in each.items()}


def unseen_collectives_pct() -> float | None:
    """Mean error of the collectives of clusters that the fit has not seen, each row the same."""
    known = [entry for entry in read_record("collectives").values() if entry.get("left_out_pct")]
    rows = sum(entry["rows"] for entry in known)
    return sum(entry["rows"] * entry["left_out_pct"] for entry in known) / rows if rows else None


def _settings(target: Target) -> list[str]:
    fields = {**target.cost, **fitted_values(target.fitted)}
    words = [default.words() for default in target.defaults]
    return [*words, *(f"{name} {_plain(value)}" for name, value in fields.items())]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
