"""A module's forward pass as an fx graph: what autograd saved, operators and edges.

The graph's nodes know their module. Of them operators have FLOPs, traffic and parameters; views are
no operators: what reads a view reads the tensor behind it.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nest_megatron.errors import UnplannableModelError, UserInputError, error_line, nearest
from nest_megatron.model.graph import ChainEdge, ChainOperator, OperatorKind, TensorShape

#: Where a node keeps its ``Place``.
PLACE = "nest_place"


#: Where in a module a run is: the modules that are running, outermost first, with their path and
#: the number of the call.
Place = tuple[tuple[str, int], ...]


def path_of(place: Place) -> str:
    """The path of the innermost module."""
    return place[-1][0] if place else ""


class Trace(NamedTuple):
    """What a run leaves behind.

    Args:
        graph: nodes have ``meta["val"]``, tensors without memory, and ``meta[PLACE]``.
        weights: those tensors of the parameters, by name.
        buffers, inputs: the same for buffers and inputs.
        saved: tensors that autograd saved and where, in the order of the run, a storage as often
            as it was saved.
    """

    graph: Any
    weights: dict[str, Any]
    buffers: dict[str, Any]
    inputs: tuple[Any, ...]
    saved: tuple[tuple[Any, Place], ...]


def traced(module: Any, inputs: Sequence[TensorShape]) -> Trace:
    """Run a module on shapes and record it.

    Raises:
        UserInputError: for an unknown number type.
        UnplannableModelError: for a module that cannot be run on shapes.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree as pytree

    from nest_megatron.megatron_core.substitutes import as_on_a_gpu, at_level

    # Tensors that the module holds outside its parameters become fake when they are met.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        weights = _without_memory(module.named_parameters(), module)
        buffers = _without_memory(module.named_buffers(), module)
        given = tuple(torch.empty(each.sizes, dtype=_dtype(each.dtype)) for each in inputs)
    run = _Run()
    names = (*weights, *buffers)

    def forward(*flat: Any) -> list[Any]:
        """The forward pass as a function of all tensors, which ``make_fx`` needs."""
        run.begin()
        pairs = list(zip(inputs, flat[len(names) :], strict=True))
        out = torch.func.functional_call(
            module,
            dict(zip(names, flat, strict=False)),
            tuple(tensor for each, tensor in pairs if not each.keyword),
            {each.keyword: tensor for each, tensor in pairs if each.keyword},
        )
        run.mark()
        return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]

    flat = (*weights.values(), *buffers.values(), *given)
    keeping = torch.autograd.graph.saved_tensors_hooks(run.save, lambda tensor: tensor)
    # torch 2.15 logs a traceback before it raises: the refusal says as much
    quiet = at_level("torch._subclasses.fake_tensor", logging.CRITICAL)
    try:
        with (
            mode,
            keeping,
            torch.enable_grad(),
            as_on_a_gpu(),
            hooked(module, run.enter, run.leave),
            quiet,
        ):
            graph = make_fx(forward)(*flat).graph
    except Exception as error:  # whatever the model's own code raises is the user's to know
        raise _refusal(error, module, path_of(run.place)) from error
    return Trace(
        graph=graph, weights=weights, buffers=buffers, inputs=given, saved=tuple(run.saved)
    )


def _without_memory(named: Iterator[tuple[str, Any]], module: Any) -> dict[str, Any]:
    """Tensors of the same shapes in the fake mode that is on."""
    import torch
    from torch.nn.parameter import is_lazy

    made = {}
    for name, tensor in named:
        if is_lazy(tensor):
            raise _refusal(
                ValueError(f"{name} has no shape yet: run a batch through it"), module, ""
            )
        made[name] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )
    return made


def _dtype(name: str) -> Any:
    import torch

    known = sorted(key for key, value in vars(torch).items() if isinstance(value, torch.dtype))
    if name not in known:
        raise UserInputError(
            "dtype", name, limit="torch has no such number type", fix=nearest(name, known)
        )
    return getattr(torch, name)


@contextlib.contextmanager
def hooked(
    module: Any, enter: Callable[..., None], leave: Callable[..., None], *, always: bool = False
) -> Iterator[None]:
    """Call functions with the path of each part of a module as it begins and as it ends.

    Args:
        enter: takes the path, the part, and its arguments by place and by keyword.
        leave: takes the path, the part, its arguments and its output.
        always: ``leave`` is called after an error, too.
    """
    handles = []
    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
        handles.append(part.register_forward_hook(partial(leave, path), always_call=always))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(slots=True)
