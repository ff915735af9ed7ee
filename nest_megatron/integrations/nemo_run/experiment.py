"""A training script as an experiment of NeMo-Run: started on a user's executor, and waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.packages import install_command
from nest_megatron.units import Seconds

#: What an executor's files of a task are called that hold what it printed.
_LOGS = ("*.out", "*.log")
_OPTION = "--launcher-option executor"


def read_executor(source: str) -> Any:
    """An executor by the name of its factory, or from a file that NeMo-Run can load.

    Raises:
        UserInputError: if NeMo-Run is not installed, or knows no such executor.
    """
    try:
        import fiddle
        import nemo_run
        from nemo_run.cli.config import ConfigSerializer
    except ImportError as error:
        raise UserInputError(
            "--launcher",
            "nemo_run",
            f"NeMo-Run cannot be imported ({error})",
            f"{install_command('run')}.",
        ) from error
    try:
        if Path(source).suffix:
            found = ConfigSerializer().load(Path(source))
        else:
            found = nemo_run.cli.resolve_factory(nemo_run.Executor, source)()
        executor = fiddle.build(found)
    except Exception as error:
        raise UserInputError(
            _OPTION,
            source,
            f"NeMo-Run cannot make it: {error}",
            "Name a factory that `run.cli.factory` registered, or a .yaml, .json or .toml file.",
        ) from error
    if not isinstance(executor, nemo_run.Executor):
        raise UserInputError(
            _OPTION,
            source,
            f"it makes a {type(executor).__name__}",
            "Name an executor, such as a SlurmExecutor.",
        )
    return executor


def size_of(executor: Any) -> tuple[int, int] | None:
    """Nodes, and processes on each, that an executor starts; ``None`` if it does not say."""
    try:
        return executor.nnodes(), executor.nproc_per_node()
    except NotImplementedError:
        return None


def require_size(executor: Any, num_nodes: int, gpus_per_node: int) -> None:
    """Refuse an executor that starts other processes than a job has ranks.

    Raises:
        UserInputError: naming both.
    """
    size = size_of(executor)
    if size not in (None, (num_nodes, gpus_per_node)):
        raise UserInputError(
            _OPTION,
            " x ".join(map(str, size)),
            f"the job has {num_nodes} x {gpus_per_node} ranks",
            "Change its nodes and its tasks or GPUs on each.",
        )


def run_script(
    executor: Any,
    script: Sequence[str],
    arguments: Sequence[str],
    variables: Mapping[str, str | None],
    timeout_s: Seconds,
    title: str,
) -> tuple[int | None, str]:
    """Run a script under NeMo-Run's torchrun to its end.

    Args:
        script: its path, or ``-m`` and a module.
        variables: to set in its processes, or, where ``None``, not to set by the executor.

    Returns:
        An exit code, ``None`` where time ended it, and what it printed, as far as NeMo-Run has it
        on this host.
    """
    import nemo_run as run

    *module, path = script
    task = run.Script(path=path, m=bool(module), entrypoint="python", args=list(arguments))
    own = executor.clone()
    own.launcher = "torchrun"
    own.retries = 0
    kept = {name: text for name, text in own.env_vars.items() if name not in variables}
    own.env_vars = {**kept, **{n: text for n, text in variables.items() if text is not None}}
    late = threading.Event()
    with contextlib.ExitStack() as stack, run.Experiment(title, executor=own) as experiment:
        job = experiment.add(task, tail_logs=False)
        folder = Path(experiment.jobs[0].executor.job_dir)

        def cancel() -> None:
            late.set()
            experiment.cancel(job)

        timer = threading.Timer(timeout_s, cancel)
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        try:
            experiment.run(detach=False, tail_logs=False)
        except BaseException:
            experiment.cancel(job)
            raise
    (ended,) = experiment.jobs  # leaving the experiment waits for it
    found = {path.resolve() for pattern in _LOGS for path in folder.rglob(pattern)}
    logs = filter(Path.is_file, sorted(found))  # a file that another names is read once
    printed = "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    if late.is_set():
        return None, printed
    return int(str(getattr(ended.state, "name", ended.state)) != "SUCCEEDED"), printed
