"""A GPU that is not there: torch's CUDA, with the CPU underneath and a clock of known answers.

A tensor on "cuda" is a tensor of its own type whose numbers lie on the CPU, so that the code under
test runs unmodified: what mixes devices is refused as CUDA refuses it. Time passes where
:func:`_seconds` says, and in collectives, at :data:`BYTES_PER_S`; events tell it in milliseconds,
once the device has been waited for. Memory is what the tensors hold.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pynvml
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

FLOPS = 1e12
MEMORY_BYTES_PER_S = 1e12
BYTES_PER_S = 1e9  # of a link
H100 = "NVIDIA H100 80GB HBM3"
H100_BYTES = 85_029_158_912
DRIVER, GRAPHICS_MHZ, MEMORY_MHZ = "570.86.15", 1980, 2619


def uuid_of(device: int) -> str:
    """What the driver and CUDA call a device."""
    return f"11111111-2222-3333-4444-{device:012}"


#: What torch's own C++ takes the device for: a build for the CPU can be told of no other.
_OURS = "stand_in"
#: Reserved by the allocator in blocks of so many bytes.
_BLOCK = 2 << 20


@dataclass
class Gpu:
    """What the device has done: its clock, how far it was waited for, and its memory.

    Args:
        slow: factors on the next products of matrices, in turn.
        foreign_bytes: held by CUDA itself and by other processes.
        capacity: bytes that the allocator may hand out.
        index: of the device that the process uses.
        failure: what CUDA says from now on, once it has failed for good.
        calls: what was asked of the device, in order.
    """

    now_ms: float = 0.0
    done_ms: float = 0.0
    peak: int = 0
    foreign_bytes: int = 1 << 30
    capacity: int = H100_BYTES
    index: int = 0
    failure: str = ""
    slow: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    held: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def works(self, seconds: float) -> None:
        self.now_ms += 1e3 * seconds

    def allocated(self) -> int:
        for key, (storage, _) in list(self.held.items()):
            if storage.expired():
                del self.held[key]
        return sum(size for _, size in self.held.values())

    def keeps(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self.held or self.held[reference.cdata][0].expired():
            self.held[reference.cdata] = (reference, storage.nbytes())
            total = self.allocated()
            if total > self.capacity:
                del self.held[reference.cdata]
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
            self.peak = max(self.peak, total)

    def reserved(self, size: int) -> int:
        return math.ceil(size / _BLOCK) * _BLOCK


_GPU: list[Gpu] = []  # the one that stands in now


class CudaTensor(torch.Tensor):
    """A tensor on the device; ``inner`` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(_OURS, 0),
        )
        made.inner = inner
        _GPU[-1].keeps(inner)
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", _GPU[-1].index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = dict(kwargs or {})
        if name == "detach":
            return cls(func(args[0].inner))
        target = kwargs.get("device", _OURS)
        if name == "copy_":
            args[0].inner.copy_(_inner(args[1])) if isinstance(args[0], cls) else args[0].copy_(
                args[1].inner
            )
            return args[0]
        _same_device(func, args, kwargs)
        kwargs = {key: _on_cpu(value) for key, value in kwargs.items()}
        plain_args, plain_kwargs = pytree.tree_map(_inner, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        _GPU[-1].works(_seconds(name, plain_args, found))
        if name in ("_to_copy", "empty_like") and torch.device(target).type == "cpu":
            return found
        given = {id(_inner(each)): each for each in pytree.tree_leaves((args, kwargs))}

        def outer(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return given.get(id(value)) if id(value) in given else cls(value)

        return pytree.tree_map(outer, found)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CudaTensor) else value


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type in ("cuda", _OURS)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


def _same_device(func: Any, args: Any, kwargs: Any) -> None:
    """Numbers of no dimension may lie on the CPU, as CUDA has it; nothing else may."""
    for each in pytree.tree_leaves((args, kwargs)):
        if isinstance(each, torch.Tensor) and not isinstance(each, CudaTensor) and each.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (in {func})"
            )


def _seconds(name: str, args: Sequence[Any], found: Any) -> float:
    """What an operator takes: products of matrices, lookups and Adam's step do, nothing else."""
    if name == "_fused_adam_":
        return 16.0 * sum(parameter.numel() for parameter in args[0]) / MEMORY_BYTES_PER_S
    if name in ("embedding", "embedding_dense_backward"):
        return float(found.nbytes) / MEMORY_BYTES_PER_S
    first = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}.get(name)
    if first is None:
        return 0.0
    left, right = args[first], args[first + 1]
    slow = _GPU[-1].slow
    return 2.0 * left.numel() * right.shape[-1] * (slow.pop(0) if slow else 1.0) / FLOPS


