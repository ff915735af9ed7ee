"""Where nothing fits, what helps is tried, and told with the plan that it makes possible."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.planner import NoPlan, Request, plan, shortage
from nest_megatron.planner.request import Deadline
from nest_megatron.planner.shortage import memory_changes, no_plan
from tests.cli.test_memory_verdicts import BASE
from tests.integrations.commands import LLAMA3_8B

JOB = ("model=llama3_8b", "cluster=dgx_h100", "train.global_batch_size=32")
HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer"
STATES = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
GRADIENTS = "--grad-reduce-in-bf16"
OFFLOADED = "--fine-grained-activation-offloading"
FP8_WEIGHTS = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"


def asked(*words: str) -> Request:
    composed = compose(parse([*JOB, *words]))
    return request_of(composed, choose_execution=True)


def nothing(request: Request) -> NoPlan:
    found = plan(request)
    assert isinstance(found, NoPlan)
    return found


def has_plan(request: Request) -> bool:
    asked = dataclasses.replace(request, remedies=False, num_alternatives=0)
    return isinstance(plan(asked), ParallelPlan)


def test_each_remedy_is_one_with_its_plan() -> None:
    """Of the sets of changes those are told that no smaller one is part of."""
    request = asked("cluster.num_gpus=2", "memory.margin=0.2")
    assert [OFFLOADED in words for (words,) in request.memory_spaces] == [True]
    request = dataclasses.replace(request, memory_spaces={})
    found = nothing(request)
    number, *others = found.remedies
    assert number.change == "cluster.num_gpus=3"
    fits = {words: has_plan(other) for words, other in memory_changes(request).items()}
    enough = [{*words} for words in fits if fits[words]]
    minimal = [" ".join(w) for w in fits if fits[w] and not any(e < {*w} for e in enough)]
    told = [each.change for each in others if each.change.startswith("--")]
    assert 0 < len(told) <= 5
    assert told == minimal[: len(told)]
    assert told[0] == HOST
    for remedy in (number, *others[: len(told)]):
        assert remedy.iteration_time_s
        assert 0 < (remedy.peak_memory_bytes or 0) <= found.capacity_bytes
        assert remedy.layout in remedy.words()
        assert " a step, " in remedy.words()


@pytest.mark.parametrize("margin", [0.25, 0.4, 0.5])
def test_below_a_host_the_smallest_number_is_told(margin: float) -> None:
    job = f"memory.margin={margin}"
    numbers = [each for each in range(1, 9) if has_plan(asked(f"cluster.num_gpus={each}", job))]
    for fewer in {1, numbers[0] - 1}:
        number, *_ = nothing(asked(f"cluster.num_gpus={fewer}", job)).remedies
        assert number.change == f"cluster.num_gpus={numbers[0]}"


def test_windows_under_context_parallelism_have_a_nearest_plan_and_remedies() -> None:
    """They are not exchanged in a ring, which is what other jobs are looked at with."""
    sizes = ("model=starcoder2_7b", "parallel.context_parallel_size=4", "memory.margin=0.7")
    found = nothing(asked("cluster.num_gpus=4", *sizes))
    assert "CP 4" in found.nearest
    assert "CP 4" in found.remedies[0].layout
    assert has_plan(asked(found.remedies[0].change, *sizes))


def test_changes_are_tried_singly_and_together() -> None:
    words = memory_changes(asked())
    singles = {word for each in words for word in each}
    assert {HOST, STATES, GRADIENTS, FP8_WEIGHTS} < singles
    assert any(each.startswith(OFFLOADED) for each in singles)
    assert all((each,) in words for each in singles)
    assert (STATES, GRADIENTS, FP8_WEIGHTS) in words
    assert not any({HOST, STATES} <= {*each} for each in words)  # the host has them in float32
    assert not any({HOST, FP8_WEIGHTS} <= {*each} for each in words)  # of delayed scaling alone
    sizes = [*map(len, words)]
    assert sizes == sorted(sizes)


def test_a_job_is_offered_what_it_lacks_and_its_framework_has() -> None:
    others = memory_changes(asked("target=megatron_bridge_0.3"))
    bridge = [word for words in others for word in words]
    assert not any("grad_reduce" in word for word in bridge)  # its recipes have it
    assert "optimizer.optimizer_cpu_offload=True" in " ".join(bridge)
    assert not any(word.startswith("--") for word in bridge)
    _, request = read_request(
        TypedCommand(text=LLAMA3_8B, version="0.16"), compose(parse(["cluster=dgx_h100"]), None)
    )
    said = {word for words in memory_changes(request) for word in words}
    assert GRADIENTS not in said
    assert not any("fp8-param" in word for word in said)
    _, request = read_request(
        TypedCommand(text=f"{BASE} --bf16", version="0.16"),
        compose(parse(["cluster=dgx_h100"]), None),
    )
    words = ("ZeRO-2 or ZeRO-3 through Megatron-FSDP (--free use_megatron_fsdp)",)
    zero = memory_changes(request)[words]
    assert zero.space.zero_stages == (ZeroStage.GRADIENTS, ZeroStage.WEIGHTS)
    assert zero.space.version == request.space.version


def test_the_number_of_gpus_is_answered_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a bound: all else ends with the clock."""
    request = asked("cluster.num_gpus=1")
    whole = nothing(request)
    monkeypatch.setattr(Deadline, "passed", lambda *_: True)
    cut = no_plan(request, request.cost_model(), whole.search, request.deadline(), lambda *_: None)
    assert not cut.complete
    assert cut.remedies[0].change == (
        "cluster.num_gpus=2 at least, by the memory of weights and optimizer states"
    )


