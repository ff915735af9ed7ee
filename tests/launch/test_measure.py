"""Measuring a job's own layers: what is timed and in which order, and what of it is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.config.cluster_detection import JobCluster, find_cluster
from nest_megatron.config.job import Job
from nest_megatron.config.launch import read_words
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import measure
from nest_megatron.integrations.megatron_lm.measure import (
    MeasuringError,
    gpu_of_rank,
    measure_in_child,
    measure_job,
    num_threads,
    shape_of,
    tasks_for,
    with_profile,
)
from nest_megatron.integrations.megatron_lm.measure_child import Answer, JobArguments, Orders
from nest_megatron.integrations.megatron_lm.own_layers import job_arguments
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile import store
from nest_megatron.profile.installed import installed_versions
from nest_megatron.profile.records import ProfileMode
from nest_megatron.profile.session import Skipped, Task
from tests import catalogue
from tests.cli.runs import environment
from tests.launch.jobs import job_argv, namespace, pad_like_megatron, running
from tests.profile.profiles import H100, timing

LLAMA = catalogue.model("llama3_8b")
#: As a child would find it with what is installed here.
MACHINE = dataclasses.replace(
    H100,
    **{
        name: installed_versions().get(name)
        for name in ("driver", "torch", "megatron_core", "transformer_engine")
    },
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own, on a host whose GPUs are H100s."""
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    pad_like_megatron(monkeypatch)
    monkeypatch.setattr(measure, "machine_here", lambda _: MACHINE)
    return tmp_path / "profiles"


def job(*words: str, spec: Any = LLAMA) -> tuple[Job, JobCluster]:
    argv = job_argv(spec, "--global-batch-size", "256")
    settings = read_words(["+nest=auto", "nest.cluster=dgx_h100", *words]).job
    place = find_cluster(settings, 64, {}, dry_run=False)
    return running(namespace(argv), argv), place


def measuring(*words: str) -> Callable[[], tuple[Job, JobCluster]]:
    return lambda: job("nest.profile.mode=measure", *words)


def measured(*words: str) -> tuple[Job, JobCluster]:
    """The job and where it runs, on a host without other ranks."""
    found = measure_job(measuring(*words))
    assert found is not None
    return found


def tasks(*words: str, spec: Any = LLAMA) -> tuple[Task, ...]:
    reads, place = job("nest.profile.mode=analytic", *words, spec=spec)
    outcome = decide(reads, place, free=(), alternative=0)
    assert outcome.searched is not None
    request = outcome.searched.request
    return tasks_for(outcome.decision.plan, request, Implementation.TRANSFORMER_ENGINE)


def timed(task: Task) -> Any:
    degrees = {
        name: getattr(task.shard, name)
        for name in (
            "tensor_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "micro_batch_size",
        )
    }
    return timing(task.block, **degrees)


