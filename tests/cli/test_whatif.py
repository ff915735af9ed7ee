"""``whatif``: a plan's job on changed clusters, and the present layout there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import nest_megatron
from nest_megatron.api.jobs import opened
from nest_megatron.cli import main
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_job import rates_of, reliability_of, settings_of
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.layouts import keep_layout
from nest_megatron.report.plan_rows import PlanRow
from nest_megatron.report.whatif import Variant, Variants
from tests.cli.runs import ENDLESS_SECOND_JOB, LIMITS, SECOND_JOB, interrupted, run

JOB = ("model=llama3_8b", "cluster=h100_spine_leaf", "cluster.num_gpus=32", *LIMITS)
BATCH = "train.global_batch_size=64"
QUICK = ("search.num_alternatives=0",)
NODE = "cluster.levels.node.bandwidth"
COMMAND = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --bf16 "
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 96"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whatif") / "plan.yaml"
    assert run("plan", *JOB, BATCH, *QUICK, f"out={path}").code == 0
    return path


@pytest.fixture(scope="module")
def plan(path: Path) -> ParallelPlan:
    return plan_file.read(path)


def rows(*words: str) -> list[dict[str, Any]]:
    done = run("whatif", *words, *QUICK, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = done.json()["rows"]
    return found


def test_unchanged_it_is_the_plan_itself(path: Path, plan: ParallelPlan) -> None:
    first, same = rows(str(path), f"{NODE}=450GB/s")
    assert first["changes"] == {}
    for row in (first, same):
        assert row["iteration_time_s"] == plan.predicted.iteration_time_s
        assert row["longer_percent"] == 0
        assert row["present_layout"]["is_best"]
        assert row["present_layout"]["iteration_time_s"] == plan.predicted.iteration_time_s
    done = run("whatif", str(path), f"{NODE}=450GB/s", *QUICK)
    assert "node.bandwidth=450GB/s changes nothing" in " ".join(done.out.split())
    assert "Planned again" not in done.out


@pytest.mark.slow
def test_twice_the_bandwidth_or_memory_is_never_slower(path: Path) -> None:
    words = ("memory.max_oom_chance=0.5", "search.tie_percent=0", "memory=80GiB,160GiB")
    found = rows(str(path), f"{NODE}=225GB/s,450GB/s,900GB/s", *words)
    steps = [row["iteration_time_s"] for row in found[1:]]
    by_memory = [steps[at::2] for at in (0, 1)]
    assert all(series == sorted(series, reverse=True) for series in by_memory)
    assert all(more <= less for less, more in zip(*by_memory, strict=True))


@pytest.mark.slow
def test_other_numbers_of_gpus_keep_the_layout_where_it_divides(
    path: Path, plan: ParallelPlan
) -> None:
    done = run("whatif", str(path), "gpus=16,64,100", *QUICK, "cost.gpu_hour=2", "--json")
    _, half, double, odd = done.json()["rows"]
    assert (done.code, odd["status"]) == (2, "bad input")
    assert "whole nodes" in odd["told"]
    assert "whole nodes" in odd["present_layout_told"]
    for row in (half, double):
        assert row["present_layout"]["iteration_time_s"] >= row["iteration_time_s"] * 0.99
        seconds = 3600 / (row["num_gpus"] * 2.0)
        tokens = 64 * plan.train.seq_length * seconds / row["iteration_time_s"]
        assert row["tokens_per_dollar"] == pytest.approx(tokens)


@pytest.mark.parametrize("layers", [24, 40])
def test_a_model_of_another_depth_is_spread_anew(
    path: Path, plan: ParallelPlan, layers: int
) -> None:
    spec = dataclasses.replace(plan.model, num_layers=layers)
    request = request_of(compose(settings_of(plan, path)), choose_execution=True)
    kept = keep_layout(plan, dataclasses.replace(request, spec=spec))
    assert kept.layout.partition.boundaries[-1] == spec.num_units
    longer = kept.predicted.iteration_time_s > plan.predicted.iteration_time_s
    assert longer is (layers > plan.model.num_layers)


def test_the_present_layout_is_priced_as_estimate_does(path: Path, plan: ParallelPlan) -> None:
    settings = settings_of(plan, path)
    kept = keep_layout(plan, request_of(compose(settings), choose_execution=True))
    assert (kept.layout, kept.predicted) == (plan.layout, plan.predicted)


def test_the_present_layout_keeps_what_it_overlaps(path: Path, plan: ParallelPlan) -> None:
    own = dataclasses.replace(plan.layout, overlap_grad_reduce=False, overlap_param_gather=False)
    request = request_of(compose(settings_of(plan, path)), choose_execution=True)
    assert keep_layout(dataclasses.replace(plan, layout=own), request).layout == own


@pytest.mark.slow
def test_what_was_fixed_stays_fixed(tmp_path: Path) -> None:
    fixed = (
        *("parallel.tensor_model_parallel_size=4", "search.max_data_parallel_size=8"),
        *("parallel.zero_stage=1", "parallel.recompute_granularity=full"),
        *("parallel.recompute_method=uniform", "parallel.recompute_num_layers=1"),
        *("cost.dp_overlap=0.5", "memory.margin=0.1", "train.micro_batch_size=1"),
    )
    path = tmp_path / "fixed.yaml"
    assert run("plan", *JOB, BATCH, *QUICK, *fixed, f"out={path}").code == 0
    plan = plan_file.read(path)
    stated = {str(setting) for setting in settings_of(plan, path)}
    assert set(fixed) <= stated
    first, _ = rows(str(path), "memory=100GiB")
    assert first["iteration_time_s"] == plan.predicted.iteration_time_s


PLANNED_WITH = (
    *("memory.max_oom_chance=0.01", "search.tie_percent=2.5", "search.keep=[cp_comm_type]"),
    *("cost.gpu_hour=2.5", "cost.gpu_watts=1000.0", "train.tokens=1000000000000"),
    *("reliability.mtbf_hours=50000.0", "reliability.restart_s=300.0", "profile.site=false"),
)


def test_what_a_plan_was_made_with_need_not_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    assert run("plan", *JOB, BATCH, *QUICK, *PLANNED_WITH, f"out={path}").code == 0
    plan = plan_file.read(path)
    stated = {str(setting) for setting in settings_of(plan, path)}
    assert {*PLANNED_WITH, "profile.mode=analytic", "reliability.checkpoint_s=60.0"} <= stated
    assert "reliability.save_interval" not in " ".join(stated), "the best of each job"
    changes = {"memory": "100GiB", "memory.max_oom_chance": 0.5, "search.num_alternatives": 0}
    found = nest_megatron.whatif(path, changes)
    again = found.variants[0].row.plan
    assert again is not None
    assert (rates_of(again), reliability_of(again)) == (rates_of(plan), reliability_of(plan))
    assert again.choice is not None
    assert again.choice.max_oom_chance == 0.5, "a word that is typed wins"
    assert "memory.max_oom_chance=0.5" in again.provenance.given


def test_other_rates_and_the_length_of_the_run_are_typed(path: Path, tmp_path: Path) -> None:
    priced = tmp_path / "priced.yaml"
    words = (*JOB, BATCH, *QUICK, "train.tokens=1T", "cost.gpu_hour=2")
    assert run("plan", *words, f"out={priced}").code == 0
    changes = {"memory": "100GiB", "train.train_samples": 1000, "search.num_alternatives": 0}
    again = nest_megatron.whatif(priced, changes).variants[0].row.plan
    assert again is not None
    assert again.price is not None
    assert (again.price.gpu_hour, again.price.tokens) == (2.0, 1000 * again.train.seq_length)


def test_adapters_of_a_plan_file_are_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    adapters = ("target=nemo_2.7", "peft.scheme=lora", "peft.dim=16")
    assert run("plan", *JOB, BATCH, *QUICK, *adapters, f"out={path}").code == 0
    plan = plan_file.read(path)
    first, _ = rows(str(path), "memory=100GiB")
    assert first["iteration_time_s"] == plan.predicted.iteration_time_s
    assert first["present_layout"]["is_best"]


def test_another_accelerator(path: Path) -> None:
    first, other = rows(str(path), "cluster.accelerator=h200_sxm_141gb")
    assert other["capacity_bytes"] > first["capacity_bytes"]


@pytest.mark.slow
def test_a_folder_goes_on_where_it_was(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "whatif"
    for number, values in enumerate(("100GiB", "100GiB,120GiB")):
        done = run("whatif", str(path), f"memory={values}", *QUICK, "--out", str(out))
        assert done.code == 0, done.err
        assert ("2 of 3 jobs are done" in done.err) == bool(number)
    assert (out / "memory_bytes=120GiB.yaml").exists()
    assert (out / "sweep.csv").read_text(encoding="utf-8").count("\n") == 4


@pytest.mark.parametrize(
    "words",
    [
        ("train.sequence_packing=true", "train.sequence_lengths={}"),
        ("train.sequence_length_mean=500", "train.sequence_length_std=400"),
        ("target=megatron_lm_0.17", "train.rampup_batch_size=[32,32,9000]"),
        (
            *("target=megatron_lm_0.17", "train.rampup_batch_size=[32,32,9000]"),
            *("train.train_samples=9100", "cost.gpu_hour=2"),
        ),
        ("target=megatron_lm_0.18", "train.step_batch_size_schedule='0:32 1B:64'"),
    ],
)
def test_lengths_and_batches_that_grow_are_in_the_file(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    lengths, path = tmp_path / "lengths.txt", tmp_path / "plan.yaml"
    lengths.write_text("100\n700\n3000\n", encoding="utf-8")
    own = [each.format(lengths) for each in words]
    batch = () if "step_batch" in words[-1] else (BATCH,)
    assert run("plan", *JOB, *batch, *own, *QUICK, f"out={path}").code == 0
    plan = plan_file.read(path)
    unchanged, more = rows(str(path), "gpus=64")
    assert unchanged["iteration_time_s"] == plan.predicted.iteration_time_s
    assert unchanged["present_layout"]["is_best"]
    assert more["iteration_time_s"] < unchanged["iteration_time_s"]
    if str(lengths) in own[-1]:
        lengths.write_text("100\n", encoding="utf-8")
        done = run("whatif", str(path), "gpus=64")
        assert f"{path} = sequence lengths: the plan's job has it, and the settings" in done.err


def test_a_job_of_a_command_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "command.yaml"
    command = (
        f"{COMMAND} --main-grads-dtype bf16 --use-precision-aware-optimizer "
        "--use-distributed-optimizer"
    )
    done = run("plan", "--from", command, "cluster=dgx_h100", "cluster.num_gpus=8", f"out={path}")
    assert done.code == 0, done.err
    with pytest.raises(UserInputError, match="settings of its file do not give it"):
        settings_of(plan_file.read(path), path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "whatif: it names no change"),
        (("search.max_seconds=5",), "names no change"),
        (("memory=100GB/s",), "80GB, or 141GiB"),
        (("cluster.levels.rack.latency=1us",), "Known: leaf, node, spine"),
        (("memory=80GB", "memory=90GB"), "given twice"),
        (("out=x", "memory=80GB"), "--out FOLDER"),
        (("gpu=8",), "no such setting"),
        (("cluster.levels.node.speed=1GB/s",), "no such field"),
        (("memory=80",), "implausible"),
        (("gpus=0,abc",), "cluster.num_gpus = 0"),
        (("parallel.tensor_model_parallel_size=3",), "must divide the 32 GPUs"),
        (("memory=80GB", "cost.gpu_hour=-1"), "above 0 and finite"),
        (("memory=80GB", "--out", "/absent/x/y"), "are kept in a folder"),
        (("--free", "all", "memory=80GB"), "goes with --from"),
    ],
)
def test_a_wrong_change_is_refused(path: Path, words: tuple[str, ...], told: str) -> None:
    done = run("whatif", str(path), *words)
    assert done.code == 2
    assert told in done.err + done.out
    assert run("whatif", "absent.yaml", "memory=80GB").code == 2


def test_what_is_wrong_in_some_changes_has_rows_of_its_own(path: Path) -> None:
    _, wrong, right = nest_megatron.whatif(
        path, {"gpus": [0, 32], "search.num_alternatives": 0}
    ).variants
    assert "at least 1" in wrong.refusal
    assert right.row.plan is not None


def test_a_longer_step_has_a_reason_where_the_present_layout_is_shorter(
    plan: ParallelPlan,
) -> None:
    longer = dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, iteration_time_s=99.0)
    )

    def notes(kept: ParallelPlan, found: ParallelPlan) -> str:
        first = PlanRow(number=0, settings={}, status="ok", plan=plan)
        row = PlanRow(number=1, settings={"a.x": "1"}, status="ok", plan=found)
        rows = [Variant(row=first, kept=plan), Variant(row=row, kept=kept)]
        return Variants(present=plan, variants=rows).to_html()

    words = "The chosen layout is faster where"
    assert words in notes(plan, longer)
    assert words not in notes(longer, longer), "a worse cluster"
    assert words not in notes(plan, dataclasses.replace(longer, choice=None)), "as it was asked for"


def test_oversubscription_of_a_plan_file_is_that_of_its_cluster(path: Path, tmp_path: Path) -> None:
    found = cluster_of(f"cluster={path}", "cluster.oversubscription=2")
    assert found == cluster_of(*JOB[1:3], "cluster.oversubscription=2")
    assert found.levels[-1].bandwidth_bytes_per_s == 25e9, "not a half of what 4 leaves"
    changed = tmp_path / "changed.yaml"
    words = (*JOB, BATCH, *QUICK, "cluster.oversubscription=1", f"out={changed}")
    assert run("plan", *words).code == 0
    done = run("plan", "model=llama3_8b", f"cluster={changed}", "cluster.oversubscription=4")
    assert done.code == 2
    assert "name the cluster" in done.err


@pytest.mark.parametrize("level", ["spine", "2"])
def test_a_bandwidth_that_is_typed_is_what_a_gpu_has_in_every_command(
    path: Path, tmp_path: Path, level: str
) -> None:
    typed = f"cluster.levels.{level}.bandwidth=20GB/s"
    for source in JOB[1], f"cluster={path}":
        found = cluster_of(source, typed)
        assert found.levels[-1].bandwidth_bytes_per_s == 20e9, "12.5 GB/s is left of 50 by a file"
        inner = cluster_of(source, "cluster.levels.leaf.bandwidth=20GB/s")
        assert inner.levels[-1].bandwidth_bytes_per_s == 12.5e9
        with pytest.raises(UserInputError, match="Give that bandwidth alone"):
            cluster_of(source, typed, "cluster.oversubscription=2")
    own = tmp_path / "own.yaml"
    assert run("cluster", "new", "--out", str(own)).code == 0
    own.write_text(own.read_text().replace("oversubscription: 1.0", "oversubscription: 4"))
    found = cluster_of(f"cluster={own}", "cluster.levels.fabric.bandwidth=20GB/s")
    assert found.levels[-1].bandwidth_bytes_per_s == 20e9


def cluster_of(*settings: str) -> Cluster:
    return read_cluster(compose(parse(settings)))


@pytest.mark.slow
def test_the_page_has_a_heat_map_of_each_figure(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "whatif.html"
    words = (f"{NODE}=450GB/s,900GB/s", "gpus=16,32", "cost.gpu_hour=2")
    done = run("whatif", str(path), *words, *QUICK, "--html", str(page), "--json")
    assert done.code == 0, done.err
    text = page.read_text(encoding="utf-8")
    assert "<h2>Tokens/s</h2>" in text
    assert "<h2>Tokens/$</h2>" in text
    for row in done.json()["rows"][1:]:
        assert f"{row['tokens_per_s_per_gpu'] * row['num_gpus']:,.0f}" in text
    assert text.count("<td style=") == 2 * 4
    assert text.count(", the most</b>") >= 2
    assert not re.search(r"(src|href)=|@import|url\(", text)
    assert run("whatif", str(path), words[0], "--html", str(path)).code == 2


def combinations(plan: ParallelPlan, settings: int) -> list[Variant]:
    """A job unchanged, and every combination of two values of some settings; one does not fit."""
    keys = [f"a.{name}" for name in "xyz"[:settings]]
    rows = [PlanRow(number=0, settings={}, status="ok", plan=plan)]
    for number, values in enumerate(itertools.product("12", repeat=settings), 1):
        fits = number != 2
        row = PlanRow(
            number=number,
            settings=dict(zip(keys, values, strict=True)),
            status="ok" if fits else "does not fit",
            plan=plan if fits else None,
            missing_bytes=None if fits else 5 << 30,
        )
        rows.append(row)
    return [Variant(row=row, kept=plan) for row in rows]


@pytest.mark.parametrize("settings", [1, 2, 3])
def test_heat_maps_of_any_number_of_settings(plan: ParallelPlan, settings: int) -> None:
    text = Variants(present=plan, variants=combinations(plan, settings)).to_html()
    assert text.count("<td style=") == 2**settings
    assert text.count("<h2>Tokens/s") == max(1, 2 ** (settings - 2))
    assert ">does not fit<br>" in text


def test_each_row_has_its_place_among_the_sliders(plan: ParallelPlan) -> None:
    text = Variants(present=plan, variants=combinations(plan, 2)).to_html()
    assert re.findall(r'data-place="(.*?)"', text) == ["", "0,0", "0,1", "1,0", "1,1"]
    assert text.count('type="range"') == 2
    assert text.count("<script>") == text.count("script-src 'sha256-") == 1
    assert (
        'type="range"' not in Variants(present=plan, variants=combinations(plan, 2)[:2]).to_html()
    )


@pytest.mark.slow
def test_a_command_is_planned_on_changed_clusters() -> None:
    command = f"torchrun --nproc-per-node 8 --nnodes 2 {COMMAND} --use-distributed-optimizer"
    words = ("cluster=dgx_h100", "memory=80GiB,160GiB", *QUICK)
    done = run("whatif", "--from", command, *words, "--free", "all", "--json")
    assert done.code == 0, done.err
    first, *others = done.json()["rows"]
    priced = run("estimate", "--from", command, "cluster=dgx_h100", "--json").json()
    assert first["changes"] == {}
    assert [each["num_gpus"] for each in (first, *others)] == [16, 16, 16]
    today = first["present_layout"]["iteration_time_s"]
    assert today == priced["predicted"]["iteration_time_s"]
    assert first["iteration_time_s"] <= today
    assert others[1]["capacity_bytes"] > first["capacity_bytes"]


def test_a_fixed_command_varies_in_what_is_typed() -> None:
    done = run("whatif", "--from", COMMAND, "cluster=dgx_h100", "memory=80GB")
    assert done.code == 2
    assert "no setting has several values" in done.err
    done = run("whatif", "--from", COMMAND, "cluster=dgx_h100,dgx_a100", "memory=80GB,90GB")
    assert "one cluster" in done.err


@pytest.mark.slow
def test_the_python_api_says_the_same(path: Path) -> None:
    changes = {NODE: ["450GB/s", "900GB/s"], QUICK[0].partition("=")[0]: 0}
    found = nest_megatron.whatif(path, changes)
    done = run("whatif", str(path), f"{NODE}=450GB/s,900GB/s", *QUICK, "--json")
    assert without_seconds(found.to_dict()) == without_seconds(done.json())
    assert "node.bandwidth=450GB/s changes nothing" in " ".join(str(found).split())
    assert "<h2>Tokens/s</h2>" in found.to_html()


def without_seconds(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "search_seconds"} for row in document["rows"]]


def test_two_in_one_folder(path: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "both"):
        done = run("whatif", str(path), "memory=90GiB", "--out", str(tmp_path / "both"), "--json")
    assert done.code == 2
    assert "another sweep" in done.json()["error"]["limit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "done_of"),
    [("whatif", "2 of 9"), ("plan", "1 of 8")],  # the plan itself is the first of whatif's
)
def test_an_interruption_says_what_is_kept(
    command: str, done_of: str, path: Path, tmp_path: Path
) -> None:
    out, sizes = tmp_path / "kept", "8..64:8"
    words = ["whatif", str(path), "gpus=range(8,72,8)", "--out", str(out)]
    if command == "plan":
        words = ["plan", *JOB[:2], "--for-gpus", sizes, f"out={out}"]
    done = interrupted(SECOND_JOB, *words, cwd=tmp_path, prepare=ENDLESS_SECOND_JOB)
    assert done.code == 130
    assert f"{done_of} jobs are done; the same command goes on from there." in done.err
    assert "nothing was written" not in done.err
    assert not (out / "sweep.csv").exists()


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_which_row_is_begun(path: Path) -> None:
    words = ("whatif", str(path), "memory=80GiB,90GiB", *QUICK)
    assert "2 of 3" not in run(*words).err
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    assert "2 of 3: cluster.accelerator.memory_bytes=80GiB" in terminal.getvalue()
