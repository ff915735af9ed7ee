"""The cut that a user's flags make, against megatron-core's own layers and offsets."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    STAGE_OPTIONS,
    partition_of_values,
    states_stages,
)
from nest_megatron.layout.rulebook.schedule import decoder_layers, mtp_chunk, mtp_chunk_fits
from nest_megatron.layout.stage_layout import StagePartition, layout_string
from nest_megatron.model.spec import TransformerSpec
from tests.layout.cut_models import cut_models, make_spec

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated")

LAYOUT, FIRST, LAST, EMBEDDING, LOSS, _ = STAGE_OPTIONS
LAYERS_A_STAGE = "num_layers_per_virtual_pipeline_stage"
STAGES_A_RANK = "num_virtual_stages_per_pipeline_rank"

#: For each virtual stage its first layer, its layers and its MTP layers; ``None`` if refused.
Built = list[tuple[int, int, int]] | None


def ours(spec: TransformerSpec, values: Mapping[str, Any], pp: int) -> Built:
    try:
        partition = partition_of_values(spec, values, pp)
    except UserInputError:
        return None
    assert partition is not None
    layers = decoder_layers(spec, partition)
    offsets = [0, *accumulate(layers)]
    mtp = mtp_chunk(spec, partition)
    assert partition.boundaries[1] >= 1
    return [
        (offsets[k], layers[k], spec.num_mtp_layers if k == mtp else 0)
        for k in range(partition.num_chunks)
    ]


def virtual_size(spec: TransformerSpec, values: Mapping[str, Any], pp: int) -> int | None:
    """Megatron's arguments.py:503-585, line by line."""
    layout, direct, layers = (values.get(name) for name in (LAYOUT, STAGES_A_RANK, LAYERS_A_STAGE))
    assert sum(value is not None for value in (layout, direct, layers)) <= 1
    total = spec.num_layers + bool(values.get(EMBEDDING)) + bool(values.get(LOSS))
    uneven = values.get(FIRST) is not None or values.get(LAST) is not None
    virtual = None
    if layout is not None:
        virtual = layout.count("|") + 1
        assert virtual % pp == 0
        virtual //= pp
    elif layers is not None:
        assert not uneven
        assert total % pp == 0
        assert total // pp % layers == 0
        virtual = total // pp // layers
    elif direct is not None:
        virtual = direct
    elif not uneven:
        assert total % pp == 0
    if virtual in (None, 1):
        return None
    assert pp > 1
    return virtual


