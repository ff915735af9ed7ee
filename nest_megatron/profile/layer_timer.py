"""Times layer blocks of a model, built from megatron-core's modules, on this device.

A block is built with the real shapes of one rank, in a process group whose other ranks do not
exist: what it would communicate costs nothing here. Routing is balanced. Nothing waits for the
device inside a timed stretch: events are put into a GPU's stream and read when all is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any

from nest_megatron.megatron_core.stage import Where, staged
from nest_megatron.megatron_core.units import Layers, Stretch, Unit, build
from nest_megatron.model.block_parameters import sized
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.profile.clock import OUT_OF_MEMORY, DeviceClock, HostClock, middle_half
from nest_megatron.profile.records import SHAPE, Timing
from nest_megatron.units import Seconds

#: What is built for each block, and how much of it is run.
_UNITS = {
    LayerBlock.ATTENTION: (LayerKind.DENSE, Stretch.ATTENTION),
    LayerBlock.WINDOW_ATTENTION: (LayerKind.WINDOW_DENSE, Stretch.ATTENTION),
    LayerBlock.DENSE: (LayerKind.DENSE, Stretch.FEED_FORWARD),
    LayerBlock.EXPERTS: (LayerKind.MOE, Stretch.FEED_FORWARD),
    LayerBlock.EMBEDDING: (LayerKind.EMBEDDING, Stretch.WHOLE),
    LayerBlock.MTP: (LayerKind.MTP, Stretch.AROUND),
    LayerBlock.HEAD: (LayerKind.HEAD, Stretch.WHOLE),
}


def can_time(block: LayerBlock) -> bool:
    """Whether megatron-core's layers of a block are built here: its scans need more packages."""
    return block.base in _UNITS


#: Passes that are made however long they take: a spread needs two.
_FEWEST = 2


@frozen
class Measuring:
    """How blocks are timed.

    Args:
        repetitions: most passes that count, after ``warm_up``; ``least`` are made, if time allows.
        max_seconds: no further pass is begun after so long with one block.
        steady: spread at which the passes so far are enough.
        changes: fields of megatron-core's configuration that the job sets otherwise.
        make_layers: makes the layers as the job's script does, instead of the implementation's.
    """

    where: Where
    implementation: Implementation
    warm_up: int = 3
    repetitions: int = 30
    least: int = 5
    max_seconds: Seconds = 10.0
    steady: float = 0.01
    changes: dict[str, Any] = field(default_factory=dict)
    make_layers: Callable[[TransformerSpec, LayerShard], Any] | None = None


def time_block(
    spec: TransformerSpec, block: LayerBlock, shard: LayerShard, measuring: Measuring
) -> Timing:
    """Time one block in one shape on one rank; one that does not fit here is a ``MemoryError``."""
    kind, stretch = _UNITS[block.base]
    inside = staged(
        sized(spec, block),
        kind,
        shard,
        where=measuring.where,
        implementation=measuring.implementation,
        make_layers=measuring.make_layers,
        **measuring.changes,
    )
    with _memory_errors(), inside as layers:
        watch = _GpuWatch() if measuring.where is Where.GPU else _CpuWatch()
        unit = _built(layers, kind, stretch, watch)
        timing = _timed(unit, block, shard, measuring, watch)
    copies = {LayerBlock.MTP: spec.num_mtp_layers, LayerBlock.HEAD: 1 + spec.num_mtp_layers}
    return _repeated_block(timing, copies.get(block, 1))


def _repeated_block(timing: Timing, copies: int) -> Timing:
    """A block that a micro batch passes several times: MTP layers, and the head after each."""
    if copies == 1:
        return timing
    repeated: tuple[str, ...] = ("forward_s", "backward_s", "recompute_s", "saved_bytes")
    if timing.block is LayerBlock.MTP:  # each has other weights; the head is the same each time
        repeated += ("optimizer_s", "parameters")
    more = {name: copies * getattr(timing, name) for name in repeated}
    return dataclasses.replace(timing, **more)


def _built(layers: Layers, kind: LayerKind, stretch: Stretch, watch: _CpuWatch) -> Unit:
    """The unit on its device, its gradients summed in float32 as Megatron's buffers sum them."""
    import torch

    unit = build(layers, kind, stretch=stretch)
    unit.module.to(device=watch.device, dtype=layers.config.params_dtype)
    with torch.no_grad():
        for parameter in unit.module.parameters():
            parameter.normal_(std=0.01)

    def add(parameter: Any) -> None:
        if parameter.grad is not None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

    for parameter in unit.module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(add)
    return unit