class _OnCuda(TorchFunctionMode):
    """Makes tensors of the device where a call names it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("cuda")
        if func is torch.Tensor.__setitem__ and isinstance(args[0], CudaTensor):
            return func(*pytree.tree_map(_inner, args))  # torch would make a number into a tensor
        device = kwargs.get("device")
        if type(device) is int:  # a bare number is a device of CUDA
            device = kwargs["device"] = torch.device("cuda", device)
        if func is torch.Tensor.to:
            return _moved(args, kwargs)
        if func in (torch.device, torch.Generator) or not _is_cuda(device):
            return func(*args, **kwargs)
        if func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        needs_grad = kwargs.pop("requires_grad", False)
        if any(isinstance(each, CudaTensor) for each in pytree.tree_leaves(args)):
            made = func(*args, **{**kwargs, "device": _OURS})
        else:
            made = CudaTensor(func(*args, **{**kwargs, "device": "cpu"}))
        return made.requires_grad_(needs_grad)


class _Move(torch.autograd.Function):
    """From one device to another; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, to_cuda: bool) -> Any:
        ctx.back = isinstance(tensor, CudaTensor)
        return CudaTensor(tensor.detach().clone()) if to_cuda else tensor.inner.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (CudaTensor(gradient) if ctx.back else gradient.inner), None


def _moved(args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.to``: the device first, then the number format."""
    tensor, *rest = args
    like = next((each for each in rest if isinstance(each, torch.Tensor)), None)
    devices = [each for each in rest if isinstance(each, str | torch.device)]
    dtypes = [each for each in rest if isinstance(each, torch.dtype)]
    if like is not None:
        devices, dtypes = [like.device], [like.dtype]
    device = kwargs.get("device", devices[0] if devices else None)
    dtype = kwargs.get("dtype", dtypes[0] if dtypes else None)
    if device is not None and _is_cuda(device) != isinstance(tensor, CudaTensor):
        tensor = _Move.apply(tensor, _is_cuda(device))
    return tensor if dtype is None else torch.Tensor.to(tensor, dtype)


class Event:
    """``torch.cuda.Event``: moments in milliseconds, known once the device was waited for."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed, self.at = enable_timing, math.nan

    def record(self, stream: Any = None) -> None:
        self.at = _GPU[-1].now_ms

    def synchronize(self) -> None:
        _GPU[-1].done_ms = max(_GPU[-1].done_ms, self.at)

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return self.at <= _GPU[-1].done_ms

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if math.isnan(self.at + end_event.at):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self.at, end_event.at) > _GPU[-1].done_ms:
            raise RuntimeError("CUDA error: device not ready")
        return end_event.at - self.at


