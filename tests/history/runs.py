"""Records of runs for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.history.records import (
    ClusterKey,
    JobKey,
    Measured,
    Outcome,
    Predicted,
    RunRecord,
)
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout

MEASURED = Measured(
    step_times_s=(9.0, 2.0, 2.2, 2.1, 2.3),
    warm_up=1,
    busy_s=(1.5, 1.6, None, 1.5),
    peak_memory_bytes=(60 << 30, 61 << 30, None, 50 << 30),
)


def run_record(**fields: Any) -> RunRecord:
    """A finished run of four ranks on two pipeline ranks, but for some fields."""
    dims = ParallelDims(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    record = RunRecord(
        id="0123abcd",
        outcome=Outcome.FINISHED,
        start="2026-11-23T12:00:00+00:00",
        end="2026-11-23T12:10:00+00:00",
        user="ada",
        batch_job="1234",
        hosts=("a", "a", "b", "b"),
        device="NVIDIA H100 80GB HBM3",
        plan="0123456789abcdef",
        job=JobKey(
            model="llama3_8b",
            model_hash="aaaabbbbccccdddd",
            global_batch_size=128,
            seq_length=8192,
            precision=Precision.BF16,
            framework="Megatron-LM",
        ),
        cluster=ClusterKey(
            name="dgx_h100",
            cluster_hash="ddddccccbbbbaaaa",
            accelerator="h100_sxm",
            num_gpus=4,
            gpus_per_node=2,
        ),
        versions={"torch": "2.13.0", "nest-megatron": "0.1"},
        grid=PartialLayout(
            dims=dims, global_batch_size=128, micro_batch_size=1, sequence_parallel=True
        ),
        pipeline_model_parallel_layout="Et*16|t*16L",
        predicted=Predicted(
            step_s=2.0,
            low_s=1.8,
            high_s=2.2,
            shares={"gemm": 0.7, "pipeline": 0.3},
            features=("fp8",),
            busy_s=(1.4, 1.4),
            peak_memory_bytes=(58 << 30, 50 << 30),
        ),
        measured=MEASURED,
    )
    return dataclasses.replace(record, **fields)
