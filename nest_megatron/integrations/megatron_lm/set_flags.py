"""Flags and settings beside a command, which override what it says and are written into it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from operator import attrgetter

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Option, ReadCommand
from nest_megatron.config.overrides import value_text
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.megatron_lm.layout_arguments import flag_of
from nest_megatron.integrations.megatron_lm.parser import known_flags, options_of, parse_words
from nest_megatron.model.spec import TransformerSpec

#: Settings that one flag of Megatron-LM says.
_TRAIN = ("global_batch_size", "micro_batch_size", "seq_length", "fp8_recipe")
#: Flags that say what another one does, and win over it.
_INSTEAD = {"vocab_size": "padded_vocab_size"}
_POSITIONS = "max_position_embeddings"


def with_flags(command: ReadCommand, composed: Settings) -> ReadCommand:
    """A command with the flags and settings that are given beside it in the place of its own.

    Raises:
        UserInputError: for a word that is no flag of the release, and for two values of one flag.
    """
    wanted = dict(_wanted(command, composed))
    if not wanted:
        return command
    typed: dict[str | None, Option] = {option.dest: option for option in command.options}
    changed = {
        dest: option for dest, option in wanted.items() if not _same(option, typed.get(dest))
    }
    removed = {_INSTEAD[dest] for dest in wanted if dest in _INSTEAD} & typed.keys() - wanted.keys()
    others = (each for each in command.options if each.dest not in {*changed, *removed})
    words = [word for option in changed.values() for word in option.tokens]
    found, unknown = parse_words(words, command.version)
    assert not unknown
    notes = [
        f"{option.flag} {option.value} is set beside the command, ".replace("  ", " ")
        + (f"which says {typed[dest].value}." if dest in typed else "which does not say it.")
        for dest, option in changed.items()
    ]
    notes += [
        f"{typed[dest].flag} {typed[dest].value} of the command is left out." for dest in removed
    ]
    return dataclasses.replace(
        command,
        options=(*others, *changed.values()),
        values={**command.values, **dict.fromkeys(removed), **found},
        explicit=command.explicit - removed | found.keys(),
        notes=(*command.notes, *notes),
    )


def require_model(spec: TransformerSpec, composed: Settings, command: ReadCommand) -> None:
    """Raise where a field of the model, set beside a command, needs more flags than its own."""
    for key in sorted(composed.given):
        section, _, name = key.partition(".")
        if section != "model" or name in _INSTEAD:
            continue
        value, found = command.values.get(name), getattr(spec, name, None)
        if found != value:
            raise UserInputError(
                key,
                value,
                f"the model of the command has {found} with it",
                "Give its flags, with those that they need, with --set.",
            )


def _wanted(command: ReadCommand, composed: Settings) -> Iterator[tuple[str, Option]]:
    """The flags by destination, settings among them."""
    version, found = command.version, dict[str, Option]()
    for option in options_of(shlex.split(composed.flags or ""), version):
        dest = _destination(option, composed, version)
        _require_one(found.get(dest), option, option.flag)
        found[dest] = option
    for key in sorted(composed.given):
        section, _, name = key.partition(".")
        if section not in ("train", "parallel"):
            continue
        value = attrgetter(key)(composed)
        option = Option(name, (flag_of(name), value_text(value)))
        _require_one(found.get(name), option, key)
        if section == "train" and name in _TRAIN and value is not None:
            found[name] = option
    if (length := found.get("seq_length")) and _POSITIONS not in found:
        values, kind = command.values, command.values.get("position_embedding_type")
        rotary = values.get("use_rotary_position_embeddings")
        reaches = length.value.isdigit() and int(length.value) > (values.get(_POSITIONS) or 0)
        if reaches and (rotary or kind not in (None, "learned_absolute")):
            # rotary positions reach as far as the sequences are long
            yield _POSITIONS, Option(_POSITIONS, (flag_of(_POSITIONS), length.value))
    yield from found.items()


def _destination(option: Option, composed: Settings, version: str) -> str:
    if option.dest is not None:
        return option.dest
    name = option.flag.removeprefix("--").replace("-", "_")
    if f"model.{name}" in composed.given:
        raise UserInputError(
            f"model.{name}",
            option.value,
            "no flag of Megatron-LM says it",
            "Give the flags that do with --set.",
        )
    limit = f"Megatron-LM {version} has no such flag"
    fix = nearest(option.flag, known_flags(version))
    if not option.flag.startswith("--"):
        limit = "it is no flag of the training script"
        fix = "Write --set '--vocab-size 131072'; settings, key=value, need no --set."
    raise UserInputError("--set", option.tokens[0], limit, fix)


def _require_one(other: Option | None, option: Option, what: str) -> None:
    if other is not None and not _same(option, other):
        raise UserInputError(
            what,
            option.value,
            f"{' '.join(other.tokens)} is set, too",
            "Leave one of them out.",
        )


def _same(option: Option, other: Option | None) -> bool:
    return other is not None and option.value == other.value and option.flag == other.flag
