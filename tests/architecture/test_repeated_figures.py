"""Figures that a page written by hand repeats are those that a program wrote elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron import plan
from tests.architecture.imports import ROOT

#: A page, the file that has the figures, where each stands in it, and the sentence of the page.
REPEATED = (
    (
        "README.md",
        "docs/expert_layouts.md",
        [r"\*\*\d+ of (\d+) published layouts", r"\*\*(\d+) of \d+ published layouts"],
        "of {} layouts that NVIDIA publishes {} are within 5 % of our best plan",
    ),
    (
        "docs/accuracy.md",
        "docs/expert_layouts.md",
        [r"\*\*(.* published layouts \(.*\) are within 5 % of our best plan)"],
        "{}. Row by row",
    ),
    (
        "docs/choice.md",
        "docs/first_plan.md",
        [r"within 5 % risk is faster than ([\d.]+ s)"],
        "none is faster than {} under this cost model; this one takes > that, and is the simplest",
    ),
    (
        "docs/choice.md",
        "docs/published_choices.md",
        [
            r"(?m)^(\d+) of the pretraining jobs",
            r"gives up \*\*([\d.]+) %",
            r"falls from [\d.]+ to ([\d.]+) %",
            r"falls from ([\d.]+) to",
        ],
        "On {} published jobs the rule gives up {} % of predicted step in the mean against the "
        "fastest plan that rather starts than not, for a mean risk of {} % in the place of {} %",
    ),
    (
        "docs/uncertainty.md",
        "docs/tuning_published.md",
        [r"\| \*\*mean\*\* \|  \| ([\d.]+) \|", r"\| \*\*mean\*\* \|  \| [\d.]+ \| ([\d.]+) \|"],
        "the mean error falls from {} to {} %",
    ),
    (
        "docs/uncertainty.md",
        "docs/tuning_published.md",
        [rf"(?m)^\| {runs} \|(?: [\d.]+ \|){{4}} ([\d.]+) \|" for runs in (1, 2, 3)],
        "hold {:.0f}, {:.0f} and {:.0f} % after one, two and three runs",
    ),
    (
        "docs/uncertainty.md",
        "hydra_configs/calibration/uncertainty.yaml",
        [rf"(?m)^  any: \[{'[^,]+, ' * i}([\d.]+)" for i in range(3)]
        + [rf"(?m)^  sources: \[{'[^,]+, ' * i}([\d.]+)" for i in range(3)],
        "Of all {:.0f} left-out runs {:.0f} % lie inside the 50 % interval and {:.0f} % inside the "
        "90 % interval, in the mean over the {:.0f} sources {:.0f} and {:.0f} %.",
    ),
    (
        "docs/hybrid.md",
        "docs/accuracy.md",
        [
            r"\| Nemotron_3_Nano \| ([\d.]+) \|",
            r"\| Nemotron_3_Super \| ([\d.]+) \|",
            r"\| hybrid \| \d+ \| \d+ \| (\d+) \| \d+ \| \d+ \| \d+ \| [\d.]+ \|",
            r"\| hybrid \| (\d+) \| \d+ \| \d+ \| \d+ \| \d+ \| \d+ \| [\d.]+ \|",
        ],
        "Nano is {} % off and Super {} %; by one that has not seen their source at all, {} % of {} "
        "runs lie in their interval of 90 %.",
    ),
)


def _figures(source: str, patterns: list[str], *, as_numbers: bool) -> list[str | float]:
    text = (ROOT / source).read_text(encoding="utf-8")
    found = [re.search(each, text) for each in patterns]
    assert all(found), f"{source} has changed its form: {patterns}"
    values = [each[1] for each in found if each is not None]
    return [float(each) for each in values] if as_numbers else list(values)


@pytest.mark.parametrize(("page", "source", "patterns", "sentence"), REPEATED)
def test_a_repeated_figure_is_that_of_its_source(
    page: str, source: str, patterns: list[str], sentence: str
) -> None:
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    figures = _figures(source, patterns, as_numbers=":.0f" in sentence)
    assert sentence.format(*figures) in words


def test_the_gpus_page_has_todays_predictions(tmp_path: Path) -> None:
    written = tmp_path / "gpu.md"
    command = [sys.executable, "benchmarks/gpu/page.py", "--page", str(written)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == written.read_text()


def test_the_readme_says_the_figures_of_the_gpus_page() -> None:
    """Large micro batches of a dense model keep the device busy."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\S+) \| [\d.]+ ms \| ([+-][\d.]+) %", text)
    busy = [abs(float(error)) for name, error in rows if re.match(r"llama\S*-mb4", name)]
    fast = [-float(error) for name, error in rows if not re.match(r"llama\S*-mb4", name)]
    (peaks,) = re.findall(r"With data sheets: .* peaks ([\d.]+) %", text)
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"peak memory is {peaks} % off; large micro batches of a dense model are predicted "
        f"within {max(busy)} %, and what its host holds up (small micro batches, experts) "
        f"{min(fast):.0f} to {max(fast):.0f} % too fast"
    ) in words


@pytest.mark.slow
def test_what_uneven_stages_gain_is_what_their_command_says() -> None:
    """``docs/hybrid.md`` names the command, and the release whose stages are even."""
    words = " ".join((ROOT / "docs" / "hybrid.md").read_text(encoding="utf-8").split())
    gains = re.findall(r"([\d.]+) % (?:shorter )?\(([\d.]+) s for ([\d.]+) s\)", words)
    jobs = (("nemotron_h_8b", 32, 4), ("nemotron3_nano", 32, 4), ("nemotron_h_56b", 64, 2))
    for (model, gpus, ranks), gain in zip(jobs, gains, strict=True):
        uneven, even = (
            plan(
                model=model,
                cluster="dgx_h100",
                num_gpus=gpus,
                global_batch_size=256,
                pipeline_model_parallel_size=ranks,
                virtual_pipeline_model_parallel_size=1,
                tie_percent=0,
                target=f"megatron_lm_{release}",
            ).predicted.iteration_time_s
            for release in ("0.19", "0.16")
        )
        assert gain == (f"{100 * (1 - uneven / even):.1f}", f"{uneven:.3f}", f"{even:.3f}")


@pytest.mark.slow
def test_a_job_without_its_lengths_takes_what_the_page_says() -> None:
    """``docs/cost_model.md`` prints the same job with lengths above."""
    text = (ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"Without lengths the best plan of the job takes ([\d.]+) s", text)
    found = plan(
        model="llama3_8b",
        cluster="dgx_h100",
        num_gpus=64,
        global_batch_size=512,
        seq_length=32768,
    )
    assert f"{found.predicted.iteration_time_s:.1f}" == said
