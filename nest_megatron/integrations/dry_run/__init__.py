"""The training command that a script of the shell would launch: bash runs it, nothing is started.

``view.py`` closes the files, processes and network of this machine to the script; ``shell.bash``
and ``recorder.py`` stand for the programs that it calls (``docs/launch_scripts.md``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run import recorder
from nest_megatron.integrations.dry_run.recorder import SHELLS, WRAPPERS
from nest_megatron.integrations.launchers import (
    SLURM_VARIABLES,
    START_EACH_RANK,
    assignment,
    header_options,
    is_secret,
    slurm_options,
)
from nest_megatron.integrations.process_variables import Environment
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds

#: Programs, by a part of their path or module, whose model is not in their words.
_UNREAD = {
    "swift": "the models of ms-swift are not read",
    "primus": "Primus takes its model from a YAML file, which is not read",
    "verl": "verl takes its model from its own configuration, which is not read",
}
_SWIFT = "megatron is the program of ms-swift, whose models are not read"
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
#: Flags of which a job that trains a model of Megatron's has one.
_TRAINING = re.compile(
    r"--(num[-_]layers|hidden[-_]size|use-checkpoint-args|yaml-cfg|micro-batch-size|train-iters|"
    r"train-samples|hybrid-layer-pattern|hybrid-override-pattern)(=|$)"
)
#: Variables that no two ranks have the same of.
_OF_A_RANK = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES"}
#: Options in which the launches of one job differ, one on each node or of each rank.
_OF_A_NODE = re.compile(r"--(?:(?:node|machine|local)[-_])?rank(=.*)?")
_OF_A_HOST = re.compile(r"--(?:nodelist|host)(=.*)?|-[wH](.+)?")


def is_script_call(words: Sequence[str]) -> bool:
    """Whether words start a shell, a batch job or a script of the shell.

    >>> is_script_call(["srun", "bash", "x.sh"]), is_script_call(["A=1", "sbatch", "-N2", "x.job"])
    (True, True)
    >>> is_script_call(["torchrun", "pretrain_gpt.py"])
    False
    """
    programs = (word for word in words if assignment(word) is None)
    first = next((word for word in programs if word.rpartition("/")[2] not in WRAPPERS), "")
    name = first.rpartition("/")[2]
    return (
        name in ("sbatch", "ssh", "pdsh", "source", ".")
        or first.endswith(_SUFFIXES)
        or recorder.shell_at([word for word in words if assignment(word) is None]) is not None
    )


def names_script(words: Sequence[str]) -> bool:
    """Whether words start a script of the shell by its file.

    >>> names_script(["bash", "-x", "train.sh", "8"]), names_script(["bash", "-c", "torchrun t.py"])
    (True, False)
    """
    return is_script_call(words) and not any(re.fullmatch(r"-[a-z]*c", word) for word in words)


def script_launch(words: Sequence[str], cluster: Cluster | None = None) -> RecordedLaunch:
    """The launch of the script that words start, which bash runs (``docs/launch_scripts.md``).

    It runs in the current folder with the variables of this process.

    Args:
        words: ``bash train.sh ARGUMENTS``, ``sbatch -N 4 job.slurm``, ``./train.sh``.
        cluster: whose GPUs the script sees.

    Raises:
        UserInputError: for a script that is not there, that launches nothing or several jobs.
    """
    rest = list(dropwhile(assignment, words))
    variables = dict(word.partition("=")[::2] for word in words[: len(words) - len(rest)])
    if rest[0] in ("source", "."):
        rest = ["bash", *rest[1:]]
    elif rest[0].endswith(_SUFFIXES):
        rest = ["bash", *rest]
    script = _script(rest)
    if script and not Path(script).is_file():
        raise UserInputError(
            "script",
            script,
            "there is no such file",
            "Correct the path; it is relative to the current folder.",
        )
    run = dry_run(rest, variables, cluster)
    found = _launch_that_trains(run, shlex.join(rest))
    given = {
        name: value
        for name, value in found.environment.items()
        if os.environ.get(name) != value and not name.startswith(("SLURM", "OMPI_COMM_"))
    }
    notes = [*_notes(run, found, script or rest[0])]
    if secret := sorted(filter(is_secret, given)):
        notes.append(f"Left out of the command, as they may be secret: {', '.join(secret)}.")
    of_rank: list[str] = []
    if Path(found.words[0]).name in START_EACH_RANK:  # a list of devices is one for all
        of_rank = sorted(name for name in _OF_A_RANK & given.keys() if "," not in given[name])
    if of_rank:
        notes.append(
            f"The script sets {', '.join(of_rank)} for each rank, and one command has the same for "
            "all: they are left out of it, so put its new flags into the script."
        )
    kept = (f"{n}={value}" for n, value in given.items() if n not in (*secret, *of_rank))
    return replace(found, words=(*kept, *found.words), notes=tuple(notes))


def _script(words: Sequence[str]) -> str:
    """The file of the script that words start; ``""`` where they hold its text."""
    at = 0 if Path(words[0]).name == "sbatch" else recorder.shell_at(words)
    if at is None:
        return ""
    started = words[at:]
    if Path(started[0]).name in (*SHELLS, "sbatch"):
        end = recorder.options_end(started)
        if any(re.fullmatch(r"-[a-z]*c|--wrap(=.*)?", word) for word in started[:end]):
            return ""
        started = started[end:]
    return started[0] if started else ""


def unread_model(words: Iterable[str]) -> str:
    """Why the model of a program is not read, which takes it from elsewhere; ``""`` for others.

    >>> unread_model(["torchrun", "primus/cli/main.py"])
    'Primus takes its model from a YAML file, which is not read'
    """
    parts = {part for word in words for part in re.split(r"[/.]", word)}
    return next((why for part, why in _UNREAD.items() if part in parts), "")


def _launch_that_trains(run: DryRun, call: str) -> RecordedLaunch:
    """The one launch that trains; one on each of several nodes is one."""
    trains = [each for each in run.launches if any(map(_is_training, each.words))]
    found = {_of_all_nodes(each.words): each for each in reversed(trains)}
    if len(found) == 1:
        return min(trains, key=lambda each: each.words[::-1])  # the first rank, not the first host
    if found:
        raise UserInputError(
            "script",
            call,
            f"it launches {len(found)} jobs, and one is planned: {_differences(trains)}",
            "Set what chooses one before the script, or give its command by --from 'COMMAND'.",
        )
    lists = {
        "Set what nothing sets": run.unset,
        "Not on this host": run.absent,
        "Programs that were not run": run.skipped,
    }
    lacks = [*_list_sentences(lists)]
    other = f"{'Or give' if lacks else 'Give'} the training command itself by --from 'COMMAND'."
    raise UserInputError("script", call, _why_none(run), " ".join((*lacks, other)))


def _is_training(word: str) -> bool:
    return any(_TRAINING.match(each) for each in word.split())


def _of_all_nodes(words: Sequence[str]) -> tuple[str, ...]:
    options = [_OF_A_NODE.fullmatch(word) or _OF_A_HOST.fullmatch(word) for word in words]
    return tuple(
        word
        for word, option, before in zip(words, options, (None, *options), strict=False)
        if option is None and (before is None or before.lastindex)
    )


def _differences(launches: Sequence[RecordedLaunch]) -> str:
    """Each launch by the options that not all have."""
    in_all = set.intersection(*(set(_options(launch.words)) for launch in launches))
    shown = {}
    for launch in launches:
        own = " ".join(text for text in _options(launch.words) if text not in in_all)[:120]
        text = own or f"nothing beside those of {_program(launch.words)}"
        shown[_of_all_nodes(launch.words)] = f"{text} (line {launch.line})"
    return "; ".join([*shown.values()][:6])


def _options(words: Sequence[str]) -> list[str]:
    """Options with their values, and the words between them."""
    found: list[str] = []
    for word in words:
        if found and found[-1].startswith("-") and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _program(words: Sequence[str]) -> str:
    """A launch by its program or module."""
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words):
            return f"-m {words[at + 1]}"
        if ".py" in word:
            return word.strip()[:60]
    return words[0]


def _why_none(run: DryRun) -> str:
    if run.launches:
        names = [*dict.fromkeys(_program(each.words) for each in run.launches)]
        unread = unread_model(name.removeprefix("-m ") for name in names)
        why = f"; {unread}" if unread else ""
        return f"it launches no job of Megatron-LM that trains ({', '.join(names)}){why}"
    if unread := _SWIFT if "megatron" in run.skipped else unread_model(run.skipped):
        return f"it launches nothing that trains; {unread}"
    ended = f"it ended with exit code {run.code}"
    if run.code is None:
        ended = f"it was ended after {MAX_SECONDS:g} s"
    said = f"; its last words are: {' | '.join(run.printed)[-300:]}" if run.printed else ""
    return f"it launches nothing that trains; {ended}{said}"


def _notes(run: DryRun, found: RecordedLaunch, script: str) -> Iterator[str]:
    place = f"{script}, line {found.line}" if found.line else script
    elsewhere = found.folder and Path(found.folder) != Path.cwd()
    where = f", which starts it in {found.folder}" if elsewhere else ""
    yield f"The command is that of {place}{where}; bash ran it, and its programs started nothing."
    skipped = {
        " ".join(each.words[:2]): each.line
        for each in run.launches
        if not any(map(_is_training, each.words))
    }
    lists = {
        "Programs that were not run": {**run.skipped, **skipped},
        "Answered for the cluster that is planned for": run.answered,
        "Variables that nothing sets, empty as in the shell": run.unset,
        "Not on this host": run.absent,
    }
    yield from _list_sentences(lists)
    if found.header:
        yield (
            f"Slurm's options of the script ({shlex.join(found.header)}) are not in the command. "
            "What Slurm tells a task is made up: hosts are node1 and so on, the rank is 0; it is "
            "that of the most nodes of a range, and of the first job of an array."
        )
    if rank := next(filter(_OF_A_NODE.fullmatch, found.words), None):
        yield f"{rank.partition('=')[0]} is that of the first: each node or rank has its own."
    if run.code is None:
        yield f"It was ended after {MAX_SECONDS:g} s; what it launches later is not seen."
    if run.exposed:
        yield (
            f"This system gives no view of its files whose writes vanish ({run.exposed}): "
            "what the script itself writes by > and >> is written."
        )


def _list_sentences(lists: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A sentence for each list that has names, which come with their lines."""
    for what, names in lists.items():
        shown = [f"{name} (line {line})" if line else name for name, line in names.items()]
        more = f" and {len(shown) - 40} more" if len(shown) > 40 else ""
        if shown:
            yield f"{what}: {', '.join(shown[:40])}{more}."


