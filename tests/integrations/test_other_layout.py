"""A plan beside other layouts: differences that add up, rules, bytes, the nearest legal layout."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from nest_megatron import api
from nest_megatron.api import Explanation, load_plan
from nest_megatron.config.keywords import read_layout
from nest_megatron.config.policy import VARIABLE
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import other_layout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import EndedEarly, NoPlan, Request
from nest_megatron.planner import plan as find_plan
from tests.cli.runs import ROOT, run

EXPERTS = ROOT / "recipes" / "mixtral_8x7b_dgx_h100_64.yaml"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of this version."""
    plan = api.plan(model="llama3_8b", cluster="dgx_h100", num_gpus=16, global_batch_size=64)
    found = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan.save(found)
    return found


@pytest.fixture(scope="module")
def explained(path: Path) -> Explanation:
    return load_plan(path).explain()


@pytest.mark.parametrize("layout", ["tp=4", "tp=2,pp=2,mbs=1", "zero=0", "pp=4,vpp=2"])
def test_differences_add_up_to_the_difference_of_the_steps(
    explained: Explanation, layout: str
) -> None:
    found = explained.versus(layout)
    before, after = found.plan.predicted, found.other.predicted
    step = after.iteration_time_s - before.iteration_time_s
    assert math.fsum(found.terms.values()) == pytest.approx(step, abs=1e-9)
    assert found.difference.seconds == step
    assert sum(found.memory.values()) == after.peak_memory_bytes - before.peak_memory_bytes
    assert before == explained.plan.predicted
    low, high = found.difference.low_percent, found.difference.high_percent
    assert low <= found.difference.percent <= high


def test_other_layouts_have_the_rates_of_the_plan(tmp_path: Path) -> None:
    rates = {"gpu_hour": 2.5, "gpu_watts": 1000.0}
    job = {"model": "llama3_8b", "cluster": "dgx_h100", "num_gpus": 16, "global_batch_size": 64}
    plan = api.plan(
        **job, cost=rates, train={"tokens": 10**12}, reliability={"mtbf_hours": 50_000.0}
    )
    plan.save(tmp_path / "plan.yaml")
    found = load_plan(tmp_path / "plan.yaml").explain().versus("mbs=2,tp=4")
    own, other, said = found.plan.price, found.other.price, plan.record.price
    assert own is not None
    assert other is not None
    assert said is not None
    assert own.run_dollars == pytest.approx(said.run_dollars)
    assert own.run_mwh == pytest.approx(said.run_mwh)
    steps = found.other.predicted.iteration_time_s / found.plan.predicted.iteration_time_s
    assert other.run_dollars == pytest.approx(steps * said.run_dollars, rel=0.01)


def test_the_other_layout_is_priced_as_estimate_prices_it(explained: Explanation) -> None:
    words = "tensor_model_parallel_size=4,pipeline_model_parallel_size=2,micro_batch_size=1"
    priced = api.estimate(
        model="llama3_8b",
        cluster="dgx_h100",
        num_gpus=16,
        global_batch_size=64,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        micro_batch_size=1,
    )
    found = explained.versus(f"{words},recompute=none").other
    assert found.layout.dims.data_parallel_size == priced.layout.dims.data_parallel_size
    assert (
        found.predicted.stages[0].memory_bytes["weights"]
        == (priced.predicted.stages[0].memory_bytes["weights"])
    )
    overlaps = found.layout.execution.tp_comm_overlap  # as plans have it, and an estimate has not
    assert overlaps != priced.record.layout.execution.tp_comm_overlap


def test_the_plan_against_itself_is_no_difference(explained: Explanation) -> None:
    size = explained.plan.layout.dims.tensor_model_parallel_size
    found = explained.versus(f"tp={size}")
    assert found.difference.seconds == 0
    assert set(found.memory.values()) == {0}
    assert not any(found.terms.values())


