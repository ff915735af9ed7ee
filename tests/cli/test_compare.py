"""``nest-megatron compare``: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from nest_megatron.cli.research import compare as command
from nest_megatron.cli.research import complete_planners
from tests.cli.runs import LIMITS, SMALL, run

FEW = "planners=[manual,phaze,autoconfigurator]"
BATCH = "train.global_batch_size=32"
JOB = ("compare", *SMALL, BATCH, FEW)


def test_json() -> None:
    found = run(*JOB, "search.tie_percent=0", "--json").json()
    rows = {row["name"]: row for row in found["planners"]}
    assert list(rows) == ["nest", "manual", "phaze", "autoconfigurator"]
    assert rows["nest"]["relative_throughput"] == 1.0
    assert rows["nest"]["parallel"]["tensor_model_parallel_size"] >= 1
    for row in rows.values():
        tokens = 32 * 8192 / row["iteration_time_s"]
        assert row["tokens_per_s"] == pytest.approx(tokens)
        assert sum(row["terms"].values()) == pytest.approx(row["iteration_time_s"])
        assert row["iteration_time_s"] >= rows["nest"]["iteration_time_s"]
        assert row["why"].endswith(".")
    lost = rows["phaze"]["worst_term"]
    assert lost["seconds"] > 0
    assert lost["term"] in rows["phaze"]["terms"]


def test_table() -> None:
    done = run(*JOB, "search.tie_percent=0")
    assert (done.code, done.err) == (0, "")
    assert "Proven optimal in its space." in done.out
    assert "a step, most in" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_plan_that_ties_with_the_fastest_is_said_to() -> None:
    done = run(*JOB, "search.tie_percent=5")
    assert (done.code, done.err) == (0, "")
    assert "simplest that ties with the fastest of its space" in " ".join(done.out.split())
    assert "P(OOM)" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_charts(tmp_path: Path, suffix: str) -> None:
    if suffix == ".png":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"planners{suffix}"
    done = run("compare", *SMALL, *LIMITS, BATCH, "planners=[phaze]", "--chart", str(path))
    assert (done.code, done.err) == (0, "")
    assert f"Drawn into {path}." in done.out
    content = path.read_bytes()
    marks = {".svg": b"phaze", ".html": b'<div class="stack"', ".png": b"\x89PNG"}
    assert marks[suffix] in content


def test_a_search_that_time_ended() -> None:
    job = ("model=llama3_70b", *SMALL[1:])
    done = run("compare", *job, "planners=[nest,mist]", "search.max_seconds=1e-9")
    assert done.code == 3
    assert "time ended the search before it found a plan" in " ".join(done.out.split())
    assert "fits" not in done.out
    assert "proven" not in done.out


def test_nothing_fits() -> None:
    job = ("model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=8", BATCH)
    done = run("compare", *job, "planners=[mist]")
    assert done.code == 1
    assert "No plan: nothing fits in memory; the nearest plan lacks" in done.out
    empty = run("compare", *job, "planners=[mist]", "--json").json()["planners"][1]
    assert empty["iteration_time_s"] is empty["parallel"] is empty["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("planners=[manuel]",), "the planners are nest, manual, mcmc"),
        (("planners=[]",), "planners = []: it names no planner"),
        (("--chart", "planners.pdf"), "a file is one of .html, .png, .svg"),
        (("--chart", "no/such/folder.svg"), "there is no folder"),
        (("out=plan.yaml",), "a comparison writes no plan"),
        (("search.max_seconds=1,2",), "it has several values"),
        (("plannres=[mist]",), "there is no such setting"),
    ],
)
def test_bad_input(given: tuple[str, ...], words: str) -> None:
    done = run("compare", *SMALL, BATCH, *given)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("plan", ["planners="]),
        ("planners=m", ["planners=manual", "planners=mcmc", "planners=mist"]),
        ("planners=[nest,ph", ["planners=[nest,phaze"]),
        ("model=llama3_7", ["model=llama3_70b"]),
    ],
)
def test_completion(typed: str, offered: list[str]) -> None:
    context = click.Context(command)
    found = complete_planners(context, command.params[0], typed)
    assert found == offered


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (("model=gpt3_126m", "train.seq_length=4096"), "model.max_position_embeddings=4096"),
        (("model=llama31_nemotron_ultra_253b",), "--heterogeneous-layers-config-path"),
    ],
)
def test_what_no_command_can_state_is_refused_before_a_search(
    job: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``plan``, ``--for-nodes`` and ``compare`` alike, on GPUs on which nothing fits, too."""
    monkeypatch.setattr("nest_megatron.planner.plan", None)
    monkeypatch.setattr("nest_megatron.api.jobs.find_plan", None)
    monkeypatch.setattr("nest_megatron.research.comparison.plan", None)
    cluster = ("cluster=dgx_h100", "cluster.num_gpus=8")
    for done in (
        run("plan", *job, *cluster),
        run("plan", *job, cluster[0], "--for-nodes", "1..2"),
        run("compare", *job, *cluster),
    ):
        assert done.code == 2
        assert words in done.err
