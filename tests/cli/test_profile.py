"""``profile``: layers timed for real on this CPU, alone and under torchrun."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.cli import profile as command
from nest_megatron.cli.profile_request import measuring_here, request_of_plan, request_of_settings
from nest_megatron.errors import BAD_INPUT, INTERRUPTED, ProfileError
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.profile import network, session, store
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import SHAPE
from nest_megatron.profile.session import Ranks, Task, meet
from nest_megatron.units import counted
from tests.cli.runs import ROOT, Run, environment, interrupted, run, spawn
from tests.megatron_lm.training import free_port

MODEL = {
    "name": "tiny",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 512,
}
#: Budget in which all shapes are timed however busy the machine is, and the longest wait for that:
#: a command that is given more than its caller waits for fails on a machine that needs it.
AMPLE_S, LIMIT_S = 1800, 2400
AMPLE = ("--max-seconds", str(AMPLE_S))
#: Four blocks, at tensor sizes of 1, 2 and 4, with micro batches of 1, 2 and 4.
NUM_SHAPES = 4 * 3 * 3


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Keep what is started here on one core, and so to one thread.

    Threads of one small product wait for each other at its end: where other processes hold the
    cores, each wait lasts until the scheduler turns up again, and a pass takes 100 times as long.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(before))})
    yield
    os.sched_setaffinity(0, before)


def timed(*arguments: str) -> Run:
    """The command in a process of its own."""
    return spawn("profile", *arguments, timeout_s=LIMIT_S)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    return f"model={path}"


def under_torchrun(folder: Path, *arguments: str) -> Run:
    """The command on two ranks."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", free_port()),
            *("-m", "nest_megatron.profile", *arguments),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=LIMIT_S,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def test_no_more_threads_than_cores_that_the_process_may_use() -> None:
    """A container or ``taskset`` leaves a process fewer cores than the host has."""
    import torch

    before = torch.get_num_threads()
    try:
        measuring_here(Ranks(0, 1, 0, 1), None, on_cpu=True)
        assert torch.get_num_threads() == 1  # of the one core of these tests
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_what_was_timed_is_not_timed_again(model: str) -> None:
    first = timed(model, *AMPLE, "--json")
    assert first.code == 0, first.err
    found = first.json()
    assert len(found["measured"]) == NUM_SHAPES
    assert (found["not_begun"], found["analytic"]) == (0, [])
    assert all(t["forward_s"] > 0 and t["backward_s"] > 0 for t in found["measured"])
    assert all(t["parameters"] > 0 and t["saved_bytes"] > 0 for t in found["measured"])
    second = timed(model, *AMPLE, "--json").json()
    assert (second["measured"], second["known"]) == ([], NUM_SHAPES)
    assert run("profiles", "verify", found["profile"]).code == 0


def test_a_budget_that_runs_out_leaves_the_rest_to_interpolate(model: str) -> None:
    found = timed(model, "--max-seconds", "0.5", "--json").json()
    assert len(found["measured"]) + found["not_begun"] == NUM_SHAPES
    assert found["not_begun"] > 0


def test_where_nothing_was_timed_nothing_is_interpolated(model: str) -> None:
    done = run("profile", model, "--max-seconds", "1e-9")
    assert done.code == BAD_INPUT
    said = " ".join(done.out.split())
    assert f"0 of {NUM_SHAPES} shapes timed in 0 s, {NUM_SHAPES} were not begun in time" in said
    assert "No time of attention, dense, embedding, head is stored: plans take it from data" in said
    assert "interpolate" not in said


@pytest.mark.slow
def test_ranks_share_the_shapes_and_time_the_network(model: str, tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, model, *AMPLE, "--no-collectives", "--json")
    assert done.code == 0, done.err
    found = done.json()
    assert len(found["measured"]) == NUM_SHAPES
    shapes = {
        (t["piece"], t["tensor_model_parallel_size"], t["micro_batch_size"])
        for t in found["measured"]
    }
    assert len(shapes) == NUM_SHAPES
    assert store.find_entry(found["profile"]).read().machine.is_cpu
    out = tmp_path / "network.yaml"
    again = under_torchrun(
        tmp_path, model, "--max-seconds", "8", "--network-out", str(out), "--json"
    )
    assert again.code == 0, again.err
    assert again.json()["known"] == NUM_SHAPES
    assert network.read(out).samples


@pytest.mark.slow
def test_plans_on_a_profile_that_is_named(model: str, tmp_path: Path) -> None:
    name = timed(model, *AMPLE, "--json").json()["profile"]
    asked = ("plan", model, "cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=8")
    assert run(*asked, "--json").json()["provenance"]["profile"] == "analytic"
    named = run(*asked, f"profile.name={name}", "--json").json()
    assert named["provenance"]["profile"].startswith(name)


def plan_for(model: str, path: Path, *words: str) -> Path:
    """A plan of eight GPUs in a file, with its runners-up."""
    job = ("cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=64", *words)
    done = run("plan", model, *job, f"out={path}")
    assert done.code == 0, done.err
    return path


