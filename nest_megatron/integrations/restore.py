"""What a job's data, its adapters and the checkpoint that it restores fix of a plan.

Of fine-tuning: packed sequences and losses over masked tokens. Of checkpoints: what is on this
host's disks is looked at; of what is not, the format that the job states is believed. Sources:
``FineTuningDataModule``, ``llm.api._validate_config``, ``AutoResume`` and ``RestoreConfig`` of NeMo
2.7.3; ``ConfigContainer`` (0.3.1, and its main branch of August 2026), ``load_checkpoint`` and
``_resolve_checkpoint_iteration`` of Megatron-Bridge.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.documents import read_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import notes_on_assumed, unplannable
from nest_megatron.integrations.fields import (
    ABSENT,
    Configuration,
    FieldValue,
    changed_fields,
    class_names,
    find,
    megatron_arguments,
    value_or,
)
from nest_megatron.integrations.megatron_lm import checkpoint
from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint, read_checkpoint
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, in_fields, naming_fields
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import token_multiple
from nest_megatron.model.encoder import EXPERTS, Adapters, PeftScheme
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

#: Data whose options are those of ``GPTSFTDataset``, by the classes of both frameworks.
_GPT_SFT = {"FineTuningDataModule", "FinetuningDatasetConfig", "GPTSFTDatasetConfig"}
#: Data of supervised fine-tuning.
_SFT_DATA = _GPT_SFT | {
    "DirectHFSFTDatasetConfig",
    "EnergonDatasetConfig",
    "MockVLMSFTDatasetConfig",
}
#: Where the packs that were made beforehand are described.
_SPECS = ("packed_sequence_specs", "offline_packing_specs")
#: Switches of packs that are made of the sequences of one micro batch.
_IN_BATCH = ("pack_sequences_in_batch", "enable_in_batch_packing")


def is_finetuning(data: Any) -> bool:
    """Whether a loss is taken over some tokens of a sequence only."""
    return not _SFT_DATA.isdisjoint(class_names(data))


def has_packs(data: Any) -> bool:
    """Whether its packs are files that exist already, padded as they are."""
    return any(value_or(find(data, n), "packed_train_data_path") for n in _SPECS)


def is_padded(data: Any) -> bool:
    """Whether every sequence becomes as long as the longest that there may be."""
    name, options = "pad_to_max_length", value_or(data, "dataset_kwargs", {})
    return bool(dict(options).get(name) or value_or(data, name, False))


def differs_by_rank(data: Any) -> bool:
    """Whether replicas have micro batches of different lengths at the same time."""
    return is_finetuning(data) and not packs_sequences(data) and not is_padded(data)


def packs_sequences(data: Any) -> bool:
    """Whether several sequences stand in one, each attending to itself alone."""
    packs = any(value_or(data, name, False) for name in (*_IN_BATCH, "packing_buffer_size"))
    return packs or packed_sequence_size(data) is not None


def packed_sequence_size(data: Any) -> int | None:
    """Tokens of a pack that was made beforehand, or ``None`` where nothing is packed so."""
    if value_or(data, "enable_offline_packing", True) is False:
        return None
    for name in _SPECS:
        size = find(data, f"{name}.packed_sequence_size")
        if isinstance(size, int) and size > 0:
            return size
    return value_or(data, "seq_length") if value_or(data, "enable_offline_packing") else None


def data_requirements(recipe: Configuration, micro_batch_size: int) -> dict[str, Requirement]:
    """What the data fixes of a layout, by the names of its degrees; a pack needs two sequences."""
    data = recipe.find(recipe.data)
    needs: dict[str, Requirement] = {}
    without_packs = f"train without packing ({recipe.data})"
    if packed_sequence_size(data) is not None or value_or(data, "packing_buffer_size"):
        needs["micro_batch_size"] = _need(
            1, "a micro batch is one pack of sequences", without_packs
        )
    elif name := next((n for n in _IN_BATCH if value_or(data, n, False)), None):
        if micro_batch_size < 2:
            raise UserInputError(
                f"{recipe.data}.{name}",
                True,
                f"a micro batch of {micro_batch_size} holds no two sequences to pack",
                "Set micro_batch_size to at least 2, or turn it off.",
            )
        needs["micro_batch_size"] = _need(
            micro_batch_size,
            "the sequences of a micro batch are packed into one",
            f"turn {recipe.data}.{name} off",
        )
    padded = all(find(data, f"{n}.pad_seq_to_mult") is ABSENT for n in _SPECS) or has_packs(data)
    if packed_sequence_size(data) is not None and padded:
        stated = recipe.find(recipe.items["context_parallel_size"])
        needs["context_parallel_size"] = _need(
            stated if isinstance(stated, int) else 1,
            "sequences of a pack are padded for one context-parallel size",
            without_packs,
        )
    elif is_finetuning(data) and recipe.find(f"{recipe.model}.calculate_per_token_loss") is ABSENT:
        needs["context_parallel_size"] = _need(
            1,
            "fine-tuning with context parallelism needs calculate_per_token_loss",
            "upgrade the framework",
        )
    return needs


def loss_notes(recipe: Configuration, fixed: Collection[str]) -> tuple[str, ...]:
    """What a plan may change where the loss is taken over some tokens of a sequence.

    Args:
        fixed: what it may not, by the names of degrees.

    Source: ``forward_step_calc_loss`` of megatron-core, which averages within each micro batch.
    """
    data = recipe.find(recipe.data)
    by_token = recipe.find(f"{recipe.model}.calculate_per_token_loss") is True
    may_change = {
        "micro_batch_size": "another micro batch weighs samples otherwise",
        "context_parallel_size": "context parallelism brings calculate_per_token_loss, the mean "
        "over all tokens of a step",
    }
    found = {name: what for name, what in may_change.items() if name not in fixed}
    if not found or by_token or not is_finetuning(data):
        return ()
    said, names = ", and ".join(found.values()), " and ".join(found)
    return (f"The loss is averaged within each micro batch: {said}. Keep {names} to train as now.",)


def _need(value: int, reason: str, fix: str) -> Requirement:
    return Requirement(value=value, reason=reason, fix=fix, who="the data")


def finetuning_fields(recipe: Configuration, plan: ParallelPlan) -> Iterator[FieldValue]:
    """What context parallelism needs where a rank may hold masked tokens alone, and paddings."""
    cp = plan.layout.dims.context_parallel_size
    data = recipe.find(recipe.data)
    if not is_finetuning(data):
        return
    yield from _padding(recipe, plan)
    if cp == 1:
        return
    why = "with context parallelism a rank may hold masked tokens alone, so the loss is per token"
    yield f"{recipe.model}.calculate_per_token_loss", True, why
    averaging = f"{recipe.ddp}.average_in_collective"
    if recipe.find(averaging) is not ABSENT:
        yield averaging, False, why
    for name in _SPECS:
        path = f"{recipe.data}.{name}.pad_seq_to_mult"
        stated = recipe.find(path)
        if stated is not ABSENT and (stated or 1) % (2 * cp) and not has_packs(data):
            why = f"{cp} context-parallel ranks hold two parts of every sequence of a pack"
            yield path, 2 * cp, why


def _padding(recipe: Configuration, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Sequences padded so that ranks divide them, where they are shorter than the longest.

    Each rank has two parts of a sequence under context parallelism, and equal parts under sequence
    parallelism, of as many tokens as the number format needs. A pack becomes as long as was
    planned: its multiple is that of each sequence in it.
    """
    data, name, whole = recipe.find(recipe.data), "pad_seq_length_to_mult", "pad_to_max_length"
    options = find(data, "dataset_kwargs")
    if options is ABSENT or _GPT_SFT.isdisjoint(class_names(data)) or is_padded(data):
        return
    options, layout = dict(options or {}), plan.layout
    dims = layout.dims
    cp, tp = dims.context_parallel_size, dims.tensor_model_parallel_size
    gathering = tp if layout.sequence_parallel else 1
    recipe_name = str(plan.provenance.settings.get("traits.fp8_recipe", "delayed"))
    tokens = token_multiple(plan.train.precision, recipe_name, gathering)
    needed = math.lcm(2 * cp if cp > 1 else 1, cp * gathering * tokens)
    stated = options.get(name, 16)  # as ``GPTSFTDataset`` pads the longest of a micro batch
    if stated % needed and packed_sequence_size(data) is not None:
        why = "ranks divide a pack into equal parts"
        yield f"{recipe.data}.dataset_kwargs", {**options, whole: True}, why
    elif stated % needed:
        why = f"ranks divide a sequence into parts of whole tokens: a multiple of {needed}"
        yield f"{recipe.data}.dataset_kwargs", {**options, name: math.lcm(stated, needed)}, why