@pytest.mark.parametrize(
    "layout",
    [
        "tp=8,pp=4",
        "parallel.tensor_model_parallel_size=8, parallel.pipeline_model_parallel_size=4",
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size=4",
        "tensor-model-parallel-size=8,PP=4",
    ],
)
def test_layouts_are_read_in_all_spellings(layout: str) -> None:
    parallel = read_layout(layout, "--why-not").parallel
    assert parallel.tensor_model_parallel_size == 8
    assert parallel.pipeline_model_parallel_size == 4


def test_a_stage_layout_keeps_its_commas() -> None:
    composed = read_layout("pp=2,recompute_modules=[core_attn,mlp],recompute=selective", "--versus")
    assert composed.parallel.recompute_modules == ("core_attn", "mlp")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tq=8", "says nothing of a layout"),
        ("tp", "has no value"),
        ("tp=null", "has no value"),
        ("", "names no size"),
        ("tp=8,tp=4", "is given as well"),
        ("tp=eight", "must be a whole number"),
        ("tp='8", "quot"),
        ("tp=1,2", "it has several values"),
    ],
)
def test_wrong_words_are_named(layout: str, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        read_layout(layout, "--versus")


def test_what_megatron_refuses_is_refused_with_its_rule(explained: Explanation) -> None:
    with pytest.raises(UserInputError, match="must divide the plan's 16 GPUs"):
        explained.versus("tp=3")
    with pytest.raises(
        UserInputError, match=r"needs pipeline_model_parallel_size above 1.*arguments.py:575"
    ):
        explained.versus("pp=1,vpp=2")


def test_an_illegal_layout_has_a_rule_and_a_legal_neighbour() -> None:
    found = load_plan(EXPERTS).explain().why_not("tp=8,pp=4,ep=16")
    assert found.verdict == "illegal"
    assert "arguments.py:1025" in found.rule
    nearest = found.nearest
    assert nearest is not None
    assert found.changed == ("expert_model_parallel_size",)
    assert nearest.layout.dims.tensor_model_parallel_size == 8
    assert nearest.layout.dims.pipeline_model_parallel_size == 4
    assert nearest.layout.dims.expert_model_parallel_size == 8
    assert nearest.predicted.fits
    assert "EP 16 -> 8" in str(found)


def test_sizes_of_experts_are_refused_without_experts(explained: Explanation) -> None:
    found = explained.why_not("tp=4,ep=2")
    assert found.verdict == "illegal"
    assert "expert_model_parallel_size" in found.rule
    assert found.changed == ("expert_model_parallel_size",)


def test_a_layout_that_does_not_fit_has_its_bytes(explained: Explanation) -> None:
    found = explained.why_not("tp=1,pp=1,zero=0,mbs=8")
    assert found.verdict == "does not fit"
    versus, needed = found.versus, found.needed_bytes
    assert versus is not None
    assert needed is not None
    assert needed > versus.other.predicted.capacity_bytes
    assert needed <= versus.other.predicted.peak_memory_bytes
    nearest = found.nearest
    assert nearest is not None
    assert nearest.predicted.fits


def test_a_legal_layout_says_what_it_loses(explained: Explanation) -> None:
    found = explained.why_not("tp=8,mbs=1")
    assert found.verdict in ("slower", "tie")
    versus = found.versus
    assert versus is not None
    assert versus.other.predicted.fits
    assert versus.other.layout.dims.tensor_model_parallel_size == 8
    assert versus.difference.seconds > 0
    assert "legal and fits, but" in str(found)
    assert found.nearest is None


def test_the_command_line_says_the_same(path: Path) -> None:
    done = run("explain", str(path), "--versus", "tp=4", "--json")
    document = done.json()
    step = document["other"]["predicted"]["iteration_time_s"]
    own = document["plan"]["predicted"]["iteration_time_s"]
    assert document["difference"]["seconds"] == step - own
    printed = run("explain", str(path), "--versus", "tp=4")
    assert printed.code == 0
    assert "Step by term" in printed.out
    assert run("explain", str(path), "--why-not", "tp=3", "--json").json()["verdict"] == "illegal"


@pytest.mark.parametrize(
    "words",
    [
        ("--versus", "tp=2", "--why-not", "tp=2"),
        ("--versus", "tp=3"),
        ("--why-not", "layers=3"),
        ("--why-not", "sequence_parallel=false"),
    ],
)
def test_bad_questions_end_with_2(path: Path, words: tuple[str, ...]) -> None:
    done = run("explain", str(path), *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--versus", ""), "--versus = ''"),
        (("--why-not", "pipeline_model_parallel_layout="), "pipeline_model_parallel_layout = ''"),
    ],
)
def test_an_empty_layout_is_no_layout_that_is_left_out(
    path: Path, words: tuple[str, ...], named: str
) -> None:
    done = run("explain", str(path), *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {named}")


def test_where_time_ends_a_search_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def ended(request: Request) -> ParallelPlan | NoPlan | EndedEarly:
        begun.append(request.begun_s)
        found = find_plan(request)
        if isinstance(found, ParallelPlan):
            found = dataclasses.replace(
                found, search=dataclasses.replace(found.search, certificate="gap")
            )
        return found

    monkeypatch.setattr(other_layout, "find_plan", ended)
    found = load_plan(EXPERTS).explain().why_not("tp=8,pp=4,ep=16")
    assert found.to_dict()["bounded"]
    assert "Time ended the search after 20 s" in " ".join(str(found).split())
    assert None not in begun
    assert len(set(begun)) == 1, "all of them have one time"
    monkeypatch.undo()
    assert not load_plan(EXPERTS).explain().why_not("tp=3").to_dict()["bounded"]


def test_the_stages_of_both_layouts_are_said(explained: Explanation) -> None:
    said = " ".join(str(explained.versus("tp=1,pp=4,vpp=2")).split())
    assert "PP 4, VPP 2," in said
    assert re.search(r", stages Et\*\d\S*\|\S*L ", said)
    assert " stages Et*32L " in " ".join(str(explained.versus("tp=4,pp=1")).split())


def test_sharding_that_is_not_named_is_searched_as_for_the_plan() -> None:
    """A plan with one replica shards nothing; layouts with more of them may."""
    job = {"model": "llama3_8b", "cluster": "alps_gh200", "num_gpus": 4, "global_batch_size": 8}
    plan = api.plan(**job)
    best = api.plan(**job, context_parallel_size=2)
    assert int(plan.layout.zero) == 0
    assert int(best.layout.zero) == 1
    versus = plan.explain().why_not("cp=2").versus
    assert versus is not None
    assert versus.other.layout == best.layout
    kept = dataclasses.replace(plan.record.search, space={"zero_stage": "0"})
    record = dataclasses.replace(plan.record, search=kept, alternatives=())
    only = dataclasses.replace(plan, record=record)
    versus = only.explain().why_not("cp=2").versus
    assert versus is not None
    assert int(versus.other.layout.zero) == 0


def test_a_runner_up_whose_layers_run_otherwise_is_not_called_slower() -> None:
    job = {"model": "mixtral_8x7b", "cluster": "h200", "num_gpus": 32, "global_batch_size": 128}
    plan = api.plan(**job, precision="fp8")
    known = [each for each in plan.alternatives if each.layout.dims.tensor_model_parallel_size == 1]
    assert known
    assert known[0].layout.execution != plan.layout.execution
    versus = plan.explain().why_not("tp=1").versus
    assert versus is not None
    assert versus.other.predicted.iteration_time_s <= 1.01 * known[0].iteration_time_s


def test_sizes_that_the_plan_has_are_no_question(explained: Explanation) -> None:
    size = explained.plan.record.layout.sizes["tensor_model_parallel_size"]
    said = str(explained.why_not(f"tp={size}"))
    assert said.strip() == f"TP {size}: the plan has these sizes."


def test_what_a_policy_forbids_is_not_called_legal(
    explained: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("plan:\n  ranges:\n    tensor_model_parallel_size: [2, 8]\n")
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(file))
    found = explained.why_not("tp=1")
    assert (found.verdict, found.versus) == ("illegal", None)
    assert found.rule.startswith("a policy forbids it: tensor_model_parallel_size = 1: it is 2 to")
    assert found.nearest is not None
    assert found.nearest.layout.sizes["tensor_model_parallel_size"] >= 2


def test_the_nearest_layout_leaves_what_a_policy_wants_free(
    explained: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "plan:\n  ranges:\n    tensor_model_parallel_size: [1, 4]\n  least_memory_free: 0.2\n"
    )
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(file))
    nearest = explained.why_not("tp=8").nearest
    assert nearest is not None
    predicted = nearest.predicted
    assert predicted.peak_memory_bytes <= 0.8 * nearest.cluster.accelerator.memory_bytes


