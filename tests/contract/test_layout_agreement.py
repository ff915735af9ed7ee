"""Layouts and even splits against megatron-core's own code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from nest_megatron.errors import UserInputError
from nest_megatron.layout.rulebook.schedule import decoder_layers, mtp_chunk, mtp_chunk_fits
from nest_megatron.layout.stage_layout import (
    StagePartition,
    layout_string,
    parse_layout,
    uniform_partition,
)
from nest_megatron.model.spec import TransformerSpec
from tests.contract.megatron_shims import torch
from tests.layout.cut_models import cut_models, make_spec


@settings(max_examples=200, deadline=None)
@given(cut_models())
def test_megatron_reads_our_layout(case: tuple[TransformerSpec, StagePartition]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    spec, partition = case
    pp = partition.pipeline_model_parallel_size
    read = PipelineParallelLayerLayout(layout_string(spec, partition), pp)
    layers = decoder_layers(spec, partition)
    for chunk in range(partition.num_chunks):
        row = read.layout[chunk % pp][chunk // pp]
        assert row.count(LayerType.decoder) == layers[chunk]
        assert row.count(LayerType.embedding) == (chunk == 0)
        assert row.count(LayerType.loss) == (chunk == partition.num_chunks - 1)
    chunk = mtp_chunk(spec, partition)
    if chunk is None or mtp_chunk_fits(chunk, pp, read.virtual_pipeline_model_parallel_size):
        read.validate_layer_layout(spec.num_layers, spec.mtp_num_layers)


@pytest.mark.parametrize("text", ["E t|tt|tL|", "Ex|L"])
def test_megatron_refuses_what_we_refuse(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    with pytest.raises(AssertionError):
        PipelineParallelLayerLayout(text, 1).validate_layer_layout(4, 0)
    with pytest.raises(UserInputError):
        parse_layout(text, make_spec(4), 1)


@pytest.mark.parametrize("layers", [1, 2, 4, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"first": 2},
        {"last": 1},
        {"first": 3, "last": 1},
        {"account_embedding": True},
        {"account_loss": True},
        {"account_embedding": True, "account_loss": True},
    ],
)
def test_even_splits_are_megatrons(layers: int, pp: int, vpp: int, options: dict[str, int]) -> None:
    theirs = _megatron_split(layers, pp, vpp, options)
    try:
        partition = uniform_partition(make_spec(layers), pp, vpp, **options)  # type: ignore[arg-type]
    except UserInputError:
        ours = None
    else:
        ours = list(decoder_layers(make_spec(layers), partition))
    empty = theirs is not None and min(theirs) < 1 and ours is None  # it even takes -1 layers
    if pp == 1 or empty:
        return  # one stage takes no such option; a stage without a unit is ours to refuse
    assert ours == theirs


def _megatron_split(layers: int, pp: int, vpp: int, options: dict[str, int]) -> list[int] | None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=8,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype=torch.bfloat16,
            num_layers_in_first_pipeline_stage=options.get("first"),
            num_layers_in_last_pipeline_stage=options.get("last"),
            account_for_embedding_in_pipeline_split=options.get("account_embedding", False),
            account_for_loss_in_pipeline_split=options.get("account_loss", False),
        )
        return [
            get_num_layers_to_build(config, vp_stage=k // pp, pp_rank=k % pp)
            for k in range(pp * vpp)
        ]
    except (AssertionError, ValueError):
        return None
