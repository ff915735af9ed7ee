"""The training command that a script of the shell would launch."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run.recorder import SHELLS, WRAPPERS
from nest_megatron.integrations.dry_run.run import MAX_SECONDS, DryRun, RecordedLaunch, dry_run
from nest_megatron.integrations.launchers import assignment

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
#: Options in which the launches of one job differ, one on each node.
_OF_A_NODE = re.compile(r"--(node[-_]rank|machine[-_]rank)(=.*)?")


def is_script_call(words: Sequence[str]) -> bool:
    """Whether words start a shell, a batch job or a script of the shell.

    >>> is_script_call(["bash", "train.sh"]), is_script_call(["A=1", "sbatch", "-N", "2", "x.job"])
    (True, True)
    >>> is_script_call(["torchrun", "pretrain_gpt.py"])
    False
    """
    programs = (word for word in words if assignment(word) is None)
    first = next((word for word in programs if word.rpartition("/")[2] not in WRAPPERS), "")
    name = first.rpartition("/")[2]
    return name in (*SHELLS, "sbatch", "source", ".") or first.endswith(_SUFFIXES)


def names_script(words: Sequence[str]) -> bool:
    """Whether words start a script of the shell by its file.

    >>> names_script(["bash", "-x", "train.sh", "8"]), names_script(["bash", "-c", "torchrun t.py"])
    (True, False)
    """
    if not is_script_call(words):
        return False
    return not any(re.fullmatch(r"-[a-z]*c", word) for word in words)


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
    script = next((word for word in rest if word.endswith(_SUFFIXES)), "")
    if script and not Path(script).is_file():
        raise UserInputError(
            "script",
            script,
            "there is no such file",
            "Correct the path; it is relative to the current folder.",
        )
    run = dry_run(rest, variables, cluster)
    found = _chosen(run, shlex.join(rest))
    given = (
        f"{name}={value}"
        for name, value in found.environment.items()
        if os.environ.get(name) != value and not name.startswith("SLURM_")
    )
    return dataclasses.replace(
        found,
        words=(*given, *found.words),
        notes=tuple(_notes(run, found, script or rest[0])),
    )


def unread_model(words: Iterable[str]) -> str:
    """Why the model of a program is not read, which takes it from elsewhere; ``""`` for others.

    >>> unread_model(["torchrun", "primus/cli/main.py"])
    'Primus takes its model from a YAML file, which is not read'
    """
    parts = (part for word in words for part in re.split(r"[/.]", word))
    return next((_UNREAD[part] for part in parts if part in _UNREAD), "")


def _chosen(run: DryRun, call: str) -> RecordedLaunch:
    """The one launch that trains; one on each of several nodes is one."""
    trains = [each for each in run.launches if any(map(_is_training, each.words))]
    found = {_of_all_nodes(each.words): each for each in reversed(trains)}
    if len(found) == 1:
        return min(trains, key=lambda each: each.words)  # that of the first node
    if found:
        raise UserInputError(
            "script",
            call,
            f"it launches {len(found)} jobs, and one is planned: {_differences(trains)}",
            "Set what chooses one before the script, or give its command by --from 'COMMAND'.",
        )
    raise UserInputError("script", call, _why_none(run), _what_lacks(run))


def _is_training(word: str) -> bool:
    return any(_TRAINING.match(each) for each in word.split())


def _of_all_nodes(words: Sequence[str]) -> tuple[str, ...]:
    told = [_OF_A_NODE.fullmatch(word) for word in words]
    before = (None, *told)
    return tuple(
        word
        for word, one, of_one in zip(words, told, before, strict=False)
        if one is None and (of_one is None or of_one[2])
    )


def _differences(launches: Sequence[RecordedLaunch]) -> str:
    """Each launch by the options that not all have."""
    each_has = [_options(launch.words) for launch in launches]
    in_all = set(each_has[0]).intersection(*each_has)
    told = {}
    for launch, options in zip(launches, each_has, strict=True):
        own = " ".join(text for text in options if text not in in_all)[:120]
        shown = own or f"nothing beside those of {_program(launch.words)}"
        told[_of_all_nodes(launch.words)] = f"{shown} (line {launch.line})"
    return "; ".join([*told.values()][:6])


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


def _what_lacks(run: DryRun) -> str:
    lists = {
        "Set what nothing sets": run.unset,
        "Not on this host": run.absent,
        "Programs that were not run": run.skipped,
    }
    return " ".join([*_told(lists), "Or give the training command itself by --from 'COMMAND'."])


def _notes(run: DryRun, found: RecordedLaunch, script: str) -> Iterator[str]:
    place = f"{script}, line {found.line}" if found.line else script
    yield f"The command is that of {place}; bash ran it, and its programs started nothing."
    others = {
        " ".join(each.words[:2]): each.line
        for each in run.launches
        if not any(map(_is_training, each.words))
    }
    lists = {
        "Programs that were not run": {**run.skipped, **others},
        "Answered for the cluster that is planned for": run.answered,
        "Variables that nothing sets, empty as in the shell": run.unset,
        "Not on this host": run.absent,
    }
    yield from _told(lists)
    if found.header:
        yield "What Slurm tells a task is made up: hosts are node1 and so on, and the rank is 0."
    if run.code is None:
        yield f"It was ended after {MAX_SECONDS:g} s; what it launches later is not seen."
    if run.exposed:
        yield (
            "This system gives no view of its files whose writes vanish "
            f"({run.exposed}): what the script itself writes by > and >> is written."
        )


def _told(lists: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A sentence for each list that has names, which come with their lines."""
    for what, names in lists.items():
        shown = [f"{name} (line {line})" if line else name for name, line in names.items()]
        more = f" and {len(shown) - 40} more" if len(shown) > 40 else ""
        if shown:
            yield f"{what}: {', '.join(shown[:40])}{more}."