@pytest.mark.parametrize("chance", [0.001, 0.5])
def test_other_layouts_run_out_of_memory_as_rarely_as_the_plan(chance: float) -> None:
    """A narrow chance: one that the plan may not have is not called faster."""
    job: dict[str, Any] = {"model": "llama3_8b", "cluster": "dgx_h100", "num_gpus": 16}
    plan = api.plan(**job, global_batch_size=64, max_oom_chance=chance, tie_percent=0)
    sizes = plan.record.layout.sizes
    own = plan.explain().why_not(f"tp={sizes['tensor_model_parallel_size']}")
    assert "the plan has these sizes" in str(own)
    other = plan.explain().why_not("tp=2,mbs=2").versus
    assert other is not None
    assert other.other.uncertainty.out_of_memory <= chance
    assert other.difference.percent >= 0


EXCHANGES = [
    ("a2a+p2p", ["--hierarchical-context-parallel-sizes", "2", "2"], 2, "p2p"),
    ("a2a+p2p", ["--hierarchical-context-parallel-sizes", "2", "2"], 4, "a2a+p2p"),
    ("a2a", [], 8, "p2p"),
    ("p2p", ["--window-size", "1024", "0"], 2, "a2a"),
]


@pytest.mark.parametrize(("exchange", "more", "size", "other"), EXCHANGES)
def test_other_numbers_of_context_ranks_exchange_as_they_can(
    exchange: str, more: list[str], size: int, other: str
) -> None:
    """Two levels are those of one size, and heads divide among the ranks of some sizes."""
    words = (
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 16384 --max-position-embeddings 16384 --bf16 "
        "--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm "
        "--vocab-size 32000 --tokenizer-type NullTokenizer --global-batch-size 64 "
        f"--context-parallel-size {4 if exchange != 'p2p' else 1} --cp-comm-type {exchange} "
        "--use-distributed-optimizer "
        "--micro-batch-size 1"
    )
    explained = api.estimate_command([*words.split(), *more], cluster="dgx_h100").explain()
    beside, found = explained.versus(f"cp={size}"), explained.why_not(f"cp={size}")
    assert beside.other.layout.execution.cp_comm_type.value == other
    assert found.verdict != "illegal"
    assert found.versus is not None
    assert found.versus.other.predicted.iteration_time_s <= beside.other.predicted.iteration_time_s


