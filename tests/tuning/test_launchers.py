"""Starting runs: words, real processes and their end, failures by what they print."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.history.records import Outcome
from nest_megatron.report.failure import end
from nest_megatron.tuning import launchers
from nest_megatron.tuning.job import RunCommand
from nest_megatron.tuning.launchers import (
    launcher_named,
    run_by_submitit,
    run_process,
    running_file,
    step_words,
)
from nest_megatron.tuning.session import Ended, Failure, State, Trial, judged, open_locked
from tests.history.runs import run_record
from tests.patience import LONG_S, wait_until
from tests.tuning.stand_in import job

COMMAND = RunCommand(
    launcher=("torchrun", "--nnodes", "2", "--nproc-per-node", "8"),
    script=("pretrain_gpt.py",),
    argv=("--bf16",),
    environment={"A": "1", "HOME": None},
    num_nodes=2,
    gpus_per_node=8,
)
ALLOCATION = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "gpu[07-08]"}
TRIAL = Trial(number=1, plan="", layout="", predicted_s=1.0, state=State.STARTED)
#: What sleeps until it is ended, and is told by its words from what other tests start.
SLEEP = f"time.sleep({3600 + os.getpid()})"
#: A launcher whose child, in a session of its own, outlives a SIGTERM of the launcher's group.
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; {SLEEP}"], start_new_session=True)
print("started", flush=True)
{SLEEP}
"""


def test_the_command_is_the_users_own_with_a_plan(tmp_path: Path) -> None:
    found, candidate = job(), job().ranked.candidates[1]
    plan = found.plan(candidate)
    pinned, history = tmp_path / "pinned.yaml", tmp_path / "record.jsonl"
    command = found.command(plan, pinned, 20, history)
    words = command.words()
    assert words[:3] == ["torchrun", "--nproc_per_node", "8"]
    tp = plan.layout.dims.tensor_model_parallel_size
    assert words[words.index("--tensor-model-parallel-size") + 1] == str(tp)
    assert words[-3:] == ["+nest=pinned", f"nest.plan={pinned}", "nest.watch=20"]
    assert words[words.index("--exit-interval") + 1] == "21"
    assert command.variables()["NEST_MEGATRON_HISTORY"] == str(history)
    assert pinned.is_file()


def test_flags_without_a_script_cannot_be_started(tmp_path: Path) -> None:
    found = job()
    plan = found.plan(found.ranked.candidates[0])
    assert found.job.command is not None
    bare = dataclasses.replace(found.job.command, script="", launcher=())
    without = dataclasses.replace(found, job=dataclasses.replace(found.job, command=bare))
    with pytest.raises(UserInputError, match="no training script"):
        without.command(plan, tmp_path / "pinned.yaml", 20, tmp_path)


def test_a_step_of_an_allocation_is_torchrun_on_each_host() -> None:
    words = step_words(COMMAND, ALLOCATION)
    assert words[:4] == ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert "--rdzv-endpoint=gpu07:25123" in words
    assert words[-2:] == ["pretrain_gpt.py", "--bf16"]


def test_a_step_without_torchrun_has_a_task_for_each_rank() -> None:
    words = step_words(dataclasses.replace(COMMAND, launcher=("python",)), ALLOCATION)
    assert "--ntasks-per-node=8" in words
    assert not [word for word in words if word.startswith("--rdzv")]


def test_the_users_own_srun_stays() -> None:
    own = dataclasses.replace(COMMAND, launcher=("srun", "-N", "2", "torchrun"))
    assert step_words(own, ALLOCATION) == own.words()


def test_no_step_outside_an_allocation() -> None:
    with pytest.raises(UserInputError, match="no Slurm allocation"):
        step_words(COMMAND, {})


def test_several_hosts_are_not_started_from_one() -> None:
    with pytest.raises(UserInputError, match="2 hosts"):
        launcher_named("local", (), COMMAND)


@pytest.mark.parametrize(
    ("name", "options"), [("local", ["a=1"]), ("mpi", []), ("submitit", ["slurm_partition"])]
)
def test_a_wrong_launcher_is_refused(name: str, options: list[str]) -> None:
    with pytest.raises(UserInputError):
        launcher_named(name, options, COMMAND)


def test_a_launcher_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserInputError, match="submitit is not installed here"):
        launcher_named("submitit", [], COMMAND)


def test_options_reach_submitit() -> None:
    found = launcher_named("submitit", ["slurm_partition=h100", "cpus_per_task=8"], COMMAND)
    assert isinstance(found, partial)
    assert found.func is run_by_submitit
    assert found.keywords["options"] == {"slurm_partition": "h100", "cpus_per_task": 8}


@pytest.mark.slow
def test_a_job_of_submitit_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('ran', os.environ['A']); sys.exit(3)\n")
    command = RunCommand(
        launcher=(sys.executable,),
        script=(str(script),),
        argv=(),
        environment={"A": "1"},
        num_nodes=1,
        gpus_per_node=1,
    )
    ended = run_by_submitit(command, LONG_S, tmp_path / "output.txt", options={}, cluster="local")
    assert ended.code == 3
    assert (tmp_path / "output.txt").read_text() == "ran 1\n"