_SCHEMES = {
    "LoRA": PeftScheme.LORA,
    "DoRA": PeftScheme.DORA,
    "CanonicalLoRA": PeftScheme.CANONICAL_LORA,
}
_READ = tuple(field.name for field in dataclasses.fields(Adapters) if field.name != "scheme")
#: Fields that change neither time nor memory: scaling, first values, what is derived, what a
#: checkpoint holds.
_NO_EFFECT = (
    "alpha",
    "lora_A_init_method",
    "lora_B_init_method",
    "canonical_mapping",
    "params_to_save",
)


def with_adapters(
    spec: TransformerSpec,
    peft: Any,
    where: str,
    config: Any,
    assume_harmless: Collection[str] = (),
) -> tuple[TransformerSpec, tuple[str, ...]]:
    """The model with what a job's ``peft`` trains, and notes.

    Args:
        peft: ``LoRA``, ``DoRA`` or ``CanonicalLoRA`` of ``nemo.collections.llm.peft`` or
            ``megatron.bridge.peft``, built or a Fiddle ``Config``.
        where: what messages call it.
        config: of the model: without grouped products each expert would have adapters of its own.
        assume_harmless: as of ``refuse_unplannable``.

    Raises:
        UnplannableModelError: for another scheme, or a field whose effect is not known.
        UserInputError: for what cannot be priced, naming the field.
    """
    name = class_names(peft)[0]
    if name not in _SCHEMES:
        raise unplannable(
            where, name, f"of fine-tuning schemes {', '.join(_SCHEMES)} are supported"
        )
    notes = notes_on_assumed(
        where, changed_fields(peft, (*_SCHEMES,), (*_READ, *_NO_EFFECT)), assume_harmless
    )
    read = {name: value for name in _READ if (value := value_or(peft, name)) is not None}
    if not (targets := tuple(read.pop("target_modules", ()))):
        raise UserInputError(
            f"{where}.target_modules",
            [],
            "adapters on all but some modules are not priced",
            "Name target_modules.",
        )
    adapters = Adapters(scheme=_SCHEMES[name], target_modules=targets, **read)
    grouped = value_or(config, "moe_grouped_gemm", False)
    for path in EXPERTS if spec.is_moe and not grouped else ():
        if adapters.adapts(path, spec.num_layers):
            raise UserInputError(
                "model.moe_grouped_gemm",
                grouped,
                f"without it every expert has an adapter of its own on {path}, not priced here",
                f"Set it, or leave {path.rpartition('.')[2]} out of {where}.target_modules.",
            )
    return replace(spec, adapters=adapters), notes


