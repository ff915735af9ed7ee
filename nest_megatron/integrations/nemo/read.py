"""A NeMo 2.x recipe (a Fiddle ``run.Partial`` of ``llm.pretrain`` or its like) as a job."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.cost_model.target_defaults import NEMO, NEMO_LACKS
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import refuse_unplannable
from nest_megatron.integrations.base_models import (
    build_within,
    hub_name,
    is_here,
    known_rows,
    offline,
)
from nest_megatron.integrations.execution_fields import NEMO_LACKS_CALLBACK, ExecutionPlaces
from nest_megatron.integrations.fields import (
    ABSENT,
    ConfigPaths,
    class_names,
    find,
    require_parts,
    value_or,
    whole,
)
from nest_megatron.integrations.peft import with_adapters
from nest_megatron.integrations.recipe import (
    DEGREES,
    RECOMPUTE,
    job_of_fields,
    lightning_precision,
    memory_fields,
    spec_from_transformer_config,
)
from nest_megatron.integrations.restore import packed_sequence_size, restored_by_nemo
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.packages import install_command

_STRATEGY = "trainer.strategy"
#: Where a recipe has what a plan reads and writes. Source: NeMo 2.7.3
#: ``nemo.lightning.MegatronStrategy``, which copies its own sizes over those of ``model.config``
#: before the model is built.
PATHS = ConfigPaths(
    items={
        **{name: f"{_STRATEGY}.{name}" for name in (*DEGREES, "use_tp_pp_dp_mapping")},
        **{name: f"model.config.{name}" for name in RECOMPUTE},
        "use_distributed_optimizer": "optim.config.use_distributed_optimizer",
        "data_parallel_sharding_strategy": f"{_STRATEGY}.ddp.data_parallel_sharding_strategy",
        "overlap_grad_reduce": f"{_STRATEGY}.ddp.overlap_grad_reduce",
        "overlap_param_gather": f"{_STRATEGY}.ddp.overlap_param_gather",
        "micro_batch_size": "data.micro_batch_size",
        "global_batch_size": "data.global_batch_size",
    },
    model="model.config",
    data="data",
    ddp=f"{_STRATEGY}.ddp",
    incompatible={
        name: f"{_STRATEGY}.{name}"
        for name in ("microbatch_group_size_per_vp_stage", "num_distributed_optimizer_instances")
    },
    pipeline_types=(f"{_STRATEGY}.pipeline_dtype", "trainer.plugins.pipeline_dtype"),
    ckpt_format=f"{_STRATEGY}.save_ckpt_format",
    async_save=f"{_STRATEGY}.ckpt_async_save",
    seq_length="data.seq_length",
    rampup_batch_size="data.rampup_batch_size",
    iterations="trainer.max_steps",
    called="recipe",
)
#: Rows of the tokenizer that NeMo's mock data builds where none is given.
#: The last is called as the first, in another module (``llm.t5.data``).
_MOCK_ROWS = {
    "MockDataModule": 50_257,
    "BERTMockDataModule": 30_522,
    "T5MockDataModule": 28_996,
}
_OVERLAPS, _GIVEN = "MegatronCommOverlapCallback", "user_comm_overlap_cfg"
#: What ``DeepEPCallback`` sets; its backend stays the model's.
_DEEPEP: Mapping[str, object] = {
    "moe_token_dispatcher_type": "flex",
    "moe_shared_expert_overlap": False,
}


def read_recipe(recipe: Any, *, vocab_size: int | None = None) -> Job:
    """Read model, batch, sequence, devices and layout from a recipe; nothing is changed.

    Args:
        recipe: a Fiddle ``Partial`` or ``Config`` with ``model``, ``data``, ``trainer``, ``optim``,
            or an object with the same attributes.
        vocab_size: of the tokenizer, where the recipe names one whose files are not here.

    Raises:
        UnplannableModelError: if this planner does not support the model, naming what it lacks.
        UserInputError: if a field is missing or wrong.
    """
    spec, notes = read_spec(recipe, vocab_size)
    per_node, nodes = num_devices(recipe), value_or(recipe.trainer, "num_nodes", 1)
    plugin, strategy = _precision_plugin(recipe), recipe.trainer.strategy
    holders = (
        *(find(recipe, path) for path in overlap_paths(recipe)),
        plugin,
        recipe.model.config,
        recipe.optim.config,
        value_or(strategy, "ddp", None),
        strategy,
    )
    return job_of_fields(
        recipe,
        PATHS,
        execution_places(recipe),
        spec=spec,
        precision=_precision(recipe, plugin),
        memory=memory_fields(*holders),
        uses_fsdp=value_or(strategy, "fsdp", None) == "megatron",
        restored=restored_by_nemo(recipe),
        notes=notes,
        target=NEMO,
        num_gpus=per_node * nodes,
        gpus_per_node=per_node,
    )


def overlap_paths(recipe: Any) -> tuple[str, ...]:
    """Paths of the callbacks that set overlaps of communication; of a built one, what it was given.

    Their settings replace those of ``model.config`` (``MegatronCommOverlapCallback.setup``).
    """
    callbacks = value_or(recipe.trainer, "callbacks", [])
    at = (i for i, callback in enumerate(callbacks) if _OVERLAPS in class_names(callback))
    paths = (f"trainer.callbacks[{index}]" for index in at)
    return tuple(
        path if find(recipe, f"{path}.{_GIVEN}") is ABSENT else f"{path}.{_GIVEN}" for path in paths
    )


def turns_on_deepep(callback: Any) -> bool:
    """Whether it is the callback that turns DeepEP on, on Ampere and Hopper."""
    return "DeepEPCallback" in class_names(callback)


def execution_places(recipe: Any) -> ExecutionPlaces:
    """Where a recipe says how layers are carried out."""
    overlap = overlap_paths(recipe)
    deepep = any(map(turns_on_deepep, value_or(recipe.trainer, "callbacks", [])))
    lacks = NEMO_LACKS if overlap else {**NEMO_LACKS, "tp_comm_overlap": NEMO_LACKS_CALLBACK}
    return ExecutionPlaces(
        model="model.config", overlap=overlap, lacks=lacks, forced=_DEEPEP if deepep else {}
    )


def read_spec(recipe: Any, vocab_size: int | None) -> tuple[TransformerSpec, tuple[str, ...]]:
    """The model of a recipe, and what was assumed of it; raises as ``read_recipe`` does."""
    _require_recipe(recipe)
    rows, is_padded, notes = _vocabulary(recipe, vocab_size)
    length = packed_sequence_size(recipe.data) or whole(recipe, "data.seq_length", called="recipe")
    spec = spec_from_transformer_config(
        recipe.model.config, seq_length=length, vocab_size=rows, vocab_is_padded=is_padded
    )
    if spec.decoder_seq_length is not None:
        decoder = value_or(recipe.data, "seq_length_dec", spec.decoder_seq_length)
        spec = dataclasses.replace(spec, decoder_seq_length=decoder)
    for name in ("peft", "model_transform"):
        if (peft := value_or(recipe, name, None)) is not None:
            return with_adapters(spec, peft, f"recipe.{name}", recipe.model.config), notes
    return spec, notes


def num_devices(recipe: Any) -> int:
    """GPUs that each node gives to the job, which a recipe may leave to the launch: an error."""
    devices = value_or(recipe.trainer, "devices", "auto")
    if isinstance(devices, list | tuple):
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    limit, fix = "a plan needs the number of GPUs in a node", "Set it, for example to 8."
    raise UserInputError("trainer.devices", devices, limit, fix)


def require_language_models(installed: str | None = None) -> None:
    """Explain an installed release of NeMo, or the one named, that has no language models."""
    what = "nemo-toolkit"
    fix = f"{install_command('nemo')} (nemo-toolkit >=2.4,<3; 2.7.3 is what was tried)."
    if installed is None:
        try:
            installed = importlib.metadata.version(what)
        except importlib.metadata.PackageNotFoundError:
            raise UserInputError(what, None, limit="it is not installed", fix=fix) from None
    if int(installed.partition(".")[0]) >= 3:
        limit = "since 3.0.0 it has no collection of language models and no MegatronStrategy"
        raise UserInputError(what, installed, limit, fix)


def _require_recipe(recipe: Any) -> None:
    require_parts(
        recipe,
        ("model", "model.config", "data", "trainer", "trainer.strategy", "optim.config"),
        "recipe",
        limit="a recipe of nemo.collections.llm has it",
        fix="Give what a pretrain_recipe() returns, with its model and optimizer set.",
    )
    refuse_unplannable(recipe.model.config, recipe.model)
    strategy = class_names(recipe.trainer.strategy)
    if "MegatronStrategy" not in strategy:
        limit = "only MegatronStrategy lays a model out over ranks"
        fix = "Launch this job without nest."
        raise UserInputError("trainer.strategy", strategy[0], limit, fix)


def _vocabulary(recipe: Any, given: int | None) -> tuple[int, bool, tuple[str, ...]]:
    """Rows of the embedding, whether they are padded already, and what was assumed.

    Source: ``GPTConfig.configure_model``: a size in the config is taken as it is, that of the
    tokenizer is padded.
    """
    preset = value_or(recipe.model.config, "vocab_size", None)
    if preset is not None:
        return preset, True, ()
    if given is not None:
        return given, False, ()
    for holder in (recipe.model, recipe.data):
        tokenizer = value_or(holder, "tokenizer", None)
        if tokenizer is not None:
            rows, notes = _rows(tokenizer)
            return rows, False, notes
    base = hub_name(find(recipe, "resume.restore_config.path"))
    if base is not None and (found := known_rows(base)) is not None:
        return found, False, (_of_base(base, found),)
    kind = class_names(recipe.data)[0]
    if kind == "MockDataModule" and "T5Model" in class_names(recipe.model):
        kind = "T5MockDataModule"
    if kind in _MOCK_ROWS:
        rows = _MOCK_ROWS[kind]
        note = f"The recipe names no tokenizer; {rows} rows are assumed, as {kind} takes."
        return rows, False, (note,)
    limit = "the recipe names no tokenizer"
    if base is not None:
        limit += f", and how many rows that of {base} has is not known"
    raise _no_vocabulary(kind, limit)


def _rows(tokenizer: Any) -> tuple[int, tuple[str, ...]]:
    """Rows of a tokenizer, which is built if it is not yet and can be, and what was assumed."""
    if not hasattr(tokenizer, "__fn_or_cls__"):
        return int(tokenizer.vocab_size), ()
    import fiddle

    names = (value_or(tokenizer, each, None) for each in ("pretrained_model_name", "model_name"))
    name = next(filter(None, map(hub_name, names)), None)
    is_cached = name is not None and is_here(name)
    if name is not None and not is_cached and (known := known_rows(name)) is not None:
        return known, (_of_base(name, known),)
    try:
        with offline() if is_cached else contextlib.nullcontext():
            return int(build_within(lambda: fiddle.build(tokenizer)).vocab_size), ()
    except TimeoutError as error:
        limit = f"the tokenizer cannot be fetched ({error}; is there a network here?)"
        raise _no_vocabulary(name or repr(tokenizer), limit) from error
    except Exception as error:
        limit = f"the tokenizer cannot be built here ({type(error).__name__})"
        raise _no_vocabulary(name or repr(tokenizer), limit) from error


def _of_base(name: str, rows: int) -> str:
    return (
        f"The vocabulary has {rows:,} rows, as {name} has; its tokenizer is not here. vocab_size= "
        "says another number."
    )


def _no_vocabulary(value: str, limit: str) -> UserInputError:
    fix = "Give vocab_size=, or set model.config.vocab_size."
    return UserInputError("recipe.data.tokenizer", value, limit, fix)


def _precision_plugin(recipe: Any) -> Any:
    plugins = value_or(recipe.trainer, "plugins", [])
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    named = (each for each in plugins if any("Precision" in name for name in class_names(each)))
    return next(named, None)


def _precision(recipe: Any, plugin: Any) -> tuple[Precision, str, str]:
    """Number format, FP8 recipe and format around FP8: the plugin's, or Lightning's own."""
    stated = value_or(recipe.trainer if plugin is None else plugin, "precision", "32")
    around = lightning_precision(stated, "trainer.plugins.precision")
    in_fp4, in_fp8 = (value_or(plugin, name, None) for name in ("fp4", "fp8"))
    if not (in_fp4 or in_fp8):
        return around, "delayed", around.value
    narrow = Precision.NVFP4 if in_fp4 else Precision.FP8
    return narrow, str(value_or(plugin, "fp8_recipe", "delayed")), around.value
