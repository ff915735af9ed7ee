"""The operator chain of any ``nn.Module``, traced with torch.fx and without its numbers.

``torch.fx.symbolic_trace`` gives up at the first ``if`` over a shape or a cache object, and so at
every model of Hugging Face. Instead the module's own forward pass is run, under ``make_fx`` of
torch.fx, with tensors that have shapes and no memory (``FakeTensorMode``): whatever Python does on
the way simply happens, each operator that torch would launch becomes a node, and its shapes are
those of the run. Models built on ``torch.device("meta")`` work, and so 70 billion parameters cost
nothing. What cannot work is a model that asks for a tensor's *values*; it is refused by name and
line.

The module runs as it is: one in training mode (as built) has its dropout, one after ``.eval()``
has none. Its parameters' ``requires_grad`` decides what is kept for the backward pass.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.fx_operators import ChainWork, chain_work
from nest_megatron.megatron_core.fx_trace import Place, traced
from nest_megatron.model.chain import ChainBlock, ChainGraph, ChainOperator, TensorShape
from nest_megatron.packages import install_command


def extract_chain(module: Any, inputs: Sequence[TensorShape]) -> ChainGraph:
    """The forward pass of a module as operators, edges and a chain of blocks.

    Args:
        module: any ``torch.nn.Module``; nothing in it changes, and its numbers are not read.
        inputs: shapes of its inputs, in the order in which it takes them or by their keywords.

    Returns:
        Work and traffic of one forward pass on one device. Attention is one operator, as on a GPU,
        and its FLOPs are those of the whole square of scores, as torch counts them.

    Raises:
        UserInputError: without torch, or for an unknown number type.
        UnplannableModelError: if the module cannot be traced, naming the place.
    """
    require_torch()
    trace = traced(module, inputs)
    work = chain_work(trace)
    return ChainGraph(
        name=type(module).__name__,
        inputs=tuple(inputs),
        input_bytes=float(sum(tensor.nbytes for tensor in trace.inputs)),
        operators=work.operators,
        edges=work.edges,
        blocks=chain_blocks(work, block_of(module), module),
    )


def require_torch() -> None:
    """Refuse to go on without torch.

    Raises:
        UserInputError: naming what to install.
    """
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UserInputError(
            "extract",
            value=None,
            limit="a module is traced by torch, which is not installed",
            fix=f"{install_command('megatron')}; torch alone is enough.",
        ) from error


#: Name of what the model does outside all its parts.
_MODEL = "(model)"

_Call = tuple[str, int]
_Run = tuple[_Call, int, int]


def block_of(module: Any) -> Callable[[str], str]:
    """A function from a module's path to the path of the block that it is in."""
    opened = frozenset(_opened(module, ""))

    def block(path: str) -> str:
        words = path.split(".") if path else []
        for length in range(len(words) + 1):
            prefix = ".".join(words[:length])
            if prefix not in opened:
                return prefix
        return path

    return block


def _opened(module: Any, path: str) -> Iterator[str]:
    """Paths of the parts that are looked into."""
    yield path
    repeated = _repeated_classes(module)
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if type(child) not in repeated and _holds_a_list(child):
            yield from _opened(child, inner)


def _holds_a_list(module: Any) -> bool:
    return any(_repeated_classes(part) for part in module.modules())


def _repeated_classes(module: Any) -> frozenset[type]:
    """Classes that a list holds more than once, and that have parts of their own."""
    from torch import nn

    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return frozenset()
    counts = Counter(type(child) for child in module if any(child.children()))
    return frozenset(kind for kind, count in counts.items() if count > 1)


def chain_blocks(
    work: ChainWork, block: Callable[[str], str], module: Any
) -> tuple[ChainBlock, ...]:
    """The blocks of a chain, in the order of the run; the module's parts name their kinds."""
    runs = _runs(work.places, block)
    names = _numbered([path for (path, _), _, _ in runs])
    kinds = _kinds(work.operators, runs, module)
    kept = _kept(work, runs, block)
    crossing = _crossing(work, [last for _, _, last in runs])
    return tuple(
        ChainBlock(
            name=names[at],
            kind=kinds[at],
            first=first,
            last=last,
            flops=sum(op.flops for op in work.operators[first:last]),
            bytes_moved=sum(op.bytes_moved for op in work.operators[first:last]),
            parameters=sum(op.parameters for op in work.operators[first:last]),
            saved_bytes=kept[at],
            cut_bytes=crossing[at],
        )
        for at, (_, first, last) in enumerate(runs)
    )


def _runs(places: Sequence[Place], block: Callable[[str], str]) -> list[_Run]:
    """Call and bounds of each stretch of operators of one block."""
    runs, first = [], 0
    for call, run in groupby(places, key=lambda place: _call(place, block)):
        last = first + len(list(run))
        runs.append((call, first, last))
        first = last
    return runs


def _call(place: Place, block: Callable[[str], str]) -> _Call:
    """One call of a block: one that is called twice in a row is two blocks."""
    path = block(place.path)
    return path, place.call_of(path)


def _numbered(paths: Sequence[str]) -> list[str]:
    """Names of blocks, no two alike.

    >>> _numbered(["a", "", "a"])
    ['a', '(model)', 'a#2']
    """
    seen: Counter[str] = Counter()
    names = []
    for path in paths:
        seen[path] += 1
        number = f"#{seen[path]}" if seen[path] > 1 else ""
        names.append(f"{path or _MODEL}{number}")
    return names


def _kinds(operators: Sequence[ChainOperator], runs: Sequence[_Run], module: Any) -> list[str]:
    """The class of each block's module, numbered where blocks of one class do different work."""
    works: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
    kinds = []
    for (path, _), first, last in runs:
        name = type(module.get_submodule(path)).__name__
        work = tuple(
            (op.target, op.flops, op.bytes_moved, op.output_bytes) for op in operators[first:last]
        )
        if work not in works[name]:
            works[name].append(work)
        kinds.append((name, works[name].index(work)))
    return [f"{name}.{at + 1}" if len(works[name]) > 1 else name for name, at in kinds]


def _kept(work: ChainWork, runs: Sequence[_Run], block: Callable[[str], str]) -> list[float]:
    """Bytes of each block's saved activations; a call in pieces has them all at its first."""
    by_call: defaultdict[_Call, float] = defaultdict(float)
    for place, num_bytes in work.kept:
        by_call[_call(place, block)] += num_bytes
    return [by_call.pop(call, 0.0) for call, _, _ in runs]


def _crossing(work: ChainWork, ends: Sequence[int]) -> list[float]:
    """Bytes that cross each cut between blocks: each tensor made before and read after it."""
    position = {op.name: at for at, op in enumerate(work.operators)}
    lives: dict[str, tuple[int, int, float]] = {}
    for edge in work.edges:
        if edge.source in position:
            made, reader = position[edge.source], position[edge.target]
            _, last, size = lives.get(edge.source, (made, made, 0.0))
            lives[edge.source] = (made, max(last, reader), max(size, edge.num_bytes))
    return [sum(size for made, last, size in lives.values() if made < end <= last) for end in ends]
