"""An option that another one leaves without effect is refused, and so is one without its other."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from nest_megatron.cli.command_kinds import Option
from nest_megatron.cli.commands import cli
from nest_megatron.errors import BAD_INPUT
from tests.cli.runs import SMALL, run
from tests.cli.test_commands import commands_below

PLAN = ("plan", *SMALL)
EXTRACT = ("extract", "model=llama3_8b")
MODULE = ("extract", "--module", "my:build", "--input", "1,8")
RESUME = ("tune", "--resume", "runs")
FROM = ("--from", "pretrain_gpt.py --num-layers 2")

PAIRS = {
    "launcher without a host file": ((*PLAN, "--launcher", "mpirun"), "--launcher", "--write-host"),
    "its default": ((*PLAN, "--launcher", "srun"), "--launcher", "--write-hostfile"),
    "host file without hosts": (
        (*PLAN, "--write-hostfile", "r.txt"),
        "--write-hostfile",
        "--hosts",
    ),
    "free": ((*PLAN, "--free", "all"), "--free", "--from"),
    "strict": ((*PLAN, "--strict"), "--strict", "--from"),
    "release": ((*PLAN, "--megatron-version", "0.16"), "--megatron-version", "--from"),
    "release of extract": (
        (*EXTRACT, "--megatron-version", "0.16"),
        "--megatron-version",
        "--from",
    ),
    "release of estimate": (
        ("estimate", *SMALL, "--megatron-version", "0.16"),
        "--megatron-version",
        "--from",
    ),
    "page of a table": (
        (*PLAN, "--for-nodes", "2..3", "--html", "p.html"),
        "--html",
        "--for-nodes",
    ),
    "hosts of a sweep": ((*PLAN, "-m", "--hosts", "h.txt"), "--multirun", "--hosts"),
    "sweep of a command": (("plan", "-m", *FROM), "--from", "--multirun"),
    "sweep of a script": (("plan", "-m", "--", "bash", "train.sh"), "--from", "--multirun"),
    "two tables": ((*PLAN, "--for-gpus", "8", "--for-nodes", "1"), "--for-gpus", "--for-nodes"),
    "every figure of a table": ((*PLAN, "--for-gpus", "8", "--full"), "--full", "--for-gpus"),
    "shortlists of a sweep": ((*PLAN, "-m", "--shortlist"), "--shortlist", "--multirun"),
    "input without module": ((*EXTRACT, "--input", "1,8"), "--input", "--module"),
    "type without module": ((*EXTRACT, "--dtype", "int64"), "--dtype", "--module"),
    "settings of a module": ((*MODULE, "model=llama3_8b"), "KEY=VALUE", "--module"),
    "formulas of a module": ((*MODULE, "--closed-form"), "--closed-form", "--module"),
    "layer of a module": ((*MODULE, "--layer", "dense"), "--layer", "--module"),
    "attention of a module": ((*MODULE, "--unfused"), "--unfused", "--module"),
    "command and module": ((*MODULE, *FROM), "--from", "--module"),
    "implementation of formulas": (
        (*EXTRACT, "--closed-form", "--implementation", "local"),
        "--implementation",
        "--closed-form",
    ),
    "runs of a tuning": ((*RESUME, "--budget", "9"), "--budget", "--resume"),
    "default of a tuning": ((*RESUME, "--launcher", "auto"), "--launcher", "--resume"),
    "settings of a tuning": ((*RESUME, "cluster=dgx_h100"), "KEY=VALUE", "--resume"),
    "flags of a tuning": ((*RESUME, "--set", "--seq-length=8"), "--set", "--resume"),
    "a dry run goes on": ((*RESUME, "--dry-run"), "--dry-run", "--resume"),
    "signature": (("verify", "p.yaml", "--signature", "s"), "--signature", "--key"),
    "tables of a site": (("calibrate", "--site", "runs.csv"), "FILE.CSV", "--site"),
    "check of a site": (
        ("calibrate", "--site", "--no-cross-validation"),
        "--cross-validation",
        "--site",
    ),
    "settings of a plan": (("profile", "--for", "p.yaml", "model=x"), "KEY=VALUE", "--for"),
    "files of a plan": (
        ("profile", "--for", "p.yaml", "--config-dir", "."),
        "--config-dir",
        "--for",
    ),
    "network of one process": (
        ("profile", "model=llama3_8b", "--cpu", "--network-out", "n.yaml"),
        "--network-out",
        "one process",
    ),
    "two sources of hosts": (
        ("cluster", "discover", "--local", "--slurm"),
        "--local",
        "--slurm",
    ),
    "filter of one run": (("history", "--model", "a", "show", "0123"), "--model", "behind show"),
}


@pytest.mark.parametrize(("words", "refused", "other"), PAIRS.values(), ids=PAIRS.keys())
def test_an_option_without_effect_is_refused(
    words: tuple[str, ...],
    refused: str,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.code == BAD_INPUT
    first, fix = done.err.splitlines()
    assert first.startswith(f"error: {refused}")
    assert other in first + fix
    assert not list(tmp_path.iterdir())


def test_options_name_others_of_their_command() -> None:
    known = 0
    for _, command in commands_below("", cli):
        names = {each.opts[-1] for each in command.params if isinstance(each, click.Option)}
        names |= {str(each.metavar).strip("[].") for each in command.params}
        for each in command.params:
            if isinstance(each, Option):
                named = [*each.needs.split()[:1], *each.excludes[0].split()]
                assert names.issuperset(named)
                known += len(named)
    assert known > 20


def test_a_document_of_one_run_is_asked_for_behind_it() -> None:
    error = run("history", "--json", "show", "0123").json()["error"]
    assert (error["what"], error["fix"]) == ("--json", "Leave it out, or put it behind show.")
