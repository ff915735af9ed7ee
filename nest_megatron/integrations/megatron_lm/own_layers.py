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
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from nest_megatron.config.job import ReadCommand
from nest_megatron.integrations.megatron_lm.inert_pickle import is_plain
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    RECOMPUTE,
    VIRTUAL_STAGES,
    Values,
    arguments_of,
)
from nest_megatron.integrations.megatron_lm.parser import defaults_of
from nest_megatron.integrations.process_variables import set_variables
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.megatron_core.stage import Where, smallest_dims
from nest_megatron.megatron_core.units import Layers, described_layers
from nest_megatron.model.execution import Implementation
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.units import Bytes

#: What concerns the whole model, other ranks or the run: one layer has Megatron's default.
_NOT_OF_A_LAYER = (*VIRTUAL_STAGES, *RECOMPUTE, *arguments_of("not_of_a_layer"))


@frozen
class JobArguments:
    """What a job's layers are made from, as plain data.

    Args:
        values: what Megatron's arguments are besides: a checkpoint's, or the script's own doing.
        defaults: what the script sets where the user says nothing.
    """

    script: str
    argv: tuple[str, ...]
    values: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)


def job_arguments(command: ReadCommand, defaults: Values) -> JobArguments:
    """The arguments of a command; those at the recorded release's default are left out."""
    recorded = defaults_of(command.version)
    return JobArguments(
        script=command.script,
        argv=command.argv,
        values={
            name: value
            for name, value in command.values.items()
            if is_plain(value) and value != recorded.get(name)
        },
        defaults={name: value for name, value in defaults.items() if is_plain(value)},
    )


class JobLayers:
    """Makes a job's layers in the shape of a shard; a ``megatron_core.stage.MakeLayers``.

    Raises:
        SystemExit: by Megatron's parser, for flags that it refuses.
    """

    def __init__(self, job: JobArguments, where: Where) -> None:
        self.job = job
        self.where = where
        default = vars(_parsed(job.script, ()))
        self._default = {name: default[name] for name in _NOT_OF_A_LAYER if name in default}
        self._parsed = args = _parsed(job.script, job.argv)
        for name, value in job.values.items():
            before = getattr(args, name, None)
            if is_plain(before):  # what is of Megatron's types stays
                setattr(args, name, tuple(value) if isinstance(before, tuple) else value)

    def __call__(self, spec: TransformerSpec, shard: LayerShard) -> Layers:
        """The layers of a model with one decoder layer, where the groups of the shard exist."""
        from megatron.core.models.common.language_module.language_module import LanguageModule
        from megatron.training import arguments, global_vars

        args = self._arguments(spec, shard)
        global_vars.set_args(args)
        set_variables({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        on_gpu = self.where is Where.GPU
        device = contextlib.nullcontext() if on_gpu else stand_in_device("cpu", 9, 1 << 36)
        with contextlib.redirect_stdout(io.StringIO()):  # it lists all arguments each time
            with device:
                arguments.validate_args(args, dict(self.job.defaults))
            layers = _layers(spec, shard, args)
        # choose the kernel as a model does when it is built
        LanguageModule._set_attention_backend(SimpleNamespace(config=layers.config))
        return layers

    def _arguments(self, spec: TransformerSpec, shard: LayerShard) -> Namespace:
        """The job's arguments with a layer in the place of its model, divided as the shard is."""
        args = copy.deepcopy(self._parsed)
        dims = smallest_dims(spec, shard)
        micro = shard.micro_batch_size
        vars(args).update(
            copy.deepcopy(self._default),
            rank=0,
            world_size=dims.world_size,
            tensor_model_parallel_size=dims.tensor_model_parallel_size,
            pipeline_model_parallel_size=1,
            context_parallel_size=1,  # such a rank is a shorter sequence (``megatron_core.stage``)
            expert_model_parallel_size=dims.expert_model_parallel_size,
            expert_tensor_parallel_size=launched_expert_tensor_size(spec, dims),
            sequence_parallel=shard.sequence_parallel,
            micro_batch_size=micro,
            global_batch_size=micro * dims.data_parallel_size,
            seq_length=spec.seq_length // shard.context_parallel_size,
            num_layers=1,
            num_experts=spec.num_experts,
            moe_layer_freq=1,
            moe_token_dispatcher_type="alltoall",
            mtp_num_layers=spec.mtp_num_layers,
            padded_vocab_size=spec.padded_vocab_size(shard.tensor_model_parallel_size),
            perform_initialization=False,
            use_cpu_initialization=self.where is not Where.GPU,
        )
        windows = getattr(args, "window_attn_skip_freq", None)
        if isinstance(windows, list):
            args.window_attn_skip_freq = windows[:1]
        return args


def _parsed(script: str, argv: Sequence[str]) -> Namespace:
    """What Megatron's own parser makes of a command line without the script's own flags."""
    from megatron.training import arguments

    with mock.patch.object(sys, "argv", [script, *argv]):
        args: Namespace = arguments.parse_args(ignore_unknown_args=True)
    return args


@contextlib.contextmanager
def stand_in_device(name: str, major: int, memory_bytes: Bytes) -> Iterator[None]:
    """Have torch describe a device that is not there, for Megatron's validation of arguments."""
    import torch

    device = SimpleNamespace(name=name, major=major, minor=0, total_memory=memory_bytes)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, 0)),
    ):
        yield


def _layers(spec: TransformerSpec, shard: LayerShard, args: Namespace) -> Layers:
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_block import _get_block_submodules
    from megatron.training.arguments import core_transformer_config_from_args

    mtp = None
    if spec.family is ModelFamily.BERT:
        config = core_transformer_config_from_args(args)
        # ``pretrain_bert.model_provider`` (0.16.1)
        from megatron.core.models.bert import bert_layer_specs

        if args.spec is None:
            described = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
        elif args.spec[0] == "local":
            described = bert_layer_specs.bert_layer_local_spec
        else:
            described = import_module(args.spec)
    elif (builders := _builders()) is not None:
        given: dict[str, Any] = {}
        with mock.patch.object(builders, "GPTModel", lambda **model: given.update(model)):
            builders.gpt_builder(args, True, True)
        config, described = given["config"], given["transformer_layer_spec"]
        block = given.get("mtp_block_spec")
        mtp = None if block is None else block.layer_specs[0]
    else:  # a script of another folder: the same decisions by megatron-core alone
        config = core_transformer_config_from_args(args)
        uses_engine = args.transformer_impl == "transformer_engine"
        made_by = Implementation.TRANSFORMER_ENGINE if uses_engine else Implementation.LOCAL
        layers = described_layers(spec, shard, config, made_by)
        if args.spec is None:
            return layers
        described, mtp = import_module(args.spec), layers.mtp
    # the single layer of a description, and the norm behind it, as a block of layers reads it
    block = _get_block_submodules(config, described)
    return Layers(
        spec=spec,
        shard=shard,
        config=config,
        layer=block.layer_specs[-1],
        norm=block.layer_norm,
        mtp=mtp,
    )


def _builders() -> ModuleType | None:
    try:
        return importlib.import_module("gpt_builders")
    except ModuleNotFoundError as error:
        if error.name != "gpt_builders":
            raise
        return None
