"""Profiles that nobody measured."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator

from nest_megatron.cluster.records import Precision
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.records import Implementation, LayerProfile, Machine, Timing
from tests import catalogue

H100 = Machine(
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=85520809984,
    driver="550.54.15",
    torch="2.6.0+cu124",
    megatron_core="0.16",
    transformer_engine="2.2.0",
    nccl="2.21.5",
    graphics_mhz=1980,
    memory_mhz=2619,
    implementation=Implementation.TRANSFORMER_ENGINE,
    is_cpu=False,
)
H200 = dataclasses.replace(H100, device_name="NVIDIA H200", memory_bytes=150 << 30)
CPU = dataclasses.replace(
    H100,
    device_name="Intel Xeon",
    driver=None,
    transformer_engine=None,
    nccl=None,
    graphics_mhz=None,
    memory_mhz=None,
    implementation=Implementation.LOCAL,
    is_cpu=True,
)


def timing(block: LayerBlock = LayerBlock.ATTENTION, **changes: object) -> Timing:
    """One shape of a block: a millisecond forward, two backward, unless told otherwise."""
    fields: dict[str, object] = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "micro_batch_size": 1,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "recompute_s": 2e-3,
        "optimizer_s": 1e-4,
        "spread": 0.01,
        "repetitions": 20,
        "parameters": 1_000_000,
        "saved_bytes": 1 << 20,
        "peak_memory_bytes": 1 << 22,
    }
    return Timing(block=block, **{**fields, **changes})  # type: ignore[arg-type]


def profile(
    timings: Iterable[Timing],
    *,
    name: str = "mine",
    spec: TransformerSpec | None = None,
    machine: Machine = H100,
    created: str = "2026-05-01T10:00:00+00:00",
    imported: bool = False,
    precision: Precision = Precision.BF16,
) -> LayerProfile:
    """A profile of these timings, of llama3_8b on an H100 unless told otherwise."""
    return LayerProfile(
        name=name,
        created=created,
        imported=imported,
        precision=precision,
        machine=machine,
        model=catalogue.model("llama3_8b") if spec is None else spec,
        timings=tuple(timings),
    )


def whole_profile(
    name: str = "llama3_8b-h100", spec: TransformerSpec | None = None
) -> LayerProfile:
    """A profile with a few shapes of every block of a model."""
    spec = catalogue.model("llama3_8b") if spec is None else spec
    shapes = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2)]
    timings = (
        timing(
            block,
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            micro_batch_size=micro,
            forward_s=4e-3 * micro / tp,
            backward_s=9e-3 * micro / tp,
        )
        for block in spec.blocks
        for tp, micro in shapes
    )
    return profile(timings, name=name, spec=spec)


def random_timings(rng: random.Random, spec: TransformerSpec) -> Iterator[Timing]:
    """Times without rhyme or reason: not monotone in any degree, some shapes left out."""
    for block in spec.blocks:
        for tp in (1, 2, 4):
            for micro in (1, 2):
                for ep in (1, 2) if block is LayerBlock.EXPERTS else (1,):
                    if rng.random() < 0.4:
                        continue
                    yield timing(
                        block,
                        tensor_model_parallel_size=tp,
                        sequence_parallel=tp > 1,
                        micro_batch_size=micro,
                        expert_model_parallel_size=ep,
                        forward_s=10 ** rng.uniform(-6, -2),
                        backward_s=10 ** rng.uniform(-6, -2),
                    )
