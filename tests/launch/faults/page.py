"""The section on ranks of docs/reliability.md."""

from __future__ import annotations

import platform
import re
import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nest_megatron.files import write_text
from tests.launch.faults.cases import CASES, HEARTBEAT_S, RENDEZVOUS_S, Case
from tests.launch.faults.ranks import Launcher

#: Training scripts, and the names of their sections.
STAND_IN, MEGATRON = "stand-in", "Megatron-LM"
_COMMAND = "pytest -m reliability tests/launch/test_reliability.py --write-docs"
_ROW = re.compile(
    r"^\| (?P<case>[^|]+) \| (?P<what>[^|]+) \| (?P<launcher>torchrun|by hand|nest-megatron) \|"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one case."""

    case: str
    what: str
    launcher: str
    ends: str
    bound: str
    seconds: float
    message: str


#: What a run saw: the rows of each training script.
Seen = dict[str, list[Row]]


def runs(script: str) -> list[tuple[Case, Launcher]]:
    """The cases that are tried with a training script, in the order of the page."""
    cases = [case for case in CASES if script == STAND_IN or case.on_megatron]
    return [(case, launcher) for case in cases for launcher in case.launchers]


def write_sections(page: Path, seen: Seen) -> None:
    """Put what a run saw into the section of its script, and leave all others alone.

    A run of some cases replaces their rows.

    Raises:
        ValueError: if rows are missing then.
    """
    for script, rows in seen.items():
        text = page.read_text(encoding="utf-8")
        lines = _lines(text, script) | {(r.case, r.what, r.launcher): _line(r) for r in rows}
        wanted = [(case.name, case.what, launcher.value) for case, launcher in runs(script)]
        missing = [
            f"{case} ({launcher})"
            for case, what, launcher in wanted
            if (case, what, launcher) not in lines
        ]
        if missing:
            raise ValueError(f"the page lacks the rows of {', '.join(missing)}: run them, too")
        table = [*_TABLE_HEAD, *(lines[key] for key in wanted)]
        before, begin, after = _around(text, script)
        section = "\n".join(["", *textwrap.wrap(_HEADS[script](), 118), "", *table, "", ""])
        write_text(page, f"{before}{begin}{section}{after}")


def rows_of(text: str, script: str) -> list[tuple[str, str, str]]:
    """Case, what was done and launcher of the rows in a script's section."""
    return list(_lines(text, script))


def _lines(text: str, script: str) -> dict[tuple[str, str, str], str]:
    before, begin, after = _around(text, script)
    section = text[len(before) + len(begin) : len(text) - len(after)]
    found = [(_ROW.match(line), line) for line in section.splitlines()]
    return {(row["case"], row["what"], row["launcher"]): line for row, line in found if row}


def _around(text: str, script: str) -> tuple[str, str, str]:
    begin, end = f"<!-- ranks, {script}: begin -->\n", f"<!-- ranks, {script}: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before, begin, f"{end}{after}"


def _versions() -> str:
    import torch

    day = datetime.now(UTC).date().isoformat()
    version = f"torch {torch.__version__} and Python {platform.python_version()}"
    return f"(each row by the latest run of its case, the last on {day}) with {version}"


def _head_of_stand_in() -> str:
    return (
        f"Written by `{_COMMAND}` {_versions()}: real processes on one host, three ranks over "
        "gloo, and a stand-in for Megatron-LM's training script that parses its arguments, has "
        f"them planned and joins a process group. `nest.heartbeat_timeout_s={HEARTBEAT_S}` where a "
        "rank is killed or stopped, and "
        f"`nest.rendezvous_timeout_s={RENDEZVOUS_S}` where one is missing; a job has 20 s and "
        "`--distributed-timeout-minutes` unless told otherwise. *Grace period* is the time, 10 s "
        "at most, that ranks which end wait until all have printed why. Seconds are from the start "
        "of the command to the end of its last process, imports included, on a busy machine; "
        "under torchrun a stopped rank costs 30 s more, which torchrun gives it to end, and the "
        "exit code is torchrun's own."
    )


def _head_of_megatron() -> str:
    return (
        "The same with Megatron-LM's own pretrain_gpt.py, written by "
        f"`MEGATRON_LM_HOME=CHECKOUT {_COMMAND} -k Megatron` {_versions()}."
    )


_HEADS = {STAND_IN: _head_of_stand_in, MEGATRON: _head_of_megatron}


_TABLE_HEAD = (
    "| case | what was done | launcher | how it ends | within | took | message |",
    "|---|---|---|---|---|---|---|",
)


def _line(row: Row) -> str:
    cells = [
        *(row.case, row.what, row.launcher, row.ends, row.bound or "-"),
        f"{row.seconds:.0f} s",
        _cell(row.message),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    words = re.sub(r"/\S*pytest\S*/", ".../", text.removeprefix("error: "))
    return re.sub(r"\s*\n\s*", "<br>", words).replace("|", "\\|").replace(socket_name(), "HOST")


def socket_name() -> str:
    """This host's name, which is nobody's business."""
    return platform.node()
