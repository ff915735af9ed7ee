"""Figures 5 to 7 as a picture: each planner's throughput over nest's, a panel a model.

Lines are ours and open circles the paper's, each over its own nest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.files import require_folder, write_bytes
from nest_megatron.report.charts import check_matplotlib, check_suffix, render
from nest_megatron.research.paper.outcome import FigureRow, Report

_COLOURS = {
    "manual": "#858b95",
    "mcmc": "#c98a00",
    "alpa_e": "#7d57b2",
    "mist": "#1f8a70",
    "phaze": "#b3364b",
    "nest": "#2f6fb7",
}
_WIDTH, _LEAST_WIDTH, _HEIGHT = 2.6, 6.5, 3.1
_DPI = 130


def check_figure(name: str, path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the minutes that an experiment takes.

    Args:
        name: of the experiment.

    Raises:
        UserInputError: for a table, another suffix, a missing folder, or without matplotlib.
    """
    if not name.startswith("figure"):
        raise UserInputError(
            "--chart", value=name, limit="it is a table", fix="Leave --chart out, or run a figure."
        )
    check_suffix(path, "--chart")
    require_folder(path, "--chart")
    check_matplotlib("--chart")


def draw_figure(report: Report, path: Path) -> None:
    """Write a figure's picture.

    Raises:
        UserInputError: as ``check_figure``, or if the file cannot be written.
    """
    check_figure(report.name, path)
    models = list(dict.fromkeys(row.job.model for row in report.rows))
    size = (max(_LEAST_WIDTH, _WIDTH * len(models)), _HEIGHT)
    settings, draw = {"font.size": 8}, lambda figure: _draw(figure, report, models)
    write_bytes(path, render(draw, size, path.suffix, dpi=_DPI, settings=settings))


def _draw(figure: Any, report: Report, models: Sequence[str]) -> None:
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, model, [row for row in report.rows if row.job.model == model])
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{report.title.partition(',')[0]}, over that of nest", fontsize=9)


def _panel(axes: Any, model: str, rows: Sequence[FigureRow]) -> None:
    by_size = len({row.job.num_gpus for row in rows}) == 1
    best = {row.job: row for row in rows if row.planner == "nest"}
    for planner in dict.fromkeys(row.planner for row in rows):
        mine = [row for row in rows if row.planner == planner]
        colour = _COLOURS.get(planner, "#454b55")
        ours = [(_place(r, by_size), _share(r.ours, best[r.job].ours)) for r in mine]
        paper = [(_place(r, by_size), _share(r.paper, best[r.job].paper)) for r in mine]
        axes.plot(*_seen(ours), color=colour, marker=".", label=planner)
        axes.plot(*_seen(paper), color=colour, marker="o", linestyle="", markerfacecolor="none")
    ticks = sorted({_place(row, by_size) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1)
    axes.set_title(model, fontsize=8)
    axes.set_xlabel("micro batch" if by_size else "GPUs")
    axes.grid(linewidth=0.3)


def _share(value: float | None, best: float | None) -> float | None:
    return None if value is None or best is None else value / best


def _seen(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    found = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in found], [y for _, y in found]


def _place(row: FigureRow, by_size: bool) -> int:
    return (row.job.micro_batch_size or 1) if by_size else row.job.num_gpus
