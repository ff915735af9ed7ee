"""What rows say in words of how layers are carried out."""

from __future__ import annotations

import pytest

from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from tests.validation.test_pipeline_runs import ROW

BOOK = ModelBook.load()


@pytest.mark.parametrize(
    ("text", "argument", "value"),
    [
        ("dispatcher DeepEP; +1f1b overlap", "moe_flex_dispatcher_backend", "deepep"),
        ("dispatcher DeepEP; +1f1b overlap", "overlap_moe_expert_parallel_comm", True),
        ("dispatcher A2A", "moe_token_dispatcher_type", "alltoall"),
        ("all-to-all dispatcher (HybridEP off)", "moe_token_dispatcher_type", "alltoall"),
        ("NCCL all-to-all", "moe_token_dispatcher_type", "alltoall"),
        ("HybridEP EP overlap off", "overlap_moe_expert_parallel_comm", False),
        ("(HybridEP off), no CUDA graphs, no EP overlap", "cuda_graph_impl", "none"),
        ("(HybridEP off), no EP overlap", "overlap_moe_expert_parallel_comm", False),
        ("permute fusion disabled; 5 steps", "moe_permute_fusion", False),
        ("HybridEP; partial CG; offload", "cuda_graph_impl", "transformer_engine"),
        ("of the log; CUDA graphs, hybridep dispatcher", "cuda_graph_impl", "transformer_engine"),
        ("paged stash; full CG", "cuda_graph_impl", "full_iteration"),
    ],
)
def test_words_are_settings(text: str, argument: str, value: object) -> None:
    assert job_of({**ROW, "ambiguity": text}, BOOK).flags[argument] == value


@pytest.mark.parametrize(
    "text",
    [
        "comparison partner of the DeepEP row",
        "recompute/offload/CUDA-graph settings not in the table",
        "schedule 1f1b",
    ],
)
def test_words_about_something_else_are_none(text: str) -> None:
    assert job_of({**ROW, "ambiguity": text}, BOOK).flags == job_of(ROW, BOOK).flags


def test_a_plan_does_not_know_what_was_run() -> None:
    row = {**ROW, "ambiguity": "partial CUDA graphs"}
    planned = job_of(row, BOOK, as_planned=True)
    assert planned.flags == job_of(ROW, BOOK, as_planned=True).flags
