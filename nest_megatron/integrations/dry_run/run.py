"""Run a script by bash, with programs that write down that they were called."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run import recorder
from nest_megatron.integrations.launchers import SLURM_VARIABLES, header_options, slurm_options
from nest_megatron.units import Seconds

#: How long a script may take: as much processor time as ``view.py`` permits each process.
MAX_SECONDS: Seconds = 20.0
#: Programs of this machine that a script may call: they read. awk and sed write where they are
#: told to, which the view discards.
READS = (
    *("[", "awk", "basename", "cat", "cksum", "cmp", "column", "comm", "cut", "date", "diff"),
    *("dirname", "du", "echo", "egrep", "expand", "expr", "false", "fgrep", "file", "find", "fmt"),
    *("fold", "free", "gawk", "getconf", "getent", "getopt", "grep", "groups", "head", "hostname"),
    *("id", "join", "jq", "locale", "logname", "ls", "lscpu", "mawk", "md5sum", "nl", "nproc"),
    *("numfmt", "od", "paste", "pathchk", "pr", "printenv", "printf", "pwd", "readlink"),
    *("realpath", "rev", "sed", "seq", "sha256sum", "shuf", "sort", "stat", "strings", "sum"),
    *("tac", "tail", "test", "tr", "true", "tsort", "tty", "uname", "uniq", "wc", "whoami"),
    *("xxd", "zcat", "bc", "nawk"),
)
#: Batch scripts that scripts submit, one in another.
_MAX_BATCHES = 8
_MAX_LAUNCHES = 1000
_END_S, _TAIL_BYTES = 5.0, 4096
#: Variables of the shell's own.
_OWN = ("PATH", "PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV", "ENV", "BASH_XTRACEFD")
VIEW = Path(__file__).with_name("view.py")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a terminal's colours
_FILES = ("shell.bash", "recorder.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLaunch:
    """A command that would start programs of Python.

    Args:
        words: as the program is called, those of ``srun`` and the like around it before them; of
            the one that trains variables that the script sets, too.
        environment: all variables that it would have.
        header: Slurm's options of the batch script that it stands in.
        line: of the script; ``""`` where it is not known.
        notes: what was left out of the script, one sentence each.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    header: tuple[str, ...]
    line: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a script did.

    Args:
        launches: in their order.
        skipped, answered, absent, unset: programs that were not run, and those that were answered
            for, files and folders that are not here, variables that nothing sets; with their lines.
        code: the exit status; ``None`` where time ended it.
        printed: the last lines of its output.
        exposed: why its redirections wrote to this machine's files; ``""`` where they did not.
    """

    launches: tuple[RecordedLaunch, ...]
    skipped: Mapping[str, str]
    answered: Mapping[str, str]
    absent: Mapping[str, str]
    unset: Mapping[str, str]
    code: int | None
    printed: tuple[str, ...]
    exposed: str


def dry_run(words: Sequence[str], variables: Mapping[str, str], cluster: Cluster | None) -> DryRun:
    """Run a command of the shell, and the batch scripts that it submits.

    Args:
        words: ``bash train.sh ARGUMENT``, ``sbatch -N 2 job.slurm``, ``./train.sh``.
        variables: set beside those of this process.
        cluster: whose GPUs ``nvidia-smi`` shows.

    Raises:
        UserInputError: if there is no bash.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UserInputError(
            words[0],
            shlex.join(words),
            "bash is absent",
            "Give the command itself by --from 'COMMAND'.",
        )
    with tempfile.TemporaryDirectory(prefix="nest-megatron-") as name:
        folder = Path(name).resolve()
        _furnish(folder, bash, cluster)
        start = {**os.environ, **variables}
        options: tuple[str, ...] = ()
        script = next((Path(word) for word in words[1:] or words if Path(word).is_file()), None)
        in_job = "SLURM_JOB_ID" in start or words[0].endswith("sbatch")
        if script is not None and not in_job:  # bash starts a batch script
            options = header_options(script.read_text(encoding="utf-8", errors="replace"))
        code = _run(folder, words, {**start, **_slurm_variables(options, start)})
        launches: list[RecordedLaunch] = []
        pending = [(options, record) for record in _records(folder)]
        batches = 0
        while pending:
            header, record = pending.pop(0)
            if record["script"] is None:
                launches.append(_launch(record, header))
            elif batches < _MAX_BATCHES:
                batches += 1
                given = record["environment"]
                text = Path(record["script"][1]).read_text(encoding="utf-8", errors="replace")
                options = (*header_options(text), *record["words"][1:])
                given |= _slurm_variables(options, given)
                code = _run(folder, record["script"], given)
                pending += [(options, each) for each in _records(folder)]
        return DryRun(
            launches=tuple(launches),
            **{each: _listed(folder / each) for each in ("skipped", "answered", "absent", "unset")},
            code=code,
            printed=tuple(_last_lines(folder / "printed")),
            exposed=(folder / "open").read_text("utf-8") if (folder / "open").exists() else "",
        )


