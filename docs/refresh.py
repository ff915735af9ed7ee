"""Prints the samples of the documents anew: ``python docs/refresh.py [--check] [PAGE...]``.

A sample is a fenced block that begins with ``$ nest-megatron ...``, or that has a line above it,

    <!-- sample [nemo|megatron_lm] [: COMMAND] -->

which says what the sample needs, and the command where it is not the one that is shown. Commands of
a page run one after another in one empty folder, with ``$ROOT`` for the checkout. Lines ``...``
stand for what is left out: each part between them begins where the output has the same words up to
the first digit, and is as long as before (the last one goes to the end). Pages that a benchmark
writes whole (``WHOLE``) take minutes, so they are written where they are named.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LIMIT_S = 3600
#: What each page that is written whole needs, and the command.
WHOLE = {
    "planners.md": ("", "python $ROOT/benchmarks/planners.py --out $PAGE"),
    "recurrence.md": ("", "python $ROOT/benchmarks/recurrence.py --out $PAGE"),
    "peft_recipes.md": ("nemo", "python $ROOT/benchmarks/peft_recipes.py --out $PAGE"),
    "recipes.md": ("nemo", "python $ROOT/benchmarks/recipes.py --out $PAGE"),
    "functional_tests.md": (
        "megatron_lm",
        "python $ROOT/benchmarks/functional_tests.py --out $PAGE $CHECKOUTS",
    ),
    "tuning_published.md": (
        "measurements",
        "cd $MEASUREMENTS && python $ROOT/benchmarks/tuning.py throughput.csv throughput_2.csv"
        " throughput_vtrain_a100.csv memory_peak.csv memory_peak_2.csv memory_megatron_golden.csv"
        " --out $PAGE",
    ),
    "published_choices.md": (
        "measurements",
        "python $ROOT/benchmarks/choice.py $MEASUREMENTS/throughput.csv --every 5 --worlds 4"
        " --out $PAGE",
    ),
    "expert_layouts.md": (
        "measurements",
        "python $ROOT/benchmarks/expert_layouts.py $MEASUREMENTS/throughput.csv --out $PAGE",
    ),
}
_SAMPLE = re.compile(
    r"^(?:<!-- sample *(?P<needs>\w*) *(?:: (?P<command>.*?))? ?-->\n+)?"
    r"```\w*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: What differs from run to run, behind what it is printed as: times of programs, names, folders.
_VARIES = (
    (r"\bin [\d.]+ s\b", "in T s"),
    (r"(median|most|took|import took),? [\d.]+ m?s\b|[\d.]+ m?s( in the median| at most)", "T s"),
    (r"\| \d+\.\d\d \|$", "| T |"),
    (r"_\d{15,}", "_ID"),
    (r"[Ww]ritten on \d{4}-\d\d-\d\d|Measured on \d{4}-\d\d-\d\d", "DAY"),
    (r"/tmp/\w+", "/tmp/T"),
)
ELISION = "..."
#: How to give what a sample needs.
OPTIONS = {
    "nemo": "--nemo PYTHON (see .ci/nemo)",
    "megatron_lm": "--megatron-lm CHECKOUT",
    "measurements": "--measurements FOLDER",
}


class PageError(Exception):
    """A sample that cannot be printed anew, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What samples run with: an interpreter with NeMo, Megatron-LM's trees, measured rows."""

    nemo: Path | None = None
    checkouts: Sequence[Path] = field(default=())
    measurements: Path | None = None

    def missing(self, needs: str) -> str:
        """What to give for a sample that needs something; "" where it is there."""
        given = {
            "nemo": self.nemo,
            "megatron_lm": self.checkouts,
            "measurements": self.measurements,
        }
        return f"needs {OPTIONS[needs]}" if needs and not given[needs] else ""

    def run(self, needs: str, command: str, folder: Path, **more: str) -> str:
        """What a command prints in a folder."""
        python = self.nemo if needs == "nemo" and self.nemo else Path(sys.executable)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("NEST_", "SLURM_"))},
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / ".cache"),
            "NEST_MEGATRON_PROFILES": str(folder / ".profiles"),
            "MEGATRON_LM_HOME": str(next(iter(self.checkouts), "")),
            "CHECKOUTS": shlex.join(map(str, self.checkouts)),
            "MEASUREMENTS": str(self.measurements or ""),
            "ROOT": str(ROOT),
            "COLUMNS": "80",
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode in (126, 127) or "Traceback (most recent call last)" in done.stdout:
            raise PageError(f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}")
        return done.stdout


def normalised(text: str) -> str:
    """A text without what differs from run to run, and without the layout of its lines."""
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return " ".join(text.split())


