"""Narrow terminals lose nothing; files are shown like entries of the catalogue."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console

from nest_megatron import load_plan
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import BAD_INPUT
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import plan as run_plan
from nest_megatron.report.tables import FittingTable, figure_columns, name_columns, word_columns
from nest_megatron.report.words import other_layouts
from nest_megatron.units import format_seconds
from tests.cli.runs import LIMITS, ROOT, SMALL, run


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_every_number_of_a_plan_is_printed(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    plan = run("plan", *SMALL, *LIMITS, "--json").json()
    done = run("plan", *SMALL, *LIMITS, "--full")
    assert max(map(len, done.out.splitlines())) <= int(columns)
    for stage in plan["predicted"]["stages"]:
        assert f"{sum(stage['memory_bytes'].values()) / 2**30:.1f}" in done.out
    total = plan["predicted"]["iteration_time_s"]
    for seconds in plan["predicted"]["terms"].values():
        if seconds >= 5e-5 * total:
            assert f"{100 * seconds / total:.1f} %" in done.out
    for other in plan["alternatives"]:
        assert f"{other['slower_percent']:.2f} %" in done.out


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_command_of_a_plan_keeps_to_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = run("explain", str(ROOT / "recipes" / "mixtral_8x7b_dgx_h100_64.yaml"))
    assert max(map(len, done.out.splitlines())) <= int(columns)


def test_a_terminal_of_no_width_is_one_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = run("clusters", "dgx_h100").out
    monkeypatch.setenv("COLUMNS", "0")
    assert run("clusters", "dgx_h100").out == printed


def test_a_flag_longer_than_the_terminal_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run("estimate", "model=nemotron3_nano", "cluster=dgx_h100", "gpus=64")
    pasted = done.out[done.out.index("  --tensor") :].split("\nnote:")[0]
    assert "\n" not in pasted.replace("\\\n", "").strip()
    words = shlex.split(pasted.replace("\\\n", ""))
    assert "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME" in words


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_every_model_and_cluster_keeps_its_columns(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    models = run("models")
    assert "8 of 256" in models.out  # deepseek_v3
    assert models.out.count("70.6 B") >= 1  # llama3_70b
    clusters = run("clusters")
    assert "79.1 GiB" in clusters.out
    assert "Memory" in clusters.out


def test_a_model_and_a_cluster_by_path(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8}
    fields |= {"vocab_size": 32000, "num_attention_heads": 8, "intermediate_size": 4096}
    config.write_text(json.dumps(fields | {"max_position_embeddings": 2048}), encoding="utf-8")
    done = run("models", str(config))
    assert done.code == 0
    assert "1024" in done.out
    assert run("models", str(config), "--json").json()["num_layers"] == 8
    mine = tmp_path / "mine.yaml"
    mine.write_text((ROOT / "hydra_configs/cluster/custom.yaml").read_text(), encoding="utf-8")
    assert "H100" in run("clusters", str(mine)).out
    assert run("models", "./nope.json").code == BAD_INPUT
    assert run("clusters", "./nope.yaml").code == BAD_INPUT


def test_a_sweep_says_what_changes_nothing() -> None:
    small = (*SMALL[1:], *LIMITS, "search.num_alternatives=0")
    done = run("plan", "-m", "model=llama3_8b", *small, "cluster.oversubscription=1,2")
    assert "cluster.oversubscription changes nothing" in " ".join(done.out.split())
    done = run("plan", "-m", "model=llama3_8b", *small, "train.global_batch_size=64,128")
    assert "changes nothing" not in done.out


@pytest.mark.slow
def test_each_row_of_the_documented_sweep_is_another_plan() -> None:
    page = ROOT / "docs" / "sizing.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    (command,) = (line for line in lines if line.startswith("$ nest-megatron plan -m "))
    jobs = run(*command.split()[2:], "search.num_alternatives=0", "--json").json()["jobs"]
    times = {f"{job['plan']['predicted']['iteration_time_s']:.2g}" for job in jobs}
    assert len(times) == len(jobs) == 3


def test_a_dense_models_report_names_no_choice_about_experts() -> None:
    small = ("cluster=dgx_h100", "cluster.num_gpus=8", "target=nemo_2.7")
    assert "moe_" not in run("plan", "model=llama3_8b", *small, "search.num_alternatives=0").out


@pytest.mark.parametrize(("width", "lines"), [(44, 3), (38, 3), (30, 6)])
def test_columns_move_together_before_rows_come_apart(width: int, lines: int) -> None:
    table = FittingTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number in range(6):
        table.add_column(f"{number:05}", justify="right", no_wrap=True)
    table.add_row(*"123456")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    printed = [line for line in captured.get().splitlines() if line.strip()]
    assert len(printed) == lines


def test_a_long_name_is_cut_before_a_number() -> None:
    table = FittingTable(*name_columns("Name", "Other"), *figure_columns("GiB", "Search"))
    table.add_row("a" * 20, "b" * 12, "1234567.8", "1234.56 s")
    console = Console(width=46)
    with console.capture() as captured:
        console.print(table)
    *names, gib, seconds, unit = captured.get().splitlines()[-2].split()
    assert all(name.endswith("…") for name in names)
    assert (gib, seconds, unit) == ("1234567.8", "1234.56", "s")


@pytest.mark.parametrize("width", [*range(76, 88), 100, 120])
@pytest.mark.parametrize("chosen", ["is the best", "3.439 s (-1.4 %), 5 % risk"])
def test_a_least_width_of_words_makes_no_table_wider_than_the_terminal(
    width: int, chosen: str
) -> None:
    columns = (
        *word_columns("Change", min_width=18),
        *word_columns("Best layout"),
        *figure_columns("Step", "vs plan", "Tok/s/GPU"),
        *word_columns("Chosen layout"),
    )
    figures = ("3.439 s", "+0.0 %", "9,528")
    row = ("pipeline_model_parallel_size=\n1", "TP 2 PP 1 CP 1 DP 8, 5 % risk", *figures, chosen)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(FittingTable(*columns, rows=[row]), crop=False)
    printed = captured.get()
    assert max(map(len, printed.splitlines())) <= width
    assert all(each in printed for each in figures)
    assert width < 100 or "pipeline_model_parallel_size=" in printed


JOB = ("model=llama3_70b", "cluster=h100_spine_leaf", "cluster.num_gpus=1024")


def test_a_plan_is_one_screen_with_the_flags_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "plan.yaml"
    monkeypatch.chdir(tmp_path)
    out = run("plan", *JOB, "train.global_batch_size=4096", "out=plan.yaml").out
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    pasted = shlex.split(out[out.index("  --") : out.index("  with ")].replace("\\\n", " "))
    plan = load_plan(path)
    assert pasted == plan.to_megatron_args(layout_only=True)
    for words in (
        "Faster ",
        " risk: ",
        "runs like it",
        "proven: ",
        "no profile of this cluster",
    ):
        assert words in out
    assert "nest-megatron explain plan.yaml" in lines[-1]


def test_a_safer_layout_has_at_most_half_of_the_risk(plan_at_risk: ParallelPlan) -> None:
    rows = dict(other_layouts(plan_at_risk))
    risk = plan_at_risk.uncertainty.out_of_memory
    safe = [
        other
        for other in plan_at_risk.alternatives
        if other.uncertainty is not None and other.uncertainty.out_of_memory <= risk / 2
    ]
    assert safe
    assert rows["Safer"].startswith(format_seconds(safe[0].iteration_time_s))


@pytest.fixture(scope="module")
def plan_at_risk() -> ParallelPlan:
    found = run_plan(
        request_of(
            compose(
                parse(
                    [
                        "model=llama3_8b",
                        "cluster=dgx_h100",
                        "cluster.num_gpus=8",
                        "train.global_batch_size=128",
                    ]
                )
            )
        )
    )
    assert isinstance(found, ParallelPlan)
    return found


def test_runners_up_of_the_readmes_job_are_a_table_of_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run("plan", *JOB, "train.global_batch_size=4096", "--full").out
    assert re.search(r"\n #  +Step +Slower", out)
    assert len([line for line in out.splitlines() if line.startswith((" plan ", " 5 "))]) == 2
