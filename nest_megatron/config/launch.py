"""``+nest=auto nest.KEY=VALUE ...`` beside a training script's own arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nest_megatron.config.defaults import naming_defaults, with_defaults
from nest_megatron.config.overrides import (
    SHORT_KEYS,
    Setting,
    choice,
    parse,
    refuse_resolvers,
    refuse_sweeps,
    type_limit,
    typed_value,
)
from nest_megatron.config.schema import LaunchConfig, launch_keys, section_keys
from nest_megatron.errors import (
    UserInputError,
    nearest,
    require_at_least,
    require_seconds,
)
from nest_megatron.layout.policy import OnMismatch
from nest_megatron.plain import Name, frozen

TOKEN = re.compile(r"^(\+\+?nest=|\+{0,2}nest\.)")


class Mode(Name):
    """What ``+nest=`` asks for."""

    AUTO = "auto"
    PINNED = "pinned"
    OFF = "off"


class MixedGpus(Name):
    """What happens where the hosts of a job have unlike GPUs."""

    REFUSE = "refuse"
    SLOWER = "slower"


@frozen
class LaunchWords:
    """The ``nest`` words of a command: settings of the planning job and of ``LaunchConfig``.

    The defaults of the site stand before those that were typed.
    """

    mode: Mode
    job: tuple[Setting, ...]
    launch: tuple[Setting, ...]


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words of a command line, and the script's."""
    return [w for w in argv if TOKEN.match(w)], [w for w in argv if not TOKEN.match(w)]


def read_words(words: Iterable[str]) -> LaunchWords:
    """Check the mode and every key; ``UserInputError`` for an unknown one, naming the nearest."""
    mode, job, launch = Mode.AUTO, [], []
    for word in words:
        text = word.lstrip("+")
        if text.startswith("nest="):
            name = text.removeprefix("nest=")
            if name == "tune":
                raise UserInputError(
                    "+nest",
                    name,
                    "a rank of a job that has started cannot start others on its GPUs",
                    "In the place of this command type nest-megatron tune --from '<this command "
                    "without +nest>'; in an allocation of Slurm its runs are steps of it.",
                )
            mode = choice("+nest", name, Mode)
            continue
        text = text.removeprefix("nest.")
        key, equals, value = text.partition("=")
        if equals and key == "keep":  # short for search.keep, beside free
            job.append(_job_setting(f"search.keep={'[all]' if value == 'all' else value}"))
        elif equals and key in launch_keys():
            key = "watch.steps" if key == "watch" else key
            refuse_resolvers(f"nest.{key}", value)
            launch.append(Setting(key=key, value=value))
        else:
            job.append(_job_setting(text))
    refuse_sweeps([s for s in job if s.key != "out"])
    if mode is Mode.OFF:
        return LaunchWords(mode=mode, job=tuple(job), launch=tuple(launch))
    return LaunchWords(
        mode=mode, job=with_defaults(job), launch=with_defaults(launch, of_launch=True)
    )


def _job_setting(text: str) -> Setting:
    key, equals, value = text.partition("=")
    name = key.lstrip("~")
    name = SHORT_KEYS.get(name, name)
    section = name.partition(".")[0]

    def wrong(limit: str, fix: str) -> UserInputError:
        return UserInputError(f"nest.{key}", value if equals else None, limit, fix)

    if section in ("model", "train", "flags"):
        raise wrong("the model and the batch are the training job's own", "Change its own flag.")
    known = (*section_keys(), *launch_keys())
    if section != "cluster" and name not in known:
        words = [
            f"nest.{each}"
            for each in (*known, "cluster", "cluster.num_gpus")
            if not each.startswith("train.")
        ]
        raise wrong("there is no such setting", nearest(f"nest.{name}", words, count=2))
    if not equals and not key.startswith("~"):
        raise wrong("it has no value", f"Write nest.{key}=VALUE.")
    return parse([text])[0]


#: Settings that a mode has no use for, with the reason and the fix.
OF_OTHER_MODES = {
    "on_mismatch": (
        Mode.AUTO,
        "+nest=auto plans for the machines that are there",
        "Leave it out.",
    ),
    "plan": (
        Mode.AUTO,
        "+nest=auto makes a plan and launches no other",
        "Type +nest=pinned to launch this one, or leave it out.",
    ),
    "alternative": (
        Mode.PINNED,
        "+nest=pinned launches the pinned plan, which has no runners-up",
        "Pin the plan that is to be launched, or leave it out.",
    ),
}


def read_launch(words: LaunchWords) -> LaunchConfig:
    """The launch settings, typed; ``UserInputError`` for a wrong type or outside its range."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with naming_defaults(words.launch):
        config = OmegaConf.structured(LaunchConfig)
        for setting in words.launch:
            value = typed_value(setting, f"nest.{setting.key}")
            if isinstance(value, str) and setting.key in ("free", "may_differ"):
                value = [value]  # one name is a list of one
            try:
                OmegaConf.update(config, setting.key, value)
            except OmegaConfBaseException as error:
                raise UserInputError(
                    f"nest.{setting.key}", setting.value, type_limit(error), "Correct the value."
                ) from error
        launch = OmegaConf.to_object(config)
        assert isinstance(launch, LaunchConfig)
        _check(launch)
        for key, (mode, limit, fix) in OF_OTHER_MODES.items():
            if words.mode is mode and any(s.key == key for s in words.launch):
                raise UserInputError(f"nest.{key}", getattr(launch, key), limit, fix)
        return launch


def _check(launch: LaunchConfig) -> None:
    require_at_least("nest.alternative", launch.alternative, 0, "Use 0.")
    require_at_least("nest.watch", launch.watch.steps, 0, "Use 0.")
    if launch.port is not None and not 0 < launch.port < 65_536:
        limit = "a port is 1 to 65535"
        raise UserInputError("nest.port", launch.port, limit, "Name a free one, or leave it out.")
    for name in ("rendezvous_timeout_s", "heartbeat_timeout_s"):
        if (seconds := getattr(launch, name)) is not None:
            require_seconds(f"nest.{name}", seconds)
    if launch.on_mismatch is not None:
        choice("nest.on_mismatch", launch.on_mismatch, OnMismatch)
    choice("nest.mixed_gpus", launch.mixed_gpus, MixedGpus)
    ranks = launch.ranks
    is_list = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    if ranks not in ("by_host", "launched") and not is_list:
        raise UserInputError(
            "nest.ranks",
            ranks,
            "it is by_host, launched, or a list with the new rank of each launched one",
            "Leave it out.",
        )
