"""Layout strings: round trips, Megatron's grammar, and the split without a layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given

from nest_megatron.errors import UserInputError
from nest_megatron.layout.stage_layout import (
    StagePartition,
    expand_layout,
    layout_string,
    parse_layout,
    uniform_partition,
)
from nest_megatron.model.spec import TransformerSpec
from tests import catalogue
from tests.layout.cut_models import cut_models, make_spec


@given(cut_models())
def test_round_trip(case: tuple[TransformerSpec, StagePartition]) -> None:
    spec, partition = case
    text = layout_string(spec, partition)
    assert " " not in text
    again = parse_layout(text, spec, partition.pipeline_model_parallel_size)
    assert again == partition


def test_compact_form() -> None:
    spec = make_spec(61, 1)
    marks = (0, *range(5, 62, 4), len(spec.layer_kinds()))
    partition = StagePartition(boundaries=marks, pipeline_model_parallel_size=16)
    assert layout_string(spec, partition) == "Et*4|(t*4|)*14tmL"


def test_mtp_layers_are_written_one_by_one() -> None:
    spec = make_spec(4, 2)
    partition = StagePartition(boundaries=(0, 3, 7), pipeline_model_parallel_size=2)
    assert layout_string(spec, partition) == "Ett|ttmmL"


@pytest.mark.parametrize(
    "text",
    [
        "Et t|ttL",
        "Ett|tt|ttL",
        "tE|tttL",
        "Ett||tL|t",
        "Ett|ttx",
        "Etttt|L|",
        "(E(t|)*2)*2L",
        "Et*999999999|L",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UserInputError):
        parse_layout(text, make_spec(4), 2)


def test_the_example_is_the_same_everywhere_and_of_a_known_model() -> None:
    spec = catalogue.model("llama3_8b")
    with pytest.raises(UserInputError) as error:
        parse_layout("Et t|tL", spec, 2)
    example = error.value.fix.removeprefix("Write for example ").removesuffix(".")
    parse_layout(example, spec, 4)
    root = Path(__file__).parents[2]
    for page in ("docs/concepts.md", "docs/settings.md", "hydra_configs/plan.yaml"):
        said = (root / page).read_text().replace("\\|", "|")
        assert example in said, page


def test_split_mtp_layers_are_refused() -> None:
    with pytest.raises(UserInputError, match="one virtual stage"):
        parse_layout("Ett|ttm|m|L", make_spec(4, 2), 4)


def test_expand() -> None:
    assert expand_layout("Ettt|(tt|)*3,m|L") == ("Ettt", "tt", "tt", "tt", "m", "L")


def test_uniform() -> None:
    assert uniform_partition(make_spec(8), 4).boundaries == (0, 3, 5, 7, 10)
    assert uniform_partition(make_spec(8), 2, 2).boundaries == (0, 3, 5, 7, 10)
    uneven = uniform_partition(make_spec(8), 4, first=1, last=1)
    assert uneven.boundaries == (0, 2, 5, 8, 10)
    accounted = uniform_partition(make_spec(6), 4, account_embedding=True, account_loss=True)
    assert accounted.boundaries == (0, 2, 4, 6, 8)
    assert uniform_partition(make_spec(8, 2), 2).boundaries == (0, 5, 11)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "options"),
    [
        (6, 4, 1, {}),
        (8, 4, 3, {}),
        (8, 4, 1, {"first": 3}),
        (8, 4, 1, {"first": 4, "last": 4}),
        (8, 1, 1, {"last": 4}),
        (8, 4, 1, {"first": 2, "account_loss": True}),
        (8, 2, 1, {"first": 0}),
    ],
)
def test_uniform_refused(layers: int, pp: int, vpp: int, options: dict[str, int]) -> None:
    with pytest.raises(UserInputError):
        uniform_partition(make_spec(layers), pp, vpp, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("layers", [13, 33, 34])
def test_the_ends_that_are_proposed_are_taken(layers: int, pp: int, vpp: int) -> None:
    """Ends that virtual stages do not divide are not proposed."""
    spec = make_spec(layers)
    if layers % pp == 0:
        return
    with pytest.raises(UserInputError) as refused:
        uniform_partition(spec, pp, vpp)
    found = re.search(r"first-pipeline-num-layers (\d+) --\S+ (\d+)", refused.value.fix)
    assert (found is None) == (vpp > 1)
    if found is not None:
        uniform_partition(spec, pp, vpp, first=int(found[1]), last=int(found[2]))