#: How long a script may take: as much processor time as ``view.py`` permits each process.
MAX_SECONDS: Seconds = 20.0
#: Programs of this machine that a script may call: they read. awk and sed write where they are
#: told to, which the view discards.
READS = """
    [ awk basename cat cksum cmp column comm cut date diff dirname du echo egrep expand expr
    false fgrep file find fmt fold free gawk getconf getent getopt grep groups head id
    join jq locale logname ls lscpu mawk md5sum nl nproc numfmt od paste pathchk pr printenv
    printf pwd readlink realpath rev sed seq sha256sum shuf sort stat strings sum tac tail test
    tr true tsort tty uname uniq wc whoami xxd zcat bc nawk
"""
#: Batch scripts that scripts submit, one in another.
_MAX_BATCHES = 8
_MAX_LAUNCHES, _END_S, _TAIL_BYTES = 1000, 5.0, 4096
#: Variables of the shell's own.
_OWN = ("PATH", "PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV", "BASH_XTRACEFD")
#: Variables of the dry run.
_IN_RUN = re.compile("NEST_DRY_RUN|BASH_FUNC_")
VIEW = Path(__file__).with_name("view.py")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a terminal's colours


@frozen
class RecordedLaunch:
    """A command that would start programs of Python.

    Args:
        words: as the program is called, those of ``srun`` and the like around it before them; of
            the one that trains variables that the script sets, too.
        environment: all variables that it would have.
        header: Slurm's options of the batch script that it stands in.
        line: of the script; ``""`` where it is not known.
        folder: in which it starts; ``""`` where it is not known.
        notes: what was left out of the script, one sentence each.
    """

    words: tuple[str, ...]
    environment: Environment
    header: tuple[str, ...]
    line: str
    folder: str = ""
    notes: tuple[str, ...] = ()