def _timed(
    unit: Unit, block: LayerBlock, shard: LayerShard, measuring: Measuring, watch: _CpuWatch
) -> Timing:
    import torch

    inputs = unit.inputs()
    output = unit.forward(*inputs)
    gradient = torch.randn_like(output)
    output.backward(gradient)  # libraries have made their workspaces, which are no block's
    del output
    before = watch.start_peak()
    unit.forward(*inputs).backward(gradient)
    peak = watch.peak() - before

    def once() -> list[Any]:
        marks = [watch.mark()]
        with torch.no_grad():
            unit.forward(*inputs)
        marks.append(watch.mark())
        output = unit.forward(*inputs)
        marks.append(watch.mark())
        output.backward(gradient)
        marks.append(watch.mark())
        return marks

    warm = time.perf_counter() + measuring.max_seconds / 2
    for _ in range(measuring.warm_up):
        once()
        if time.perf_counter() > warm:
            break
    passes = watch.read(_repeated(once, measuring, watch))
    without, forward, backward = zip(*passes, strict=True)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return Timing(
        block=block,
        **{name: getattr(shard, name) for name in SHAPE},
        forward_s=middle_half(forward)[0],
        backward_s=middle_half(backward)[0],
        recompute_s=middle_half(without)[0] + middle_half(forward)[0],
        optimizer_s=_optimizer_step(unit.module, measuring, watch),
        spread=middle_half(both)[1],
        repetitions=len(passes),
        parameters=sum(parameter.numel() for parameter in unit.module.parameters()),
        saved_bytes=_saved_bytes(unit, inputs),
        peak_memory_bytes=max(0, peak),
    )


def _repeated(once: Callable[[], Any], measuring: Measuring, watch: _CpuWatch) -> list[Any]:
    """Passes until they agree, or time or their number is over."""
    marks: list[Any] = []
    ended = time.perf_counter() + measuring.max_seconds
    while len(marks) < measuring.repetitions:
        marks.append(once())
        if len(marks) >= _FEWEST and time.perf_counter() > ended:
            break
        if len(marks) < measuring.least:
            continue
        if len(marks) % measuring.least == 0:
            times = [sum(times[1:]) for times in watch.read(marks)]
            if middle_half(times)[1] <= measuring.steady:
                break
    return marks


def _optimizer_step(module: Any, measuring: Measuring, watch: _CpuWatch) -> Seconds:
    """One step of Adam over float32 master weights, and the copy back.

    Source: ``megatron.core.optimizer``, ``Float16OptimizerWithFloat16Params`` and
    ``FP32Optimizer``.
    """
    import torch

    parameters = list(module.parameters())
    if not parameters:
        return 0.0
    masters = [
        p if p.dtype is torch.float32 else torch.nn.Parameter(p.detach().float())
        for p in parameters
    ]
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.main_grad
    adam = torch.optim.Adam(masters, fused=watch.fuses_adam, foreach=None)

    def step() -> list[Any]:
        marks = [watch.mark()]
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return [*marks, watch.mark()]

    step()
    times = watch.read([step() for _ in range(measuring.least)])
    return middle_half([seconds for (seconds,) in times])[0]


def _saved_bytes(unit: Unit, inputs: Sequence[Any]) -> int:
    """Bytes that a forward pass keeps, each storage once, weights and shared inputs apart."""
    import torch

    first, *shared = inputs
    known = [*unit.module.parameters(), *unit.module.buffers()]
    known += [tensor for tensor in shared if tensor is not None]
    weights = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept = {first.untyped_storage().data_ptr(): first.untyped_storage()}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor.detach()  # the tensor itself would hold its graph, and all memory, for good

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = unit.forward(*inputs)
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return int(total)


class _CpuWatch(HostClock):
    device = "cpu"
    fuses_adam = False

    def start_peak(self) -> int:
        """Bytes that are allocated now; the peak counts from here."""
        return 0

    def peak(self) -> int:
        """Largest number of bytes allocated since; 0 where the device does not say."""
        return 0


class _GpuWatch(DeviceClock, _CpuWatch):
    device = "cuda"
    fuses_adam = True

    def start_peak(self) -> int:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    def peak(self) -> int:
        import torch

        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    import torch

    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if OUT_OF_MEMORY.search(str(error)):
            raise MemoryError(str(error)) from error
        raise
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
