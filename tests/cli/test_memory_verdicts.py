"""What a plan says of memory where a flag of the job is not modelled, or the limit is near."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.overrides import parse
from nest_megatron.cost_model.memory import PEAK_ERROR
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import NoPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.report.failure import NothingFitsError
from nest_megatron.report.html import html_report
from nest_megatron.report.memory_words import memory_verdict, no_plan_verdict
from nest_megatron.report.terminal import no_plan_report
from nest_megatron.report.words import certificate
from tests.cli.runs import run
from tests.integrations.commands import LLAMA3_8B

GIB = 1 << 30
BASE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024"
    " --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512"
    " --micro-batch-size 1 --global-batch-size 64 --tokenizer-type NullTokenizer"
    " --vocab-size 32000 "
)
OFFLOADED = BASE + "--bf16 --fp32-residual-connection --use-nccl-ub"
NAMED = ("--fp32-residual-connection", "--use-nccl-ub")


def composed(*settings: str) -> Settings:
    return compose(parse(["cluster=dgx_h100", *settings]), None)


def searched(command: str, *settings: str) -> ParallelPlan | NoPlan:
    _, wanted = read_request(TypedCommand(text=command, version="0.16"), composed(*settings))
    return find_plan(dataclasses.replace(wanted, num_alternatives=0))


def traits_of(command: str) -> ExecutionTraits:
    _, request = read_request(TypedCommand(text=command, version="0.16"), composed())
    return request.settings.traits


def test_a_flag_that_is_not_modelled_qualifies_every_verdict() -> None:
    plan = searched(OFFLOADED)
    assert isinstance(plan, ParallelPlan)
    assert plan.search.not_modelled == NAMED
    words = f"not modelled: {', '.join(NAMED)}"
    assert certificate(plan.search).startswith(f"May fit, {words}.")
    assert f"may fit, {words}" in html_report(plan)
    read = plan_file.load(plan_file.dump(plan))
    assert read.search.not_modelled == NAMED


def test_nothing_is_proven_of_memory_that_is_not_modelled() -> None:
    found = searched(OFFLOADED, "memory.reserve_bytes=84000000000")
    assert isinstance(found, NoPlan)
    assert certificate(found.search).startswith("Not proven, memory is not modelled: ")
    assert NAMED[0] in str(NothingFitsError(found, ()))
    document = NothingFitsError(found, ()).document()
    assert NAMED[0] in document["no_plan"]["verdict"]


def test_less_than_a_tenth_of_a_gib_is_told_in_mib() -> None:
    found = searched(OFFLOADED, "memory.reserve_bytes=84000000000")
    assert isinstance(found, NoPlan)
    little = NothingFitsError(dataclasses.replace(found, missing_bytes=12_000_000), ())
    assert str(little).endswith("lacks 12 MiB")
    told = io.StringIO()
    Console(file=told, width=80).print(no_plan_report(little.refusal))
    assert "Missing       12 MiB" in told.getvalue()


def test_a_flag_that_megatron_lacks_qualifies_every_verdict() -> None:
    command = BASE + "--bf16 --some-unknown 3 --other=4 --some-unknown 5"
    plan = searched(command)
    assert plan.search.not_modelled == ("--some-unknown", "--other")
    assert certificate(plan.search).startswith("May fit, not modelled: --some-unknown, --other.")
    nothing = run(
        "plan", "--from", command, "cluster=dgx_h100", "memory.reserve_bytes=84000000000", "--json"
    )
    assert nothing.code == 1
    verdict = json.loads(nothing.out)["no_plan"]["verdict"]
    assert verdict.endswith("not modelled: --some-unknown, --other")


def test_the_terminal_and_json_say_it() -> None:
    done = run("plan", "--from", OFFLOADED, "cluster=dgx_h100")
    assert "may fit, not modelled: --fp32-residual-connection" in " ".join(done.out.split())
    fields = json.loads(run("plan", "--from", OFFLOADED, "cluster=dgx_h100", "--json").out)
    assert tuple(fields["search"]["not_modelled"]) == NAMED


def test_a_plan_without_such_flags_is_written_as_before() -> None:
    plan = searched(BASE + "--bf16")
    assert isinstance(plan, ParallelPlan)
    assert "not_modelled" not in plan_file.dump(plan)
    assert "traits." not in plan_file.dump(plan)


@pytest.mark.parametrize(
    ("over", "verdict"),
    [
        (-1.0, ""),
        (0.0, ""),
        (PEAK_ERROR / 2, "may fit: "),
        (2 * PEAK_ERROR, "does not fit, as predicted: "),
    ],
)
def test_near_the_limit_memory_proves_nothing(over: float, verdict: str) -> None:
    limit = 74 * GIB
    said = memory_verdict(round(limit * (1 + over)), limit)
    assert said.startswith(verdict)
    assert bool(said) == bool(verdict)


def test_no_plan_near_the_limit() -> None:
    def verdict(missing: int, *not_modelled: str) -> str:
        search = SimpleNamespace(not_modelled=not_modelled)
        found = SimpleNamespace(search=search, missing_bytes=missing, capacity_bytes=74 * GIB)
        return no_plan_verdict(found)

    assert "may fit" in verdict(GIB)
    assert verdict(9 * GIB) == "no plan is predicted to fit in memory"
    assert verdict(9 * GIB, "--use-nccl-ub").endswith("memory; not modelled: --use-nccl-ub")


def test_the_script_that_nvidia_ships_is_priced_with_its_flags() -> None:
    """``examples/llama/train_llama3_8b_h100_fp8.sh`` with its TP 1, PP 1 and CP 1."""
    pinned = " ".join(LLAMA3_8B.split()) + " --pipeline-model-parallel-size 1"
    assert traits_of(pinned) == ExecutionTraits(
        fp8_weights=True,
        fp8_gather=True,
        gradient_bytes=2,
        loss_bytes=10,
        loss_traffic_bytes=28,
    )
    plan = searched(pinned)
    assert isinstance(plan, ParallelPlan)
    assert plan.predicted.fits


def test_single_precision_is_planned() -> None:
    """Megatron's default: no ``--bf16``, no ``--fp16``."""
    traits = traits_of(BASE)
    assert (traits.params_bytes, traits.gradient_bytes, traits.optimizer_bytes) == (4, 4, 8)
    single, half = searched(BASE), searched(BASE + "--bf16")
    assert isinstance(single, ParallelPlan)
    assert isinstance(half, ParallelPlan)
    assert single.train.precision.value == "fp32"
    assert single.predicted.iteration_time_s > half.predicted.iteration_time_s
    assert single.layout.dims.context_parallel_size == 1