class Children:
    """Stands for the processes that measure, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[Orders] = []
        self.limit = 10**9
        self.refuses: Callable[[Task], bool] = lambda _: False
        monkeypatch.setattr(measure, "measure_in_child", self.measure)

    def measure(self, orders: Orders, *_: object) -> Answer:
        self.orders.append(orders)
        done = orders.tasks[: self.limit]
        skipped = [Skipped(task=t, reason="no", is_too_large=True) for t in done if self.refuses(t)]
        timings = [timed(t) for t in done if not self.refuses(t)]
        return Answer(machine=MACHINE, timings=tuple(timings), skipped=tuple(skipped), seconds=12.0)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


def test_the_best_plan_comes_first_then_what_is_near() -> None:
    found = tasks()
    reads, place = job("nest.profile.mode=analytic")
    plan = decide(reads, place, free=(), alternative=0).decision.plan
    first = found[:4]
    assert [task.block for task in first] == [
        LayerBlock.ATTENTION,
        LayerBlock.DENSE,
        LayerBlock.EMBEDDING,
        LayerBlock.HEAD,
    ]
    for task in first:
        tp = task.shard.tensor_model_parallel_size
        assert tp == plan.layout.dims.tensor_model_parallel_size
        assert task.shard.micro_batch_size == plan.layout.micro_batch_size
        assert task.shard.sequence_parallel == (tp > 1)


def test_each_shape_once_within_a_node_and_whole_sequences_for_attention() -> None:
    spec = catalogue.model("mixtral_8x7b")
    found = tasks(spec=spec)
    shapes = [shape_of(spec, task) for task in found]
    assert len(shapes) == len(set(shapes))
    assert {task.shard.expert_model_parallel_size for task in found} >= {1, 2, 4, 8}
    for task in found:
        assert task.shard.tensor_model_parallel_size <= 8
        if task.block is LayerBlock.ATTENTION:
            assert task.shard.context_parallel_size == 1


def test_what_is_kept_bounds_what_is_measured() -> None:
    found = tasks("nest.parallel.tensor_model_parallel_size=2")
    assert {task.shard.tensor_model_parallel_size for task in found} == {2}


def test_the_plan_rests_on_what_was_measured(children: Children) -> None:
    reads, place = measured()
    (orders,) = children.orders
    note = place.notes[-1]
    assert note.startswith(f"Measured {len(orders.tasks)} blocks of this job's layers in 12 s")
    assert str(store.profiles_folder()) in note
    outcome = decide(reads, place, free=(), alternative=0)
    name = place.settings.profile.name
    assert outcome.decision.plan.provenance.profile.startswith(f"{name}: ")
    assert "imported" not in outcome.decision.plan.provenance.profile
    assert note in outcome.notes


def test_the_second_run_measures_nothing(children: Children) -> None:
    _, first = measured()
    _, second = measured()
    assert len(children.orders) == 1
    assert second.settings == first.settings
    assert "Nothing was measured" in second.notes[-1]


def test_what_was_not_reached_is_measured_next_time(children: Children) -> None:
    children.limit = 5
    _, first = measured()
    assert "Not reached within 120 s" in first.notes[-1]
    children.limit = 10**9
    measured()
    assert len(children.orders[1].tasks) == len(children.orders[0].tasks) - 5
    measure_job(measuring())
    assert len(children.orders) == 2


def test_what_does_not_fit_is_not_tried_again(children: Children) -> None:
    children.refuses = lambda task: task.block is LayerBlock.HEAD
    _, first = measured()
    assert "Too large for the device" in first.notes[-1]
    assert "head (tp " in first.notes[-1]
    _, second = measured()
    assert len(children.orders) == 1
    assert "known not to be timed" in second.notes[-1]


def test_a_profile_of_another_version_is_not_added_to(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_job(measuring())
    newer = dataclasses.replace(MACHINE, torch="99.0")
    monkeypatch.setattr(measure, "machine_here", lambda _: newer)
    measure_job(measuring())
    assert len(children.orders) == 2


def test_nothing_timed_is_an_error(children: Children) -> None:
    children.refuses = lambda _: True
    with pytest.raises(MeasuringError, match="could be timed: no"):
        measure_job(measuring())


def test_the_new_profile_is_named_as_asked(children: Children) -> None:
    _, place = measured("nest.profile.name=mine")
    assert place.settings.profile.name == "mine"


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_a_budget_that_is_none_is_refused(seconds: str) -> None:
    reads, place = job(f"nest.profile.max_seconds={seconds}")
    with pytest.raises(UserInputError) as caught:
        decide(reads, place, free=(), alternative=0)
    assert caught.value.what == "nest.profile.max_seconds"


def test_the_budget_reaches_the_child_and_is_shared_by_its_blocks(children: Children) -> None:
    measure_job(measuring("nest.profile.max_seconds=8"))
    (orders,) = children.orders
    assert orders.max_seconds == 8
    assert orders.block_seconds == pytest.approx(max(0.2, 8 / len(orders.tasks)))


def test_orders_and_answers_survive_the_way(children: Children) -> None:
    measure_job(measuring())
    (orders,) = children.orders
    assert from_plain(Orders, json.loads(json.dumps(to_plain(orders)))) == orders
    answer = children.measure(orders)
    assert from_plain(Answer, json.loads(json.dumps(to_plain(answer)))) == answer


def test_a_job_s_arguments_are_those_it_states_or_has_from_elsewhere() -> None:
    reads, _ = job()
    values = {**reads.command.values, "hidden_size": 77, "of_torch": object()}
    command = dataclasses.replace(reads.command, values=values)
    found = job_arguments(command, {"tokenizer_type": "GPT2BPETokenizer", "call": print})
    assert found.values["hidden_size"] == 77
    assert "of_torch" not in found.values
    assert "fp16" not in found.values  # at its default
    assert found.defaults == {"tokenizer_type": "GPT2BPETokenizer"}


def orders_for(children_s: tuple[Task, ...] = ()) -> Orders:
    return Orders(
        spec=LLAMA,
        precision="bf16",  # type: ignore[arg-type]
        tasks=children_s,
        job=JobArguments(script="pretrain_gpt.py", argv=()),
        implementation=Implementation.LOCAL,
        where=Where.CPU,
        max_seconds=5.0,
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    command = (sys.executable, "-c", textwrap.dedent(code))
    monkeypatch.setattr(measure, "_COMMAND", command)


def test_a_child_that_dies_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import sys; sys.exit('no such device')")
    with pytest.raises(MeasuringError, match=r"ended with code 1; it said:\n  no such device"):
        measure_in_child(orders_for(), {}, lambda: None)


def test_a_child_that_is_killed_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(MeasuringError, match="ended by signal 9"):
        measure_in_child(orders_for(), {}, lambda: None)


def test_a_child_that_ends_early_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "pass")
    with pytest.raises(MeasuringError, match="ended with code 0"):
        measure_in_child(orders_for(), {}, lambda: None)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import time; time.sleep(900)")
    monkeypatch.setattr(measure, "SPARE_S", -4.0)
    started = time.monotonic()
    with pytest.raises(MeasuringError, match="did not end within its time"):
        measure_in_child(orders_for(), {}, lambda: None)
    assert time.monotonic() - started < 450


def test_a_child_ends_when_another_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import time; time.sleep(900)")

    def check() -> None:
        raise KeyError("another rank")

    started = time.monotonic()
    with pytest.raises(KeyError):
        measure_in_child(orders_for(), {}, check)
    assert time.monotonic() - started < 450


PARENT = """
import os, subprocess, sys
code = '''
import sys, time
from nest_megatron.integrations.megatron_lm.measure_child import end_with_parent
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())])
print("child", child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a child with its parent")
def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    lines = sorted([parent.stdout.readline(), parent.stdout.readline()])
    pid = int(lines[0].split()[1])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    ended = time.monotonic() + 300
    while _is_running(pid) and time.monotonic() < ended:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_child_knows_of_no_rank_and_of_one_gpu() -> None:
    rank = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_PROCID": "5",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }
    on_gpu = dataclasses.replace(orders_for(), where=Where.GPU)
    found = measure.child_environment(on_gpu, rank)
    assert found["CUDA_VISIBLE_DEVICES"] == "5"
    assert found["HOME"] == "/root"
    assert rank.keys() & found.keys() == {"HOME", "CUDA_VISIBLE_DEVICES"}
    on_cpu = measure.child_environment(orders_for(), rank)
    assert on_cpu["OMP_NUM_THREADS"] == str(num_threads(rank))


@pytest.mark.parametrize(
    ("variables", "gpu"),
    [
        ({}, "0"),
        ({"LOCAL_RANK": "3"}, "3"),
        ({"SLURM_LOCALID": "2"}, "2"),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "GPU-a"}, "GPU-a"),
    ],
)
def test_a_rank_s_own_gpu(variables: dict[str, str], gpu: str) -> None:
    assert gpu_of_rank(variables) == gpu


def test_cores_are_shared_by_the_ranks_of_a_host() -> None:
    cores = len(os.sched_getaffinity(0))
    assert num_threads({}) == cores
    assert num_threads({"LOCAL_WORLD_SIZE": "10000"}) == 1


def test_measuring_leaves_the_rest_of_the_place_alone() -> None:
    _, place = job("nest.profile.mode=measure", "nest.profile.max_seconds=7")
    analytic = with_profile(place, ProfileMode.ANALYTIC)
    assert analytic.settings.profile.mode == "analytic"
    assert analytic.settings.profile.max_seconds == 7
    assert place.settings.profile.mode == "measure"
    assert analytic.cluster is place.cluster