def megatron(spec: TransformerSpec, values: Mapping[str, Any], pp: int) -> Built:
    """What megatron-core builds; its own refusals of any kind are ``None``."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    try:
        virtual = virtual_size(spec, values, pp)
        return _built(spec, values, pp, virtual)
    except (AssertionError, ValueError, ZeroDivisionError, IndexError):
        return None


def _built(spec: TransformerSpec, values: Mapping[str, Any], pp: int, virtual: int | None) -> Built:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = _config(spec, values, pp, virtual)
    built = []
    for chunk in range(pp * (virtual or 1)):
        stage = chunk // pp if virtual else None
        with (
            mock.patch.object(
                parallel_state, "get_pipeline_model_parallel_rank", return_value=chunk % pp
            ),
            mock.patch.object(
                parallel_state,
                "get_virtual_pipeline_model_parallel_world_size",
                return_value=virtual,
            ),
        ):
            count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=chunk % pp)
            offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=chunk % pp)
        built.append((offset, count, _mtp_layers(config, chunk, pp, virtual or 1)))
    return built


def _config(spec: TransformerSpec, values: Mapping[str, Any], pp: int, virtual: int | None) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    logging.getLogger("megatron").setLevel(logging.ERROR)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=64,
        num_attention_heads=8,
        mtp_num_layers=spec.mtp_num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_layout=values.get(LAYOUT),
        num_layers_in_first_pipeline_stage=values.get(FIRST),
        num_layers_in_last_pipeline_stage=values.get(LAST),
        account_for_embedding_in_pipeline_split=bool(values.get(EMBEDDING)),
        account_for_loss_in_pipeline_split=bool(values.get(LOSS)),
    )


def _mtp_layers(config: Any, chunk: int, pp: int, virtual: int) -> int:
    """Source: ``multi_token_prediction.get_mtp_num_layers_to_build``."""
    from megatron.core.transformer.enums import LayerType

    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return int(layout.layout[chunk % pp][chunk // pp].count(LayerType.mtp))
    return (config.mtp_num_layers or 0) if chunk == pp * virtual - 1 else 0


def is_whole(built: Built, spec: TransformerSpec) -> bool:
    """Every layer is built once. Megatron takes splits where that is not so, and trains on."""
    if built is None:
        return False
    ends = [offset + count for offset, count, _ in built]
    starts = [offset for offset, _, _ in built]
    tiled = all(end == start for end, start in zip(ends, starts[1:], strict=False))
    counts = [count for _, count, _ in built]
    return starts[0] == 0 and tiled and ends[-1] == spec.num_layers and min(counts) >= 0


VIRTUAL: tuple[dict[str, int], ...] = (
    {},
    *({STAGES_A_RANK: n} for n in (0, 1, 2, 3)),
    *({LAYERS_A_STAGE: n} for n in (0, 1, 2, 3)),
    {STAGES_A_RANK: 2, LAYERS_A_STAGE: 2},
)
ENDS = (None, 0, 1, 2, 3, 4, 6, 8)


def cuts() -> Iterator[dict[str, Any]]:
    for first, last in product(ENDS, ENDS):
        for embedding, loss in product((False, True), repeat=2):
            if first is last is None or not (embedding or loss) or first == last == 2:
                yield {FIRST: first, LAST: last, EMBEDDING: embedding, LOSS: loss}


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layers", [4, 6, 7, 8, 11, 12])
def test_splits_are_megatrons(pp: int, layers: int) -> None:
    spec = make_spec(layers, random.Random(layers).choice([None, 1, 2]))
    for cut, virtual in product(cuts(), VIRTUAL):
        values = {**cut, **virtual}
        if not (any(states_stages(cut, name) for name in cut) or any(virtual.values())):
            assert partition_of_values(spec, values, pp) is None
            continue
        theirs = megatron(spec, values, pp)
        two_ends_of_one_rank = pp == 1 and None not in (cut[FIRST], cut[LAST])
        expected = theirs if is_whole(theirs, spec) and not two_ends_of_one_rank else None
        assert ours(spec, values, pp) == expected, values


@settings(max_examples=300, deadline=None)
@given(cut_models())
def test_layouts_are_megatrons(case: tuple[TransformerSpec, StagePartition]) -> None:
    spec, partition = case
    pp = partition.pipeline_model_parallel_size
    values = {LAYOUT: layout_string(spec, partition)}
    theirs = megatron(spec, {LAYOUT: _written_out(values[LAYOUT])}, pp)
    mtp, virtual = mtp_chunk(spec, partition), partition.num_chunks // pp
    if mtp is not None and not mtp_chunk_fits(mtp, pp, virtual):
        first_rank = mtp % pp == 0 and mtp // pp == virtual - 1
        assert theirs is None or first_rank  # a rule of Megatron that its own check overlooks
        theirs = None
    assert ours(spec, values, pp) == theirs
    if theirs:
        assert partition_of_values(spec, values, pp) == partition


def _written_out(text: str) -> str:
    """The layout without repetitions, whose bars can be counted."""
    from nest_megatron.layout.stage_layout import expand_layout

    return "|".join(expand_layout(text))


@pytest.mark.parametrize(
    ("text", "pp"),
    [
        ("", 1),
        ("EttttL", 2),
        ("Ett|ttL", 1),
        ("E tt|ttL", 2),
        ("Ett|tL", 2),
        ("tE|tttL", 2),
        ("Ett|tt|L", 2),
        ("Ett|ttm|L", 3),
    ],
)
def test_layouts_that_both_refuse(text: str, pp: int) -> None:
    assert megatron(make_spec(4), {LAYOUT: text}, pp) is None
    assert ours(make_spec(4), {LAYOUT: text}, pp) is None


def test_an_empty_stage_is_ours_to_refuse() -> None:
    values = {LAYOUT: "Ett||tt|L"}
    assert megatron(make_spec(4), values, 4) == [(0, 2, 0), (2, 0, 0), (2, 2, 0), (4, 0, 0)]
    with pytest.raises(UserInputError, match="every virtual stage holds a unit"):
        partition_of_values(make_spec(4), values, 4)


@pytest.mark.parametrize(
    "other",
    [
        {FIRST: 2},
        {LAST: 2},
        {EMBEDDING: True},
        {LOSS: True},
        {LAYERS_A_STAGE: 1},
        {STAGES_A_RANK: 2},
    ],
)
def test_a_layout_stands_alone(other: dict[str, Any]) -> None:
    values = {LAYOUT: "Et|t|t|tL", **other}
    assert megatron(make_spec(4), values, 2) is None
    with pytest.raises(UserInputError, match=f"beside {next(iter(other))}"):
        partition_of_values(make_spec(4), values, 2)
    assert ours(make_spec(4), {LAYOUT: "Et|t|t|tL", **dict.fromkeys(other)}, 2) is not None


def test_no_cut_is_none() -> None:
    nothing = {LAYOUT: None, FIRST: None, LAST: None, EMBEDDING: False, LOSS: False}
    assert partition_of_values(make_spec(7), nothing, 4) is None


@pytest.mark.parametrize(
    ("values", "pp", "said"),
    [
        ({EMBEDDING: True}, 0, "--pipeline-model-parallel-size = 0"),
        ({FIRST: 2, LOSS: True}, 2, "--decoder-first-pipeline-num-layers = 2: Megatron refuses it"),
        ({FIRST: 2, LAYERS_A_STAGE: 1}, 2, "beside num_layers_per_virtual_pipeline_stage"),
        ({FIRST: 4, LAST: 4, STAGES_A_RANK: 2}, 2, "needs a rank between"),
        ({EMBEDDING: True, LOSS: True, LAYERS_A_STAGE: 2}, 2, "10 layers, embedding and loss"),
        ({EMBEDDING: True, LOSS: True, STAGES_A_RANK: 0}, 2, "stages-per-pipeline-rank = 0"),
        ({FIRST: 4, LAST: 4}, 3, "0 layers are left for 1 middle"),
        ({FIRST: 9}, 2, "-1 layers are left"),
        ({EMBEDDING: True}, 2, "multiple of the 2 pipeline ranks"),
        ({LAST: 4, STAGES_A_RANK: 3}, 2, "must divide the 4 layers"),
        ({EMBEDDING: True, LOSS: True, STAGES_A_RANK: 2}, 1, "more than one pipeline rank"),
    ],
)
def test_refusals_name_the_limit(values: dict[str, Any], pp: int, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        partition_of_values(make_spec(8), values, pp)


def test_mtp_layers_follow_the_layout_or_the_last_layer() -> None:
    spec = make_spec(6, 2)
    accounted = partition_of_values(spec, {EMBEDDING: True, LOSS: True}, 4)
    assert accounted is not None
    assert [len(units) for units in map(accounted.chunk, range(4))] == [2, 2, 2, 3]
    apart = partition_of_values(spec, {LAYOUT: "Ettt|ttt|mm|L"}, 4)
    assert apart is not None
    assert apart.boundaries == (0, 4, 7, 8, 9)
    with pytest.raises(UserInputError, match="m in stage 1 of 2"):
        partition_of_values(spec, {LAYOUT: "Et*6mm|L"}, 2)
