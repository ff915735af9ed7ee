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
from nest_megatron.packages import install_command, installed_version

_RECIPE = "--recipe"
_TRAINS_RECIPE = re.compile(r"(.*/)?run_recipe\.py|--recipe(=.*)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
#: Words of ``nemo llm pretrain`` and of ``run_recipe.py`` that do not change what is trained; those
#: of the executor and of plugins among them. Source: nemo-run 0.11.1 ``RunContext.cli_command``.
_PASSED = re.compile(
    r"run\..*|-[yv]|--(yes|no-confirm|dryrun|detach|verbose|(no-)?(direct|tail-logs))"
    r"|--(dry[-_]run|dump[-_]env)"
)
#: Options of ``run_recipe.py`` -> what they say, or the field that they set, since 0.6 but for the
#: first three. Source: ``_build_parser``, ``COMMON_OVERRIDE_FIELDS``.
_OPTIONS = """\
--mode mode
--step_func --step-func step_func
--dataset dataset
-ms --max_steps train.train_iters
-gb --global_batch_size train.global_batch_size
-mb --micro_batch_size train.micro_batch_size
-sl --seq_length dataset.seq_length
-tp --tensor_model_parallel_size model.tensor_model_parallel_size
-pp --pipeline_model_parallel_size model.pipeline_model_parallel_size
-cp --context_parallel_size model.context_parallel_size
-vp --virtual_pipeline_model_parallel_size model.virtual_pipeline_model_parallel_size
-ep --expert_model_parallel_size model.expert_model_parallel_size
-etp --expert_tensor_parallel_size model.expert_tensor_parallel_size
--lr optimizer.lr
--min_lr optimizer.min_lr
--warmup_iters scheduler.lr_warmup_iters
--pretrained_checkpoint checkpoint.pretrained_checkpoint
--save_dir checkpoint.save
--load_dir checkpoint.load
--save_interval checkpoint.save_interval"""


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
def _made_by(maker: str, name: str, install: str, fix: str) -> Iterator[None]:
    """Refuse a recipe that its framework does not make, and keep standard output for our plan."""
    try:
        with _PRINTING, contextlib.redirect_stdout(sys.stderr):
            yield
    except UserInputError:
        raise
    except ImportError as error:
        raise _command_error(
            name, f"{maker} cannot be imported here ({first_line(error)})", install
        ) from error
    except Exception as error:
        raise _command_error(name, f"{maker} does not make it: {first_line(error)}", fix) from error


class _Parser(argparse.ArgumentParser):
    """Raises our own error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise _command_error(message, "its words cannot be read", "Correct them.")


def _command_error(value: str, limit: str, fix: str) -> UserInputError:
    return UserInputError("--from", value, limit, fix)


def _fields(words: Sequence[str]) -> list[str]:
    """Words that set fields of a recipe; a ``UserInputError`` for others that matter."""
    fields = [word for word in words if not _PASSED.fullmatch(word)]
    for word in fields:
        if word.startswith("-") or "=" not in word:
            raise _command_error(
                word,
                "what it changes of the recipe is not known here",
                "Write the fields that it sets, each as FIELD=VALUE.",
            )
    return fields


def _nemo_job(words: Sequence[str], assume_harmless: Sequence[str], vocab_size: int | None) -> Job:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("collection", choices=["llm"])
    parser.add_argument("task", choices=["pretrain", "finetune"])
    parser.add_argument("--factory", "-f", required=True)
    parser.add_argument("--name", "-n")
    given, rest = parser.parse_known_args(words)
    recipe = _nemo_recipe(given.task, given.factory, _fields(rest))
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


def _nemo_recipe(task: str, factory: str, fields: list[str]) -> Any:
    """What ``nemo llm`` would run, by NeMo-Run's own reader."""
    with _made_by(
        "NeMo-Run",
        factory,
        f"{install_command('nemo')}.",
        f"`nemo llm {task} --factory NAME --dryrun` shows what it takes.",
    ):
        nemo.require_language_models()
        from nemo.collections import llm
        from nemo_run.cli.api import RunContext

        return RunContext(name=task, factory=factory).parse_fn(getattr(llm, task), fields)


def _bridge_job(
    command: SplitCommand, assume_harmless: Sequence[str], vocab_size: int | None
) -> Job:
    parser = _Parser(add_help=False, allow_abbrev=False)
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(_RECIPE)
    named.add_argument("--model")
    is_old = re.match(r"0\.[1-5]\b", installed_version("megatron-bridge") or "")
    rows = _OPTIONS.splitlines()
    for row in rows[:3] if is_old else rows:
        *options, meaning = row.split()
        parser.add_argument(*options, dest=meaning)
    given, rest = parser.parse_known_args(command.argv)
    typed = [f"{name}={value}" for name, value in vars(given).items() if "." in name and value]
    # the mode is what the recipe's own name says, but for DoRA; the step feeds the model: no field
    task = "peft" if given.mode in ("lora", "dora") else given.mode
    name = given.recipe or f"{given.model}_{task}_config"
    scheme = {"peft_scheme": "dora"} if given.mode == "dora" else {}
    cfg = _bridge_recipe(name, scheme, [*typed, *_fields(split_words(rest)[1])], given.dataset)
    known: dict[str, Any] = {"environment": {}, "assume_harmless": assume_harmless}
    job = megatron_bridge.read_recipe(cfg, vocab_size=vocab_size, **known)
    return replace(
        job,
        script=name,
        num_gpus=command.ranks.num_ranks,
        notes=(*command.ranks.notes, *job.notes),
        changes=partial(megatron_bridge.plan_changes, cfg, free=("global_batch_size",), **known),
    )


def _bridge_recipe(
    name: str, scheme: Mapping[str, str], fields: list[str], data: str | None = None
) -> Any:
    """The configuration that ``run_recipe.py`` makes of a recipe, its data and its overrides."""
    with _made_by(
        "Megatron-Bridge",
        name,
        "Plan where it is installed; docs/nemo.md says how.",
        "Correct the fields, or give what it lacks.",
    ):
        from megatron.bridge import recipes
        from megatron.bridge.training.utils import omegaconf_utils

        names = re.compile(r"\w+_config\b").findall
        others = Path(recipes.__path__[0]).parent.glob("perf_recipes/**/__init__.py")
        of_others = map(names, map(Path.read_text, others))
        limit = (
            "run_recipe.py finds no such recipe in megatron.bridge.recipes (those of perf_recipes, "
            "which come first, take +nest=auto)"
        )
        require_known(_RECIPE, name, {*names(" ".join(dir(recipes)))}.difference(*of_others), limit)
        cfg = getattr(recipes, name)(**scheme)
        if data is not None:
            cfg.dataset = recipes.utils.dataset_utils.build_dataset_config(cfg, data)
        cfg = omegaconf_utils.process_config_with_overrides(cfg, cli_overrides=fields)
        return megatron_bridge.as_script(cfg, fields)
