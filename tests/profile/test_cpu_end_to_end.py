"""Profile, plan, train and compare on this machine's cores: the benchmark's parts fit together.

Figures are the benchmark's affair (``benchmarks/cpu_end_to_end.py``): here other processes may take
the cores at any time, so no time is compared.
"""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import cpu_report
from benchmarks.cpu_end_to_end import CHOICE, run
from benchmarks.cpu_job import Layout, Trial
from benchmarks.cpu_ranks import Limits
from benchmarks.cpu_report import Outcome
from nest_megatron.layout.recompute import FULL_RECOMPUTE
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.store import FOLDER_VARIABLE, stored_entries

if find_spec("torch") is None or find_spec("megatron") is None:
    pytest.skip("torch and megatron-core are not installed", allow_module_level=True)
if (os.cpu_count() or 1) < 2:
    pytest.skip("two processes need two cores", allow_module_level=True)

#: Half a second a step at most.
SMALL = Trial(
    spec=TransformerSpec(
        name="gpt_small",
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=512,
        num_attention_heads=4,
        seq_length=128,
        vocab_size=1024,
    ),
    global_batch_size=8,
    layouts=(
        Layout(name="dp2", micro=4),
        Layout(name="dp2 zero1", micro=4, zero=ZeroStage.OPTIMIZER),
        Layout(name="tp2", tp=2, micro=8),
        Layout(name="tp2 sp", tp=2, micro=8, sequence_parallel=True),
        Layout(name="pp2", pp=2, micro=2, layers=(2, 2)),
        Layout(name="pp2 vpp2", pp=2, micro=2, layers=(1, 1, 1, 1)),
        Layout(name="pp2 alone", pp=2, micro=8, layers=(2, 2)),
        Layout(name="pp2 alone, full", pp=2, micro=8, layers=(2, 2), recompute=FULL_RECOMPUTE),
    ),
    micro_batch_sizes=(1, 2, 4, 8),
    rounds=1,
    passes=3,
    network_s=300.0,
    largest_bytes=16 << 20,
    warm_up=1,
    steps=3,
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder / "profiles"))
        found = run(SMALL, folder)
        assert [
            {timing.block for timing in entry.read().timings} for entry in stored_entries()
        ] == [{LayerBlock.ATTENTION, LayerBlock.DENSE, LayerBlock.EMBEDDING, LayerBlock.HEAD}]
    return found


def test_it_ends_with_its_time_and_says_how_far_it_came(tmp_path: Path) -> None:
    said: list[str] = []
    limits = Limits(max_seconds=0.2, tell=said.append)
    with pytest.raises(RuntimeError, match=r"not done within 0\.2 s: 0 of 2 calls"):
        run(SMALL, tmp_path, limits)
    assert said == ["1. the cores and the network"]


def test_every_time_was_measured(outcome: Outcome) -> None:
    """No block of any layout, the planner's among them, is taken from a data sheet."""
    for row in outcome.rows.values():
        assert row.plan.provenance.profile.endswith(": 4 measured")
    assert outcome.optimizer_step_s > 0
    level = outcome.rows[outcome.choice].plan.cluster.levels[0]
    assert level.source.startswith("measured: 2 ranks on 1 host (")


def test_every_layout_ran(outcome: Outcome) -> None:
    names = [layout.name for layout in SMALL.layouts]
    assert list(outcome.rows) in (names, [*names, CHOICE])
    assert outcome.choice in outcome.rows
    for row in outcome.rows.values():
        assert 0 < row.measured_s < 60
        assert 0 < row.predicted_s < 60
        assert row.loss == pytest.approx(math.log(SMALL.spec.vocab_size), rel=0.2)
        assert row.memory_bytes > 0


def test_the_planner_found_nothing_slower_than_it_was_given(outcome: Outcome) -> None:
    """Its space holds all but tensor ranks without sequence parallelism."""
    plans = [row.plan for row in outcome.rows.values()]
    within = [
        plan.predicted.iteration_time_s
        for plan in plans
        if plan.layout.sequence_parallel or plan.layout.dims.tensor_model_parallel_size == 1
    ]
    chosen = outcome.rows[outcome.choice]
    assert chosen.predicted_s == pytest.approx(min(within), rel=1e-9)
    assert chosen.plan.search.certificate == "optimal"


def test_the_page_and_the_figures_hold_every_layout(outcome: Outcome) -> None:
    page, text = cpu_report.as_markdown(outcome), cpu_report.as_text(outcome)
    document = json.loads(json.dumps(cpu_report.as_document(outcome)))
    assert len(document["layouts"]) == len(outcome.rows)
    for name in outcome.rows:
        assert name in page
        assert name in text
    assert page.count("**") == 2, "the one bold sentence is what docs/accuracy.md quotes"
    assert all(math.isfinite(document[key]) for key in ("mape_pct", "regret_pct", "seconds"))
