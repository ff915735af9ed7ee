"""A job's own layers on one rank: its arguments, its script's way of making layers from them.

Megatron parses and validates the job's arguments for the small world of one layer; then the
checkout's ``gpt_builders.gpt_builder`` runs, and what it would build a model of is taken instead.

Source: ``gpt_builders.gpt_builder`` and ``core_transformer_config_from_args`` (0.16.1, 0.20).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from nest_megatron.config.job import ReadCommand
from nest_megatron.integrations.megatron_lm.layout_arguments import RECOMPUTE, VIRTUAL_STAGES
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.integrations.megatron_lm.stand_in import stand_in_device
from nest_megatron.megatron_core.stage import Where, smallest_dims
from nest_megatron.megatron_core.units import Layers, described_layers
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.parallel.rules import launched_expert_tensor_size

#: What concerns the whole model, other ranks or the run, by what: one layer has Megatron's default.
_NOT_OF_A_LAYER = {
    "stages": (
        "virtual_pipeline_model_parallel_size",
        *VIRTUAL_STAGES,
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "defer_embedding_wgrad_compute",
        "first_last_layers_bf16",
    ),
    "recomputation and offloading": (
        *RECOMPUTE,
        "distribute_saved_activations",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "fine_grained_activation_offloading",
        "offload_modules",
        "optimizer_cpu_offload",
    ),
    "replicas": (
        "use_distributed_optimizer",
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "align_param_gather",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
    ),
    "communication, which is priced by where its group lies": (
        "hierarchical_context_parallel_sizes",
        "hybrid_context_parallel",
        "cp_comm_type",
        "tp_comm_overlap",
        "tp_comm_overlap_cfg",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "moe_shared_expert_overlap",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
    ),
    "kernels launched as one, which a single block is not": (
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "enable_cuda_graph",
        "external_cuda_graph",
    ),
    "uneven load of experts": (
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
    ),
    "the run": (
        "rampup_batch_size",
        "load",
        "save",
        "pretrained_checkpoint",
        "use_checkpoint_args",
        "non_persistent_ckpt_type",
        "async_save",
        "encoder_num_layers",
        "encoder_seq_length",
        "fake_process_group",
    ),
}
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArguments:
    """What a job's layers are made from, as plain data.

    Args:
        argv: the script's own arguments.
        values: what Megatron's arguments are besides: a checkpoint's, or the script's own doing.
        defaults: what the script sets where the user says nothing.
    """

    script: str
    argv: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def job_arguments(command: ReadCommand, defaults: Mapping[str, Any]) -> JobArguments:
    """The arguments of a command; those at the recorded release's default are left out."""
    recorded = {argument.dest: argument.default for argument in load_arguments(command.version)}
    plain = {name: value for name, value in command.values.items() if _is_plain(value)}
    return JobArguments(
        script=command.script,
        argv=command.argv,
        values={name: value for name, value in plain.items() if value != recorded.get(name)},
        defaults={name: value for name, value in defaults.items() if _is_plain(value)},
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON, lists for tuples apart."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)


class JobLayers:
    """Makes a job's layers in the shape of a shard; a ``framework.stage.MakeLayers``.

    Args:
        where: what they run on.

    Raises:
        SystemExit: by Megatron's parser, for flags that it refuses.
    """

    def __init__(self, job: JobArguments, where: Where) -> None:
        self.job = job
        self.where = where
        self._default = _parsed(job.script, ())
        self._parsed = _with_values(_parsed(job.script, job.argv), job.values)

    def __call__(self, spec: TransformerSpec, shard: LayerShard) -> Layers:
        """The layers, where the groups of the shard exist.

        Args:
            spec: the model with a single decoder layer.

        Raises:
            Exception: whatever Megatron says of arguments that it refuses.
        """
        from megatron.training import arguments, global_vars

        args = self._arguments(spec, shard)
        global_vars.set_args(args)
        with contextlib.redirect_stdout(io.StringIO()):  # it lists all arguments each time
            with _validating(self.where):
                arguments.validate_args(args, dict(self.job.defaults))
            layers = _layers(spec, shard, args)
        _choose_attention(layers.config)
        return layers

    def _arguments(self, spec: TransformerSpec, shard: LayerShard) -> Namespace:
        """The job's arguments with one layer, for the smallest world that divides it so."""
        args = copy.deepcopy(self._parsed)
        for name in (name for names in _NOT_OF_A_LAYER.values() for name in names):
            if hasattr(self._default, name):
                setattr(args, name, copy.deepcopy(getattr(self._default, name)))
        for name, value in _shape(spec, shard).items():
            setattr(args, name, value)
        args.use_cpu_initialization = self.where is not Where.GPU
        windows = getattr(args, "window_attn_skip_freq", None)
        if isinstance(windows, list):
            args.window_attn_skip_freq = windows[:1]
        return args


def _shape(spec: TransformerSpec, shard: LayerShard) -> dict[str, Any]:
    """Arguments that say how one layer is divided.

    A context rank is a shorter sequence, as in ``framework.stage``.
    """
    dims = smallest_dims(spec, shard)
    micro = shard.micro_batch_size
    return {
        "rank": 0,
        "world_size": dims.world_size,
        "tensor_model_parallel_size": dims.tensor_model_parallel_size,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": dims.expert_model_parallel_size,
        "expert_tensor_parallel_size": launched_expert_tensor_size(spec, dims),
        "sequence_parallel": shard.sequence_parallel,
        "micro_batch_size": micro,
        "global_batch_size": micro * dims.data_parallel_size,
        "seq_length": spec.seq_length // shard.context_parallel_size,
        "num_layers": 1,
        "num_experts": spec.num_experts,
        "moe_layer_freq": 1,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": spec.mtp_num_layers,
        "padded_vocab_size": spec.padded_vocab_size(shard.tensor_model_parallel_size),
        "perform_initialization": False,
    }


def _parsed(script: str, argv: Sequence[str]) -> Namespace:
    """What Megatron's own parser makes of a command line; the script's own flags are passed over.

    Flags of scripts that are unknown to Megatron change no layer of it.
    """
    from megatron.training import arguments

    with mock.patch.object(sys, "argv", [script, *argv]):
        args: Namespace = arguments.parse_args(ignore_unknown_args=True)
    return args


def _with_values(args: Namespace, values: Mapping[str, Any]) -> Namespace:
    """The arguments with values that the running job has; those of Megatron's types stay."""
    for name, value in values.items():
        before = getattr(args, name, None)
        if _is_plain(before):
            setattr(args, name, tuple(value) if isinstance(before, tuple) else value)
    return args


@contextlib.contextmanager
def _validating(where: Where) -> Iterator[None]:
    """What Megatron's validation asks of the machine, where it is not there."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with contextlib.nullcontext() if where is Where.GPU else stand_in_device("cpu", 9, 1 << 36):
        yield


def _layers(spec: TransformerSpec, shard: LayerShard, args: Namespace) -> Layers:
    if spec.family is ModelFamily.BERT:
        return _bert_layers(spec, shard, args)
    builders = _builders()
    if builders is None:
        return _like_the_builders(spec, shard, args)
    described: dict[str, Any] = {}
    with mock.patch.object(builders, "GPTModel", lambda **given: described.update(given)):
        builders.gpt_builder(args, True, True)
    mtp = described.get("mtp_block_spec")
    return _of_block(
        spec,
        shard,
        described["config"],
        described["transformer_layer_spec"],
        mtp.layer_specs[0] if mtp is not None else None,
    )


def _builders() -> ModuleType | None:
    """The checkout's own builders, which lie beside its scripts."""
    try:
        return importlib.import_module("gpt_builders")
    except ModuleNotFoundError as error:
        if error.name != "gpt_builders":
            raise
        return None


def _like_the_builders(spec: TransformerSpec, shard: LayerShard, args: Namespace) -> Layers:
    """The same decisions by megatron-core alone, for scripts of other folders."""
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    uses_engine = args.transformer_impl == "transformer_engine"
    implementation = Implementation.TRANSFORMER_ENGINE if uses_engine else Implementation.LOCAL
    layers = described_layers(spec, shard, config, implementation)
    if args.spec is None:
        return layers
    return _of_block(spec, shard, config, import_module(args.spec), layers.mtp)


def _bert_layers(spec: TransformerSpec, shard: LayerShard, args: Namespace) -> Layers:
    """The layers of BERT's script. Source: ``pretrain_bert.model_provider`` (0.16.1)."""
    from megatron.core.models.bert import bert_layer_specs as specs
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    if args.spec is None:
        described = specs.get_bert_layer_with_transformer_engine_spec()
    elif args.spec[0] == "local":
        described = specs.bert_layer_local_spec
    else:
        described = import_module(args.spec)
    return _of_block(spec, shard, config, described, None)


def _of_block(
    spec: TransformerSpec, shard: LayerShard, config: Any, described: Any, mtp: Any
) -> Layers:
    """The single layer of a description, and the norm behind it, as a block of layers reads it."""
    from megatron.core.transformer.transformer_block import _get_block_submodules

    block = _get_block_submodules(config, described)
    return Layers(
        spec=spec,
        shard=shard,
        config=config,
        layer=block.layer_specs[-1],
        norm=block.layer_norm,
        mtp=mtp,
    )


def _choose_attention(config: Any) -> None:
    """Set what Transformer Engine's choice of a kernel follows, as a model does when it is built.

    Source: ``LanguageModule.__init__``.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    LanguageModule._set_attention_backend(SimpleNamespace(config=config))
