"""A Megatron-Bridge ``ConfigContainer`` as a job."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.cluster_detection import number_said, processes_per_host
from nest_megatron.config.job import Job
from nest_megatron.cost_model.target_defaults import BRIDGE_0_3, BRIDGE_2026
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import refuse_unplannable
from nest_megatron.integrations.base_models import hub_name, known_rows
from nest_megatron.integrations.execution_fields import BRIDGE_LACKS_LEVELS, ExecutionPlaces
from nest_megatron.integrations.fields import (
    ABSENT,
    ConfigPaths,
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
    memory_fields,
    spec_from_transformer_config,
)
from nest_megatron.integrations.restore import packed_sequence_size, restored_by_bridge
from nest_megatron.model.spec import TransformerSpec

#: Where a ``ConfigContainer`` (0.3.1; HEAD has the same) has what a plan reads and writes.
PATHS = ConfigPaths(
    items={
        **{name: f"model.{name}" for name in (*DEGREES, *RECOMPUTE)},
        "use_tp_pp_dp_mapping": "dist.use_tp_pp_dp_mapping",
        "use_distributed_optimizer": "optimizer.use_distributed_optimizer",
        "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
        "overlap_grad_reduce": "ddp.overlap_grad_reduce",
        "overlap_param_gather": "ddp.overlap_param_gather",
        "micro_batch_size": "train.micro_batch_size",
        "global_batch_size": "train.global_batch_size",
    },
    model="model",
    data="dataset",
    ddp="ddp",
    incompatible={
        "microbatch_group_size_per_vp_stage": "model.microbatch_group_size_per_vp_stage",
        "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    },
    pipeline_types=("model.pipeline_dtype", "mixed_precision.pipeline_dtype"),
    ckpt_format="checkpoint.ckpt_format",
    async_save="checkpoint.async_save",
    seq_length="model.seq_length",
    rampup_batch_size="train.rampup_batch_size",
    iterations="train.train_iters",
)
#: Both switches of Megatron-FSDP.
FSDP_SWITCHES = ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp")
#: The release of Megatron-Bridge in NeMo Framework 26.06 (its ``docs/releases``).
_SINCE_26_06 = (0, 5)


def read_recipe(
    cfg: Any,
    *,
    vocab_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Read model, batch, sequence and layout from a configuration; nothing is changed.

    Args:
        cfg: a ``ConfigContainer``, or an object with the same attributes.
        vocab_size: of the tokenizer, where its files are not here.
        environment: the launcher's variables, which alone know the number of ranks; those of this
            process if not given.

    Raises: as ``nemo.read_recipe``.
    """
    spec = read_spec(cfg, vocab_size)
    variables = os.environ if environment is None else environment
    return job_of_fields(
        cfg,
        PATHS,
        execution_places(cfg),
        spec=spec,
        precision=_precision(cfg),
        memory=_memory_fields(cfg),
        uses_fsdp=uses_fsdp(cfg),
        restored=restored_by_bridge(cfg),
        target=installed_target(),
        num_gpus=ranks(variables),
        gpus_per_node=processes_per_host(variables),
    )


def execution_places(cfg: Any) -> ExecutionPlaces:
    """Where a configuration says how layers are carried out.

    ``comm_overlap`` replaces the model's settings (``CommOverlapConfig.setup``).
    """
    alone = find(cfg, "dist.use_decentralized_pg") is True
    return ExecutionPlaces(
        model="model",
        overlap=() if find(cfg, "comm_overlap") in (ABSENT, None) else ("comm_overlap",),
        lacks={"hierarchical_context_parallel_sizes": BRIDGE_LACKS_LEVELS} if alone else {},
        beside_graphs=("model.use_te_rng_tracker", "rng.te_rng_tracker"),
        version=installed_target().megatron_core,
    )


def installed_target() -> Target:
    """The installed release; the one that the contract tests know where none is installed."""
    try:
        version = importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return BRIDGE_0_3
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    return BRIDGE_2026 if release >= _SINCE_26_06 else BRIDGE_0_3


def read_spec(cfg: Any, vocab_size: int | None) -> TransformerSpec:
    """The model of a configuration; raises as ``read_recipe`` does."""
    require_parts(
        cfg,
        ("model", "train", "optimizer", "ddp", "dist", "dataset", "checkpoint"),
        "cfg",
        limit="a ConfigContainer of Megatron-Bridge has it",
        fix="Give what a recipe such as llama3_8b_pretrain_config() returns.",
    )
    refuse_unplannable(cfg.model)
    rows, is_padded = _vocabulary(cfg, vocab_size)
    spec = spec_from_transformer_config(
        cfg.model, seq_length=_seq_length(cfg), vocab_size=rows, vocab_is_padded=is_padded
    )
    return with_adapters(spec, value_or(cfg, "peft", None), "cfg.peft", cfg.model)


