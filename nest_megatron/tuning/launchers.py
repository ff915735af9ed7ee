"""How runs are started: on this host, as steps of a Slurm allocation, by submitit or NeMo-Run.

Each waits for the end of one run, and ends all of its processes when time is up, on an error, and
when this program is interrupted or killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nest_megatron.documents import parse_yaml
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.files import write_text
from nest_megatron.integrations.nemo_run.task import (
    read_executor,
    require_size,
    run_script,
)
from nest_megatron.integrations.process_variables import first_host
from nest_megatron.packages import is_installed
from nest_megatron.tuning import LAUNCHERS
from nest_megatron.tuning.job import RunCommand
from nest_megatron.tuning.session import Ended, open_locked
from nest_megatron.units import Seconds

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
#: Time that a launcher has to end its ranks before they are killed.
GRACE_S = 15.0
#: Ports for torchrun's agents: below Linux's ephemeral range, one for each of many jobs.
_FIRST_PORT, _NUM_PORTS = 25_000, 5_000


#: Runs a command to its end, for so long at most; what it prints goes into the file.
Launcher = Callable[[RunCommand, Seconds, Path], Ended]


def run_locally(command: RunCommand, timeout_s: Seconds, output: Path) -> Ended:
    """Run a child process on this host: torchrun of one host, or ``srun`` and its like."""
    meeting = ["--standalone"] if command.meets_nowhere else []  # two jobs on one host do not meet
    return run_process(command.words(*meeting), command.variables(), timeout_s, output)


def run_as_step(command: RunCommand, timeout_s: Seconds, output: Path) -> Ended:
    """Run a step of the Slurm allocation that this process runs in."""
    return run_process(step_words(command, os.environ), command.variables(), timeout_s, output)


def step_words(command: RunCommand, environment: Mapping[str, str]) -> list[str]:
    """A run as a step of an allocation: ``srun`` starts torchrun on each host, or each rank.

    Args:
        environment: of a process in the allocation.

    Raises:
        UserInputError: outside an allocation.
    """
    if "SLURM_JOB_ID" not in environment:
        raise UserInputError(
            "--launcher",
            "srun",
            "this process runs in no Slurm allocation (SLURM_JOB_ID is not set)",
            "Run it inside sbatch or salloc, or give --launcher submitit.",
        )
    if command.starts_ranks:  # the user's srun
        return command.words()
    tasks = 1 if command.is_torchrun else command.gpus_per_node
    sizes = [f"--nodes={command.num_nodes}", f"--ntasks-per-node={tasks}"]
    return ["srun", *sizes, "--kill-on-bad-exit=1", *_host_words(command, environment)]


def _host_words(command: RunCommand, environment: Mapping[str, str]) -> list[str]:
    """A run on one host of an allocation: torchruns of all hosts meet on the first."""
    meeting = []
    if command.meets_nowhere:
        host = first_host(environment.get("SLURM_JOB_NODELIST", "")) or "localhost"
        job = environment["SLURM_JOB_ID"]
        port = _FIRST_PORT + int("".join(filter(str.isdigit, job)) or 0) % _NUM_PORTS
        meeting = ["--rdzv-backend=c10d", f"--rdzv-id=nest-{job}", f"--rdzv-endpoint={host}:{port}"]
    return command.words(*meeting)


def run_by_submitit(
    command: RunCommand,
    timeout_s: Seconds,
    output: Path,
    *,
    options: Mapping[str, Any],
    cluster: str | None,
) -> Ended:
    """Submit one Slurm job by submitit, and wait for it.

    Args:
        options: of ``AutoExecutor.update_parameters`` (``slurm_partition=h100``).
    """
    import submitit

    begun = time.monotonic()
    executor = submitit.AutoExecutor(folder=output.parent / "submitit", cluster=cluster)
    minutes = max(1, int(timeout_s // 60) + 1)
    sizes = {"nodes": command.num_nodes, "tasks_per_node": 1, "timeout_min": minutes}
    if cluster != "local":
        sizes["slurm_gpus_per_node"] = command.gpus_per_node
    executor.update_parameters(**{**sizes, **options})
    job = executor.submit(run_on_host, command, timeout_s, output)
    try:
        code = job.result()
    except submitit.core.utils.UncompletedJobError:
        code = 1  # the job's log, next to the output, says why
    except BaseException:
        job.cancel()
        raise
    return Ended(code=code, seconds=time.monotonic() - begun)


def run_by_nemo_run(
    command: RunCommand, timeout_s: Seconds, output: Path, *, executor: str
) -> Ended:
    """Run an experiment of NeMo-Run: the script of a command under NeMo-Run's torchrun.

    Args:
        executor: name of a factory, or a file that NeMo-Run can load.
    """
    begun = time.monotonic()
    found = read_executor(executor)
    require_size(found, command.num_nodes, command.gpus_per_node)
    code, printed = run_script(
        found,
        command.script,
        command.argv,
        command.environment,
        timeout_s,
        f"nest_tune_{output.parent.name}",
    )
    write_text(output, printed)
    return Ended(code=code, seconds=time.monotonic() - begun)


def run_on_host(command: RunCommand, timeout_s: Seconds, output: Path) -> int | None:
    """A host's part of a submitted run: its torchrun, which meets those of the other hosts."""
    if command.starts_ranks or "SLURM_JOB_ID" not in os.environ:
        return run_locally(command, timeout_s, output).code
    words = _host_words(command, os.environ)
    node = os.environ.get("SLURM_NODEID", "0")
    path = output if node == "0" else output.with_suffix(f".{node}.txt")
    return run_process(words, command.variables(), timeout_s, path).code