@frozen
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
        variables: set in addition to those of this process.
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
        script = Path(_script(words))
        text = script.read_bytes() if script.is_file() else b""
        if b"\r\n" in text:
            raise UserInputError(
                "script",
                f"{script}",
                "its lines end as on Windows, and bash takes their carriage returns for text",
                f"Convert it: sed -i 's/\\r$//' {shlex.quote(str(script))}",
            )
        in_job = "SLURM_JOB_ID" in start or Path(words[0]).name in START_EACH_RANK
        # bash starts a batch script
        options = () if in_job else header_options(text.decode(errors="replace"))
        launches: list[RecordedLaunch] = []
        start = {
            **recorder.slurm_variables(options, slurm_options(options), SLURM_VARIABLES, start),
            **start,
        }
        code, pending = _run(folder, words, options, start)
        batches = 0
        while pending:
            options, record = pending.pop(0)
            if record["script"] is None:
                given = record["environment"].items()
                launches.append(
                    RecordedLaunch(
                        words=tuple(record["words"]),
                        environment={
                            k: v for k, v in given if k not in _OWN and not _IN_RUN.match(k)
                        },
                        header=options,
                        line=record["place"].rpartition(":")[2],
                        folder=record["environment"].get("PWD", ""),
                    )
                )
            elif batches < _MAX_BATCHES:
                batches += 1
                text = Path(record["script"][1]).read_bytes()
                options = (*header_options(text.decode(errors="replace")), *record["words"][1:])
                environment = recorder.passed_on(["sbatch", *options], record["environment"])
                here = (environment.get("PWD", ""), *recorder.values(options, "--chdir", "-D"))
                call = ["bash", "-c", 'cd "$0"; exec "$@"', str(Path(*here)), *record["script"]]
                code, found = _run(
                    folder,
                    call,
                    options,
                    recorder.slurm_variables(
                        options, slurm_options(options), SLURM_VARIABLES, environment
                    ),
                )
                pending += found
        return DryRun(
            launches=tuple(launches),
            **{
                each: _read_names(folder / each)
                for each in ("skipped", "answered", "absent", "unset")
            },
            code=code,
            printed=_last_lines(folder / "printed"),
            exposed=(folder / "open").read_text("utf-8") if (folder / "open").exists() else "",
        )


