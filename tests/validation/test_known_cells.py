"""What a page misprints or leaves out and its own script says."""

from __future__ import annotations

import pytest

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.validation.finetuning import with_packs
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RefusedRowError, Row

ROW = {
    "path": "llama3/finetuning/README_8b.md#L48 @tag v25.02",
    "task": "finetune",
    "model": "Llama3 8b Finetuning SFT",
    "framework": "NeMo v25.02",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "precision": "BF16",
    "seq": "4096",
    "gbs": "32",
    "tp": "1",
    "pp": "41",
    "cp": "1",
    "iter_time_s": "1.32",
}


def test_the_script_of_a_page_says_the_layout() -> None:
    job = job_of(ROW, ModelBook.load())
    assert {(g.dims.pipeline_model_parallel_size, g.micro_batch_size) for g in job.grids} == {
        (1, 1)
    }
    assert "pp 1 (llama3_finetune_utils.py)" in job.assumptions
    assert job.settings.traits.attended_tokens is not None
    assert 200 < job.settings.traits.attended_tokens < 400


@pytest.mark.parametrize("change", [{"path": "another/README.md"}, {"pp": "40"}])
def test_other_rows_stay_as_they_are_printed(change: Row) -> None:
    with pytest.raises(RefusedRowError, match="does not multiply out"):
        job_of({**ROW, **change}, ModelBook.load())


@pytest.mark.parametrize(
    ("row", "is_packed"),
    [
        ({"ambiguity": "SQuAD packed to 4096", "iter_time_s": "1"}, True),
        ({"ambiguity": "SQuAD packed to 4096", "tflops_per_gpu": "600"}, False),
        ({"ambiguity": "real data", "iter_time_s": "1"}, False),
        ({"path": "docs/source/performance_benchmarks.md", "section": "Finetuning"}, False),
        (
            {
                "path": "docs/source/performance_benchmarks.md#L32",
                "section": "Finetuning",
                "iter_time_s": "1",
            },
            True,
        ),
        (
            {
                "path": "docs/source/performance_benchmarks.md#L3",
                "section": "Pretraining",
                "iter_time_s": "1",
            },
            False,
        ),
    ],
)
def test_packs_count_where_a_time_is_printed(row: Row, is_packed: bool) -> None:
    settings, notes = with_packs(row, CostSettings(), 4096)
    assert (settings.traits.attended_tokens is not None) == is_packed
    assert bool(notes) == is_packed


V100 = {
    "path": "experiments/gpt2.md#L104",
    "model": "GPT-18B",
    "params_b": "18",
    "framework": "Megatron-LM (bigscience fork)",
    "gpu": "V100-16GB",
    "gpus_per_node": "4",
    "n_gpus": "16",
    "precision": "fp16",
    "seq": "1024",
    "gbs": "768",
    "mbs": "6",
    "tp": "4",
    "pp": "4",
    "recompute": "full",
}


def test_scripts_beside_a_page_say_the_shape_and_its_headings_the_gpu() -> None:
    job = job_of(V100, ModelBook.load())
    assert (job.spec.num_layers, job.spec.hidden_size, job.spec.num_attention_heads) == (
        40,
        6144,
        32,
    )
    assert job.cluster.accelerator.name == "V100-SXM2-32GB"
    small = job_of({**V100, "model": "GPT-30B", "pp": "8", "n_gpus": "64"}, ModelBook.load())
    assert small.spec.hidden_size == 7168
    assert small.cluster.accelerator.name == "V100-SXM2-16GB"


def test_a_micro_batch_that_does_not_make_the_global_batch_is_the_one_that_does() -> None:
    row = {**V100, "model": "GPT-52B", "gbs": "2048", "mbs": "4", "ga": "256", "dp": "1"}
    job = job_of({**row, "pp": "16", "n_gpus": "64"}, ModelBook.load())
    assert {grid.micro_batch_size for grid in job.grids} == {8}