class _Run:
    """Where the run is, and what it has saved.

    make_fx appends nodes as operators run; at each step into or out of a module all nodes since the
    last step get their module.
    """

    place: Place = ()
    calls: int = 0
    saved: list[tuple[Any, Place]] = field(default_factory=list)
    last: Any = None

    def begin(self) -> None:
        """Find the end of the graph that is being written."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        self.last = next(iter(reversed(get_proxy_mode().tracer.graph.nodes)))

    def mark(self) -> None:
        """Tell the nodes since the last call their module."""
        while (node := self.last.next).op != "root":
            node.meta[PLACE] = self.place
            self.last = node

    def save(self, tensor: Any) -> Any:
        """Note a tensor that autograd keeps."""
        self.saved.append((tensor, self.place))
        return tensor

    def enter(self, path: str, *_: Any) -> None:
        """Note that a module begins."""
        self.mark()
        self.calls += 1
        self.place = (*self.place, (path, self.calls))

    def leave(self, path: str, *_: Any) -> None:
        """Note that a module ends."""
        self.mark()
        # A module inside that raised, and was caught, is left with it.
        names = [name for name, _ in self.place]
        last = len(names) - 1 - names[::-1].index(path)
        self.place = self.place[:last]


#: Words of torch where a run needs a tensor's values; the classes differ from release to release.
_VALUE_WORDS = (
    "datadependent",
    "data-dependent",
    "data dependent",
    "dynamicoutputshape",
    "dynamic output shape",
    "tracing tensor",
    "unbacked",
    "meta tensors",
)


def _refusal(error: Exception, module: Any, path: str) -> UnplannableModelError:
    """The error for a module of which the part at a path was running."""
    part = module.get_submodule(path)
    where = f"{path or 'the model'} ({type(part).__name__})"
    place = _place(error)
    text = f"{type(error).__name__} {error}".lower()
    if any(word in text for word in _VALUE_WORDS):
        limit = f"it decides by the values of a tensor{place}, and a trace has shapes only"
        fix = "Use a tensor operation instead (torch.where, masks), or extract the parts around it "
        return UnplannableModelError("module", where, limit, fix=f"{fix}one by one.")
    limit = f"its forward pass fails on these inputs{place}: {error_line(error).rstrip('.: ')}"
    fix = "Check the inputs' number, shapes (--input) and number types (--dtype)."
    return UnplannableModelError("module", where, limit, fix)


def _place(error: Exception) -> str:
    """The innermost line of the model's own code, in words."""
    import torch

    frames = [(frame, Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    entries = [  # under which the model's code begins
        at + 1
        for at, (frame, path) in enumerate(frames)
        if frame.name == "forward" and path == Path(__file__)
    ]
    other = (Path(__file__).parent, Path(torch.__file__).parent, Path(contextlib.__file__))
    own = [
        frame
        for frame, path in frames[max(entries, default=len(frames)) :]
        if not any(path.is_relative_to(folder) for folder in other)
    ]
    if not own:
        return ""
    last = own[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f" at {last.filename}:{last.lineno}" + (f" (`{code}`)" if code else "")


_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
#: These read the rows that they are asked for, and no more of the table.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
#: These give memory that nothing has been written to, or constants of the program.
_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "lift_fresh_copy"}
)
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class ChainWork(NamedTuple):
    """Operators in the order of the run and their places, edges, and what is saved first where."""

    operators: tuple[ChainOperator, ...]
    places: tuple[Place, ...]
    edges: tuple[ChainEdge, ...]
    saved: tuple[tuple[Place, float], ...]


def chain_work(trace: Trace) -> ChainWork:
    """Work and traffic of every operator of a trace."""
    makers = {storage_of(t): f"input_{i}" for i, t in enumerate(trace.inputs)}
    unused = {storage_of(weight): weight.numel() for weight in trace.weights.values()}
    # what the backward pass needs besides the weights, with where each is saved first
    known = {*unused, *map(storage_of, trace.buffers.values())}
    saved: dict[int, tuple[Place, float]] = {}
    for tensor, place in trace.saved:
        if (storage := storage_of(tensor)) not in known:
            saved.setdefault(storage, (place, float(tensor.untyped_storage().nbytes())))
    operators: list[ChainOperator] = []
    places: list[Place] = []
    edges: list[ChainEdge] = []
    for node in trace.graph.nodes:
        if not _is_operator(node, makers):
            continue
        read = _read(node)
        edges += [
            ChainEdge(source=makers[s], target=node.name, num_bytes=num_bytes)
            for s, num_bytes in read.items()
            if s in makers
        ]
        out = {storage_of(t): _size(t) for t in _tensors(node)}
        parameters = sum(unused.pop(s, 0) for s in read)
        output_bytes = sum(out.values())
        if _name(node) in _GATHERS:
            read |= {storage_of(t): min(output_bytes, _size(t)) for t in _tensors(node.args[0])}
        # an update in place keeps what it was
        kept = [saved[s][1] for s in out if s in saved and s not in makers]
        places.append(node.meta.get(PLACE, ()))
        operators.append(
            ChainOperator(
                name=node.name,
                target=".".join(str(node.target).split(".")[:2]),  # "aten.mm" of "aten.mm.default"
                module=path_of(places[-1]),
                kind=_kind(node),
                flops=float(_flops(node)),
                bytes_moved=sum(read.values()) + output_bytes,
                parameters=parameters,
                output_bytes=output_bytes,
                saved_bytes=sum(kept),
            )
        )
        makers |= dict.fromkeys(out, node.name)
    return ChainWork(
        operators=tuple(operators),
        places=tuple(places),
        edges=tuple(edges),
        saved=tuple(saved.values()),
    )


def _is_operator(node: Any, makers: dict[int, str]) -> bool:
    """Whether a node is an operator that a device works on."""
    if node.op != "call_function" or not hasattr(node.target, "_schema") or _name(node) in _FREE:
        return False
    made = {storage_of(t) for t in _tensors(node)}
    if node.target._schema.is_mutable:
        return bool(made)
    return not made <= (_read(node).keys() | makers.keys())


def _read(node: Any) -> dict[int, float]:
    """Bytes that a node reads of each storage."""
    read: dict[int, float] = {}
    for argument in node.all_input_nodes:
        for tensor in _tensors(argument):
            storage = storage_of(tensor)
            read[storage] = max(read.get(storage, 0.0), _size(tensor))
    return read


def _tensors(node: Any) -> list[Any]:
    """The tensors that a node gives."""
    import torch

    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def storage_of(tensor: Any) -> int:
    """The storage of a tensor, which views share."""
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Any) -> float:
    """Bytes of a tensor; of one that is expanded, those that are really there."""
    whole: int = tensor.untyped_storage().nbytes()
    return float(min(tensor.numel() * tensor.element_size(), whole))