def launcher_named(name: str, options: Sequence[str], command: RunCommand) -> Launcher:
    """A launcher by its name; ``auto`` takes what fits the command and where this process runs.

    Args:
        options: ``key=value``, for submitit and NeMo-Run.

    Raises:
        UserInputError: for an unknown one, one whose package is not installed, or one that does
            not start the command's ranks here.
    """
    found = read_options(name, options)
    if name == "auto":
        in_allocation = "SLURM_JOB_ID" in os.environ and command.num_nodes > 1
        name = "srun" if in_allocation and not command.starts_ranks else "local"
    if name == "submitit":
        if not is_installed(name):
            raise UserInputError(
                "--launcher",
                name,
                "submitit is not installed here",
                "pip install submitit, or give --launcher srun inside an allocation.",
            )
        cluster = found.pop("cluster", None)
        return partial(run_by_submitit, options=found, cluster=cluster)
    if name == "nemo_run":
        return partial(run_by_nemo_run, executor=str(found["executor"]))
    if name == "srun":
        step_words(command, os.environ)  # refuses what is in no allocation
        return run_as_step
    if command.num_nodes > 1 and not command.starts_ranks:
        hosts = command.num_nodes
        raise UserInputError(
            "--launcher",
            name,
            f"the command starts ranks on this host alone, and the job has {hosts} hosts",
            "Inside a Slurm allocation give --launcher srun; elsewhere --launcher submitit.",
        )
    return run_locally


def read_options(name: str, options: Sequence[str]) -> dict[str, Any]:
    """The options of a launcher, which may be ``auto``; nothing is loaded.

    Raises:
        UserInputError: for a launcher that is not known, and options that it does not take.
    """
    require_known("--launcher", name, LAUNCHERS)
    found: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise UserInputError(
                "--launcher-option",
                option,
                "it must be KEY=VALUE",
                "Write --launcher-option slurm_partition=h100.",
            )
        found[key] = parse_yaml(value, "--launcher-option")
    if found and name not in ("submitit", "nemo_run"):
        raise UserInputError(
            "--launcher-option",
            options[0],
            "options are those of submitit and NeMo-Run",
            "Leave them out, or add --launcher submitit or nemo_run.",
        )
    if name == "nemo_run" and found.keys() != {"executor"}:
        raise UserInputError(
            "--launcher-option",
            list(options),
            "NeMo-Run takes one executor, and nothing else",
            "Give --launcher-option executor=NAME, or a .yaml file.",
        )
    return found


def run_process(
    words: Sequence[str], variables: Mapping[str, str], timeout_s: Seconds, output: Path
) -> Ended:
    """Run a command with all that it starts, and leave none of it behind.

    Raises:
        UserInputError: if there is no such program.
    """
    begun = time.monotonic()
    with output.open("wb") as stream, open_locked(running_file(output.parent)) as lock:
        assert lock is not None, "no two runs share a folder"
        try:
            child = subprocess.Popen(
                words,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],  # held until the launcher is gone, even if this program is killed
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call into libc
            )
        except OSError as error:
            raise UserInputError(
                "--from",
                words[0],
                f"it cannot be started: {error.strerror or error}",
                "Start it by hand once, in this folder and environment.",
            ) from error
        code = None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.poll() is None:
                _end(child)
    return Ended(code=code, seconds=time.monotonic() - begun)


def running_file(folder: Path) -> Path:
    """The file that is locked as long as a run's launcher lives."""
    return folder / "running"


def _end_with_parent() -> None:
    """Have Linux end a launcher when this program is gone; torchrun then ends its ranks."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a launcher and all that it has started, in other process groups, too."""
    known = _descendants(child.pid)
    child.terminate()
    try:
        child.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        known |= _descendants(child.pid)
    for pid in known & _parents().keys():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()


def _descendants(pid: int) -> set[int]:
    parents, found = _parents(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parents() -> dict[int, int]:
    """The parent of each process of this host, which is one with ``/proc``."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        found[int(folder.name)] = int(fields[1])
    return found
