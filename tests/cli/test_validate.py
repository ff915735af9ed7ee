"""``nest-megatron validate``: what it reads, refuses, prints and writes."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.runs import run

RUN = {
    "row_id": "a1",
    "source": "tests",
    "model": "Llama 3.1 8B",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "seq": "8192",
    "gbs": "128",
    "mbs": "1",
    "tp": "1",
    "pp": "1",
    "cp": "2",
    "precision": "BF16",
    "framework": "NeMo 24.09",
    "iter_time_s": "9.5",
    "recompute": "none",
}
COLLECTIVE = {
    "row_id": "c1",
    "source": "tests",
    "gpu": "H100",
    "nodes": "1",
    "gpus_per_node_used": "8",
    "n_ranks": "8",
    "collective": "all_reduce",
    "size_bytes": "1073741824",
    "time_us": "4300",
}
SCORES = {
    "source",
    "rows",
    "predicted",
    "refused",
    "mape_pct",
    "median_signed_pct",
    "p90_abs_pct",
    "groups",
    "spearman_mean",
    "regret_mean_pct",
    "regret_max_pct",
}

#: Exactly what each basis of each source, total and regime holds.
BASIS = {
    "rows",
    "predicted",
    "refused",
    "mape_pct",
    "median_signed_pct",
    "p90_abs_pct",
    "coverage_50_pct",
    "coverage_90_pct",
    "ran_called_infeasible",
    "ran",
    "oom_caught",
    "oom",
    "groups",
    "regret_mean_pct",
    "regret_max_pct",
    "pairs_in_order_pct",
}
REGIMES = [
    "dense",
    "moe",
    "fp8",
    "hybrid",
    "lora",
    "sft",
    "long_context",
    "fsdp",
    "small_step",
    "large_scale",
]


def table(path: Path, *rows: Mapping[str, str]) -> Path:
    """Write rows as CSV."""
    stream = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(stream, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(stream.getvalue(), encoding="utf-8")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two layouts of one job, a third that nothing is known of, and one on an unknown GPU."""
    return table(
        tmp_path / "runs.csv",
        RUN,
        {**RUN, "row_id": "a2", "cp": "1", "tp": "2", "iter_time_s": "9.9"},
        {**RUN, "row_id": "a3", "gpu": "Z80", "source": "others"},
        {**RUN, "row_id": "a4", "tp": "3"},
    )


def test_json_has_the_promised_keys(runs: Path) -> None:
    (file,) = run("validate", str(runs), "--json").json()["files"]
    assert (file["file"], file["kind"]) == (str(runs), "throughput")
    assert [each["source"] for each in file["sources"]] == ["tests", "others"]
    for each in (*file["sources"], file["total"]):
        assert each.keys() >= SCORES
    total = file["total"]
    assert (total["rows"], total["predicted"], total["groups"]) == (4, 2, 1)
    assert sum(total["refused"].values()) == 2
    assert 0 < total["mape_pct"] < 50
    assert total["spearman_mean"] in (-1.0, 1.0)


def test_both_bases_are_everywhere(runs: Path, tmp_path: Path) -> None:
    other = table(tmp_path / "collectives.csv", COLLECTIVE)
    document = run("validate", str(runs), str(other), "--json").json()
    assert list(document["regimes"]) == list(document["regime_definitions"]) == REGIMES
    scored = [*document["regimes"].values()]
    for file in document["files"]:
        assert list(file["regimes"]) == REGIMES
        scored += [*file["sources"], file["total"], *file["regimes"].values()]
    for each in scored:
        for basis in ("as_stated", "as_planned"):
            assert each[basis].keys() == BASIS
            assert each[basis]["rows"] == each[basis]["predicted"] + each[basis]["refused"]
    assert all(each.keys() == {"as_stated", "as_planned"} for each in document["regimes"].values())


def test_intervals_are_judged_and_sources_left_out(runs: Path) -> None:
    found, other = (
        run("validate", str(runs), *options, "--json").json()["files"][0]["total"]["as_stated"]
        for options in ((), ("--left-out",))
    )
    predicted = found["mape_pct"]
    assert predicted > 30  # no dense run on H100 is as far off
    assert found["coverage_50_pct"] == found["coverage_90_pct"] == 0.0
    assert found == other  # nothing was fitted to the source "tests"


