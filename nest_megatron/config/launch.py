"""``+nest=auto nest.KEY=VALUE ...`` beside a training script's own arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.config.overrides import (
    Setting,
    first_line,
    parse,
    refuse_sweeps,
    unreadable,
)
from nest_megatron.config.schema import LaunchConfig, launch_keys, section_keys
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.names import Name

TOKEN = re.compile(r"^(\+\+?nest=|\+{0,2}nest\.)")
#: Sections of a planning job that the training job itself decides.
_OF_THE_JOB = ("model", "train")
#: Settings that are lists of names.
_LISTS = ("free", "may_differ")
#: Short for ``search.keep``, beside ``free``.
_KEEP = "keep"


class Mode(Name):
    """What ``+nest=`` asks for."""

    AUTO = "auto"
    PINNED = "pinned"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWords:
    """The ``nest`` words of a command line.

    Args:
        job: settings of the planning job (``cluster``, ``search.*``, ...), without the prefix.
        launch: settings of ``LaunchConfig``, without the prefix.
    """

    mode: Mode
    job: tuple[Setting, ...]
    launch: tuple[Setting, ...]


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words of a command line, and the script's."""
    ours = [word for word in argv if TOKEN.match(word)]
    return ours, [word for word in argv if not TOKEN.match(word)]


def read_words(words: Iterable[str]) -> LaunchWords:
    """Check the mode and every key.

    Raises:
        UserInputError: for an unknown mode or key, naming the nearest.
    """
    mode, job, launch = Mode.AUTO, [], []
    for word in words:
        text = word.lstrip("+")
        if text.startswith("nest="):
            mode = _mode(text.removeprefix("nest="))
            continue
        text = text.removeprefix("nest.")
        key, equals, value = text.partition("=")
        if equals and key == _KEEP:
            job.append(_job_setting(f"search.{text}"))
        elif equals and key in launch_keys():
            launch.append(Setting(key=key, value=value))
        else:
            job.append(_job_setting(text))
    refuse_sweeps([s for s in job if s.key != "out"])
    return LaunchWords(mode=mode, job=tuple(job), launch=tuple(launch))


def _mode(text: str) -> Mode:
    known = [mode.value for mode in Mode]
    if text not in known:
        raise UserInputError(
            "+nest", value=text, limit=f"it is one of {', '.join(known)}", fix=nearest(text, known)
        )
    return Mode(text)


def _job_setting(text: str) -> Setting:
    key, equals, value = text.partition("=")
    name = key.lstrip("~")
    section = name.partition(".")[0]
    if section in _OF_THE_JOB:
        raise UserInputError(
            f"nest.{key}",
            value=value,
            limit="the model and the batch are the training job's own",
            fix="Change the job's own flag.",
        )
    known = (*section_keys(), *launch_keys())
    if section != "cluster" and name not in known:
        raise UserInputError(
            f"nest.{key}",
            value=value if equals else None,
            limit="there is no such setting",
            fix=_nearest_word(name, known),
        )
    if not equals and not key.startswith("~"):
        raise UserInputError(
            f"nest.{key}", value=None, limit="it has no value", fix=f"Write nest.{key}=VALUE."
        )
    (setting,) = parse([text])
    return setting


def _nearest_word(key: str, known: Iterable[str]) -> str:
    """The settings closest to a misspelt one, as they are typed beside ``+nest``."""
    candidates = [k for k in (*known, "cluster", "cluster.num_gpus") if not k.startswith("train.")]
    return nearest(f"nest.{key}", [f"nest.{k}" for k in candidates], count=2)


def read_launch(words: LaunchWords) -> LaunchConfig:
    """The launch settings, typed.

    Raises:
        UserInputError: for a value of the wrong type or outside its range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.structured(LaunchConfig)
    for setting in words.launch:
        try:
            OmegaConf.update(config, setting.key, _value(setting))
        except OmegaConfBaseException as error:
            raise UserInputError(
                f"nest.{setting.key}",
                value=setting.value,
                limit=first_line(error),
                fix="Correct the value.",
            ) from error
    launch = OmegaConf.to_object(config)
    assert isinstance(launch, LaunchConfig)
    _check(launch)
    return launch


def _value(setting: Setting) -> Any:
    """A value by Hydra's grammar; a single name for ``free`` is a list of one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"{setting.key}={setting.value}").value()
    except HydraException as error:
        raise unreadable(f"nest.{setting.key}", setting.value, error) from error
    return [value] if setting.key in _LISTS and isinstance(value, str) else value


def _check(launch: LaunchConfig) -> None:
    for name in ("alternative", "watch"):
        if getattr(launch, name) < 0:
            raise UserInputError(
                f"nest.{name}", value=getattr(launch, name), limit="it is at least 0", fix="Use 0."
            )
    for name in ("rendezvous_timeout_s", "heartbeat_timeout_s"):
        seconds = getattr(launch, name)
        if seconds is not None and not 0 < seconds < math.inf:
            raise UserInputError(
                f"nest.{name}", value=seconds, limit="it is above 0 and finite", fix="Use 20."
            )
    ranks = launch.ranks
    is_list = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    if ranks not in ("by_host", "launched") and not is_list:
        raise UserInputError(
            "nest.ranks",
            value=ranks,
            limit="it is by_host, launched, or a list with the new rank of each launched one",
            fix="Leave it out.",
        )