def _furnish(folder: Path, bash: str, cluster: Cluster | None) -> None:
    """Fill the folder: programs that read, and what stands for others."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "launches").mkdir()
    for name in _FILES:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    start = f"#!{bash} -p\n"  # -p: it reads no BASH_ENV
    start += '[[ $0 == */.recorder ]] || set -- "${0##*/}" "$@"\n'
    start += (
        f'exec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(folder / _FILES[1]))} "$@"\n'
    )
    (programs / ".recorder").write_text(start, encoding="utf-8")
    (programs / ".recorder").chmod(0o700)
    pythons = (f"python3.{minor}" for minor in range(8, 16))
    for name in (*recorder.STANDS_FOR, *pythons):
        (programs / name).symlink_to(".recorder")
    for name in READS:
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    per_node = 8 if cluster is None else cluster.host_size or cluster.num_gpus
    settings = {
        "bash": bash,
        "gpus_per_node": str(per_node),
        "gpu": "GPU" if cluster is None else cluster.accelerator.name,
        "memory_mib": str(int(cluster.accelerator.memory_bytes) >> 20 if cluster else 0),
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")


def _run(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Run words in the view of ``view.py``; the exit status, ``None`` where time ended them."""
    given = {
        **{name: value for name, value in environment.items() if name not in _OWN},
        "PATH": str(folder / "bin"),
        "NEST_DRY_RUN": str(folder),
        "NEST_DRY_RUN_PATH": os.environ.get("PATH", ""),
    }
    recorder_path = folder / "bin" / ".recorder"
    start = [sys.executable, "-I", "-S", str(VIEW), str(folder), str(recorder_path), *words]
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen(
            start,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # it ends all below it
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _records(folder: Path) -> list[dict[str, Any]]:
    """What was written down since the last time."""
    found = []
    for path in sorted((folder / "launches").glob("*.json"))[:_MAX_LAUNCHES]:
        found.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    return found


def _launch(record: Mapping[str, Any], header: tuple[str, ...]) -> RecordedLaunch:
    environment = {
        name: value
        for name, value in record["environment"].items()
        if name not in _OWN and not name.startswith(("NEST_DRY_RUN", "BASH_FUNC_"))
    }
    return RecordedLaunch(
        words=tuple(record["words"]),
        environment=environment,
        header=header,
        line=record["place"].rpartition(":")[2],
    )


def _slurm_variables(options: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that has these options, as far as Slurm has not set them."""
    if not options:
        return {}
    sizes = slurm_options(options)
    nodes, per_node = sizes.get("--nodes", "1"), sizes.get("--ntasks-per-node", "")
    if "--ntasks" not in sizes and nodes.isdigit() and per_node.isdigit():
        sizes["--ntasks"] = str(int(nodes) * int(per_node))
    found = {name: value for option, value in sizes.items() for name in SLURM_VARIABLES[option]}
    hosts = f"node[1-{nodes}]"
    found |= {
        **dict.fromkeys(SLURM_VARIABLES["--nodes"], nodes),
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_SUBMIT_DIR": environment.get("PWD") or str(Path.cwd()),
    }
    return {name: value for name, value in found.items() if name not in environment}


def _listed(path: Path) -> dict[str, str]:
    """Names with the line of their first call."""
    if not path.exists():
        return {}
    parts = path.read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    pairs = zip(parts[::2], parts[1::2], strict=False)
    found: dict[str, str] = {}
    for name, place in pairs:
        found.setdefault(name, place.rpartition(":")[2])
    return found


def _last_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    text = _ESCAPE.sub("", text).replace(f"{path.parent}/bin/", "")
    lines = ("".join(filter(str.isprintable, line)).strip() for line in text.splitlines())
    yield from [line for line in lines if line][-3:]
