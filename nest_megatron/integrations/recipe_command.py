"""A command that trains a recipe of NeMo 2.x or Megatron-Bridge, as a job.

The recipe is made as the command would make it, by its framework, which has to be installed;
nothing is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import Any, NoReturn

from nest_megatron.config.job import Job
from nest_megatron.config.launch import split_words
from nest_megatron.config.overrides import first_line
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.launchers import LaunchPlace
from nest_megatron.integrations.megatron_lm.parser import (
    CommandText,
    SplitCommand,
    split_command,
    tokens,
)
from nest_megatron.packages import install_command

_RECIPE = "--recipe"
_TRAINS_RECIPE = re.compile(r"(.*/)?run_recipe\.py|--recipe(=.*)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
#: Options of ``nemo llm pretrain`` that do not change what is trained. Source: nemo-run 0.11.1
#: ``RunContext.cli_command``.
_SWITCHES = (
    *("--yes", "-y", "--no-confirm", "--dryrun", "--detach", "--direct", "--no-direct"),
    *("--tail-logs", "--no-tail-logs", "--verbose", "-v"),
)


def read_recipe(
    text: CommandText,
    place: LaunchPlace | None = None,
    *,
    assume_harmless: Sequence[str] = (),
    vocab_size: int | None = None,
) -> Job | None:
    """The job of a command that trains a recipe; ``None`` for any other command.

    Args:
        place: where it is launched.
        assume_harmless, vocab_size: as of ``read_recipe`` of each framework.
        text: ``nemo llm pretrain --factory llama3_8b trainer.num_nodes=4``, or
            ``torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b_pretrain_config``.

    Raises:
        UserInputError: for a recipe that is not known, a framework that is not installed, or a word
            whose meaning is not known; and the errors of ``read_recipe`` of each framework.
    """
    words = list(dropwhile(_ASSIGNMENT.match, tokens(text)))
    if words and PurePath(words[0]).name == "nemo":
        return _nemo_job(words[1:], assume_harmless, vocab_size)
    if any(map(_TRAINS_RECIPE.fullmatch, words)):
        return _bridge_job(split_command(words, place), assume_harmless, vocab_size)
    return None


#: The standard output is the process's: of two threads that put it back, the wrong one is last.
_PRINTING = threading.Lock()


@contextlib.contextmanager
def _printing_to_standard_error() -> Iterator[None]:
    """Keep standard output for what we print: a plan's JSON may go there."""
    with _PRINTING, contextlib.redirect_stdout(sys.stderr):
        yield


class _Parser(argparse.ArgumentParser):
    """Raises our own error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise _command_error(message, "its words cannot be read", "Correct them.")


def _command_error(value: str, limit: str, fix: str) -> UserInputError:
    return UserInputError("--from", value, limit, fix)


def _fields(words: Sequence[str]) -> list[str]:
    """Words that set fields of a recipe; a ``UserInputError`` for any other."""
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise _command_error(
                word,
                "what it changes of the recipe is not known here",
                "Write the fields that it sets, each as FIELD=VALUE.",
            )
    return list(words)


def _nemo_job(words: Sequence[str], assume_harmless: Sequence[str], vocab_size: int | None) -> Job:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("collection", choices=["llm"])
    parser.add_argument("task", choices=["pretrain", "finetune"])
    parser.add_argument("--factory", "-f", required=True)
    parser.add_argument("--name", "-n")
    for switch in _SWITCHES:
        parser.add_argument(switch, action="store_true")
    given, rest = parser.parse_known_args(words)
    own = [word for word in rest if not word.startswith("run.")]  # the executor's, and plugins'
    recipe = _nemo_recipe(given.task, given.factory, _fields(own))
    return replace(
        nemo.read_recipe(recipe, vocab_size=vocab_size, assume_harmless=assume_harmless),
        script=given.factory,
        changes=partial(
            nemo.plan_changes,
            recipe,
            free=("num_gpus", "global_batch_size"),
            assume_harmless=assume_harmless,
        ),
    )


@_printing_to_standard_error()
def _nemo_recipe(task: str, factory: str, fields: list[str]) -> Any:
    """What ``nemo llm`` would run, by NeMo-Run's own reader."""
    nemo.require_language_models()
    try:
        from nemo.collections import llm
        from nemo_run.cli.api import RunContext
    except ImportError as error:
        limit = f"it cannot be imported here ({first_line(error)})"
        fix = f"{install_command('nemo')}."
        raise UserInputError("nemo llm", factory, limit, fix) from error
    try:
        return RunContext(name=task, factory=factory).parse_fn(getattr(llm, task), fields)
    except Exception as error:
        raise _command_error(
            factory,
            f"NeMo-Run does not make it: {first_line(error)}",
            f"`nemo llm {task} --factory NAME --dryrun` shows what it takes.",
        ) from error


def _bridge_job(
    command: SplitCommand, assume_harmless: Sequence[str], vocab_size: int | None
) -> Job:
    parser = _Parser(add_help=False, allow_abbrev=False)
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(_RECIPE)
    named.add_argument("--model")
    parser.add_argument("--mode")  # what the recipe's own name says, but for DoRA
    parser.add_argument("--step_func", "--step-func")  # what feeds the model: no field
    given, rest = parser.parse_known_args(command.argv)
    task = "peft" if given.mode in ("lora", "dora") else given.mode
    name = given.recipe or f"{given.model}_{task}_config"
    scheme = {"peft_scheme": "dora"} if given.mode == "dora" else {}
    cfg = _bridge_recipe(name, scheme, _fields(split_words(rest)[1]))
    known: dict[str, Any] = {"environment": {}, "assume_harmless": assume_harmless}
    job = megatron_bridge.read_recipe(cfg, vocab_size=vocab_size, **known)
    return replace(
        job,
        script=name,
        num_gpus=command.ranks.num_ranks,
        notes=(*command.ranks.notes, *job.notes),
        changes=partial(megatron_bridge.plan_changes, cfg, free=("global_batch_size",), **known),
    )


@_printing_to_standard_error()
def _bridge_recipe(name: str, scheme: Mapping[str, str], fields: list[str]) -> Any:
    """The configuration that ``run_recipe.py`` makes of a recipe and its overrides."""
    try:
        from megatron.bridge import recipes
        from megatron.bridge.training.utils import omegaconf_utils
    except ImportError as error:
        raise UserInputError(
            _RECIPE,
            name,
            f"Megatron-Bridge cannot be imported here ({first_line(error)})",
            "Plan where it is installed; docs/nemo.md says how.",
        ) from error
    names = re.compile(r"\w+_config\b").findall
    others = Path(recipes.__path__[0]).parent.glob("perf_recipes/**/__init__.py")
    known = {*names(" ".join(dir(recipes)))}.difference(*map(names, map(Path.read_text, others)))
    limit = (
        "run_recipe.py finds no such recipe in megatron.bridge.recipes (those of perf_recipes, "
        "which come first, take +nest=auto)"
    )
    require_known(_RECIPE, name, known, limit)
    try:
        return megatron_bridge.pack_as_script(
            omegaconf_utils.process_config_with_overrides(
                getattr(recipes, name)(**scheme), cli_overrides=fields
            )
        )
    except Exception as error:
        raise _command_error(
            name,
            f"Megatron-Bridge does not make it: {first_line(error)}",
            "Correct the fields, or give what it lacks.",
        ) from error
