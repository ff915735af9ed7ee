"""``nest-megatron paper``: small parts of the experiments, for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import run

SMALL = ("--model", "bert_large", "--num-gpus", "64")


def test_a_figure_has_three_columns_gains_and_reasons(tmp_path: Path) -> None:
    picture = tmp_path / "figure.svg"
    done = run("paper", "figure7", *SMALL, "--chart", str(picture))
    assert done.code == 0
    assert "ours   artifact   paper" in done.out
    assert "Geometric-mean gain of nest" in done.out
    assert "1.47x in the paper" in " ".join(done.out.split())
    assert "over that of nest" in picture.read_text()


def test_ours_is_never_worse() -> None:
    report = run("paper", "figure7", *SMALL, "--json").json()
    assert len(report["gains"]) == 4
    for gain in report["gains"]:
        assert gain["least"] >= 1.0, gain["planner"]
    assert report["notes"]


def test_settings_hold_for_every_planner() -> None:
    words = ("paper", "table2", "--model", "bert_large", "parallel.tensor_model_parallel_size=2")
    report = run(*words, "--json").json()
    layouts = {cells[1]: cells[2] for cells in report["cells"]}
    assert all(layout.startswith("TP 2") for layout in layouts.values()), layouts


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("figure5", "--model", "bert"), "bert_large"),
        (("figure5", "--num-gpus", "65"), "no job"),
        (("table2", *SMALL[:2], "--chart", "x.svg"), "it is a table"),
        (("figure7", *SMALL, "--chart", "x.pdf"), ".png, .svg"),
        (("figure8",), "figure8"),
        (("figure7", *SMALL, "nonsense=1"), "nonsense"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], told: str) -> None:
    done = run("paper", *words)
    assert done.code == 2
    assert told in done.err
