"""``accuracy.md``: how well predictions agree with measured runs, with pictures."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.cost_model.targets import Target, default_words, fitted_values
from nest_megatron.documents import read_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, expanded, read_text, write_bytes, write_text
from nest_megatron.report.tables import figure
from nest_megatron.units import GIB
from nest_megatron.validation import row_settings
from nest_megatron.validation.frameworks import RULES
from nest_megatron.validation.outcome import REGIMES, Basis, Judged
from nest_megatron.validation.report import (
    BothScores,
    MeasuredJob,
    certainty_by_regime,
    file_scores,
    regime_scores,
    risks_by_regime,
)
from nest_megatron.validation.rows import SETTINGS_FILE, RowKind
from nest_megatron.validation.scores import NOISE, Certainty
from tools.accuracy.goals import goals_reached, margin_figures, subject, worst_rows
from tools.accuracy.named_sets import scored_sets
from tools.accuracy.pictures import CAPTIONS, pictures
from tools.calibration.parameters import PARAMETERS, Parameter

#: Hand-written reasons, beside the page.
NOTES = "accuracy_notes.yaml"
NOT_EXPLAINED = "not explained"
PAGE, PICTURES, EXPERTS = "accuracy.md", "accuracy", "expert_layouts.md"
#: What is written anew of the README beside the folder of the page, where it has these lines.
README = "README.md"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
#: Runs of our own, which ``benchmarks/cpu_end_to_end.py`` writes.
OWN_RUNS = "accuracy/cpu_end_to_end.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What a person found out by looking at rows.

    Args:
        rows: why a row is far off, by its ``row_id``.
        goals: why a goal is missed, by its name in the table of goals.
        not_captured: what the model leaves out.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, str] = field(default_factory=dict)
    not_captured: Sequence[str] = ()


def read_notes(path: Path) -> Notes:
    """Read a file of notes; without one, nothing is explained.

    Raises:
        UserInputError: if it is no mapping of the fields.
    """
    if not path.is_file():
        return Notes()
    try:
        return Notes(**(read_yaml(path, "notes") or {}))
    except TypeError as error:
        raise UserInputError(
            "notes",
            str(path),
            limit=f"it cannot be read: {error}",
            fix="Give `rows` (row_id: reason), `goals` (name: reason) and `not_captured` (texts).",
        ) from error


def write_accuracy(
    folder: Path,
    judged: Sequence[Judged],
    unseen: Sequence[Judged] = (),
    *,
    force: bool | None = None,
) -> list[Path]:
    """Write the page, its pictures and the README's lines; all is made before the first is written.

    Args:
        unseen: the files of throughput, each row predicted without its source.
        force: replace a page that this program has not written; see ``check_output``.

    Returns:
        The files that were written, the page last.

    Raises:
        UserInputError: without matplotlib, for unreadable notes, or a folder that is none.
    """
    folder = expanded(folder, "--docs")
    if not folder.is_dir():
        raise UserInputError(
            "--docs",
            str(folder),
            limit="there is no such folder",
            fix=f"mkdir -p {folder}",
        )
    check_output("--docs", folder / PAGE, force=force)
    readme = folder.parent / README
    lines = readme_text(readme, judged)
    drawn = pictures(judged)
    experts, own_runs = (_bold_sentence(folder / name) for name in (EXPERTS, OWN_RUNS))
    text = page(judged, read_notes(folder / NOTES), list(drawn), experts, own_runs, unseen)
    (folder / PICTURES).mkdir(exist_ok=True)
    images = {folder / PICTURES / f"{name}.png": content for name, content in drawn.items()}
    for path, content in images.items():
        write_bytes(path, content)
    if lines:
        write_text(readme, lines)
    write_text(folder / PAGE, text)
    return [*([readme] if lines else []), *images, folder / PAGE]


def readme_text(path: Path, judged: Sequence[Judged]) -> str:
    """The README with its lines on accuracy, or nothing where it has no place for them."""
    text = read_text(path, "README") if path.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return ""
    regimes = regime_scores(judged)
    body = _rendered(
        "readme.md.j2",
        Notes(),
        regimes=[*_worst_first(regimes), regimes["all"]],
        missed=[each for each in goals_reached(judged, regimes) if not each.is_met and each.value],
    )
    return f"{before}{begin}\n{body}{end}{after}"


def page(
    judged: Sequence[Judged],
    notes: Notes,
    drawn: Sequence[str],
    experts: str,
    own_runs: str,
    unseen: Sequence[Judged] = (),
) -> str:
    """The text of the page.

    Args:
        drawn: names of the pictures.
        experts: a sentence on the layouts that experts published, "" without one.
        own_runs: a sentence on runs of our own, "" without one.
        unseen: files of runs, predicted without their source: for the section on intervals.
    """
    names = [each.file.path.name for each in judged]
    runs = [each for each in judged if each.file.kind is RowKind.THROUGHPUT]
    regimes = regime_scores(judged)
    certainty = certainty_by_regime(unseen)
    peaks = [o for each in runs for o in each.as_planned if o.measured_bytes is not None]
    refused = Counter((o.refused, each.file.kind) for each in judged for o in each.as_stated)
    settings = CostSettings()
    return _rendered(
        "accuracy.md.j2",
        notes,
        command=shlex.join(["nest-megatron", "validate", *names, "--docs", "docs"]),
        notes_file=NOTES,
        regimes=[*_worst_first(regimes), regimes["all"]] if runs else [],
        goals=list(goals_reached(judged, regimes)),
        certainty={n: each for n, each in certainty.items() if each[Basis.AS_STATED].coverage},
        missed_intervals=list(_missed_intervals(certainty)),
        files=[file_scores(each) for each in judged],
        sets=list(scored_sets(judged)),
        drawn=drawn,
        captions=CAPTIONS,
        peaks=len(peaks),
        unscored_peaks=sum(each.predicted_bytes is None for each in peaks),
        worst=list(worst_rows(judged)),
        experts=experts,
        experts_page=EXPERTS,
        own_runs=own_runs,
        own_runs_page=OWN_RUNS,
        margin=margin_figures(judged),
        reserve_gib=settings.memory_reserve_bytes / GIB,
        default_margin=settings.memory_margin,
        risks=risks_by_regime(judged),
        refusals=[(key, count) for key, count in refused.most_common() if key[0]],
        **reference(),
    )


def _rendered(template: str, notes: Notes, **values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_cell,
        autoescape=False,  # Markdown: ``_cell`` escapes what ends a cell
    )
    environment.filters |= {
        "figure": figure,
        "job": _job,
        "one_line": _one_line,
        "percent": lambda share: None if share is None else 100 * share,
        "reason": lambda each: _one_line(notes.rows.get(each.row.get("row_id", ""), NOT_EXPLAINED)),
        "seconds": lambda pair: f"{pair[1]:.4g} ({pair[0]:.4g})",
        "share": lambda counts: f"{counts[1]} of {counts[0]}" if counts[0] else "",
        "subject": subject,
        "worst_first": _worst_first,
    }
    scales = {"s": 1.0, "ms": 1e-3, "GiB": float(GIB)}
    shared = {"notes": notes, "scales": scales, "definitions": REGIMES, "noise": NOISE}
    return environment.get_template(template).render(**shared, **values)


def _cell(value: object) -> object:
    """A value as a template shows it: ``None`` as nothing, and no bar or line that ends a cell."""
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    return "" if value is None else value


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _job(job: MeasuredJob) -> str:
    row = job.row.row
    parts = (("gbs", "batch"), ("seq", "sequence"), ("precision", ""))
    said = (f"{word} {row[column]}".strip() for column, word in parts if row.get(column))
    return ", ".join((subject(job.row), *said))


def _worst_first(regimes: Mapping[str, BothScores]) -> list[BothScores]:
    errors = {each.name: regimes[each.name].as_planned.errors.mape_pct for each in REGIMES}
    known = {name: error for name, error in errors.items() if error is not None}
    return [regimes[name] for name in sorted(known, key=lambda name: -known[name])]


#: Levels of intervals in per cent, and how far all runs as stated and those of a regime may be off.
_LEVELS = {"within_50_pct": 50.0, "within_90_pct": 90.0}
_POINTS, _REGIME_POINTS = 5.0, 10.0


def _missed_intervals(found: Mapping[str, Mapping[Basis, Certainty]]) -> Iterator[str]:
    for name, each in found.items():
        covered = each[Basis.AS_STATED].coverage
        for key, level in _LEVELS.items() if covered else ():
            share = float(getattr(covered, key))
            if abs(share - level) > (_POINTS if name == "all" else _REGIME_POINTS):
                yield f"{name} ({share:.1f} % in the interval of {level:.0f} %)"


def _bold_sentence(path: Path) -> str:
    """The one bold sentence of another page, where that page exists."""
    if not path.is_file():
        return ""
    lines = read_text(path, "page").splitlines()
    return next((line.strip("* ") for line in lines if line.startswith("**")), "")


Entries = Mapping[str, Mapping[str, Any]]
#: A constant this close to a bound, in shares of its range, is marked.
_AT_BOUND = 0.005


def reference() -> dict[str, object]:
    """What the page says of constants, links, targets and columns, whatever the files are."""
    devices = catalogue_entry("calibration", "devices")
    both = {**devices, **catalogue_entry("calibration", "frameworks")}
    return {
        "constants": list(_constants(both)),
        "fitted_sources": list(_sources(devices, both)),
        "unseen_models": _left_out(both, "model"),
        "links": catalogue_entry("calibration", "links"),
        "collectives": catalogue_entry("calibration", "collectives"),
        "rules": [(rule, _settings(rule.target)) for rule in RULES],
        "targets": [*TARGETS.values()],
        "default_words": default_words,
        "settings_file": SETTINGS_FILE,
        "settings_columns": row_settings.COLUMNS,
    }


def _constants(entries: Entries) -> Iterator[tuple[Parameter, float, int, bool]]:
    for p in PARAMETERS:
        entry = entries.get(p.owner, {})
        value = entry.get("values", {}).get(p.name)
        if value is not None:
            near = min(value - p.low, p.high - value) < _AT_BOUND * (p.high - p.low)
            yield p, value, sum(entry.get("rows", {}).values()), near


def _sources(devices: Entries, both: Entries) -> Iterator[tuple[str, int, float, float | None]]:
    rows: Counter[str] = Counter()
    # a run has one kind of memory, but its framework may have no constants
    for entry in devices.values():
        rows.update(entry["rows"] if "memory_efficiency" in entry["values"] else {})
    seen = {name: value for e in both.values() for name, value in e.get("mape_pct", {}).items()}
    unseen = _left_out(both, "source")
    for name in sorted(seen):
        yield name, rows[name], seen[name], unseen.get(name)


def _left_out(entries: Entries, by: str) -> dict[str, float]:
    left_out = [entry.get("left_out_pct", {}).get(by, {}) for entry in entries.values()]
    return {name: value for each in left_out for name, value in each.items()}


def _settings(target: Target) -> list[str]:
    fields = {**target.cost, **fitted_values(target.fitted)}
    words = [default_words(default) for default in target.defaults]
    return [*words, *(f"{name} {_plain(value)}" for name, value in fields.items())]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
