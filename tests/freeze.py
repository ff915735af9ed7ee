"""Compare plans, commands, namespaces and errors with the digests in ``data/freeze/digests.csv``.

usage: python -m tests.freeze [--only PATTERN] [--texts FOLDER] [--write]

A row is a job of ``recipes/jobs.csv`` on one cluster, a line of ``commands.txt`` or ``errors.txt``
that the command line runs, or one of ``namespaces.txt``: a training command whose arguments are
parsed as by Megatron-LM and changed as a launch with ``+nest=auto`` changes them. Rows that differ
are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fnmatch
import functools
import hashlib
import os
import re
import shlex
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from nest_megatron.cost_model import site_file
from nest_megatron.history import store as history_store
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, launch_request
from nest_megatron.integrations.megatron_lm.launch import apply
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.megatron_core import layers
from nest_megatron.profile import store
from recipes import make
from tests.cli.runs import run
from tests.cli.test_validate import RUN, table
from tests.integrations.test_checkpoint import SHORT, legacy, torch_dist
from tests.integrations.test_checkpoint_arguments import MODEL
from tests.launch.jobs import decided, pad_like_megatron

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "freeze"
DIGESTS = DATA / "digests.csv"
COMMANDS, ERRORS, NAMESPACES = "commands", "errors", "namespaces"
JOBS = {
    f"jobs {recipe.framework} {recipe.name} {cluster}": (recipe, cluster)
    for job in make.jobs()
    for recipe in job.recipes()
    for cluster in make.CLUSTERS
}
#: Variables that name what the user of a machine has measured, extracted and run.
STORES = (store.FOLDER_VARIABLE, layers.CACHE_VARIABLE, history_store.VARIABLE, site_file.VARIABLE)
#: What differs from run to run, and what stands for it.
MASKS = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)": "DATE",
    r"\bin [\d.,]+ (s|ms|us|min) with the (kernel|reference)": r"in SECONDS with the \2",
    r"(?m)( % +)[\d.]+ s$": r"\1SECONDS",  # of searches that are compared
    r"(P\(OOM\)) +Search": r"\1 Search",
    r"──+": "──",
    r"nest-megatron \d+\.\d+\.\d+": "nest-megatron VERSION",
    r"\b([0-9a-f]{64}|[0-9a-f]{16})\b": "HASH",
}


@dataclass(frozen=True)
class Digest:
    """A row of the table: ``headline`` is there to be read, ``sha256`` covers the whole text."""

    name: str
    exit_code: str
    headline: str
    sha256: str


@functools.cache
def lines(kind: str) -> Mapping[str, str]:
    """The commands of a file by their names; one that has no name is its own."""
    found, parts = dict[str, str](), dict[str, str]()
    for line in (DATA / f"{kind}.txt").read_text(encoding="utf-8").splitlines():
        if defined := re.fullmatch(r"([A-Z_0-9]+) = (.*)", line):
            parts[defined[1]] = string.Template(defined[2]).substitute(parts)
        elif line and not line.startswith("#"):
            named = re.fullmatch(r"([a-z0-9][a-z0-9 ,._-]*): (.*)", line)
            name, text = (named[1], named[2]) if named else (line, line)
            assert f"{kind} {name}" not in found
            found[f"{kind} {name}"] = string.Template(text).safe_substitute(parts)
    return found


def names() -> list[str]:
    """All rows."""
    return [*JOBS, *(name for kind in (COMMANDS, NAMESPACES, ERRORS) for name in lines(kind))]


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder to run in, with checkpoints, a script and measured runs, and a fixed environment."""
    before, cwd = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        folder = Path(name).resolve()
        (folder / "home").mkdir()
        os.environ.clear()
        os.environ.update(HOME=str(folder / "home"), PATH=before["PATH"], COLUMNS="1000")
        os.environ.update(TERM="dumb", NO_COLOR="1", LC_ALL="C.UTF-8", USER="user")
        os.environ.update({name: str(folder / "home" / name.lower()) for name in STORES})
        torch_dist(folder / "dist", "fully", **MODEL)
        legacy(folder / "legacy", "mp_rank_00 mp_rank_01", **{**MODEL, "tp": 2, "dist": False})
        shutil.copy(ROOT / "docs" / "samples" / "train_llama3_8b.sh", folder / "train.sh")
        table(folder / "runs.csv", RUN, {**RUN, "row_id": "a2", "cp": "1", "tp": "2"})
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(before)


def job_text(name: str) -> tuple[str, str]:
    """The decision of a job, without a word of the plan file's form."""
    recipe, cluster = JOBS[name]
    plan = recipe.planned(cluster)
    predicted, search = plan.predicted, plan.search
    said = [
        ("layout", *parallel_argv(launch_request(plan))),
        ("GPUs", plan.layout.num_gpus, plan.layout.dims.rank_order.value),
        ("step", predicted.iteration_time_s, predicted.mfu, *sorted(predicted.terms.items())),
        ("memory", predicted.peak_memory_bytes, predicted.capacity_bytes),
        ("search", search.certificate, search.gap_percent, search.candidates, search.bounded),
        ("solved", search.solved, search.stage_nodes, search.simulations),
        ("infeasible", *sorted(search.infeasible.items()), *search.illegal),
        *(("offer", offer) for offer in plan.offers),
    ]
    if (likely := plan.uncertainty) is not None:
        said.append(("range", likely.mean_s, likely.low_s, likely.high_s, likely.out_of_memory))
    for framework, launch in plan.launch.items():
        said.append((framework, launch.script, *launch.argv))
        said.append((framework, *sorted(launch.environment.items())))
        said += [(framework, note) for note in (*plan.notes, *launch.notes)]
    text = "\n".join(f"{key}: {' '.join(map(str, values))}" for key, *values in said)
    return text, f"{predicted.iteration_time_s} s {degrees(plan)} {search.certificate}"