@frozen
class Restored:
    """A checkpoint that a job restores.

    Args:
        source: where it lies, as the job writes it.
        values: what the job says of loading, by Megatron's destinations.
        is_seen: it lies on this host; otherwise only its format is known, as it is stated.
        format_source: where its format comes from if it was not seen, for the note.
        afresh: how the job starts its optimizer from scratch, where that is no flag.
        fields: Megatron-LM's arguments, and what says the same in the job, where it has no flags.
        missing: why the job would not start on this host, where it has to restore something.
    """

    source: str
    saved: SavedCheckpoint
    values: Values
    is_seen: bool = False
    format_source: str = ""
    afresh: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    def required(self) -> Mapping[str, Requirement]:
        """What a plan must keep, by the names of ``layout_arguments``."""
        if self.saved.format == _HUGGING_FACE:
            return {}
        return {
            name: replace(need, fix=self.afresh or in_fields(need.fix, self.fields))
            for name, need in checkpoint.requirements(self.saved, self.values).items()
            if self.is_seen or need.value is not None
        }

    def check(self, plan: ParallelPlan, version: str) -> None:
        """Raise if a plan's layout is one that the checkpoint cannot be loaded into."""
        if self.is_seen:
            with naming_fields(self.fields):
                checkpoint.check_loadable(self.saved, plan.arguments, self.values, version)

    def note(self) -> str:
        """What is known of it, for the plan's notes."""
        if self.missing:
            return f"{self.missing} A plan counts on the format {self.saved.format}."
        how = "as was found there" if self.is_seen else self.format_source
        found = (
            f"The job restores {self.source or 'a checkpoint that restore_config does not name'}, "
            f"in the format {self.saved.format} ({how})."
        )
        if self.afresh:
            found += (
                " Its optimizer's state keeps the layout that it was saved with, which is taken to "
                "be the recipe's; a run that was planned goes on under its own plan (pin it)."
            )
        return found


