"""Fitted constants, targets and columns in ``accuracy.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.cost_model.targets import Target, fitted_values
from nest_megatron.report.markdown import figure, table
from nest_megatron.validation import row_settings
from nest_megatron.validation.calibration import PARAMETERS
from nest_megatron.validation.columns import COLUMNS
from nest_megatron.validation.frameworks import RULES, FrameworkRule
from nest_megatron.validation.rows import RowKind

Entries = Mapping[str, Mapping[str, Any]]
#: A constant this close to a bound, in shares of its range, is marked.
_AT_BOUND = 0.005


def _calibration(name: str) -> Entries:
    text = catalogue_root().joinpath("calibration", f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text) or {})


def constants_section() -> str:
    """Constants with their priors, what is left after the fit, and how well they carry over."""
    devices, frameworks = _calibration("devices"), _calibration("frameworks")
    both = {**devices, **frameworks}
    parts = [
        "## Fitted constants",
        "Written by `nest-megatron calibrate` into `hydra_configs/calibration/`. A constant "
        "belongs to a generation of GPUs or to a framework, never to a row, a model or a source; "
        "it is pulled to its prior, which separate measurements of kernels or data sheets give. "
        "Rows: measured runs that it is fitted to.",
        table(("constant", "fitted", "prior", "bounds", "rows"), _constants(both), numeric=4),
        "Mean error of the runs that were fitted (at most 120 of each source), and of the same "
        "runs predicted by a fit that has not seen their source.",
        table(("source", "rows", "fitted %", "unseen %"), _sources(devices, both), numeric=3),
    ]
    models = sorted(_left_out(both, "model").items())
    if models:
        rows = [(name, figure(value)) for name, value in models]
        parts += [
            "The same for models that the fit has not seen.",
            table(("model", "unseen %"), rows, numeric=1),
        ]
    return "\n\n".join(parts)


def _constants(entries: Entries) -> Iterator[tuple[str, ...]]:
    for p in PARAMETERS:
        entry = entries.get(p.owner, {})
        value = entry.get("values", {}).get(p.name)
        if value is None:
            continue
        near = min(value - p.low, p.high - value) < _AT_BOUND * (p.high - p.low)
        yield (
            f"{p.owner}: {p.name}",
            f"{value:.4g}" + (" (at its bound)" if near else ""),
            f"{p.prior:.3g}",
            f"{p.low:.3g} to {p.high:.3g}",
            str(sum(entry.get("rows", {}).values())),
        )


def _sources(devices: Entries, both: Entries) -> Iterator[tuple[str, ...]]:
    rows: Counter[str] = Counter()
    for (
        entry
    ) in devices.values():  # a run has one generation, but its framework may have no constants
        rows.update(entry.get("rows", {}))
    seen = {name: value for e in both.values() for name, value in e.get("mape_pct", {}).items()}
    unseen = _left_out(both, "source")
    for name in sorted(seen):
        yield name, str(rows[name] or ""), figure(seen[name]), figure(unseen.get(name))


def _left_out(entries: Entries, by: str) -> dict[str, float]:
    left_out = [entry.get("left_out_pct", {}).get(by, {}) for entry in entries.values()]
    return {name: value for each in left_out for name, value in each.items()}


def links_section() -> str:
    """How well link technologies are known."""
    rows = [
        (
            name,
            str(sum(entry.get("rows", {}).values()) or ""),
            figure(_per_cent(entry.get("error"))),
            figure(_per_cent(entry.get("cross_validated"))),
            entry.get("note", ""),
        )
        for name, entry in _calibration("links").items()
    ]
    return "\n\n".join(
        (
            "## Link technologies",
            "`hydra_configs/calibration/links.yaml`. Error: mean over the collectives of 1 MB and "
            "more that cross it; unseen: each cluster by a fit to the other clusters.",
            table(("technology", "rows", "error %", "unseen %", "note"), rows),
            "The same by cluster, as `nest-megatron calibrate comm_collectives.csv` prints it:",
            table(("cluster", "rows", "error %", "unseen %"), collectives_by_cluster()),
        )
    )


def collectives_by_cluster() -> list[tuple[str, str, str, str]]:
    """Cluster, rows, error, and error by a fit that has not seen it."""
    return [
        (name, str(entry["rows"]), figure(entry["error_pct"]), figure(entry["left_out_pct"]))
        for name, entry in _calibration("collectives").items()
    ]


def unseen_collectives_pct() -> float | None:
    """Mean error of the collectives of clusters that the fit has not seen, each row the same."""
    known = [entry for entry in _calibration("collectives").values() if entry.get("left_out_pct")]
    rows = sum(entry["rows"] for entry in known)
    return sum(entry["rows"] * entry["left_out_pct"] for entry in known) / rows if rows else None


def _per_cent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def targets_section() -> str:
    """What frameworks are taken to set where a row does not say."""
    rows = [
        (
            f"`{rule.framework.pattern or 'any other'}`{_since(rule)}",
            f"`{rule.gpu.pattern}`" if rule.gpu.pattern else "any",
            f"{rule.target.name}: {rule.target.reason}",
            _settings(rule.target),
        )
        for rule in RULES
    ]
    return "\n\n".join(
        (
            "## Targets",
            "What a row leaves out is filled in by framework, release and GPU, never by who "
            "published it. The first pattern that matches counts; `--rows FILE` lists under "
            "`assumptions` what was filled in.",
            table(("framework", "GPU", "target", "settings"), rows),
            "Plans are made for these (`target=NAME`, or the job's own framework), and take the "
            "same defaults, each from a file of the framework.",
            table(("target", "setting", "source"), _sources_of_defaults()),
        )
    )


def _sources_of_defaults() -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        for default in target.defaults:
            yield target.name, default.words(), default.source


def _since(rule: FrameworkRule) -> str:
    return " since {}.{:02}".format(*rule.since) if any(rule.since) else ""


def _settings(target: Target) -> str:
    fields = {**target.cost, **fitted_values(target.fitted)}
    words = [default.words() for default in target.defaults]
    return ", ".join([*words, *(f"{name} {_plain(value)}" for name, value in fields.items())])


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def columns_section() -> str:
    """The columns of each kind of file."""
    parts = [
        "## How columns are read",
        "Files are CSV with a head line; their kind is known by their columns. An empty cell means "
        "that nobody said. Columns that are not listed are kept and ignored. `--models FILE` gives "
        "shapes of models that the catalogue lacks: `name`, then the columns of the shape.",
        f"A file `{row_settings.FILE}` in the same folder says what the recipe behind a row set: "
        "`row_id` (of the row, or its `throughput_row`), `confidence` and `layout_matches` "
        "(`exact` and `yes` count as what ran, anything else as what may have run), "
        f"and {', '.join(f'`{name}`' for name in row_settings.COLUMNS)}. As planned, none is read.",
    ]
    for kind in RowKind:
        names = [
            (", ".join(f"`{name}`" if name[0] != "(" else name for name in each.names.split(", ")))
            for each in COLUMNS[kind]
        ]
        rows = [
            (name, each.unit, each.meaning) for name, each in zip(names, COLUMNS[kind], strict=True)
        ]
        parts += [f"### {kind}", table(("columns", "unit", "meaning"), rows)]
    return "\n\n".join(parts)
