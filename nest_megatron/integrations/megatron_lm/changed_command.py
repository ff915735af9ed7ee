"""A user's command with other arguments: our settings, a checkpoint's, those of a short run.

Inside a job Megatron merges the arguments of ``--use-checkpoint-args`` before it validates
anything; here the same is done for a command that is planned beforehand. Nothing that was pickled
is run (``inert_pickle``), and torch is not needed. Source: ``load_args_from_checkpoint`` and its
callers (core_v0.16.1 ``training/initialize.py``, 0.20 ``training/arguments.py``).

The steps of a short run are those of the job: model, data, batch, layout, number formats, and what
it logs on its standard output, stay. ``--train-iters`` stays too, because the learning rate, and
the indices of the data, hang on it; ``--exit-interval`` ends the run, without a last evaluation
(``checkpoint_and_decide_exit`` of ``megatron/training/training.py``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from operator import attrgetter
from pathlib import Path
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Option, ReadCommand
from nest_megatron.config.overrides import value_text
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint, read_checkpoint
from nest_megatron.integrations.megatron_lm.inert_pickle import is_plain
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    ROLES,
    Values,
    arguments_of,
    flag_error,
    flag_of,
)
from nest_megatron.integrations.megatron_lm.parser import (
    known_flags,
    options_of,
    parse_words,
    read_argv,
    words_for,
)
from nest_megatron.layout.rulebook.facts import is_within, release_number
from nest_megatron.model.spec import TransformerSpec

_SWITCH, _DEGREES_SWITCH = "use_checkpoint_args", "use_mp_args_from_checkpoint_args"
_PER_VIRTUAL_STAGE = "num_layers_per_virtual_pipeline_stage"
#: Without these a command says nothing of the model.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
_BY_HAND = "leave --use-checkpoint-args out and give the model's flags"
#: What Megatron takes from saved arguments, by release.
_TABLES = packaged(__package__, "arguments_data/checkpoint_arguments.toml")


def with_checkpoint_arguments(command: ReadCommand) -> ReadCommand:
    """The command as Megatron sees it after ``--use-checkpoint-args``; others stay as they are.

    Saved degrees (``--use-mp-args-from-checkpoint-args``) are written out as flags, so that a plan
    can change them: Megatron would put the saved ones in their place.

    Raises:
        UserInputError: for a checkpoint that is not on this host or cannot be read, and where
            Megatron itself ends.
    """
    if not command.values.get(_SWITCH):
        return command
    named = [*filter(command.values.get, ("pretrained_checkpoint", "load"))]
    if not named:
        raise UserInputError(
            flag_of(_SWITCH),
            True,
            "it needs a checkpoint",
            "Add --load or --pretrained-checkpoint.",
        )
    if command.values.get("non_persistent_ckpt_type") == "local":
        raise UserInputError(
            flag_of(_SWITCH),
            True,
            "Megatron does not take it with --non-persistent-ckpt-type local",
            f"L{_BY_HAND[1:]}.",
        )
    values = dict(command.values)
    notes = list(command.notes)
    missing = []
    for name in named:
        if (saved := _named_checkpoint(values, name)) is None:
            missing.append(name)
            continue
        values.update(values_from_checkpoint(values, saved.arguments, command.version))
        if not saved.arguments:
            notes.append(
                f"{saved.directory} is of the format {saved.format}, of which Megatron takes no "
                "arguments: the model is that of the command's own flags."
            )
            continue
        notes.append(f"--use-checkpoint-args: the model is read from {saved.directory}.")
        notes += (
            f"The checkpoint was saved with {each} = {before}, which Megatron {command.version} "
            f"does not take from it; the command has {values[each]}."
            for each in _names("not_taken", command.version)
            if (before := saved.arguments.get(each)) and each in values and is_plain(before)
            if before != values[each]
        )
    if missing == named:
        notes.append(_note_without_checkpoint(values, missing[-1]))
    grouped = values.get("moe_grouped_gemm") or values.get("transformer_impl") == "local"
    if values.get("num_experts") and not grouped:  # and would stay so, whatever flag a plan adds
        raise flag_error(
            "moe_grouped_gemm",
            False,
            "the checkpoint turns it off, and plans are priced with grouped experts",
            f"L{_BY_HAND[1:]}.",
        )
    names = {name for name, value in values.items() if value != command.values.get(name)}
    merged = replace(
        command,
        values={**values, _SWITCH: False},
        explicit=command.explicit | names,
        notes=tuple(notes),
    )
    return with_degrees_as_flags(merged)


def _names(kind: str, version: str) -> Iterator[str]:
    """Arguments of a table that a release has."""
    yield from _TABLES["all"].get(kind, ())
    for limit in ("since", "until"):
        for release, names in _TABLES[limit].items():
            if is_within(version, **{limit: release}):
                yield from names.get(kind, ())


def values_from_checkpoint(values: Values, saved: Values, version: str) -> dict[str, Any]:
    """What Megatron sets from saved arguments, by destination.

    Args:
        values: the command's own, by destination, defaults filled in.
        saved: what the checkpoint was saved with.

    Raises:
        UserInputError: for a value that is no number, text, list or switch.
    """
    saved = dict(saved)  # under today's names
    if "disable_bias_linear" in saved:
        saved["add_bias_linear"] = not saved["disable_bias_linear"]
    if release_number(version) >= (0, 17):
        pattern = saved.get("hybrid_override_pattern")
        if pattern is not None and saved.get("hybrid_layer_pattern") is None:
            saved |= {"hybrid_layer_pattern": pattern, "num_layers": None}
        saved.setdefault("gdp_num_householder", 3)
    found = {
        name: saved[name]
        for kind in ("replaced", "filled")
        for name in _names(kind, version)
        if saved.get(name) is not None and (kind == "replaced" or values.get(name) is None)
    }
    if saved.get("num_experts") is None:
        found["moe_ffn_hidden_size"] = None
    elif saved.get("moe_ffn_hidden_size") is not None:
        found["moe_ffn_hidden_size"] = saved["moe_ffn_hidden_size"]
    switches = {"tokenizer": "use_tokenizer_model_from_checkpoint_args", "degrees": _DEGREES_SWITCH}
    found |= {
        name: saved[name]
        for kind, flag in switches.items()
        for name in _TABLES["all"][kind]
        if values.get(flag) and saved.get(name) is not None
    }
    if values.get(_DEGREES_SWITCH) and values.get(_PER_VIRTUAL_STAGE) is None:
        found[_PER_VIRTUAL_STAGE] = saved.get(_PER_VIRTUAL_STAGE)
    for name, value in found.items():
        if not is_plain(value):
            raise flag_error(
                name,
                type(value).__name__,
                "the checkpoint holds an object there, which is not read",
                f"Give it, and {_BY_HAND}.",
            )
    return found


def with_degrees_as_flags(command: ReadCommand) -> ReadCommand:
    """The command with its degrees typed in the place of ``--use-mp-args-from-checkpoint-args``."""
    values = command.values
    flag = flag_of(_DEGREES_SWITCH)
    if all(option.dest != _DEGREES_SWITCH for option in command.options):
        return command
    others = [option for option in command.options if option.dest != _DEGREES_SWITCH]
    names = [*_TABLES["all"]["degrees"], _PER_VIRTUAL_STAGE]
    stated = {name: values[name] for name in names if values.get(name) is not None}
    return replace(
        command,
        options=(*others, *starmap(Option, words_for(stated, command.version).items())),
        values={**values, _DEGREES_SWITCH: False},
        explicit=command.explicit | stated.keys(),
        notes=(
            *command.notes,
            f"The checkpoint's degrees are written out in the place of {flag}.",
        ),
    )


def _named_checkpoint(values: Values, name: str) -> SavedCheckpoint | None:
    """The checkpoint of ``--load`` or ``--pretrained-checkpoint``; ``None`` if there is none."""
    others = {"pretrained_checkpoint": None, "moe_use_upcycling": None}
    saved = read_checkpoint({**values, **others, "load": values[name]})
    if saved is None:
        if values.get("exit_on_missing_checkpoint"):
            raise flag_error(
                name,
                values[name],
                f"{_reason_of_absence(values[name])}, and --exit-on-missing-checkpoint ends the "
                "job there",
                "Correct the path.",
            )
        return None
    if saved.format == "fsdp_dtensor" and values.get("use_megatron_fsdp"):
        return replace(saved, arguments={})  # Megatron takes none from this format
    if not saved.arguments:
        raise flag_error(
            name,
            values[name],
            f"the arguments in {saved.directory} are missing or damaged",
            f"Check that the checkpoint is whole, or {_BY_HAND}.",
        )
    return saved


def _note_without_checkpoint(values: Values, name: str) -> str:
    """The note of a job that starts without a checkpoint, from its own flags."""
    where = values[name]
    if all(values.get(each) for each in _SHAPE):
        if Path(where).is_dir():
            return f"{where} holds no checkpoint, so the model is that of the command's own flags."
        return (
            f"There is no folder {where} on this host, so the model is that of the command's own "
            "flags; where the job runs, --use-checkpoint-args takes it from the checkpoint there."
        )
    raise flag_error(
        name,
        where,
        f"{_reason_of_absence(where)}, and --use-checkpoint-args reads the model from it",
        "Plan where the checkpoint lies, copy its metadata here (latest_checkpointed_iteration.txt "
        f"and iter_*/ without the *.distcp of weights), or {_BY_HAND}.",
    )


def _reason_of_absence(where: str) -> str:
    return (
        "the folder holds no latest_checkpointed_iteration.txt"
        if Path(where).is_dir()
        else "there is no such folder on this host"
    )


#: Settings that one flag of Megatron-LM says.
_TRAIN = ("global_batch_size", "micro_batch_size", "seq_length", "fp8_recipe")
#: Flags that say what another one does, and win over it.
_INSTEAD = {"vocab_size": "padded_vocab_size"}
_POSITIONS = "max_position_embeddings"


def with_flags(command: ReadCommand, composed: Settings) -> ReadCommand:
    """A command with flags and settings of our command line in the place of its flags.

    Raises:
        UserInputError: for a word that is no flag of the release, and for two values of one flag.
    """
    wanted = dict(_flags_to_set(command, composed))
    if not wanted:
        return command
    typed: dict[str | None, Option] = {option.dest: option for option in command.options}
    changed = {
        dest: option for dest, option in wanted.items() if not _is_same(option, typed.get(dest))
    }
    removed = {_INSTEAD[dest] for dest in wanted if dest in _INSTEAD} & typed.keys() - wanted.keys()
    others = (each for each in command.options if each.dest not in {*changed, *removed})
    words = [word for option in wanted.values() for word in option.tokens]
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
    return replace(
        command,
        options=(*others, *changed.values()),
        values={**command.values, **dict.fromkeys(removed), **found},
        explicit=command.explicit - removed | found.keys(),
        notes=(*command.notes, *notes),
    )


def require_model(spec: TransformerSpec, composed: Settings, command: ReadCommand) -> None:
    """Raise where a field of the model, set for a command, needs more flags than one."""
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


def _flags_to_set(command: ReadCommand, composed: Settings) -> Iterator[tuple[str, Option]]:
    """The flags by destination, settings among them."""
    version = command.version
    found = dict[str, Option]()
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
        values = command.values
        kind = command.values.get("position_embedding_type")
        rotary = values.get("use_rotary_position_embeddings")
        reaches = length.value.isdigit() and int(length.value) > (values.get(_POSITIONS) or 0)
        if reaches and (rotary or kind not in (None, "learned_absolute")):
            # rotary positions reach as far as the sequences are long
            yield _POSITIONS, Option(_POSITIONS, (flag_of(_POSITIONS), length.value))
    recipe = composed.train.fp8_recipe
    if recipe and not any(name in found or command.values.get(name) for name in ("fp8", "fp4")):
        raise UserInputError(
            "train.fp8_recipe",
            recipe,
            "the command computes in 16 bits, where no recipe has an effect",
            "Give --set '--fp8-format hybrid', too.",
        )
    yield from found.items()


def _destination(option: Option, composed: Settings, version: str) -> str:
    if option.dest is not None:
        return option.dest
    key = f"model.{option.flag.removeprefix('--').replace('-', '_')}"
    if key in composed.given:
        raise UserInputError(
            key,
            composed.given[key],
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
    if other is not None and not _is_same(option, other):
        raise UserInputError(
            what,
            option.value,
            f"{' '.join(other.tokens)} is set, too",
            "Leave one of them out.",
        )


def _is_same(option: Option, other: Option | None) -> bool:
    return other is not None and option.value == other.value and option.flag == other.flag


#: Arguments that a short run leaves out; those that are restored only where it restores nothing.
_LEFT_OUT = frozenset(arguments_of("of_short_run"))
_RESTORED = frozenset(ROLES["of_short_run"]["restored"].split())
_WEIGHTS_ALONE = ("--finetune", "--no-load-optim", "--no-load-rng")


def short_run(argv: Sequence[str], version: str, iterations: int) -> tuple[str, ...]:
    """A script's arguments for a run of some steps, without checkpoints, evaluation or trackers.

    A checkpoint is not loaded, unless ``--use-checkpoint-args`` takes the model from it: then its
    weights are, and steps are counted from 0.

    Args:
        version: the release of Megatron-LM whose flags they are.

    Raises:
        UserInputError: for a job whose batch grows: its first steps are not those of the plan.

    >>> " ".join(short_run(["--bf16", "--save", "/ckpt", "--train-iters", "500"], "0.16", 20))
    '--bf16 --train-iters 500 --exit-interval 20 --eval-iters 0 --no-one-logger'
    """
    command = read_argv("", argv, version)
    values = command.values
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if values.get(name):
            raise flag_error(
                name,
                values[name],
                "the first steps have another batch than the one that is planned for",
                "Leave it out of the command to tune at the batch where it ends.",
            )
    restores = bool(values.get("use_checkpoint_args"))
    left_out = _LEFT_OUT - _RESTORED if restores else _LEFT_OUT
    words = [
        word for option in command.options if option.dest not in left_out for word in option.tokens
    ]
    words += ["--exit-interval", str(iterations), "--eval-iters", "0", "--no-one-logger"]
    return (*words, *(_WEIGHTS_ALONE if restores else ()))