def test_choices_among_measured_layouts_are_judged(runs: Path) -> None:
    document = run("validate", str(runs), "--json").json()
    assert list(document["certainty"]) == [*REGIMES, "all"]
    found = document["certainty"]["all"]["as_stated"]
    assert found["coverage"]["runs"] == 2
    choice = found["choice"]
    assert choice["jobs"] == 1
    # of 9.5 and 9.9 s either one is chosen
    for name in ("nominal_regret_pct", "default_regret_pct", "started_regret_pct"):
        assert choice[name] in (0.0, pytest.approx(100 * (9.9 / 9.5 - 1)))
    assert 1 <= choice["shortlist_size"] <= 2
    assert document["certainty"]["moe"]["as_stated"] == {"coverage": None, "choice": None}
    text = run("validate", str(runs)).out
    assert "Intervals and choices" in text


def test_verdicts_count_every_run_that_is_predicted(tmp_path: Path) -> None:
    """Also one that leaves out its recomputation: the planner would choose it."""
    silent = {**RUN, "recompute": ""}
    too_large = {**RUN, "model": "Llama 3.1 70B", "row_id": "a2", "iter_time_s": "90"}
    ended = {**too_large, "row_id": "a3", "outcome": "oom", "iter_time_s": ""}
    path = table(tmp_path / "runs.csv", {**silent, "outcome": "ok"}, too_large, ended)
    (file,) = run("validate", str(path), "--json").json()["files"]
    for basis in ("as_stated", "as_planned"):
        found = file["total"][basis]
        assert (found["ran"], found["ran_called_infeasible"]) == (2, 1)
        assert (found["oom"], found["oom_caught"]) == (1, 1)
    assert file["regimes"]["dense"]["as_planned"]["ran"] == 2
    assert file["regimes"]["moe"]["as_planned"]["ran"] == 0