def ranks(environment: Mapping[str, str]) -> int | None:
    """Ranks of the running job, if its launcher says so; as ``get_world_size_safe`` looks."""
    return number_said(environment, "WORLD_SIZE", "SLURM_NTASKS")


def uses_fsdp(cfg: Any) -> bool:
    """Whether either of the two switches of Megatron-FSDP is on."""
    return any(find(cfg, path) is True for path in FSDP_SWITCHES)


def _seq_length(cfg: Any) -> int:
    """The data's length, which ``run_recipe.py`` copies to the model; else the model's."""
    if (pack := packed_sequence_size(cfg.dataset)) is not None:
        return pack
    return whole(
        cfg, "dataset.seq_length" if value_or(cfg.dataset, "seq_length", 0) else PATHS.seq_length
    )


def _vocabulary(cfg: Any, given: int | None) -> tuple[int, bool]:
    """Rows of the embedding, and whether they are padded already.

    Source: ``setup._validate_and_set_vocab_size``: a size of the model's own is taken as it is,
    that of the tokenizer is padded, and replaces the model's if ``use_tokenizer_vocab_size`` is on.
    """
    preset = value_or(cfg.model, "vocab_size", None)
    of_tokenizer = find(cfg, "tokenizer.use_tokenizer_vocab_size") is True
    if preset is not None and not of_tokenizer:
        return preset, not value_or(cfg.model, "should_pad_vocab", False)
    if given is not None:
        return given, False
    kind = str(find(cfg, "tokenizer.tokenizer_type"))
    rows = find(cfg, "tokenizer.vocab_size")
    if kind == "NullTokenizer" and isinstance(rows, int):
        return rows + _adds_end_of_document(cfg), False
    base = hub_name(find(cfg, "tokenizer.tokenizer_model"))
    if base is not None and (known := known_rows(base)) is not None:
        return known, False
    limit = f"it comes from the files of {kind}, which are not read"
    fix = "Set it, or give vocab_size=."
    raise UserInputError("model.vocab_size", None, limit, fix)


def _adds_end_of_document(cfg: Any) -> bool:
    """Whether ``NullTokenizer`` has a row beside those that it is given, for a document's end.

    Source: ``NullTokenizer.vocab_size`` of megatron-core 0.16.1 (0.20 has none), and
    ``_NullTokenizer.vocab_size`` of Megatron-Bridge 0.3.1 with ``legacy_tokenizer``.
    """
    is_legacy = find(cfg, "tokenizer.legacy_tokenizer") is True
    return installed_target().megatron_core.startswith("0.16") and not is_legacy


def _memory_fields(cfg: Any) -> Mapping[str, Any]:
    """Settings of memory; those of mixed precision are copied over the others before training.

    Source: ``update_config_with_precision_overrides`` and the recipes beside it, of which those of
    fp8 gather weights in fp8, blockwise scaling apart.
    """
    mixed = value_or(cfg, "mixed_precision", None)
    others = (value_or(cfg, "comm_overlap", None), cfg.model, cfg.optimizer, cfg.ddp, cfg.dist)
    if not isinstance(mixed, str):
        return memory_fields(mixed, *others)
    name = mixed.replace("-", "_")
    of_recipe = {
        "accumulate_allreduce_grads_in_fp32": not name.startswith("fp16"),
        "grad_reduce_in_bf16": False,
        "fp8_param_gather": "fp8" in name and "subchannel" not in name,
        "fp4": "e2m1" if "fp4" in name else None,
        # its recipe gathers weights in NVFP4 since 26.06
        "fp4_param_gather": "fp4" in name and installed_target() is BRIDGE_2026,
    }
    return {**memory_fields(*others), **of_recipe}


def _precision(cfg: Any) -> tuple[Precision, str, str]:
    """Number format, FP8 recipe and format around FP8; mixed precision may be given by name."""
    mixed = value_or(cfg, "mixed_precision", None)
    formats = ("bf16", "fp16")
    if isinstance(mixed, str):
        name = mixed.replace("-", "_")
        around = next((kind for kind in formats if kind in name), "fp32")
        known = {"delayed": "delayed", "mxfp8": "mxfp8", "subchannel": "blockwise"}
        recipe = next((known[kind] for kind in known if kind in name), "tensorwise")
        in_fp4, in_fp8 = "fp4" in name, "fp8" in name
    else:
        holder = cfg.model if mixed is None else mixed
        around = next((kind for kind in formats if value_or(holder, kind, False)), "fp32")
        recipe = str(value_or(holder, "fp8_recipe", "delayed"))
        in_fp4, in_fp8 = (bool(value_or(holder, name, None)) for name in ("fp4", "fp8"))
    if in_fp4 or in_fp8:
        return (Precision.NVFP4 if in_fp4 else Precision.FP8), recipe, around
    return Precision(around), "delayed", around
