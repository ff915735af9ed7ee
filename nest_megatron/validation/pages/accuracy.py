"""``accuracy.md``: how well predictions agree with measured runs, with pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nest_megatron.documents import read_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, read_text, write_bytes, write_text
from nest_megatron.validation.outcome import Judged
from nest_megatron.validation.pages.goals import goals_section
from nest_megatron.validation.pages.pictures import pictures
from nest_megatron.validation.pages.reference import (
    columns_section,
    constants_section,
    links_section,
    targets_section,
)
from nest_megatron.validation.pages.regimes import all_runs, regimes_section, regimes_table
from nest_megatron.validation.pages.scores import (
    errors_section,
    files_section,
    refusals_section,
    sets_section,
    sets_table,
)
from nest_megatron.validation.pages.uncertainty import uncertainty_section
from nest_megatron.validation.pages.worst import margin_section, worst_section
from nest_megatron.validation.report import regime_scores
from nest_megatron.validation.rows import RowKind

#: Hand-written reasons, beside the page.
NOTES = "accuracy_notes.yaml"
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
            value=str(path),
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
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserInputError(
            "--docs",
            value=str(folder),
            limit="there is no such folder",
            fix=f"mkdir -p {folder}",
        )
    check_output("--docs", folder / PAGE, force=force)
    readme = folder.parent / README
    lines = readme_text(readme, judged)
    drawn = pictures(judged)
    text = page(
        judged,
        read_notes(folder / NOTES),
        list(drawn),
        _bold_sentence(folder / EXPERTS),
        _bold_sentence(folder / OWN_RUNS),
        uncertainty_section(unseen),
    )
    (folder / PICTURES).mkdir(exist_ok=True)
    for name, content in drawn.items():
        write_bytes(folder / PICTURES / f"{name}.png", content)
    if lines:
        write_text(readme, lines)
    write_text(folder / PAGE, text)
    return [
        *([readme] if lines else []),
        *(folder / PICTURES / f"{name}.png" for name in drawn),
        folder / PAGE,
    ]


def readme_text(path: Path, judged: Sequence[Judged]) -> str:
    """The README with its lines on accuracy, or nothing where it has no place for them."""
    text = read_text(path, "README") if path.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return ""
    regimes = regime_scores(RowKind.THROUGHPUT, judged)
    body = "\n\n".join(
        (
            "Step time of published runs, predicted *as planned*: with the settings that the "
            "planner assumes or chooses, not with those that a recipe turned out to have. The "
            'worst regimes first; "as stated" knows the settings.',
            regimes_table(regimes, all_runs(judged)),
            "The same for rows that others have predicted:",
            sets_table(judged),
        )
    )
    return f"{before}{begin}\n{body}\n{end}{after}"


def page(
    judged: Sequence[Judged],
    notes: Notes,
    drawn: Sequence[str],
    experts: str,
    own_runs: str,
    intervals: str = "",
) -> str:
    """The text of the page.

    Args:
        drawn: names of the pictures.
        experts: a sentence on the layouts that experts published, "" without one.
        own_runs: a sentence on runs of our own, "" without one.
        intervals: the section on intervals and choices.
    """
    sections = (
        _head(judged, own_runs),
        regimes_section(judged),
        goals_section(judged, notes.rows, notes.goals),
        intervals,
        files_section(judged),
        sets_section(judged),
        _pictures_section(drawn),
        errors_section(judged),
        worst_section(judged, notes.rows),
        _not_captured_section(notes.not_captured),
        _experts_section(experts),
        _own_runs_section(own_runs),
        margin_section(judged),
        refusals_section(judged),
        constants_section(),
        links_section(),
        targets_section(),
        columns_section(),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(judged: Sequence[Judged], own_runs: str) -> str:
    command = shlex.join(
        ["nest-megatron", "validate", *(each.file.path.name for each in judged), "--docs", "docs"]
    )
    ours = f", but for [one section](#{_OWN_RUNS_TITLE.lower().replace(' ', '-')})"
    return f"""\
# Accuracy

How well the cost model predicts runs that others measured and published: step time, peak memory,
the ranking of layouts of one job, and single collectives. Nothing here was measured by
us{ours if own_runs else ""}. Written by the command below, run in the folder of the files with the
folder of this page at its end; do not edit it (reasons by hand are in `{NOTES}`).

    {command}

**Error** is 100 (predicted / measured - 1) per cent: above 0 the prediction is too large. MAPE is
the mean of its size, p90 what nine of ten rows stay under. **Regret** compares layouts of one job
(same source, model and shape, GPUs, network, batch, sequence, number format, framework and
release): how much slower the layout that we would choose ran than the fastest that was measured.
**Rank correlation** is Spearman's, the mean over such jobs."""


_CAPTIONS = {
    "time": "Step time, one panel a source; the bands are 10 and 20 % around agreement.",
    "memory": "Peak memory of one GPU, predicted against measured.",
    "collectives": "Collectives, predicted against measured, all sizes.",
}


def _pictures_section(drawn: Sequence[str]) -> str:
    if not drawn:
        return ""
    shown = (f"{_CAPTIONS[name]}\n\n![{_CAPTIONS[name]}]({PICTURES}/{name}.png)" for name in drawn)
    return "\n\n".join(("## Predicted against measured", *shown))


def _not_captured_section(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "\n".join(f"* {' '.join(text.split())}" for text in texts)
    return f"## What the model does not capture\n\n{items}"


def _bold_sentence(path: Path) -> str:
    """The one bold sentence of another page, where that page exists."""
    if not path.is_file():
        return ""
    lines = read_text(path, "page").splitlines()
    return next((line.strip("* ") for line in lines if line.startswith("**")), "")


def _experts_section(sentence: str) -> str:
    if not sentence:
        return ""
    return f"## Layouts that experts published\n\n{sentence} Row by row: [{EXPERTS}]({EXPERTS})."


_OWN_RUNS_TITLE = "Runs of our own"


def _own_runs_section(sentence: str) -> str:
    if not sentence:
        return ""
    return f"""\
## {_OWN_RUNS_TITLE}

Layer blocks and collectives profiled on a machine, layouts predicted from that profile and then
trained there for real. {sentence} Layout by layout: [{OWN_RUNS}]({OWN_RUNS})."""
