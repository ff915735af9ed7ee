"""``plan --for-nodes``: a plan for each number of nodes, which load each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron import load_plan
from nest_megatron.errors import NOTHING_FITS, PlanFileError, UserInputError
from nest_megatron.integrations.megatron_lm import checkpoint
from nest_megatron.integrations.megatron_lm.checkpoint import checkpoint_of_plan
from nest_megatron.layout import plan_file
from nest_megatron.planner import plan_table
from nest_megatron.planner.pins import read_pinned, read_table
from nest_megatron.planner.plan_table import PlanTable, TableText
from tests.cli.runs import LIMITS, run

JOB = ("model=llama3_8b", "cluster=dgx_h100", *LIMITS)
BATCH = "train.global_batch_size=480"
COMMAND = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --bf16 --global-batch-size 96 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --use-distributed-optimizer"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four to seven nodes with a batch that seven do not divide."""
    path = tmp_path_factory.mktemp("table") / "table.yaml"
    done = run("plan", *JOB, BATCH, "--for-nodes", "4..7", f"out={path}")
    assert done.code == 0, done.err
    assert f"nest-megatron pin {path}" in done.out
    return path


def table_in(path: Path) -> PlanTable:
    found = read_table(path)
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def table(path: Path) -> PlanTable:
    return table_in(path)


def test_each_number_of_nodes_has_a_plan_or_a_reason(table: PlanTable) -> None:
    assert [entry.num_nodes for entry in table.entries] == [4, 5, 6, 7]
    planned = dict(table.planned())
    assert [entry.num_gpus for entry in planned] == [32, 40, 48]
    assert all(plan.layout.num_gpus == entry.num_gpus for entry, plan in planned.items())
    assert all(plan.layout.global_batch_size == 480 for plan in planned.values())
    seven = table.entries[-1]
    assert "no layout is legal" in seven.told
    assert "6 nodes, with 1 of them idle, take" in seven.told


def test_all_plans_load_what_the_largest_saves(table: PlanTable) -> None:
    plans = [plan for _, plan in table.planned()]
    for saving in plans:
        saved = checkpoint_of_plan(saving, {}, "0.16", "it")
        for loading in plans:
            checkpoint.check_loadable(saved, loading.arguments, {}, "0.16")
    assert any("dp_reshardable" in note for note in table.notes)


def test_one_number_is_planned_as_it_is_alone(table: PlanTable, tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    assert run("plan", *JOB, BATCH, "cluster.num_gpus=48", f"out={path}").code == 0
    *_, (six, largest) = table.planned()
    assert (six.num_nodes, plan_file.read(path).layout) == (6, largest.layout)


def test_states_that_can_be_resharded_free_the_layouts(tmp_path: Path) -> None:
    words = ["cluster=dgx_h100", *LIMITS, "--for-nodes", "1..2"]
    kept, free = tmp_path / "kept.yaml", tmp_path / "free.yaml"
    assert run("plan", "--from", COMMAND, *words, f"out={kept}").code == 0
    command = f"{COMMAND} --dist-ckpt-optim-fully-reshardable"
    assert run("plan", "--from", command, *words, f"out={free}").code == 0
    assert table_in(kept).notes
    assert not table_in(free).notes


def test_what_runs_today_on_more_nodes_is_no_plan_of_fewer() -> None:
    wide = COMMAND.replace("1024", "4096").replace("--bf16", "--bf16 --overlap-grad-reduce")
    launch = f"torchrun --nproc-per-node 8 --nnodes 2 {wide} --micro-batch-size 1"
    words = ["cluster=dgx_h100", *LIMITS, "--for-nodes", "1..2", "--free", "all"]
    done = run("plan", "--from", launch, *words)
    assert done.code == 0, done.err
    assert "no plan" not in done.out


def test_it_is_pinned_and_each_size_gets_its_plan(path: Path, tmp_path: Path) -> None:
    pinned = tmp_path / "pinned.yaml"
    done = run("pin", str(path), "--out", str(pinned), "--by", "ada", "--release", "0.16")
    assert done.code == 0, done.err
    for size, taken in ((32, 32), (40, 40), (56, 48), (64, 48), (8, 32)):
        found = read_pinned(pinned, size)
        assert (found.plan.layout.num_gpus, found.sizes) == (taken, (32, 40, 48))
        assert found.pin.by == "ada"
    assert "no layout is legal" in read_pinned(pinned, 56).told
    shown = run("explain", str(pinned))
    assert "Pinned" in shown.out
    assert "6 nodes, with 1 of them idle" in " ".join(shown.out.split())
    entries = run("explain", str(pinned), "--json").json()["plan_table"]
    assert [entry["plan"] is None for entry in entries] == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("num_layers: 32", "num_layers: 33", 1), "4 nodes"),
        (lambda text: text.rpartition("\n---\n")[0], "holds 2"),
        (lambda text: text.replace("num_gpus: 32", "num_gpus: 48", 1), "order of their sizes"),
        (lambda text: text.replace("schema: 1", "schema: 9", 1), "schema"),
        (lambda text: text.replace("num_nodes: 4", "num_nodes: four", 1), "num_nodes"),
    ],
)
def test_a_table_with_a_broken_entry_is_not_pinned(
    change: object, said: str, path: Path, tmp_path: Path
) -> None:
    assert callable(change)
    broken = tmp_path / "broken.yaml"
    broken.write_text(change(path.read_text("utf-8")), encoding="utf-8")
    done = run("pin", str(broken))
    assert done.code == 2
    assert said in done.err


