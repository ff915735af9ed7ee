"""Sweeps: on Hydra's launchers, gathered in one table, and gone on with after they were ended."""

from __future__ import annotations

import csv
import resource
import time
from pathlib import Path

import pytest

from nest_megatron.api.jobs import (
    SweepJob,
    opened,
    outcome,
    read_result,
    sweep_job,
    write_result,
)
from nest_megatron.config.compose import Settings
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.report.plan_rows import PlanRow, sweep_chart, to_csv, to_parquet
from tests.cli.runs import (
    ENDLESS_SECOND_JOB,
    SECOND_JOB,
    SMALL,
    Run,
    interrupted,
    run,
    spawn,
    start,
)

#: Quickly planned: what is swept is not how the layers are divided.
JOB = (
    *SMALL[:2],
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
)
TWO = (*JOB, "cluster.num_gpus=8,16")


def sweep(out: Path, *words: str) -> Run:
    return run("plan", "-m", *words, f"out={out}", "--json")


def results(out: Path) -> dict[str, int]:
    """When each result was written."""
    found = (out / ".jobs").glob("*.json")
    return {path.name: path.stat().st_mtime_ns for path in found if path.name != "list.json"}


def num_gpus(out: Path) -> list[int]:
    return sorted(plan_file.read(path).cluster.num_gpus for path in out.glob("*.yaml"))