#: What holds weights alone, of any layout. Source: ``is_hf_checkpoint_dir`` (0.6).
_HUGGING_FACE = "Hugging Face"
#: Files of which a checkpoint of Megatron-Bridge has one.
_TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
#: Megatron-LM's flags, and what says the same in Megatron-Bridge, which reads no torch checkpoint.
_BRIDGE_FIELDS = {
    "ckpt_convert_format": "Megatron-LM's --ckpt-convert-format",
    "ckpt_format": "checkpoint.ckpt_format",
    "ckpt_step": "checkpoint.ckpt_step",
    "ddp_bucket_size": "ddp.bucket_size",
    "moe_grouped_gemm": "model.moe_grouped_gemm",
    "no_load_optim": "checkpoint.load_optim=False",
    "no_load_rng": "checkpoint.load_rng=False",
}


def restored_by_command(values: Values) -> Restored | None:
    """What ``--load`` and ``--pretrained-checkpoint`` of a Megatron-LM command restore.

    The host that plans may not be the one that trains: only a folder that is here, and holds no
    checkpoint, is one from which training starts afresh.
    """
    named = [str(values[name]) for name in ("load", "pretrained_checkpoint") if values.get(name)]
    saved = None if any("://" in name for name in named) else read_checkpoint(values)
    if saved is not None:
        return Restored(source=str(saved.directory), saved=saved, values=values, is_seen=True)
    source = next((name for name in named if not Path(name).is_dir()), None)
    if source is None or values.get("moe_use_upcycling"):
        return None
    return _unseen_checkpoint(
        source,
        str(values.get("ckpt_format") or "torch_dist"),
        values,
        "as --ckpt-format has it: there is no such folder on this host",
    )


def restored_by_bridge(cfg: Any) -> Restored | None:
    """What ``checkpoint.pretrained_checkpoint`` and ``checkpoint.load`` restore.

    A folder to load from that is still empty starts training afresh, except in fine-tuning, which
    starts from something.
    """
    said = partial(value_or, cfg.checkpoint)
    pretrained, load = said("pretrained_checkpoint"), said("load")
    resumes = _holds(load, *_TRACKERS)
    if not (pretrained or resumes or (load and is_finetuning(value_or(cfg, "dataset")))):
        return None
    values = {
        "load": load if resumes else None,
        "pretrained_checkpoint": None if resumes else pretrained,
        "ckpt_step": said("ckpt_step") if resumes else None,
        "ckpt_format": said("ckpt_format", "torch_dist"),
        "finetune": said("finetune", False) or not resumes,
        "no_load_optim": not said("load_optim", True),
        "no_load_rng": not said("load_rng", True),
        "num_experts": value_or(cfg.model, "num_moe_experts"),
    }
    source = str(load if resumes else pretrained or load)
    named = "load" if resumes else "pretrained_checkpoint"
    fields = {**_BRIDGE_FIELDS, "load": f"checkpoint.{named}"}
    with naming_fields(fields):
        saved = read_checkpoint(values) if _holds(source, *_TRACKERS) else None
    if saved is not None:
        saved = replace(saved, **_saved_sizes(saved.directory))
        return Restored(source=source, saved=saved, values=values, is_seen=True, fields=fields)
    has_weights = _holds(pretrained, "model*.safetensors", "pytorch_model*.bin")
    if not resumes and has_weights and _holds(pretrained, "config.json"):
        return _unseen_checkpoint(source, _HUGGING_FACE, values, "as was found there")
    found = _unseen_checkpoint(source, str(values["ckpt_format"]), values)
    if pretrained:
        return found
    missing = (
        "Fine-tuning starts from a checkpoint: checkpoint.pretrained_checkpoint is not set, and "
        f"checkpoint.load ({load}) holds none on this host. Set checkpoint.pretrained_checkpoint."
    )
    return replace(found, missing=missing)


