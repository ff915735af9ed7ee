"""``--use-checkpoint-args``: the model as a checkpoint's own arguments describe it.

Inside a job Megatron merges them before it validates anything; here the same is done for a command
that is planned beforehand. Nothing that was pickled is run (``inert_pickle``), and
torch is not needed. Source: ``load_args_from_checkpoint`` and its callers (core_v0.16.1
``training/initialize.py``, 0.20 ``training/arguments.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nest_megatron.config.job import ReadCommand
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint, read_checkpoint
from nest_megatron.integrations.megatron_lm.inert_pickle import is_plain
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error, flag_of
from nest_megatron.integrations.megatron_lm.parser import options_for
from nest_megatron.layout.rulebook.facts import is_within, release_number

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
    named = [name for name in ("pretrained_checkpoint", "load") if command.values.get(name)]
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
    values, notes, missing = dict(command.values), list(command.notes), []
    for name in named:
        if (saved := _saved(values, name)) is None:
            missing.append(name)
        else:
            values.update(taken(values, saved.arguments, command.version))
            notes += _notes(values, saved, command.version)
    if missing == named:
        notes.append(_without_checkpoint(values, missing[-1]))
    grouped = values.get("moe_grouped_gemm") or values.get("transformer_impl") == "local"
    if values.get("num_experts") and not grouped:  # and would stay so, whatever flag a plan adds
        raise flag_error(
            "moe_grouped_gemm",
            False,
            "the checkpoint turns it off, and plans are priced with grouped experts",
            f"L{_BY_HAND[1:]}.",
        )
    names = {name for name, value in values.items() if value != command.values.get(name)}
    merged = dataclasses.replace(
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


def taken(values: Values, saved: Values, version: str) -> dict[str, Any]:
    """What Megatron sets from saved arguments, by destination.

    Args:
        values: the command's own, by destination, defaults filled in.
        saved: what the checkpoint was saved with.

    Raises:
        UserInputError: for a value that is no number, text, list or switch.
    """
    saved = _as_of_now(saved, version)
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
    extra = (n for kind, flag in switches.items() if values.get(flag) for n in _TABLES["all"][kind])
    found |= {name: saved[name] for name in extra if saved.get(name) is not None}
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
    values, flag = command.values, flag_of(_DEGREES_SWITCH)
    if all(option.dest != _DEGREES_SWITCH for option in command.options):
        return command
    others = [option for option in command.options if option.dest != _DEGREES_SWITCH]
    names = [*_TABLES["all"]["degrees"], _PER_VIRTUAL_STAGE]
    stated = {name: values[name] for name in names if values.get(name) is not None}
    note = f"The checkpoint's degrees are written out in the place of {flag}."
    return dataclasses.replace(
        command,
        options=(*others, *options_for(stated, command.version)),
        values={**values, _DEGREES_SWITCH: False},
        explicit=command.explicit | stated.keys(),
        notes=(*command.notes, note),
    )


def _saved(values: Values, name: str) -> SavedCheckpoint | None:
    """The checkpoint of ``--load`` or ``--pretrained-checkpoint``; ``None`` if there is none."""
    alone = {**values, "pretrained_checkpoint": None, "moe_use_upcycling": None}
    saved = read_checkpoint({**alone, "load": values[name]})
    if saved is None:
        if values.get("exit_on_missing_checkpoint"):
            raise flag_error(
                name,
                values[name],
                f"{_absent(values[name])}, and --exit-on-missing-checkpoint ends the job there",
                "Correct the path.",
            )
        return None
    if saved.format == "fsdp_dtensor" and values.get("use_megatron_fsdp"):
        return dataclasses.replace(saved, arguments={})  # Megatron takes none from this format
    if not saved.arguments:
        raise flag_error(
            name,
            values[name],
            f"the arguments in {saved.directory} are missing or damaged",
            f"Check that the checkpoint is whole, or {_BY_HAND}.",
        )
    return saved


def _without_checkpoint(values: Values, name: str) -> str:
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
        f"{_absent(where)}, and --use-checkpoint-args reads the model from it",
        "Plan where the checkpoint lies, copy its metadata here (latest_checkpointed_iteration.txt "
        f"and iter_*/ without the *.distcp of weights), or {_BY_HAND}.",
    )


def _absent(where: str) -> str:
    folder = Path(where)
    return (
        "the folder holds no latest_checkpointed_iteration.txt"
        if folder.is_dir()
        else "there is no such folder on this host"
    )


def _notes(values: Values, saved: SavedCheckpoint, version: str) -> Iterator[str]:
    if not saved.arguments:
        yield (
            f"{saved.directory} is of the format {saved.format}, of which Megatron takes no "
            "arguments: the model is that of the command's own flags."
        )
        return
    yield f"--use-checkpoint-args: the model is read from {saved.directory}."
    for name in _names("not_taken", version):
        before, now = saved.arguments.get(name), values.get(name)
        if before and name in values and is_plain(before) and before != now:
            yield (
                f"The checkpoint was saved with {name} = {before}, which Megatron {version} does "
                f"not take from it; the command has {now}."
            )


def _as_of_now(saved: Values, version: str) -> dict[str, Any]:
    """Saved arguments under today's names."""
    found = dict(saved)
    if "disable_bias_linear" in found:
        found["add_bias_linear"] = not found["disable_bias_linear"]
    if release_number(version) >= (0, 17):
        pattern = found.get("hybrid_override_pattern")
        if pattern is not None and found.get("hybrid_layer_pattern") is None:
            found |= {"hybrid_layer_pattern": pattern, "num_layers": None}
        found.setdefault("gdp_num_householder", 3)
    return found
