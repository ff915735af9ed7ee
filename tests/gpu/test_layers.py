"""The layer timer's own lines for a GPU, on one that stands in: its times and bytes are known."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch

from nest_megatron.cluster.records import Precision
from nest_megatron.integrations.megatron_lm import measure_child
from nest_megatron.integrations.megatron_lm.measure_child import Orders
from nest_megatron.integrations.megatron_lm.own_layers import _NOT_OF_A_LAYER, JobArguments
from nest_megatron.megatron_core import units
from nest_megatron.megatron_core.stage import Where, staged
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.profile import layer_timer, session
from nest_megatron.profile.layer_timer import time_block
from nest_megatron.profile.records import Timing
from nest_megatron.profile.session import Skipped, Task
from tests.gpu.stand_in import FLOPS, MEMORY_BYTES_PER_S, Gpu, stand_in_gpu
from tests.profile.test_layer_timer import DENSE, EXPERTS, QUICK, shard

pytestmark = pytest.mark.megatron_lm

ON_GPU = dataclasses.replace(QUICK, where=Where.GPU, max_seconds=3600.0)  # however busy the host
#: Products of matrices of a gated feed-forward half, forward: 2 in, 1 out, of 64 tokens.
DENSE_S = 2 * 64 * 64 * (2 * 128 + 128) / FLOPS


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with stand_in_gpu() as found:
        yield found


def test_times_are_in_seconds(gpu: Gpu) -> None:
    timing = time_block(DENSE, LayerBlock.DENSE, shard(), ON_GPU)
    assert timing.forward_s == pytest.approx(DENSE_S)
    assert timing.backward_s == pytest.approx(2 * DENSE_S)
    assert timing.recompute_s == pytest.approx(2 * DENSE_S)
    assert timing.optimizer_s == pytest.approx(16 * timing.parameters / MEMORY_BYTES_PER_S)
    assert timing.spread == pytest.approx(0, abs=1e-9)


def test_a_tensor_rank_does_its_part(gpu: Gpu) -> None:
    timing = time_block(DENSE, LayerBlock.DENSE, shard(tp=2), ON_GPU)
    assert timing.forward_s == pytest.approx(DENSE_S / 2)


def test_warm_up_is_left_out_and_a_slow_pass_moves_nothing(gpu: Gpu) -> None:
    """A pass has eight products: two and two forward, four backward; the first two have six."""
    gpu.slow[:] = [1000.0] * (6 + 6 + 3 * 8) + [50.0] * 8
    measuring = dataclasses.replace(ON_GPU, warm_up=3, repetitions=9, least=9, steady=-1.0)
    timing = time_block(DENSE, LayerBlock.DENSE, shard(), measuring)
    assert gpu.slow == []
    assert timing.repetitions == 9
    assert timing.forward_s == pytest.approx(DENSE_S)
    assert timing.spread == pytest.approx(0, abs=1e-9)


def test_the_peak_is_of_the_block_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library keeps from its first pass on is no block's."""
    built, kept = layer_timer._built, list[Any]()

    def with_workspace(*args: Any) -> Any:
        unit = built(*args)

        def forward(*inputs: Any) -> Any:
            if not kept:
                kept.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))
            return unit.forward(*inputs)

        return dataclasses.replace(unit, forward=forward)

    plain = time_block(DENSE, LayerBlock.DENSE, shard(), ON_GPU)
    monkeypatch.setattr(layer_timer, "_built", with_workspace)
    timing = time_block(DENSE, LayerBlock.DENSE, shard(), ON_GPU)
    assert plain.saved_bytes < timing.peak_memory_bytes == plain.peak_memory_bytes < 1 << 20


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("spec", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_each_block_runs_on_the_device_as_on_a_cpu(spec: Any, tp: int) -> None:
    """Nothing mixes devices, and what is kept for the backward pass is the same."""
    for block in spec.blocks:
        ours = shard(tp, 4 if spec.is_moe and tp > 1 else 1)
        with stand_in_gpu() as gpu:
            timing = time_block(spec, block, ours, ON_GPU)
        on_cpu = time_block(spec, block, ours, QUICK)
        assert timing.forward_s > 0, block
        assert timing.parameters == on_cpu.parameters, block
        assert timing.saved_bytes == pytest.approx(on_cpu.saved_bytes, abs=64), block
        assert "empty_cache" in gpu.calls


def test_a_block_leaves_nothing_on_the_device(gpu: Gpu) -> None:
    """Nothing waits for the collector of cycles: the next block may need all of the memory."""
    gc.disable()
    try:
        for block in (LayerBlock.ATTENTION, LayerBlock.EXPERTS):
            timing = time_block(EXPERTS, block, shard(), ON_GPU)
            assert gpu.allocated() < timing.saved_bytes / 10, block  # Megatron caches some angles
    finally:
        gc.enable()


def test_inputs_are_no_zeros(gpu: Gpu) -> None:
    """A GPU multiplies zeros with less power, at higher clocks: a time would be too short."""
    with staged(DENSE, LayerKind.DENSE, shard(), where=Where.GPU) as layers:
        hidden, *_ = units.build(layers, LayerKind.DENSE).inputs()
        assert hidden.is_cuda
        assert hidden.requires_grad
        assert torch.count_nonzero(hidden).item() == hidden.numel()
        (_, labels) = units.build(layers, LayerKind.HEAD).inputs()
        assert len(set(labels.flatten().tolist())) > 8
        assert max(labels.flatten().tolist()) < DENSE.padded_vocab_size(1)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "/TransformerEngine/common/gemm.cu:12 in function gemm: CUDA Error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_short_memory_is_known_whoever_says_it(
    words: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(layer_timer, "_built", full)
    with pytest.raises(MemoryError):
        time_block(DENSE, LayerBlock.DENSE, shard(), ON_GPU)


def test_a_block_that_does_not_fit_is_told_and_the_next_has_all_memory(gpu: Gpu) -> None:
    gpu.capacity = 1 << 20  # the head with its logits needs more
    tasks = [Task(block, shard()) for block in (LayerBlock.HEAD, LayerBlock.DENSE)]
    spec = dataclasses.replace(DENSE, vocab_size=8192)
    large, timed = session.run(spec, tasks, ON_GPU, until=float("inf"))
    assert isinstance(large, Skipped)
    assert large.is_too_large
    assert large.reason == "it does not fit on this device"
    assert isinstance(timed, Timing)
    assert timed.block is LayerBlock.DENSE


@pytest.mark.parametrize("words", ["CUDA error: an illegal memory access was encountered", ""])
def test_what_was_timed_before_cuda_failed_is_kept(
    words: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later blocks would fail for it, and be stored as ones that cannot be timed."""
    built = layer_timer._built

    def fails(layers: Any, kind: Any, *rest: Any) -> Any:
        if kind is LayerKind.EMBEDDING:
            gpu.failure = words
            raise RuntimeError(words or "cuBLAS error: this shape is not supported")
        return built(layers, kind, *rest)

    monkeypatch.setattr(layer_timer, "_built", fails)
    monkeypatch.setattr(measure_child, "JobLayers", lambda *_: None)
    blocks = (LayerBlock.DENSE, LayerBlock.EMBEDDING, LayerBlock.HEAD)
    orders = Orders(
        spec=DENSE,
        precision=Precision.BF16,
        tasks=tuple(Task(block, shard()) for block in blocks),
        job=JobArguments(script="pretrain_gpt.py", argv=()),
        implementation=Implementation.LOCAL,
        where=Where.GPU,
        max_seconds=3600.0,
    )
    answer = measure_child.measure(orders, 1)
    timed = [LayerBlock.DENSE] if words else [LayerBlock.DENSE, LayerBlock.HEAD]
    assert [timing.block for timing in answer.timings] == timed
    (skipped,) = answer.skipped
    assert skipped.task.block is LayerBlock.EMBEDDING
    said = words or "cuBLAS error: this shape is not supported"
    assert skipped.reason == f"RuntimeError: {said}"
    assert not skipped.is_too_large


def test_fused_permutation_gets_its_counts_on_the_device(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's kernels refuse counts that lie on the host (2.1, permutation.py)."""
    from megatron.core.transformer.moe import moe_utils

    permute, unpermute, sort = (
        getattr(moe_utils, name) for name in ("permute", "unpermute", "sort_chunks_by_idxs")
    )
    sorted_chunks: list[list[int]] = []

    def sorted_on_device(inp: Any, split_sizes: Any, sorted_index: Any, probs: Any = None) -> Any:
        assert inp.is_cuda
        assert split_sizes.is_cuda
        assert sorted_index.is_cuda
        assert split_sizes.size(0) == sorted_index.size(0)
        sorted_chunks.append(split_sizes.tolist())
        return sort(inp, split_sizes.cpu(), sorted_index.cpu(), probs=probs)

    for name, value in {
        "HAVE_TE": True,
        "fused_permute": permute,
        "fused_permute_with_probs": lambda tokens, probs, routing_map, num_out_tokens: permute(
            tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens
        )[:3],  # what the kernel gives; since 0.17 Megatron adds what is padded
        "fused_unpermute": lambda tokens, index, restore_shape=None, **_: unpermute(
            tokens, index, restore_shape
        ),
        "fused_sort_chunks_by_index": lambda *args: sorted_on_device(*args)[0],
        "fused_sort_chunks_by_index_with_probs": lambda inp, probs, sizes, index: sorted_on_device(
            inp, sizes, index, probs
        ),
    }.items():
        monkeypatch.setattr(moe_utils, name, value, raising=False)
    plain = time_block(EXPERTS, LayerBlock.EXPERTS, shard(2, 4), ON_GPU)
    fused = dataclasses.replace(ON_GPU, changes={"moe_permute_fusion": True})
    timing = time_block(EXPERTS, LayerBlock.EXPERTS, shard(2, 4), fused)
    assert timing.forward_s == pytest.approx(plain.forward_s)
    assert len(set(map(tuple, sorted_chunks))) == 1  # balanced
    assert len(sorted_chunks[0]) == 4 * 2  # each rank's tokens for each of two experts


@pytest.mark.parametrize(
    ("name", "other"), [("fp8", "fp4"), ("fp4", "fp8")], ids=["8 bits", "4 bits"]
)
def test_a_layer_runs_in_the_format_of_the_job(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.fp4_utils
    import megatron.core.fp8_utils

    entered: list[str] = []

    def context(kind: str) -> Any:
        @contextlib.contextmanager
        def within(config: Any) -> Iterator[None]:
            entered.append(kind)
            yield

        return within

    monkeypatch.setattr(megatron.core.fp8_utils, "get_fp8_context", context("fp8"))
    monkeypatch.setattr(megatron.core.fp4_utils, "get_fp4_context", context("fp4"))
    config = type("Config", (), {name: "e4m3", other: None})()
    assert units._in_format(config, lambda hidden: hidden + 1)(1) == 2
    assert entered == [name]
    assert units._in_format(config, lambda hidden: hidden, fp4=False)(1) == 1
    assert entered == [name] * (2 if name == "fp8" else 1)


def test_tokens_that_pad_a_real_router_s_load_are_not_asked_for() -> None:
    """Balanced counts, which are given, know of none: Megatron's chunks would not add up."""
    padding = {"moe_router_padding_for_fp8", "moe_router_padding_for_quantization"}
    assert padding <= set(_NOT_OF_A_LAYER)


@pytest.mark.parametrize("implementation", Implementation)
def test_experts_are_built_as_plans_launch_them(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nest_megatron.megatron_core.stage.described_layers", lambda spec, shard, config, _: config
    )
    given = {"where": Where.GPU, "implementation": implementation}
    with stand_in_gpu(), staged(EXPERTS, LayerKind.MOE, shard(), **given) as config:
        has_engine = implementation is Implementation.TRANSFORMER_ENGINE
        assert config.moe_grouped_gemm is has_engine
        assert not config.use_cpu_initialization
    with staged(EXPERTS, LayerKind.MOE, shard(), where=Where.CPU) as config:
        assert config.use_cpu_initialization
