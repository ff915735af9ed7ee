"""Records what a module does: every operator, every collective, every storage kept for later.

A dispatch mode sees each operator below autograd with its tensors' shapes; hooks on the modules say
where it belongs. What the backward pass runs is identified by the autograd node that runs it, which
is marked with its module in the forward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nest_megatron.megatron_core.fx import hooked, storage_of
from nest_megatron.model.graph import OperatorKind

#: Operators that move no bytes: they look at memory in another way, or only ask for some.
_FREE = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::lift_fresh",
    "aten::_unsafe_view",
    "aten::resize_",
    "prim::device",
}
#: Collectives by the operators that start them.
_COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "nest::pass_on": "send_recv",
}


@dataclass(slots=True)
class Work:
    """What one module does by operators of one kind."""

    flops: float = 0.0
    bytes_moved: float = 0.0
    backward_flops: float = 0.0
    backward_bytes_moved: float = 0.0
    num_kernels: int = 0

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as it was issued.

    Args:
        group: name that torch gave the process group.
        is_async: it was not waited for at once, so that a GEMM runs meanwhile.
    """

    path: str
    kind: str
    group: str
    message_bytes: int
    backward: bool
    is_async: bool


@dataclass(slots=True)
class Record:
    """Everything that was seen.

    Args:
        work: by module path and kind of operator.
        recomputed: the same, of what the backward pass ran a second time.
        saved: bytes of saved activations, by the path that kept them first.
        input_bytes: of these, the unit's own input.
    """

    work: dict[tuple[str, OperatorKind], Work] = field(default_factory=dict)
    recomputed: dict[tuple[str, OperatorKind], Work] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    input_bytes: int = 0


def record(
    module: torch.nn.Module,
    forward: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    *,
    selected_share: float = 1.0,
) -> Record:
    """Run a module forward and backward and write down what happens.

    Args:
        forward: runs the module on the inputs; the first input is the unit's own, the rest (masks,
            angles, labels) are shared by all layers and not counted as kept.
        selected_share: share of a mask's elements that are set, where one selects elements: the
            router's is a balanced one's.
    """
    seen = _Recorder(module, inputs, selected_share)
    with hooked(module, seen.enter, seen.leave, always=True), seen:
        with torch.autograd.graph.saved_tensors_hooks(seen.keep, lambda kept: kept):
            output = forward(*inputs)
        seen.count_saved()
        seen.mark(output, "")
        seen.is_backward = True
        output.backward(torch.empty_like(output))
    return seen.record


class _Recorder(TorchDispatchMode):
    """The mode, the hooks and the marks on autograd's nodes."""

    def __init__(
        self, module: torch.nn.Module, inputs: Sequence[Tensor | None], selected_share: float
    ) -> None:
        super().__init__()
        given = [tensor for tensor in inputs if tensor is not None]
        self.record = Record(input_bytes=given[0].untyped_storage().nbytes())
        self.is_backward = False
        self._share = selected_share
        self._stack = [""]
        self._paths: dict[Any, str] = {}
        # storages that are not kept for the module's sake
        self._own = {*map(storage_of, (*module.parameters(), *module.buffers(), *given))}
        self._kept: dict[int, tuple[Any, str]] = {}

    def enter(self, path: str, _: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note that a part of the module begins."""
        self.mark((*args, *kwargs.values()), self._stack[-1])
        self._stack.append(path)

    def leave(self, _: str, __: object, ___: object, output: Any) -> None:
        """Note that it ends."""
        self.mark(output, self._stack.pop())

    def mark(self, output: Any, path: str) -> None:
        """Remember which module made the nodes that lead to its output."""
        tensors = output if isinstance(output, tuple | list) else (output,)
        waiting = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in self._paths:
                continue
            self._paths[node] = path
            waiting += [before for before, _ in node.next_functions if before is not None]

    def keep(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that autograd keeps; a storage counts once."""
        key = storage_of(tensor)
        if key not in self._own and key not in self._kept and not self.is_backward:
            self._kept[key] = (tensor.untyped_storage(), self._stack[-1])
        return tensor

    def count_saved(self) -> None:
        """Count what is still there when the forward pass is over: some outputs are let go of."""
        for storage, path in self._kept.values():
            self.record.saved[path] = self.record.saved.get(path, 0) + storage.nbytes()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry an operator out and write it down."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::masked_select":  # how many are selected is not known from shapes
            output = args[0].new_empty((round(args[0].numel() * self._share),))
        else:
            output = func(*args, **kwargs)
        path = self._stack[-1]
        is_recomputed = False
        if self.is_backward and len(self._stack) > 1:
            is_recomputed = True  # the module works a second time
        elif self.is_backward:
            path = self._paths.get(torch._C._current_autograd_node(), "")
        if name in _COLLECTIVES:
            call = Call(
                path=path,
                kind=_COLLECTIVES[name],
                group=next(group for group in map(_process_group, args) if group is not None),
                message_bytes=max(sum(map(_num_bytes, _tensors(argument))) for argument in args),
                backward=self.is_backward,
                is_async=all(argument is not False for argument in args),  # the default is left out
            )
            self.record.calls.append(call)
        elif not (func.is_view or name in _FREE):
            flops = _flops(func, args, kwargs, output)
            moved = sum(map(_num_bytes, _tensors((args, tuple(kwargs.values()), output))))
            kind = OperatorKind.MEMORY_BOUND
            if name.startswith("nest::flash"):
                kind = OperatorKind.ATTENTION
            elif flops:
                is_grouped = ".local_experts." in path
                kind = OperatorKind.GROUPED_GEMM if is_grouped else OperatorKind.GEMM
            table = self.record.recomputed if is_recomputed else self.record.work
            work = table.setdefault((path, kind), Work())
            if self.is_backward and not is_recomputed:
                work.backward_flops += flops
                work.backward_bytes_moved += moved
            else:
                work.flops += flops
                work.bytes_moved += moved
                work.num_kernels += 1
        return output


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _num_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor covers; what is repeated by a stride of 0 is read once."""
    shown = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(math.prod(shown) * tensor.element_size())


def _process_group(argument: Any) -> str | None:
    """The name of a process group that an operator is given."""
    if isinstance(argument, str):
        return argument
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return str(torch.distributed.ProcessGroup.unbox(argument).group_name)
    except (RuntimeError, TypeError):
        return None


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
    """Floating-point operations, a multiply-add counted as two; 0 of what moves memory alone."""
    name = func._schema.name
    if name == "nest::flash_forward":
        return _attention_flops(*args)
    if name == "nest::flash_backward":  # five GEMMs to the forward pass's two
        _, query, key, value, _, _, span = args
        return 2.5 * _attention_flops(query, key, value, span)
    count = flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=output))


def _attention_flops(query: Any, _: Any, value: Any, span: float) -> float:
    """Of two GEMMs over all pairs of a query and the keys that it attends to."""
    tokens, batch, heads, width = query.shape
    return float(2 * tokens * span * batch * heads * (width + value.shape[-1]))