def test_a_broken_entry_leaves_the_others_alone(path: Path) -> None:
    text = path.read_text("utf-8").replace("num_layers: 32", "num_layers: 33", 1)
    found = TableText(text, "table.yaml")
    assert found.plan_for(40).layout.num_gpus == 40
    with pytest.raises(PlanFileError, match="4 nodes"):
        found.plan_for(32)


def test_a_table_is_no_plan(path: Path) -> None:
    with pytest.raises(UserInputError, match="it is a table of plans"):
        load_plan(path)
    done = run("explain", str(path), "--html", "page.html")
    assert done.code == 2
    assert "--html" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for-nodes", "8..4"], "the range goes up"),
        (["--for-nodes", "0..4"], "at least 1"),
        (["--for-nodes", "4..8:0"], "at least 1"),
        (["--for-nodes", "many"], "it is a number of nodes"),
        (["--for-nodes", "1..9999"], "at most 1000"),
        (["--for-nodes", "99999999"], "it is implausible"),
        (["--for-nodes", "2..4", "cluster.num_gpus=16"], "raise it to 32"),
        (["--for-nodes", "1..2", "cluster.num_gpus=4"], "Leave cluster.num_gpus out, or raise it"),
        (["--for-nodes", "2..4", "--shortlist"], "--shortlist"),
        (["--for-nodes", "2..4", "--full"], "--full"),
        (["--for-gpus", "8..16", "--full"], "--full"),
        (["-m", "train.global_batch_size=64,128", "--full"], "--full"),
        (["--for-nodes", "2..4", "-m"], "--multirun"),
        (["--for-nodes", "127", "train.global_batch_size=64"], "is legal for llama3_8b"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], said: str) -> None:
    done = run("plan", *JOB, *words)
    assert done.code != 0
    assert said in done.err


def test_the_text_is_read_as_it_was_written(path: Path) -> None:
    text = path.read_text("utf-8")
    assert plan_table.dump(TableText(text, "it").table()) == text


def test_where_no_number_of_nodes_fits_the_most_of_them_are_told(tmp_path: Path) -> None:
    out = tmp_path / "table.yaml"
    done = run("plan", *JOB, BATCH, "model.num_layers=400", "--for-nodes", "1..2", f"out={out}")
    assert (done.code, done.err) == (NOTHING_FITS, "")
    assert "No plan is predicted to fit in memory." in done.out
    assert "No number of nodes has a plan; this is about 2." in " ".join(done.out.split())
    assert not out.exists()