def test_single_precision_has_no_context_parallelism() -> None:
    done = run(
        "estimate",
        "model=llama3_8b",
        "cluster=dgx_h100",
        "cluster.num_gpus=8",
        "train.precision=fp32",
        "parallel.context_parallel_size=8",
    )
    assert done.code == 2
    assert "single precision" in done.err


def test_near_the_limit_the_margin_is_offered_as_a_risk() -> None:
    held = " ".join(LLAMA3_8B.split()) + " --pipeline-model-parallel-size 1"
    fused = held.replace("--cross-entropy-loss-fusion", "--cross-entropy-loss-fusion" + _ENGINE)
    as_shipped = (
        "parallel.recompute_granularity=selective",
        "parallel.recompute_modules=[core_attn]",
        "parallel.zero_stage=1",
        "memory.max_oom_chance=0.5",
        "memory.margin=0.06",
    )
    found = searched(fused, *as_shipped)
    assert isinstance(found, NoPlan)
    assert "may fit" in str(NothingFitsError(found, ()))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(no_plan_report(found))
    told = console.export_text()
    assert "so it may fit" in told
    assert "Proven" not in told
    changes = [remedy.change for remedy in found.remedies]
    (change,) = (each for each in changes if each.startswith("memory.margin="))
    margin = change.partition(",")[0]
    assert isinstance(searched(fused, *as_shipped[:-1], margin), ParallelPlan)


_ENGINE = " --cross-entropy-fusion-impl te"


@pytest.mark.parametrize(("over", "code"), [(0.0, 0), (PEAK_ERROR / 2, 0), (2 * PEAK_ERROR, 1)])
def test_estimate_ends_with_1_only_where_it_is_predicted_not_to_fit(over: float, code: int) -> None:
    layout = ("estimate", "model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8")
    layout += ("parallel.tensor_model_parallel_size=4",)
    free = ("memory.margin=0", "memory.reserve_bytes=0")
    predicted = run(*layout, *free, "--json").json()["predicted"]
    peak, capacity = predicted["peak_memory_bytes"], predicted["capacity_bytes"]
    reserve = math.floor(capacity - peak / (1 + over))
    done = run(*layout, "memory.margin=0", f"memory.reserve_bytes={reserve}")
    assert done.code == code
    assert ("does not fit, as predicted" in done.err.lower()) == (code == 1)
    assert ("may fit: " in done.err.lower()) == (code == 0 and over > 0)
