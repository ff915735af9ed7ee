"""What is known of the adapters behind a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.validation import finetuning
from nest_megatron.validation.finetuning import fine_tuning
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook

_QKV, _ATTENTION = ("linear_qkv",), ("linear_qkv", "linear_proj")
ROW = {
    "source": "nemo-automodel-perf",
    "task": "lora",
    "model": "LLAMA3-70B LoRA",
    "seq": "4096",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "precision": "BF16",
    "gbs": "32",
    "mbs": "1",
    "tp": "2",
    "pp": "4",
    "vp": "10",
    "cp": "1",
    "framework": "NeMo AutoModel (FSDP2, TE, DeepEP)",
    "iter_time_s": "24.87",
}


@pytest.mark.parametrize(
    ("cells", "modules", "dim"),
    [
        ({"source": "mlperf-training-v5.0", "cp": "8"}, _ATTENTION, 16),
        ({"source": "nvidia-dgxc-benchmarking", "model": "Llama3 70b Finetuning LORA"}, _QKV, 16),
        ({"source": "nvidia-dgxc-benchmarking", "model": "Llama3 8b Finetuning LORA"}, _QKV, 8),
        ({"source": "nvidia-nemo-docs-24.07"}, _QKV, 32),
        ({"source": "somebody"}, (*_ATTENTION, "linear_fc1", "linear_fc2"), 32),
    ],
)
def test_a_row_has_the_adapters_of_its_recipe(
    cells: dict[str, str], modules: tuple[str, ...], dim: int
) -> None:
    found = fine_tuning({**ROW, **cells})
    assert found.adapters is not None
    assert (found.adapters.target_modules, found.adapters.dim) == (modules, dim)
    assert ("assumed" in found.assumption) == (cells["source"] == "somebody")


def test_all_weights_are_trained_elsewhere() -> None:
    assert fine_tuning({**ROW, "task": "sft", "model": "LLAMA3-70B"}).adapters is None


def test_a_recipe_says_what_its_row_leaves_out_and_no_more() -> None:
    assert fine_tuning(ROW).columns == {"recompute": "full"}
    assert fine_tuning({**ROW, "recompute": "none"}).columns == {}
    assert fine_tuning({**ROW, "pp": "1"}).columns == {}
    for as_planned in (False, True):
        job = job_of(ROW, ModelBook.load(), as_planned=as_planned)
        assert {grid.recompute.granularity.value for grid in job.grids} == {"full"}
        assert job.spec.adapters == fine_tuning(ROW).adapters


def test_every_recipe_names_its_file() -> None:
    table = Path(finetuning.__file__).with_name("finetuning.toml").read_text(encoding="utf-8")
    files = [line for line in table.splitlines() if line.startswith("file = ")]
    assert len(files) == table.count("[[recipes]]")
    assert [line for line in files if " @" not in line and "(2.7.3)" not in line] == ['file = ""']