def test_the_readme_is_written_with_the_page(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs, readme = tmp_path / "docs", tmp_path / "README.md"
    docs.mkdir()
    readme.write_text("a\n<!-- accuracy: begin -->\nold\n<!-- accuracy: end -->\nz\n")
    done = run("validate", str(runs), "--docs", str(docs))
    assert (done.code, f"Wrote {readme}" in done.out) == (0, True)
    text = readme.read_text()
    assert text.startswith("a\n<!-- accuracy: begin -->\n")
    assert text.endswith("\n<!-- accuracy: end -->\nz\n")
    assert "old" not in text
    assert "runs 2 are predicted" in text
    assert "Missed [goals](docs/accuracy.md#goals): " in text
    assert " (≤ " in text


def test_a_source_without_predictions_has_no_scores(runs: Path) -> None:
    (file,) = run("validate", str(runs), "--json").json()["files"]
    others = file["sources"][1]
    assert others["predicted"] == 0
    assert others["mape_pct"] is others["regret_mean_pct"] is None


def test_the_table_counts_refusals(runs: Path) -> None:
    done = run("validate", str(runs))
    assert done.code == 0
    assert "2/4" in done.out
    assert "unknown GPU" in done.out


def test_files_are_told_apart_by_their_columns(runs: Path, tmp_path: Path) -> None:
    other = table(tmp_path / "collectives.csv", COLLECTIVE)
    files = run("validate", str(runs), str(other), "--json").json()["files"]
    assert [file["kind"] for file in files] == ["throughput", "comm_collectives"]
    assert files[1]["total"]["mape_pct"] < 30


def test_rows_are_written_with_their_reasons(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert f"Wrote {out}" in run("validate", str(runs), "--rows", str(out)).out
    with out.open(newline="") as stream:
        rows = {row["row_id"]: row for row in csv.DictReader(stream)}
    assert list(rows) == ["a1", "a2", "a3", "a4"]
    assert float(rows["a1"]["predicted_s"]) > 0
    assert float(rows["a1"]["measured_s"]) == 9.5
    assert "defaults of nemo" in rows["a1"]["assumptions"]
    assert (rows["a3"]["refused"], rows["a3"]["predicted_s"]) == ("unknown GPU", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "no rows"),
        ("model,gpu\n", "no rows"),
        ("a,b\n1,2\n", "no known kind"),
        ("model,gpu,n_gpus,tp,pp\nx,H100,8,1,1\n", "iter_time_s"),
        ('model,gpu\n"x,H100\n', "CSV"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    done = run("validate", str(path))
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert str(path) in done.err


def test_a_missing_folder_is_refused(runs: Path) -> None:
    done = run("validate", str(runs), "--rows", "/nope/rows.csv")
    assert done.code == 2
    assert "mkdir -p /nope" in done.err


def test_models_of_the_user_come_first(runs: Path, tmp_path: Path) -> None:
    mine = table(tmp_path / "mine.csv", {**RUN, "model": "MyOwn-2B"})
    assert run("validate", str(mine), "--json").json()["files"][0]["total"]["predicted"] == 0
    shape = {"name": "MyOwn-2B", "layers": "24", "hidden": "2048", "heads": "16", "vocab": "32000"}
    models = table(tmp_path / "models.csv", {**shape, "ffn": "8192", "kv_heads": "16"})
    done = run("validate", str(mine), "--models", str(models), "--json")
    assert done.json()["files"][0]["total"]["predicted"] == 1


def test_models_that_cannot_be_read_are_refused(runs: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", table(tmp_path / "x.csv", {"colour": "red"})):
        done = run("validate", str(runs), "--models", str(path))
        assert done.code == 2
        assert str(path) in done.err
    shape = {"name": "MyOwn-2B", "layers": "24", "hidden": "2048", "heads": "16"}
    path = table(tmp_path / "y.csv", {**shape, "seq": "4k"})
    done = run("validate", str(runs), "--models", str(path))
    assert done.code == 2
    assert "model MyOwn-2B: seq = 4k: it must be a whole number, which may be a product" in done.err


def test_docs_are_written(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "accuracy_notes.yaml").write_text("rows: {a1: because, a2: of | course}\n")
    done = run("validate", str(runs), "--docs", str(tmp_path))
    assert done.code == 0
    assert (tmp_path / "accuracy" / "time.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "accuracy.md").read_text()
    assert "because" in text
    assert "of \\| course" in text
    assert "nest-megatron validate runs.csv --docs docs" in text
    assert sorted(path.name for path in (tmp_path / "accuracy").iterdir()) == ["time.png"]


def test_docs_need_a_folder_and_readable_notes(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("validate", str(runs), "--docs", str(tmp_path / "none"))
    assert (done.code, "mkdir" in done.err) == (2, True)
    (tmp_path / "accuracy_notes.yaml").write_text("reasons: {}\n")
    done = run("validate", str(runs), "--docs", str(tmp_path))
    assert done.code == 2
    assert "not_captured" in done.err
    assert not (tmp_path / "accuracy.md").exists()


def test_docs_name_the_package_that_is_missing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("validate", str(runs), "--docs", str(tmp_path))
    assert done.code == 2
    assert "pip install 'nest-megatron[pictures]'" in done.err
    assert not (tmp_path / "accuracy").exists()


#: GPT-3 as NVIDIA ran it for MLPerf, but that the virtual stages are left out.
GPT3 = {
    **RUN,
    "model": "GPT3-175B",
    "n_gpus": "10752",
    "seq": "2048",
    "gbs": "2688",
    "tp": "4",
    "pp": "6",
    "cp": "1",
    "precision": "FP8",
    "iter_time_s": "1",
}


def predicted(path: Path, row: Mapping[str, str]) -> float:
    out = path / "rows.csv"
    done = run("validate", str(table(path / "runs.csv", row)), "--rows", str(out))
    assert done.code == 0
    with out.open(newline="") as stream:
        return float(next(csv.DictReader(stream))["planned_s"])


@pytest.mark.parametrize(
    ("target", "framework"),
    [("megatron_lm_0.16", "Megatron-LM with TE"), ("nemo_2.7", "NeMo 25.09")],
)
def test_a_row_is_predicted_as_estimate_would(tmp_path: Path, target: str, framework: str) -> None:
    """With six micro batches, virtual stages are worth half of the prediction."""
    degrees = {"tensor": 4, "pipeline": 6, "virtual_pipeline": 16}
    estimate = run(
        "estimate",
        *("model=gpt3_175b", "cluster=dgx_h100", "cluster.num_gpus=10752"),
        *("train.global_batch_size=2688", "train.micro_batch_size=1", "train.precision=fp8"),
        *(f"parallel.{name}_model_parallel_size={size}" for name, size in degrees.items()),
        *("parallel.zero_stage=1", f"target={target}"),
        "--json",
    ).json()
    row = {**GPT3, "framework": framework, "vp": "16"}
    expected = estimate["predicted"]["iteration_time_s"]
    assert predicted(tmp_path, row) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("framework", ["NeMo 24.07", "PyTorch NVIDIA Release 23.09"])
def test_recipes_of_nemo_interleave_where_they_do_not_say(tmp_path: Path, framework: str) -> None:
    """The container's name is all that MLPerf's systems say of it."""
    row = {**GPT3, "framework": framework}
    assert predicted(tmp_path, row) == pytest.approx(predicted(tmp_path, {**row, "vp": "16"}))


def test_virtual_stages_are_assumed_in_whole_rounds_only(tmp_path: Path) -> None:
    row = {**GPT3, "framework": "NeMo 24.07", "gbs": "2016", "pp": "8"}
    assert predicted(tmp_path, row) == pytest.approx(predicted(tmp_path, {**row, "vp": "1"}))