def test_a_number_that_time_did_not_allow_to_try_is_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = asked("cluster.num_gpus=1")
    whole = nothing(request)
    tried: list[Request] = []

    def fits_none(other: Request, *_: object) -> bool:
        tried.append(other)
        return False

    monkeypatch.setattr(shortage, "_fits", fits_none)
    monkeypatch.setattr(Deadline, "passed", lambda *_: bool(tried))
    cut = no_plan(request, request.cost_model(), whole.search, request.deadline(), lambda *_: None)
    (number,) = (r.change for r in cut.remedies if r.change.startswith("cluster.num_gpus="))
    assert number.startswith("cluster.num_gpus=2 at least")


def test_where_states_have_room_no_number_of_gpus_is_told_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Activations of one micro batch are what lacks: more GPUs have no more memory for them."""
    sizes = ("train.seq_length=65536", "train.micro_batch_size=32")
    request = asked("cluster.num_gpus=16", *sizes, "parallel.context_parallel_size=1")
    whole = nothing(request)
    tried: list[Request] = []
    monkeypatch.setattr(shortage, "_fits", lambda other, *_: tried.append(other))
    monkeypatch.setattr(Deadline, "passed", lambda *_: bool(tried))
    cut = no_plan(request, request.cost_model(), whole.search, request.deadline(), lambda *_: None)
    assert tried
    assert not any(each.change.startswith("cluster.num_gpus=") for each in cut.remedies)


@pytest.mark.parametrize("fixed", [3, 6])
def test_more_gpus_hold_whole_replicas_of_what_is_fixed(fixed: int) -> None:
    found = nothing(
        asked(
            "model=llama3_70b",
            "cluster.num_gpus=24",
            f"parallel.pipeline_model_parallel_size={fixed}",
            "parallel.recompute_granularity=none",
            "train.global_batch_size=48",
            "memory.margin=0.7",
        )
    )
    change = found.remedies[0].change
    assert change.startswith("cluster.num_gpus=")
    assert int(change.split("=")[1]) % (8 * fixed) == 0


@pytest.mark.parametrize(
    ("model", "present", "needed"), [("glm4_5_air", 4, 12), ("deepseek_v3", 8, 80)]
)
def test_more_gpus_of_a_rack_are_whole_hosts_of_it(model: str, present: int, needed: int) -> None:
    """Not the next power of two in the rack, nor the next whole rack."""
    job = (f"model={model}", "cluster=gb200_nvl72", "train.global_batch_size=96")
    number, *_ = nothing(asked(*job, f"cluster.num_gpus={present}")).remedies
    assert number.change == f"cluster.num_gpus={needed}"
    assert number.layout


@pytest.mark.slow
def test_deepseek_v3_on_96_gpus() -> None:
    """``verl-project/verl`` issue 3019: its optimizer on the host, or more nodes."""
    found = nothing(
        asked(
            "model=deepseek_v3",
            "cluster.num_gpus=96",
            "train.global_batch_size=96",
            "search.max_seconds=600",
        )
    )
    assert found.complete
    number, host, *_ = found.remedies
    assert 96 < int(number.change.removeprefix("cluster.num_gpus=")) <= 192
    assert host.change == HOST
    assert host.iteration_time_s


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.num_gpus=1"],
        ["cluster.num_gpus=8", "memory.reserve_bytes=200GiB"],
        ["cluster.num_gpus=8", "memory.margin=0.9"],
    ],
)
def test_the_gpus_that_are_named_hold_the_job(words: list[str]) -> None:
    """Part of each byte more is margin, and the chance to run out keeps a share of it, too."""
    request = dataclasses.replace(asked(*words), remedies=False)
    (said,) = (r.change for r in nothing(request).remedies if r.change.startswith("GPUs with"))
    enough = int(said.split()[2])

    def on(gib: int) -> Request:
        accelerator = dataclasses.replace(request.cluster.accelerator, memory_bytes=gib * 2**30)
        cluster = dataclasses.replace(request.cluster, accelerator=accelerator)
        return dataclasses.replace(request, cluster=cluster)

    assert has_plan(on(enough))
    assert not has_plan(on(enough - 1))
