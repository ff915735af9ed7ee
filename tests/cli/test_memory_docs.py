"""The figures of ``docs/memory.md`` are what the formula says of Megatron's own script."""

from __future__ import annotations

import math
import re

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.cost_model.device_memory import (
    CONTEXT_BYTES,
    communicator_bytes,
    out_of_memory_probability,
    shipped_peak_errors,
)
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.memory import capacity_bytes
from nest_megatron.cost_model.memory_flags import NOT_MODELLED, READ
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.units import GIB
from tests import catalogue
from tests.cli.runs import ROOT
from tests.integrations.commands import LLAMA3_8B

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
TERMS = ("weights", "gradients", "optimizer", "activations", "working")
SHIPPED = " ".join(LLAMA3_8B.split())
FUSED, GATHER, NARROW = (
    "--cross-entropy-loss-fusion",
    "--fp8-param-gather",
    "--grad-reduce-in-bf16",
)
CONTEXT = "with the README's context-parallel size of 2"
ROWS = {
    "as shipped": SHIPPED,
    CONTEXT: SHIPPED,
    "with `--cross-entropy-fusion-impl te`": SHIPPED.replace(
        FUSED, f"{FUSED} --cross-entropy-fusion-impl te"
    ),
    "without `--fp8-param-gather`": SHIPPED.replace(GATHER, ""),
    "without that and `--grad-reduce-in-bf16`": SHIPPED.replace(GATHER, "").replace(NARROW, ""),
}


def memory_gib(command: str, context_ranks: int = 1) -> list[float]:
    """Terms of the memory of one GPU, and their sum, in the layout of the script."""
    composed = compose(parse(["cluster=dgx_h100"]), None)
    _, inputs = read_request(TypedCommand(text=command, version="0.16"), composed)
    grid = PartialLayout(
        dims=ParallelDims(
            context_parallel_size=context_ranks, data_parallel_size=8 // context_ranks
        ),
        global_batch_size=128,
        micro_batch_size=1,
        sequence_parallel=False,
        zero=ZeroStage.OPTIMIZER,
    )
    whole = StagePartition(
        boundaries=(0, len(inputs.spec.layer_kinds())), pipeline_model_parallel_size=1
    )
    model = CostModel(inputs.spec, inputs.cluster, inputs.settings)
    (stage,) = estimate(model, grid.with_stages(whole)).stages
    terms = [stage.memory_bytes[name] / 2**30 for name in TERMS]
    return [*terms, stage.peak_memory_bytes / 2**30]


@pytest.mark.parametrize("row", ROWS)
def test_the_example_at_the_limit(row: str) -> None:
    cells = " | ".join(f"{num:.1f}" for num in memory_gib(ROWS[row], 1 + (row == CONTEXT)))
    print(f"| {row} | {cells} |")
    assert f"| {row} | {cells} |" in PAGE


def test_the_page_names_flags_that_are_read() -> None:
    named = {name for name in {*READ} - {*NOT_MODELLED} if f"--{name.replace('_', '-')}" in PAGE}
    assert len(named) >= 18
    assert not any(f"| `--{name.replace('_', '-')}" in PAGE for name in NOT_MODELLED)


def test_what_a_device_has_is_that_of_the_catalogue() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [\d,]+ \(([\d.]+)\) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) > 10
    settings, error = CostSettings(), shipped_peak_errors()["replicated"]
    for name, shown, figures in rows:
        device = catalogue.accelerator(name)
        limit = capacity_bytes(device, settings)
        own = [device.memory_bytes, limit, limit * math.exp(-error.quantile(0.95))]
        assert [float(text) for text in figures.split("|")] == [round(x / GIB, 1) for x in own]
        assert 0.4 < float(shown) - device.memory_bytes / GIB < 3.0, name


def test_the_chances_are_those_of_the_page() -> None:
    device = catalogue.accelerator("h100_sxm_80gb")
    limit = capacity_bytes(device, CostSettings())
    chances = [
        round(100 * out_of_memory_probability(capacity_bytes(device, settings), limit, error))
        for error in shipped_peak_errors().values()
        for settings in (CostSettings(memory_margin=share) for share in (0.04, 0.1, 0.2))
    ]
    one, two, three, *sharded = chances
    text = " ".join(PAGE.split())
    assert f"the chance is {one} % for a plan that fills all of that, {two} %" in text
    assert f"and {three} % for a fifth" in text
    assert "sharded: {}, {} and {} %".format(*sharded) in text
    groups = ParallelDims(
        tensor_model_parallel_size=4, pipeline_model_parallel_size=4, data_parallel_size=64
    )
    taken = CONTEXT_BYTES + communicator_bytes(groups)
    assert f"{taken / GIB:.1f} GiB for TP 4, PP 4, DP 64" in text