@pytest.mark.slow
def test_what_decides_between_plans_is_timed_alone(model: str, tmp_path: Path) -> None:
    plan = plan_for(model, tmp_path / "plan.yaml")
    done = timed("--for", str(plan), *AMPLE, "--json")
    assert done.code == 0, done.err
    found = done.json()
    differing = {
        command.shape_of(task) for task in request_of_plan(plan).tasks(flash_attention=False)
    }
    assert {tuple(t[name] for name in ("piece", *SHAPE)) for t in found["measured"]} == differing
    assert f"Timing {len(differing)} shapes of layers in which the plan and " in done.err
    again = timed("--for", str(plan), *AMPLE, "--json").json()
    assert (again["measured"], again["known"]) == ([], len(differing))


def test_where_no_profile_decides_it_is_said(model: str, tmp_path: Path) -> None:
    fixed = ("tensor_model_parallel_size=1", "micro_batch_size=1")
    words = [f"parallel.{fixed[0]}", f"train.{fixed[1]}"]
    plan = plan_for(model, tmp_path / "plan.yaml", *words)
    done = run("profile", "--for", str(plan))
    assert done.code == BAD_INPUT
    assert "have the same shapes of layers" in done.err
    assert "nest-megatron tune" in done.err
    both = run("profile", "--for", str(plan), "model=llama3_8b")
    assert both.code == BAD_INPUT
    assert "the plan says what is timed" in both.err
    assert run("profile", "--for", str(tmp_path / "none.yaml")).code == BAD_INPUT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model=llama3_8b", "--max-seconds", "0"), "--max-seconds = 0.0: it must be above 0"),
        (("model=llama3_8b", "--max-seconds", "inf"), "it must be above 0 and finite"),
        (("model=bert_large",), "GPT-like"),
        (("model=llama3_8b", "--implementation", "transformer_engine"), "transformer-engine"),
        (("model=llama3_8b", "train.precision=fp8"), "timed in bf16"),
        (("model=no_such_model",), "no_such_model"),
        ((), "model"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = run("profile", *arguments)
    assert done.code == BAD_INPUT
    assert words in done.err


def test_the_example_of_the_document_is_the_command_s() -> None:
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    assert "torchrun --nproc-per-node 8 -m nest_megatron.profile model=llama3_70b" in text


def test_ranks_share_alike_whatever_is_stored_by_then(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that starts late finds the first timings of the others in the store."""
    asked = request_of_settings([model], None)
    measuring = Measuring(where=Where.CPU, implementation=Implementation.LOCAL)

    def tasks_of_rank(rank: int) -> tuple[Task, ...]:
        here = Ranks(rank, 2, rank, 2)
        return command.tasks_of_rank(asked, here, measuring, again=False).tasks

    monkeypatch.setattr(command, "_known", lambda *_: ())
    first, second = tasks_of_rank(0), tasks_of_rank(1)
    shapes = [command.shape_of(task) for task in (*first, *second)]
    assert len(set(shapes)) == len(shapes) == NUM_SHAPES
    stored = (SimpleNamespace(shape=shapes[0]),)
    monkeypatch.setattr(command, "_known", lambda *_: stored)
    assert tasks_of_rank(1) == second
    assert tasks_of_rank(0) == first[1:]


def test_shapes_that_cannot_be_timed_are_told_by_their_reason(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("no such kernel\nand why")

    monkeypatch.setattr(session, "time_block", refuses)
    done = run("profile", model, *AMPLE)
    assert done.code == BAD_INPUT, "nothing was timed"
    assert f"0 of {NUM_SHAPES} shapes timed" in done.out
    (line,) = (line for line in done.out.splitlines() if line.startswith("Not timed"))
    assert line.startswith(
        "Not timed (RuntimeError: no such kernel): attention at tp 1, micro batch 1; "
    )
    assert line.endswith(f"; and {NUM_SHAPES - 3} more.")


@pytest.mark.slow
def test_ctrl_c_says_what_is_stored(model: str, tmp_path: Path) -> None:
    at = "nest_megatron.profile.session:time_block"
    done = interrupted(at, "profile", model, *AMPLE, cwd=tmp_path)
    assert done.code == INTERRUPTED, done.err
    count = sum(len(entry.read().timings) for entry in store.stored_entries())
    assert f"Interrupted: {counted(count, 'shape')} timed by this process, and stored." in done.err


def test_ranks_that_do_not_come_together_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of NCCL is no fault of this program, and loses no layer."""
    import torch.distributed as dist

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL error: Duplicate GPU detected : rank 1 and rank 0\nmore")

    monkeypatch.setattr(dist, "init_process_group", fails)
    with pytest.raises(
        ProfileError, match="'nccl': it failed: NCCL error: Duplicate GPU"
    ) as caught:
        meet(Where.GPU, ())
    assert "What was timed is stored" in str(caught.value)
    with pytest.raises(ProfileError, match="'gloo'"):
        meet(Where.GPU, (), to_measure=False)