def _furnish(folder: Path, bash: str, cluster: Cluster | None) -> None:
    """Fill the folder: programs that read, and what stands for others."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "launches").mkdir()
    for name in ("shell.bash", "recorder.py"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    stands_for = shlex.quote(str(folder / "recorder.py"))
    start = (
        f"#!{bash} -p\n"  # -p: it reads no BASH_ENV
        '[[ $0 == */.recorder ]] || set -- "${0##*/}" "$@"\n'
        f'exec {shlex.quote(sys.executable)} -I -S {stands_for} "$@"\n'
    )
    (programs / ".recorder").write_text(start, encoding="utf-8")
    (programs / ".recorder").chmod(0o700)
    is_amd = cluster is not None and cluster.accelerator.name.startswith("MI")
    absent = recorder.OF_NVIDIA if is_amd else recorder.OF_AMD
    for name in (*recorder.STANDS_FOR, *(f"python3.{minor}" for minor in range(8, 16))):
        if name not in absent:
            (programs / name).symlink_to(".recorder")
    for name in READS.split():
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    settings = {"bash": bash, "gpus_per_node": "8", "gpu": "GPU", "memory_mib": "0"}
    if cluster is not None:
        settings |= {
            "gpus_per_node": str(cluster.host_size or cluster.num_gpus),
            "gpu": cluster.accelerator.name,
            "memory_mib": str(int(cluster.accelerator.memory_bytes) >> 20),
        }
    (folder / "settings.json").write_text(json.dumps({**settings, "slurm": SLURM_VARIABLES}))


def _run(
    folder: Path, words: Sequence[str], options: tuple[str, ...], environment: Environment
) -> tuple[int | None, list[tuple[tuple[str, ...], dict[str, Any]]]]:
    """Run words in the view of ``view.py``.

    Returns:
        The exit status, ``None`` where time ended them; and what was written down, each with the
        options.
    """
    given = {
        **{name: value for name, value in environment.items() if name not in _OWN},
        "PATH": str(folder / "bin"),
        "NEST_DRY_RUN": str(folder),
        "NEST_DRY_RUN_PATH": os.environ.get("PATH", ""),
    }
    view = [sys.executable, "-I", "-S", str(VIEW), str(folder), str(folder / "bin" / ".recorder")]
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen(
            [*view, *words],
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(MAX_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            process.terminate()  # it ends all below it
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    found = []
    for path in sorted((folder / "launches").glob("*.json"))[:_MAX_LAUNCHES]:
        found.append((options, json.loads(path.read_bytes())))
        path.unlink()
    return code, found


def _read_names(path: Path) -> dict[str, str]:
    """Names with the line of their first call."""
    if not path.exists():
        return {}
    parts = path.read_bytes().decode(errors="replace").split("\0")[:-1]
    found: dict[str, str] = {}
    for name, place in zip(parts[::2], parts[1::2], strict=False):
        found.setdefault(name, place.rpartition(":")[2])
    return found


def _last_lines(path: Path) -> tuple[str, ...]:
    text = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    text = _ESCAPE.sub("", text).replace(f"{path.parent}/bin/", "")
    lines = ("".join(filter(str.isprintable, line)).strip() for line in text.splitlines())
    return tuple(filter(None, lines))[-3:]