def test_a_run_takes_all_its_processes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output.txt"

    class Launcher(subprocess.Popen):
        """Its time is over once it has started its child."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == 5.0:
                wait_until(lambda: output.read_text() == "started\n")
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Launcher)
    ended = run_process([sys.executable, "-c", PARENT], os.environ, 5.0, output)
    assert ended.code is None
    assert output.read_text() == "started\n"
    wait_until(lambda: not processes_with(SLEEP))


def test_a_killed_tuner_ends_its_run(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    code = (
        "import os, sys; from pathlib import Path;"
        "from nest_megatron.tuning.launchers import run_process;"
        f"run_process([sys.executable, '-c', 'import time; {SLEEP}'], os.environ, 600.0,"
        f" Path({str(output)!r}))"
    )
    tuner = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: processes_with(SLEEP, but=tuner.pid))
    with open_locked(running_file(tmp_path)) as lock:
        assert lock is None, "the run holds the lock of its folder"
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    with open_locked(running_file(tmp_path), LONG_S) as lock:
        assert lock is not None, "the run ends with the tuner"


def processes_with(text: str, but: int = 0) -> list[int]:
    """Processes whose command holds a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"import time; " + text.encode() in words and int(path.parent.name) != but:
            found.append(int(path.parent.name))
    return found


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="cannot be started"):
        run_process(["/no/such/torchrun"], os.environ, 5.0, tmp_path / "output.txt")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", Failure.OUT_OF_MEMORY),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp", Failure.NCCL),
        ("pretrain_gpt.py: error: unrecognized arguments: --no-such", Failure.REFUSED),
        ("ValueError: something else", Failure.OTHER),
        ("", Failure.OTHER),
    ],
)
def test_failures_are_told_apart(text: str, failure: Failure, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text(f"W1123 torchrun: closing\n{text}\nChildFailedError:\n")
    found = judged(TRIAL, None, Ended(code=1, seconds=3.0), output)
    assert (found.state, found.failure) == (State.FAILED, failure)
    assert text.rstrip() in (found.reason or "")


def test_a_launch_that_is_refused_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        end(UserInputError("nest.plan", "a.yaml", "it was pinned for 0.19", "Pin another."))
    output = tmp_path / "output.txt"
    output.write_text(f"{capsys.readouterr().err}W1123 torchrun: closing\nChildFailedError:\n")
    found = judged(TRIAL, None, Ended(code=1, seconds=3.0), output)
    assert found.failure is Failure.REFUSED
    assert found.reason == "nest.plan = a.yaml: it was pinned for 0.19"


@pytest.mark.parametrize(
    ("error", "failure"),
    [("Exception: no data", Failure.OTHER), ("DistBackendError: NCCL error", Failure.NCCL)],
)
def test_connections_that_a_failed_rank_leaves_are_no_failure(
    error: str, failure: Failure, tmp_path: Path
) -> None:
    output = tmp_path / "output.txt"
    output.write_text("[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:32898\n")
    record = run_record(outcome=Outcome.FAILED, measured=None, error=f"rank 0 (vm): {error}")
    found = judged(TRIAL, record, Ended(code=1, seconds=3.0), output)
    assert (found.failure, found.reason) == (failure, record.error)


def test_time_is_a_failure_of_its_own(tmp_path: Path) -> None:
    found = judged(TRIAL, None, Ended(code=None, seconds=60.0), tmp_path / "output.txt")
    assert found.failure is Failure.TIMEOUT


@dataclasses.dataclass
class Executor:
    """Stands for NeMo-Run's."""

    env_vars: dict[str, str]
    launcher: str | None = None
    retries: int = 2
    job_dir: str = ""

    def clone(self) -> Executor:
        return dataclasses.replace(self)

    def nnodes(self) -> int:
        return 1

    def nproc_per_node(self) -> int:
        return 2


class Experiment:
    """Stands for NeMo-Run's: its task prints what it was given, and ends as ``state`` says."""

    state = "SUCCEEDED"

    def __init__(self, title: str, executor: Executor) -> None:
        self.title, self.executor, self.jobs = title, executor, []

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, task: Any, tail_logs: bool) -> str:
        state = SimpleNamespace(name=self.state)
        self.jobs.append(SimpleNamespace(task=task, executor=self.executor, state=state))
        return "task"

    def run(self, detach: bool, tail_logs: bool) -> None:
        own = self.executor
        (job,) = self.jobs
        said = f"{own.launcher} {own.retries} {own.env_vars} {vars(job.task)}"
        Path(own.job_dir, "sbatch_1.out").write_text(said, encoding="utf-8")

    def cancel(self, job: str) -> None:
        raise AssertionError(job)


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_a_run_is_an_experiment_of_nemo_run(
    state: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "job"
    logs.mkdir()
    executor = Executor(env_vars={"HOME": "/root", "C": "2"}, job_dir=str(logs))
    monkeypatch.setattr(Experiment, "state", state)
    nemo_run = SimpleNamespace(Experiment=Experiment, Script=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nemo_run", nemo_run)
    monkeypatch.setattr(launchers, "read_executor", lambda _: executor)
    command = dataclasses.replace(COMMAND, num_nodes=1, gpus_per_node=2)
    output = tmp_path / "output.txt"
    found = launcher_named("nemo_run", ["executor=mine"], command)
    assert found(command, 60.0, output).code == code
    said = output.read_text(encoding="utf-8")
    assert said.startswith("torchrun 0 {'C': '2', 'A': '1'} {'path': 'pretrain_gpt.py'")
    assert "'args': ['--bf16']" in said
    assert executor.launcher is None, "the user's own stays as it is"
    with pytest.raises(UserInputError, match="the job has 2 x 8 ranks"):
        found(COMMAND, 60.0, output)


@pytest.mark.parametrize("options", [[], ["partition=a"], ["executor=a", "partition=b"]])
def test_nemo_run_is_told_one_executor(options: list[str]) -> None:
    with pytest.raises(UserInputError, match="one executor"):
        launcher_named("nemo_run", options, COMMAND)