class Stream:
    """``torch.cuda.Stream``: everything happens in one order here."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        _GPU[-1].done_ms = _GPU[-1].now_ms

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event  # type: ignore[no-any-return]


def _cuda(gpu: Gpu, name: str, devices: int, generator: torch.Generator) -> dict[str, Any]:
    """The functions of ``torch.cuda`` that a job uses."""
    sizes = {"multi_processor_count": 132, "total_memory": H100_BYTES}

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, major=9, minor=0, uuid=uuid_of(gpu.index), **sizes)

    stream = Stream()

    def set_device(device: Any) -> None:
        gpu.calls.append(f"set_device {device}")
        gpu.index = device

    def synchronize(device: Any = None) -> None:
        gpu.calls.append("synchronize")
        if gpu.failure:
            raise RuntimeError(gpu.failure)
        gpu.done_ms = gpu.now_ms

    def reset_peak_memory_stats(device: Any = None) -> None:
        gpu.calls.append("reset_peak_memory_stats")
        gpu.peak = gpu.allocated()

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free = H100_BYTES - gpu.foreign_bytes - gpu.reserved(gpu.allocated())
        return free, H100_BYTES

    def _lazy_call(callable: Callable[[], None], **_: Any) -> None:
        callable()

    return {
        "_lazy_init": lambda: None,
        "_lazy_call": _lazy_call,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: gpu.index,
        "set_device": set_device,
        "get_device_properties": get_device_properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: name,
        "default_generators": (generator,) * devices,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "manual_seed": generator.manual_seed,
        "synchronize": synchronize,
        "empty_cache": lambda: gpu.calls.append("empty_cache"),
        "memory_allocated": lambda device=None: gpu.allocated(),
        "max_memory_allocated": lambda device=None: gpu.peak,
        "memory_reserved": lambda device=None: gpu.reserved(gpu.allocated()),
        "max_memory_reserved": lambda device=None: gpu.reserved(gpu.peak),
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "mem_get_info": mem_get_info,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }


#: Bytes that a rank sends in a collective of ``size`` ranks, for each byte of the first tensor.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_to_all_single": lambda size: (size - 1) / size,
    "all_gather_into_tensor": lambda size: (size - 1) / size,
    "all_gather_single": lambda size: (size - 1) / size,
    "reduce_scatter_tensor": lambda size: size - 1,
    "reduce_scatter_single": lambda size: size - 1,
}


def _nccl(gpu: Gpu) -> dict[str, Any]:
    """Collectives of tensors on the device, over gloo, with the time of :data:`BYTES_PER_S`."""
    names = dict[int, str]()

    def collective(name: str) -> Any:
        real = getattr(dist, name, None)
        if real is None:
            return None

        @functools.wraps(real)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if names and not isinstance(tensor, CudaTensor):  # NCCL's groups know no other
                raise RuntimeError("No backend type associated with device type cpu")
            args, kwargs = pytree.tree_map(_inner, (args, kwargs))
            if not names:  # a group whose other ranks do not exist
                return real(_inner(tensor), *args, **kwargs)
            size = dist.get_world_size(kwargs.get("group"))
            gpu.works(tensor.nbytes * _SENT[name](size) / BYTES_PER_S)
            return real(_inner(tensor), *args, **kwargs)

        return call

    def renamed(real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = (*args, kwargs.get("backend"))
            args = tuple("gloo" if each == "nccl" else each for each in args)
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
                kwargs["timeout"] = None  # a busy machine keeps no limit
            found = real(*args, **kwargs)
            if "nccl" in [each for each in given if isinstance(each, str)]:
                names[0] = "nccl"
            return found

        return call

    def barrier(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
    ) -> Any:
        if names and device_ids != [gpu.index]:
            raise RuntimeError("barrier(): using the device under current context")
        return _barrier(group, async_op)

    def get_backend(group: Any = None) -> str:
        real = _get_backend(group)
        return "nccl" if real == "gloo" and names else real

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        """Sending and receiving go at the same time."""
        gpu.works(max(op.tensor.nbytes for op in p2p_op_list) / BYTES_PER_S)
        return [op.op(op.tensor.inner, op.peer, op.group, op.tag) for op in p2p_op_list]

    _get_backend, _barrier = dist.get_backend, dist.barrier
    calls = {name: collective(name) for name in _SENT}
    calls |= {name: renamed(getattr(dist, name)) for name in ("init_process_group", "new_group")}
    calls |= {"get_backend": get_backend, "barrier": barrier}
    calls["batch_isend_irecv"] = batch_isend_irecv
    return {name: call for name, call in calls.items() if call is not None}


def _nvml(name: str, devices: int) -> dict[str, Any]:
    """The driver's answers; a device is found by its UUID."""

    def by_uuid(uuid: str) -> int:
        known = [f"GPU-{uuid_of(index)}" for index in range(devices)]
        if uuid not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return known.index(uuid)

    memory = pynvml.c_nvmlMemory_t()
    memory.total = H100_BYTES
    clocks = {pynvml.NVML_CLOCK_GRAPHICS: GRAPHICS_MHZ, pynvml.NVML_CLOCK_MEM: MEMORY_MHZ}
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
        "nvmlDeviceGetCount": lambda: devices,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetName": lambda handle: name,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: memory,
        "nvmlDeviceGetMigMode": lambda handle: [pynvml.NVML_DEVICE_MIG_DISABLE] * 2,
        "nvmlDeviceGetClockInfo": lambda handle, type: clocks[type],
    }


@functools.cache
def _known_to_torch() -> None:
    """Tell torch's C++ of the device, once in a process."""
    from torch.utils import backend_registration

    backend = backend_registration._DummyBackendModule()
    backend.is_available = lambda: bool(_GPU)  # files are saved in another way where it is
    backend_registration._setup_privateuseone_for_python_backend(_OURS, backend)


@contextlib.contextmanager
def stand_in_gpu(name: str = H100, devices: int = 1) -> Iterator[Gpu]:
    """A CUDA device for the code inside, whose work has known times."""
    _known_to_torch()
    gpu, generator = Gpu(), torch.Generator()
    with contextlib.ExitStack() as stack:
        for owner, functions in (
            (torch.cuda, _cuda(gpu, name, devices, generator)),
            (dist, _nccl(gpu)),
            (
                torch.cuda.random,
                {"get_rng_state": lambda device="cuda": torch.cuda.get_rng_state()},
            ),
            (pynvml, _nvml(name, devices)),
            (torch.cuda.nccl, {"version": lambda: (2, 27, 5)}),
            (torch.version, {"cuda": "12.8"}),
        ):
            for key, value in functions.items():
                stack.enter_context(mock.patch.object(owner, key, value, create=True))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # a backward pass stays in this thread, and what names the device there is understood
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        mode, run_backward = stack.enter_context(_OnCuda()), torch.autograd._engine_run_backward

        def within_mode(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return run_backward(*args, **kwargs)

        patched = mock.patch.object(torch.autograd, "_engine_run_backward", within_mode)
        stack.enter_context(patched)
        _GPU.append(gpu)
        stack.callback(_GPU.pop)
        yield gpu
