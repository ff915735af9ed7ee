"""The training command that a script of the shell would launch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.integrations.launchers import header_options, slurm_options
from nest_megatron.integrations.shell_script import slurm
from nest_megatron.integrations.shell_script.interpreter import Interpreter
from nest_megatron.integrations.shell_script.record import Launched, Record
from nest_megatron.integrations.shell_script.syntax import parse
from nest_megatron.integrations.shell_script.values import Leave, ScriptError

_STARTERS = ("bash", "sh", "zsh", "sbatch", "source", ".")
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
#: Flags of which a job that trains a model of Megatron's has one.
_TRAINING = re.compile(
    r"--(num-layers|hidden-size|use-checkpoint-args|yaml-cfg|micro-batch-size|train-iters|"
    r"train-samples|hybrid-layer-pattern|hybrid-override-pattern)(=|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLaunch:
    """What a script would launch.

    Args:
        words: the command, variables that the script exports before it.
        header: Slurm's options of the script.
        notes: what was left out, one sentence each.
    """

    words: tuple[str, ...]
    header: tuple[str, ...]
    notes: tuple[str, ...]


def script_launch(text: str | Sequence[str]) -> ScriptLaunch | None:
    """The launch of the script that a text starts; ``None`` if it starts none.

    The script is read, not run: no process is started and no file written (``docs/launching.md``).
    It is read as started in the current folder, or in the Megatron-LM checkout that holds it if the
    current folder lies outside, with the environment of this process.

    Args:
        text: ``train.sh``, ``NNODES=4 bash train.sh ARGUMENTS``, ``sbatch -N 4 train.sh``.

    Raises:
        UserInputError: for a script that is not there or cannot be followed, that launches nothing
            or several jobs.
    """
    call = _call(text)
    if call is None:
        return None
    variables, options, path, args = call
    source = read_text(Path(path), "--from")
    options = (*header_options(source), *options)
    record = Record()
    shell = _shell(path, args, {**os.environ, **variables}, options, record)
    try:
        shell.run(parse(source))
    except Leave:
        pass
    except ScriptError as error:
        where = f"{shell.script}, line {shell.line}" if shell.line else path
        fix = error.fix or "Write the command out by hand"
        raise UserInputError("--from", value=where, limit=error.limit, fix=f"{fix}.") from error
    except RecursionError as error:
        limit = "its commands are nested too deep"
        fix = "Write the command out by hand."
        raise UserInputError("--from", value=path, limit=limit, fix=fix) from error
    found = _chosen(record, path)
    given = [f"{name}={value}" for name, value in {**variables, **found.exported}.items()]
    header, notes = (*options, *found.header), tuple(_notes(record, found, path))
    return ScriptLaunch(words=(*given, *found.words), header=header, notes=notes)


def _call(
    text: str | Sequence[str],
) -> tuple[dict[str, str], tuple[str, ...], str, list[str]] | None:
    """Variables, Slurm's options, the script and its arguments."""
    try:
        words = shlex.split(text) if isinstance(text, str) else list(text)
    except ValueError:
        return None
    variables: dict[str, str] = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    options: tuple[str, ...] = ()
    if words and words[0] in _STARTERS:
        place = next((n for n, w in enumerate(words) if w.endswith(_SUFFIXES)), None)
        if place is None:
            return None
        options = tuple(words[1:place])
        words = words[place:]
    if not words or not words[0].endswith(_SUFFIXES):
        return None
    return variables, options, words[0], words[1:]


def _shell(
    path: str,
    args: list[str],
    variables: Mapping[str, str],
    options: Sequence[str],
    record: Record,
) -> Interpreter:
    place = Path(path).expanduser().resolve()
    values = {n: v for n, v in variables.items() if n not in ("PWD", "OLDPWD", "_")}
    if sizes := slurm_options(options):
        values = {**slurm.variables(sizes), **values}
    return Interpreter(
        record=record,
        variables=dict(values),
        exported=set(values),
        args=args,
        script=str(place),
        folder=str(_folder(place)),
        original=values,
    )


def _folder(script: Path) -> Path:
    """The folder that the script is read in."""
    here = Path.cwd()
    checkout = next((p for p in script.parents if (p / "megatron" / "training").is_dir()), here)
    return here if here.is_relative_to(checkout) else checkout


def _chosen(record: Record, path: str) -> Launched:
    """The one launch that trains."""
    trains = [each for each in record.launched if any(map(_is_training, each.words))]
    found = list({each.words: each for each in trains}.values())
    if len(found) == 1:
        return found[0]
    if found:
        lines = ", ".join(str(each.line) for each in found)
        limit = f"it launches {len(found)} jobs (lines {lines}), and one is planned"
        raise UserInputError("--from", value=path, limit=limit, fix="Give the command of one.")
    if record.launched:
        names = ", ".join(dict.fromkeys(_program(each.words) for each in record.launched))
        limit = f"it launches no job of Megatron-LM that trains ({names})"
    else:
        limit = "it launches nothing with torchrun, srun or python"
        if record.said:
            limit += f"; its last words are {record.said[-1][:200]!r}"
    missing = _listed(record.not_found) or _listed(record.not_set)
    fix = f"It lacks {missing}. " if missing else ""
    raise UserInputError("--from", value=path, limit=limit, fix=f"{fix}Give the command itself.")


def _is_training(word: str) -> bool:
    return any(_TRAINING.match(each) for each in word.split())


def _program(words: Sequence[str]) -> str:
    return next((w for w in words if ".py" in w), words[0]).strip()[:60]


def _notes(record: Record, found: Launched, path: str) -> Iterator[str]:
    yield f"The command is that of {path}, line {found.line}, which was read and not run."
    for what, names in (
        ("Programs that were left out", record.not_run),
        ("Variables that nothing sets, empty as in the shell", record.not_set),
        ("Not on this host", record.not_found),
    ):
        if names:
            yield f"{what}: {_listed(names)}."


def _listed(names: Mapping[str, int]) -> str:
    shown = [f"{name} (line {line})" for name, line in names.items()]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")