def test_a_plan_of_a_recipe_is_held_to_no_rule_of_the_command_line() -> None:
    """Megatron-Bridge does not compare positions with the sequence."""
    job = {"model": "megatron_5b", "cluster": "dgx_h100", "num_gpus": 8, "seq_length": 4096}
    plan = api.estimate(**job, target="megatron_bridge_0.6", tensor_model_parallel_size=4)
    assert plan.model.max_position_embeddings == 2048
    assert plan.explain().versus("tp=2").other.layout.dims.tensor_model_parallel_size == 2
    with pytest.raises(UserInputError, match=r"megatron-core \S+ refuses it"):
        plan.explain().versus("ep=2")


def test_a_plan_of_megatron_lm_is_refused_by_megatron_lm(explained: Explanation) -> None:
    with pytest.raises(UserInputError, match=r"Megatron-LM \S+ refuses it"):
        explained.versus("ep=2")


@pytest.mark.parametrize(("layout", "sharding"), [("zero=3", "megatron_fsdp"), ("zero=1", "ddp")])
def test_a_stage_of_zero_has_what_carries_it(
    explained: Explanation, layout: str, sharding: str
) -> None:
    for found in (explained.versus(f"{layout},recompute=none"), explained.why_not(layout).versus):
        assert found is not None
        assert found.other.layout.sharding.value == sharding