def test_the_script_of_maxtext_says_what_it_shards_and_recomputes() -> None:
    row = {
        "path": "maxtext/README_70b.md#L53 @tag v24.11.1",
        "model": "Maxtext LLama2 70b",
        "framework": "MaxText v24.11.1",
        "gpu": "H100-80GB",
        "n_gpus": "64",
        "precision": "BF16",
        "seq": "4096",
        "gbs": "128",
        "mbs": "2",
    }
    (grid,) = job_of(row, ModelBook.load()).grids
    assert grid.zero.is_fsdp
    assert grid.dims.data_parallel_size == 64
    assert {str(module) for module in grid.recompute.modules} == {"layernorm", "core_attn", "mlp"}


@pytest.mark.parametrize(
    ("cells", "fitted", "loss_bytes"),
    [
        ({"section": "Table 1 1D FSDP eager"}, "pytorch_fsdp", 14),
        ({"section": "Table 1 1D FSDP+torch.compile"}, "pytorch_fused", 14),
        (
            {
                "path": "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md#L29",
                "section": "async TP BF16",
            },
            "pytorch_fused",
            4,
        ),
        ({"path": "benchmarks/another.md"}, "pytorch_fsdp", 14),
        (
            {
                "path": "docs/performance-summary.mdx",
                "commit": "c0e4fe1bc35a",
                "framework": "NeMo AutoModel (FSDP2)",
            },
            "pytorch_fsdp",
            8,
        ),
        (
            {
                "path": "docs/performance-summary.mdx",
                "commit": "cb9765441e51",
                "framework": "NeMo AutoModel (FSDP2)",
            },
            "pytorch_fused",
            8,
        ),
    ],
)
def test_pages_say_what_is_compiled(cells: Row, fitted: str, loss_bytes: int) -> None:
    row = {
        **ROW,
        "path": "benchmarks/llama3_h100_202412_torchtitan.md",
        "task": "pretrain",
        "model": "Llama 3.1 8B",
        "framework": "torchtitan 9dec370",
        "pp": "1",
        "mbs": "2",
        **cells,
    }
    job = job_of(row, ModelBook.load())
    assert (job.target.fitted, job.settings.traits.loss_bytes) == (fitted, loss_bytes)


CARD = {
    "path": "examples/model_verification_cards/qwen3-235b-a22b/card.yaml",
    "model": "qwen3-235b-a22b",
    "framework": "Megatron-Bridge",
    "gpu": "GB200",
    "n_gpus": "256",
    "precision": "FP8_MX",
    "seq": "4096",
    "gbs": "8192",
    "mbs": "1",
    "tp": "1",
    "pp": "8",
    "ep": "32",
}


@pytest.mark.parametrize(
    ("change", "virtual", "seq"),
    [
        ({}, 3, 4096),
        ({"gpu": "GB300", "pp": "4", "mbs": "2"}, 12, 4096),
        ({"precision": "BF16"}, 1, 4096),
        (
            {
                "path": "examples/model_verification_cards/nemotron-3-super-120b-a12b/card.yaml",
                "model": "nemotron-3-super-120b-a12b",
                "precision": "BF16",
                "gbs": "512",
                "pp": "1",
            },
            1,
            8192,
        ),
    ],
)
def test_a_card_leaves_out_virtual_stages_and_half_of_its_tokens(
    change: Row, virtual: int, seq: int
) -> None:
    job = job_of({**CARD, **change}, ModelBook.load())
    assert {g.dims.virtual_pipeline_model_parallel_size for g in job.grids} == {virtual}
    assert job.spec.seq_length == seq


def test_only_a_recipe_that_names_them_predicts_tokens_further_on() -> None:
    row = {
        "path": "docs/performance-summary.mdx",
        "framework": "NeMo AutoModel (FSDP2, TE, DeepEP)",
        "gpu": "H100-80GB",
        "n_gpus": "128",
        "precision": "BF16",
        "seq": "4096",
        "gbs": "256",
        "mbs": "2",
        "tp": "1",
        "pp": "1",
        "ep": "64",
        "zero": "3",
    }
    book = ModelBook.load()
    names = ("Nemotron V3 Super 120B", "Nemotron V3 Ultra 550B")
    assert [job_of({**row, "model": name}, book).spec.num_mtp_layers for name in names] == [0, 2]