def restored_by_nemo(recipe: Any, stated: Values) -> Restored | None:
    """What ``resume`` restores: a run that goes on, or weights of another.

    Args:
        stated: the recipe's layers and layout, by Megatron's destinations.

    Source: ``MegatronStrategy.sharded_state_dict_metadata`` and ``load_checkpoint``.
    """
    resume, strategy = value_or(recipe, "resume"), recipe.trainer.strategy
    values = {"num_experts": value_or(recipe.model.config, "num_moe_experts")}
    # whatever this run saves: an imported model is torch_dist, and so is a run with plain DDP
    path, kind = _run_that_goes_on(recipe, resume), "torch_dist"
    if path is not None:
        kind = value_or(strategy, "save_ckpt_format", kind)
    else:
        config = value_or(resume, "restore_config", value_or(strategy, "restore_config"))
        if config is None:
            return None
        path = str(value_or(config, "path", ""))
        values["finetune"] = not value_or(config, "load_optim_state", False)
    found = _unseen_checkpoint(path, kind, values)
    # an optimizer's state keeps the recipe's layout, as NeMo saves it by default
    is_divided = stated.get("use_distributed_optimizer") and found.saved.format == "torch_dist"
    whole = found.saved.weights_only or not is_divided
    if whole or value_or(strategy, "ckpt_optim_fully_reshardable", False):
        return found
    saved = replace(
        found.saved,
        **checkpoint.sizes_of(stated),
        use_distributed_optimizer=True,
        distrib_optim_sharding_type="dp_reshardable",
    )
    return replace(found, saved=saved, afresh="restore the weights alone (restore_config)")


def _run_that_goes_on(recipe: Any, resume: Any) -> str | None:
    """The folder of a run that NeMo would resume, where one is named or found."""
    if path := value_or(resume, "resume_from_path"):
        return str(path)
    if not value_or(resume, "resume_if_exists", False):
        return None
    folder = value_or(resume, "resume_from_directory")
    if folder is None:
        log, name = find(recipe, "log.log_dir"), find(recipe, "log.name")
        if not isinstance(log, str | os.PathLike) or not isinstance(name, str):
            return None
        folder = Path(log) / name / "checkpoints"
    last = [each for each in Path(folder).glob("*last") if each.is_dir()]
    return str(max(last, key=lambda each: each.lstat().st_mtime)) if last else None


def _unseen_checkpoint(
    path: str, kind: str, values: Values, how: str = "as the recipe states"
) -> Restored:
    """A checkpoint whose format is only stated, or found in NeMo's folder of weights."""
    if any((folder / "metadata.json").is_file() for folder in (Path(path) / "weights", Path(path))):
        kind = "torch_dist"  # megatron-core writes it for this format alone
    saved = SavedCheckpoint(
        directory=Path(path),
        format=kind,
        weights_only=bool(values.get("finetune")),
    )
    return Restored(source=path, saved=saved, values=values, format_source=how)


def _holds(folder: object, *patterns: str) -> bool:
    """Whether it is the path of a folder with a file of one of these names."""
    return isinstance(folder, str | os.PathLike) and any(
        any(Path(folder).glob(each)) for each in patterns
    )


def _saved_sizes(folder: Path) -> dict[str, Any]:
    """The degrees that Megatron-Bridge writes next to a checkpoint."""
    path = folder / "run_config.yaml"
    if not path.is_file():
        return {}
    values = read_yaml(path, path.name)
    try:
        model = values["model"]
        if not isinstance(model, Mapping):
            raise TypeError("model")
        return checkpoint.sizes_of(megatron_arguments(model))
    except (LookupError, TypeError, AttributeError) as error:
        raise UserInputError(
            str(path),
            None,
            f"it does not say how the checkpoint was laid out ({error})",
            "Launch this job without nest.",
        ) from error