def degrees(plan: ParallelPlan) -> str:
    """The sizes of a layout that are not 1."""
    sizes = {short: plan.arguments[SHORT[short]] for short in ("tp", "pp", "vpp", "cp", "ep", "dp")}
    sizes["mbs"] = plan.layout.micro_batch_size
    return " ".join(f"{key.upper()} {n}" for key, n in sizes.items() if n not in (None, 1))


def command_text(command: str) -> tuple[str, str, str]:
    """What commands that are joined by ``&&`` print, the last one's exit code, and a headline."""
    text, code, headline = "", 0, ""
    for each in command.split(" && "):
        done = run(*shlex.split(each))
        code = done.code
        text += f"$ {each}\n{done.out}--- standard error\n{done.err}--- exit code {code}\n"
        found = re.findall(r"^  (?:Step|Layout) +(.*)", done.out, re.MULTILINE)
        headline = " | ".join(found[:2]) or (done.err or done.out).partition("\n")[0]
    return text, str(code), re.sub(" +", " ", headline)[:160]


def namespace_text(command: str) -> tuple[str, str]:
    """Arguments before and after a launch; the command is RELEASE RANKS CLUSTER FREE FLAGS..."""
    version, ranks, cluster, free, *argv = shlex.split(command)
    names = free.split(",") if free != "-" else ()
    with pytest.MonkeyPatch.context() as patch:
        pad_like_megatron(patch)
        sizes = {"world_size": int(ranks)}
        args, _, found = decided(argv, *names, version=version, cluster=cluster, **sizes)
    before = dict(vars(args))
    apply(args, found.decision)
    text = [f"{name} = {value!r}" for name, value in sorted(before.items())]
    changed = [(name, value) for name, value in sorted(vars(args).items()) if before[name] != value]
    text += [f"{name} := {value!r}" for name, value in changed]
    text += [
        f"${name} := {value!r}"
        for name, value in found.decision.plan.launch[LAUNCHER].environment.items()
    ]
    text += [str(astuple(each)) for each in found.changes] + [f"note: {n}" for n in found.notes]
    plan, step_s = found.decision.plan, found.decision.plan.predicted.iteration_time_s
    return "\n".join(text), f"{step_s} s {degrees(plan)}, {len(changed)} arguments changed"


def judge(name: str) -> tuple[Digest, str]:
    """The digest of a row as it is now, and the text that it is of."""
    kind, code = name.partition(" ")[0], ""
    with place() as folder:
        if kind == "jobs":
            text, headline = job_text(name)
        elif kind == NAMESPACES:
            text, headline = namespace_text(lines(kind)[name])
        else:
            text, code, headline = command_text(lines(kind)[name])
    text = masked(text, folder)
    sha256 = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Digest(name, code, masked(headline, folder), sha256), text


def masked(text: str, folder: Path) -> str:
    """A text without what differs from run to run."""
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    for pattern, word in MASKS.items():
        text = re.sub(pattern, word, text)
    return text


def read() -> dict[str, Digest]:
    """The table, by the names of its rows."""
    with DIGESTS.open(encoding="utf-8", newline="") as file:
        return {row["name"]: Digest(**row) for row in csv.DictReader(file)}


def main() -> int:
    """Judge the rows in as many processes as there are cores."""
    parser = argparse.ArgumentParser(prog="python -m tests.freeze", description=__doc__)
    parser.add_argument("--only", default="*", help="rows whose name has this (* and ? allowed)")
    parser.add_argument("--texts", type=Path, help="a folder for the whole texts, for diff -r")
    parser.add_argument("--write", action="store_true", help="write the digests of today")
    asked = parser.parse_args()
    chosen = [name for name in names() if fnmatch.fnmatch(name, f"*{asked.only}*")]
    known, today, texts = read(), {}, asked.texts
    with ProcessPoolExecutor() as pool:
        for digest, text in pool.map(judge, chosen):
            today[digest.name] = digest
            if digest != (old := known.get(digest.name)):
                print(f"- {astuple(old) if old else 'no row'}\n+ {astuple(digest)}", flush=True)
            if texts:
                texts.mkdir(parents=True, exist_ok=True)
                path = texts / f"{digest.name.replace('/', '|')}.txt"
                path.write_text(text, encoding="utf-8")
    gone = sorted(known.keys() - {*names()})
    differing = [name for name, digest in today.items() if known.get(name) != digest] + gone
    print(f"{len(today)} rows, {len(differing)} differ", *(f"- {name}" for name in gone), sep="\n")
    if asked.write:
        rows = [astuple(row) for name in names() if (row := (known | today).get(name))]
        with DIGESTS.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Digest.__match_args__, *rows])
        return 0
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