def _name(node: Any) -> str:
    """``add`` of ``aten.add_.Tensor``."""
    name: str = node.target._schema.name.rpartition("::")[2]
    return name.removesuffix("_")


def _kind(node: Any) -> OperatorKind:
    from torch.utils.flop_counter import flop_registry

    name = _name(node)
    if any(word in name for word in _ATTENTION):
        return OperatorKind.ATTENTION
    if name in _GROUPED:
        return OperatorKind.GROUPED_GEMM
    if node.target.overloadpacket in flop_registry:
        return OperatorKind.GEMM
    return OperatorKind.MEMORY_BOUND


def _flops(node: Any) -> int:
    """Forward FLOPs by torch's own registry; operators that it lacks have none."""
    import torch
    from torch.utils.flop_counter import flop_registry

    if _name(node) == _CPU_ATTENTION:
        return _attention_flops(node)
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None and _name(node) in _GROUPED:  # every row meets one matrix
        left, right = (argument.meta["val"].shape for argument in node.args[:2])
        return int(2 * left.numel() * right[-1])
    if formula is None:
        return 0
    args, options = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return int(formula(*args, **options, out_val=node.meta.get("val")))


def _attention_flops(node: Any) -> int:
    """The registry's formula, with key and value heads repeated to the query's number."""
    import torch
    from torch.utils.flop_counter import flop_registry

    shapes = [argument.meta["val"].shape for argument in node.args[:3]]
    formula = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    repeated = [torch.empty((*shapes[0][:2], *shape[2:]), device="meta") for shape in shapes]
    return int(formula(*repeated, out_val=repeated[0]))