def test_one_file_a_job_and_one_table(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    done = sweep(out, *TWO)
    assert done.code == 0
    jobs = done.json()["jobs"]
    assert [job["overrides"] for job in jobs] == [["cluster.num_gpus=8"], ["cluster.num_gpus=16"]]
    assert num_gpus(out) == [8, 16]
    with (out / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    times = [job["plan"]["predicted"]["iteration_time_s"] for job in jobs]
    assert [float(row["iteration_time_s"]) for row in rows] == times
    assert [row["cluster.num_gpus"] for row in rows] == ["8", "16"]
    assert "cluster.num_gpus" in (out / "sweep.svg").read_text()


def test_the_parquet_table_is_the_csv_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    sweep(tmp_path / "sweep", *JOB, "cluster.num_gpus=8,13")
    table = parquet.read_table(tmp_path / "sweep" / "sweep.parquet").to_pylist()
    with (tmp_path / "sweep" / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in table] == ["ok", "bad input"]
    for typed, text in zip(table, rows, strict=True):
        assert {k: "" if v is None else str(v) for k, v in typed.items()} == text


@pytest.mark.parametrize(
    "launcher",
    [
        ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"),
    ],
    ids=["joblib", "submitit"],
)
def test_other_launchers_plan_the_same(launcher: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher[0].split('=')[1].split('_')[0]}_launcher")
    # In a process of its own: the launchers leave workers, handlers and threads behind in theirs.
    done = spawn("plan", "-m", *TWO, *launcher, f"out={tmp_path / 'there'}", "--json")
    assert done.code == 0, done.err
    assert num_gpus(tmp_path / "there") == [8, 16]
    times = [job["plan"]["predicted"] for job in done.json()["jobs"]]
    basic = sweep(tmp_path / "here", *TWO).json()["jobs"]
    assert times == [job["plan"]["predicted"] for job in basic]


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=joblib",)], ids=["basic", "joblib"])
@pytest.mark.parametrize(
    ("most_bytes", "words"),
    [(1536, "sweep: the jobs' launcher cannot write to it: "), (8192, "it cannot be written: ")],
)
def test_a_result_that_cannot_be_written_is_told_in_our_words(
    launcher: tuple[str, ...], most_bytes: int, words: str, tmp_path: Path
) -> None:
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    out = tmp_path / "sweep"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))  # as a full disk
    try:
        done = spawn("plan", "-m", *TWO, *launcher, f"out={out}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.code == 2
    assert done.err.partition(" = ")[2].startswith(str(out))
    assert f"{words}File too large" in done.err, done.err
    assert list(out.glob("sweep*")) == []


def test_finished_jobs_are_not_done_again(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep(out, *TWO)
    before = results(out)
    grown = sweep(out, *JOB, "cluster.num_gpus=8,16,32")
    assert "2 of 3 jobs are done" in grown.err
    assert {name: written for name, written in results(out).items() if name in before} == before
    assert num_gpus(out) == [8, 16, 32]
    again = sweep(out, *JOB, "cluster.num_gpus=8,16,32", "search.num_alternatives=3")
    assert "are done" not in again.err, "another search is another job"


def test_a_job_with_bad_input_is_tried_again_and_stops_no_other(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = (*JOB, "cluster.num_gpus=8,100")
    assert sweep(out, *words).code == 2
    done = sweep(out, *words)
    assert done.code == 2
    assert "1 of 2 jobs are done" in done.err
    assert "whole nodes" in done.json()["jobs"][1]["error"]["limit"]


def test_a_job_that_time_ended_is_tried_again_and_claims_nothing(tmp_path: Path) -> None:
    words = ("plan", "-m", "model=llama3_70b,llama3_8b", *SMALL[1:], "search.max_seconds=1e-9")
    words = (*words, f"out={tmp_path / 'sweep'}")
    for done in (run(*words), run(*words)):
        assert done.code == 3
        assert "ended early" in done.out
        assert "does not fit" not in done.out
    assert "1 of 2 jobs are done" in done.err
    table = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [row["status"] for row in table] == ["ended early", "ok"]


def test_a_plan_that_may_be_far_from_the_best_ends_a_sweep_as_it_ends_plan() -> None:
    words = ("model=deepseek_v3", "cluster=h100_spine_leaf", "search.max_seconds=1e-9")
    done = run("plan", "-m", *words, "cluster.num_gpus=256")
    assert (done.code, "% of the best" in " ".join(done.out.split())) == (3, True)
    assert run("plan", *words, "cluster.num_gpus=256").code == 3


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = (*JOB, "cluster.num_gpus=8,16,32,64,128,256")
    process = start("plan", "-m", *words, f"out={out}")
    deadline = time.monotonic() + 600
    while not (out / ".jobs").is_dir() or len(results(out)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = results(out)
    done = sweep(out, *words)
    assert done.code == 0
    assert f"{len(before)} of 6 jobs are done" in done.err
    assert before.items() <= results(out).items()
    assert len(num_gpus(out)) == 6


def test_an_interrupted_sweep_says_how_far_it_came(tmp_path: Path) -> None:
    words = ("plan", "-m", *JOB, "cluster.num_gpus=8,16,24", f"out={tmp_path / 'sweep'}")
    done = interrupted(SECOND_JOB, *words, cwd=tmp_path, prepare=ENDLESS_SECOND_JOB)
    assert done.code == 130
    assert "1 of 3 jobs are done; the same command goes on from there" in done.err


def test_two_sweeps_in_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path / "sweep"):
        done = sweep(tmp_path / "sweep", *TWO)
    assert done.code == 2
    assert "another sweep" in done.json()["error"]["limit"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("hydra/launcher=joblb",), "Could not find 'hydra/launcher/joblb'"),
        (("hydra/launcher=-1",), "must be a string or a list"),
        (("hydra/launcher=[1]",), "hydra/launcher = [1]"),
        (("hydra/launcher=submitit_slurm",), "may run on other machines"),
        (("hydra/launcher=basic", "hydra.launcher.jobs=2"), "jobs"),
        (("hydra/sweeper=optuna",), "no such setting"),
    ],
)
def test_launchers_that_are_not_there(words: tuple[str, ...], told: str) -> None:
    done = run("plan", "-m", *TWO, *words)
    assert done.code == 2
    assert told in done.err


def test_a_launcher_without_a_sweep() -> None:
    done = run("plan", *SMALL, "hydra/launcher=joblib")
    assert done.code == 2
    assert "--multirun" in done.err


def test_rows_without_a_plan() -> None:
    rows = [
        PlanRow(number=0, settings={"a.b": "1", "model": "x"}, status="does not fit",
                 missing_bytes=5),
        PlanRow(number=1, settings={"a.b": "two", "model": "y"}, status="bad input", reason="no"),
    ]  # fmt: skip
    lines = to_csv(rows).splitlines()
    assert lines[1].startswith("0,1,x,does not fit,,5,")
    assert lines[2].startswith("1,two,y,bad input,no,,")
    assert to_parquet(rows)[:4] == b"PAR1"
    assert b"does not fit" in sweep_chart(rows)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "3", "\ud800"])
def test_a_result_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".jobs").mkdir()
    job = SweepJob(settings=(), varied=(), key="job")
    write_result(tmp_path, job, {"plan": 1})
    assert read_result(tmp_path, job) == {"plan": 1}
    (file,) = tmp_path.rglob("job.json")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert read_result(tmp_path, job) is None


def test_an_interruption_of_which_a_library_makes_an_error_is_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OmegaConf makes one of it while a job is composed."""

    def interrupted(*_: object) -> Settings:
        raise UserInputError("cluster", None, "it cannot be read", "") from KeyboardInterrupt()

    monkeypatch.setattr(SweepJob, "composed", interrupted)
    with pytest.raises(UserInputError):
        sweep_job((), ())
    with pytest.raises(UserInputError):
        outcome(interrupted)  # type: ignore[arg-type]