def label(line: str) -> str:
    """By what a line is found again: its words up to the first digit."""
    return re.split(r"\d", normalised(line), maxsplit=1)[0]


def shortened(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """New output with the parts left out that the old one leaves out."""
    parts: list[list[str]] = [[]]
    for line in old:
        parts.append([]) if line.strip() == ELISION else parts[-1].append(line)
    if len(parts) == 1:
        return list(new)
    found: list[str] = []
    start = 0
    for number, part in enumerate(parts):
        found += [ELISION] if number else []
        if not part:
            continue
        same = (i for i in range(start, len(new)) if label(new[i]) == label(part[0]))
        start = next(same, -1)
        if start < 0:
            raise PageError(f"the output has no line like {part[0]!r} any more")
        end = len(new) if number == len(parts) - 1 else start + len(part)
        found += new[start:end]
        start = end
    return found


def steps(body: str) -> Iterator[tuple[str, list[str]]]:
    """Commands as they are shown, each with the lines that it printed; "" for none."""
    for part in re.split(r"^(?=\$ )", body, flags=re.MULTILINE):
        prompt, _, output = part.partition("\n") if part.startswith("$ ") else ("", "", part)
        if part:
            yield prompt, output.splitlines()


def sampled(match: re.Match[str], tools: Tools, folder: Path) -> str:
    """The body of a block with new output; what only varies stays as it is."""
    needs, hidden = match["needs"] or "", match["command"]
    lines = []
    for prompt, old in steps(match["body"]):
        printed = tools.run(needs, hidden or prompt.removeprefix("$ "), folder)
        new = shortened(old, [line.rstrip() for line in printed.rstrip().splitlines()])
        same = normalised("\n".join(new)) == normalised("\n".join(old))
        lines += ([prompt] if prompt else []) + (old if same else new)
    return "".join(f"{line}\n" for line in lines)


def is_sample(match: re.Match[str]) -> bool:
    """Whether a block is one."""
    return match[0].startswith(("<!-- sample", "```text\n$ nest-megatron "))


def refreshed(page: Path, text: str, tools: Tools) -> str:
    """The text of a page with its samples printed anew; what was done is printed."""
    with tempfile.TemporaryDirectory() as temporary:

        def replace(match: re.Match[str]) -> str:
            if not is_sample(match):
                return match[0]
            at = f"{page.name}:{text.count(chr(10), 0, match.start('body'))}"
            if missing := tools.missing(match["needs"] or ""):
                print(f"{at}: skipped, {missing}")
                return match[0]
            body = sampled(match, tools, Path(temporary))
            print(f"{at}: {'same' if body == match['body'] else 'DIFFERS'}", flush=True)
            start = match.start("body") - match.start()
            return match[0][:start] + body + "```"

        return _SAMPLE.sub(replace, text)


def written_whole(page: Path, text: str, tools: Tools, *, check: bool) -> str:
    """What the page's benchmark writes; pictures beside it are written where it is no check."""
    needs, command = WHOLE[page.name]
    if missing := tools.missing(needs):
        print(f"{page.name}: skipped, {missing}")
        return text
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / page.name if check else page.resolve()
        target.write_text(text, encoding="utf-8")
        tools.run(needs, command, Path(folder), PAGE=str(target))
        new = target.read_text(encoding="utf-8")
    same = normalised(new) == normalised(text)
    print(f"{page.name}: {'same' if same else 'DIFFERS'}", flush=True)
    return text if same else new


def main(words: Sequence[str] | None = None) -> int:
    """Refresh or check; 1 where a check finds a difference or a sample cannot be printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="all if not given")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one differs")
    parser.add_argument("--nemo", type=Path, metavar="PYTHON")
    parser.add_argument(
        "--megatron-lm", type=Path, action="append", default=[], metavar="CHECKOUT", help="several"
    )
    parser.add_argument("--measurements", type=Path, metavar="FOLDER")
    given = parser.parse_args(words)
    tools = Tools(
        nemo=given.nemo.absolute() if given.nemo else None,
        checkouts=[path.resolve() for path in given.megatron_lm],
        measurements=given.measurements.resolve() if given.measurements else None,
    )
    wrong = 0
    for page in given.pages or [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        whole = page.name in WHOLE and page in given.pages
        try:
            new = text
            if whole:
                new = written_whole(page, text, tools, check=given.check)
            new = refreshed(page, new, tools)
        except PageError as error:
            print(f"{page.name}: {error}", file=sys.stderr)
            wrong = 1
            continue
        wrong |= given.check and new != text
        if not given.check and new != text:
            page.write_text(new, encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
