"""The operator chain of any ``nn.Module``, traced with torch.fx and without its numbers.

``torch.fx.symbolic_trace`` gives up at the first ``if`` over a shape or a cache object, and so at
every model of Hugging Face. Instead the module's own forward pass is run, under ``make_fx`` of
torch.fx, with tensors that have shapes and no memory (``FakeTensorMode``): whatever Python does on
the way simply happens, each operator that torch would launch becomes a node, and its shapes are
those of the run. Models built on ``torch.device("meta")`` work, and so 70 billion parameters cost
nothing. What cannot work is a model that asks for a tensor's *values*; it is refused by name and
line.

The module runs as it is: one in training mode (as built) has its dropout, one after ``.eval()``
has none. Its parameters' ``requires_grad`` decides what is saved for the backward pass.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError, error_line, nearest
from nest_megatron.megatron_core.fx import ChainWork, Place, chain_work, path_of, traced
from nest_megatron.model.graph import ChainBlock, ChainGraph, ChainOperator, TensorShape
from nest_megatron.packages import require_package


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
        blocks=chain_blocks(work, module),
    )


def require_torch() -> None:
    """Refuse to go on without torch.

    Raises:
        UserInputError: naming what to install.
    """
    require_package(
        "torch",
        "megatron",
        "extract",
        "a module is traced by torch, which is not installed",
        "; torch alone is enough",
    )


#: Name of what the model does outside all its parts.
_MODEL = "(model)"

_Call = tuple[str, int]
_Run = tuple[_Call, int, int]


def _opened(module: Any, path: str) -> Iterator[str]:
    """Paths of the parts that are looked into."""
    yield path
    repeated = _repeated_classes(module)
    for name, child in module.named_children():
        if any(map(_repeated_classes, child.modules())) and type(child) not in repeated:
            yield from _opened(child, f"{path}.{name}" if path else name)


def _repeated_classes(module: Any) -> frozenset[type]:
    """Classes that a list holds more than once, and that have parts of their own."""
    from torch import nn

    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return frozenset()
    counts = Counter(type(child) for child in module if any(child.children()))
    return frozenset(kind for kind, count in counts.items() if count > 1)


def chain_blocks(work: ChainWork, module: Any) -> tuple[ChainBlock, ...]:
    """The blocks of a chain, in the order of the run; the module's parts name their kinds."""
    opened = frozenset(_opened(module, ""))

    def call_of(place: Place) -> _Call:
        """One call of a block: one that is called twice in a row is two blocks."""
        prefixes = ("", *accumulate(path_of(place).split("."), "{}.{}".format))
        path = next((prefix for prefix in prefixes if prefix not in opened), path_of(place))
        return path, next((number for name, number in place if name == path), 0)

    runs: list[_Run] = []
    for call, run in groupby(work.places, key=call_of):
        first = runs[-1][2] if runs else 0
        runs.append((call, first, first + len(list(run))))
    saved: defaultdict[_Call, float] = defaultdict(float)
    for place, num_bytes in work.saved:
        saved[call_of(place)] += num_bytes
    names = _numbered([path for (path, _), _, _ in runs])
    rows = zip(
        runs, names, _kinds(work.operators, runs, module), _crossing(work, runs), strict=True
    )
    return tuple(
        ChainBlock(
            name=name,
            kind=kind,
            first=first,
            last=last,
            flops=sum(op.flops for op in work.operators[first:last]),
            bytes_moved=sum(op.bytes_moved for op in work.operators[first:last]),
            parameters=sum(op.parameters for op in work.operators[first:last]),
            saved_bytes=saved.pop(call, 0.0),  # a call in pieces has them all at its first
            cut_bytes=crossing,
        )
        for (call, first, last), name, kind, crossing in rows
    )


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


def _crossing(work: ChainWork, runs: Sequence[_Run]) -> list[float]:
    """Bytes that cross the cut behind each block: each tensor made before and read after it."""
    position = {op.name: at for at, op in enumerate(work.operators)}
    lives: dict[str, tuple[int, int, float]] = {}
    for edge in work.edges:
        if edge.source in position:
            made, reader = position[edge.source], position[edge.target]
            _, last, size = lives.get(edge.source, (made, made, 0.0))
            lives[edge.source] = (made, max(last, reader), max(size, edge.num_bytes))
    return [
        sum(size for made, last, size in lives.values() if made < end <= last) for _, _, end in runs
    ]


def read_inputs(inputs: Sequence[str], dtypes: Sequence[str]) -> list[TensorShape]:
    """Shapes as typed: ``1,2048`` or ``input_ids=1,2048``, and their number types.

    >>> read_inputs(["1,2048"], ["int64"])
    [TensorShape(sizes=(1, 2048), dtype='int64', keyword='')]

    Raises:
        UserInputError: for a shape that is none, or number types that do not match the inputs.
    """
    if not inputs:
        raise UserInputError(
            "--input",
            None,
            "a module is traced on the shapes of its inputs, and none is given",
            "Add for example --input 1,2048 --dtype int64.",
        )
    if len(dtypes) not in (0, 1, len(inputs)):
        raise UserInputError(
            "--dtype",
            ", ".join(dtypes),
            f"there are {len(inputs)} inputs",
            "Give one number type for all, or one each.",
        )
    every = [*dtypes] * (len(inputs) if len(dtypes) == 1 else 1) or ["float32"] * len(inputs)
    shapes = []
    for text, dtype in zip(inputs, every, strict=True):
        keyword, _, sizes = text.rpartition("=")
        words = sizes.split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise UserInputError(
                "--input",
                text,
                "a shape is whole numbers with commas between them",
                "Give for example --input 1,2048, or --input input_ids=1,2048.",
            )
        shapes.append(
            TensorShape(sizes=tuple(map(int, words)), dtype=dtype, keyword=keyword.strip())
        )
    return shapes


def build(name: str) -> Any:
    """The model that a name stands for.

    Args:
        name: ``package.module:function``; modules of the current folder count.

    Raises:
        UserInputError: if there is no such function, or it makes no model.
    """
    from torch import nn

    path, _, attribute = name.partition(":")
    if not path or not attribute:
        limit = "it names a Python module and what to call in it, with a colon between them"
        raise _wrong(name, limit, "Write for example mypackage.mymodule:build.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever the user's own code raises
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is None or not f"{path}.".startswith(f"{absent}."):
            raise _fails(name, error, "importing it fails") from error
        limit = f"there is no Python module {absent}, neither installed nor in {folder}"
        fix = "Check the name, or run the command in the folder that holds it."
        raise _wrong(name, limit, fix) from error
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
        fix = nearest(attribute, known) if known else "It has nothing that can be called."
        raise _wrong(name, f"{path} has no {attribute}", fix)
    made = getattr(module, attribute)
    if not isinstance(made, nn.Module):
        if not callable(made):
            limit = f"it is {type(made).__name__}, which cannot be called"
            raise _wrong(name, limit, "Name a function that takes nothing and returns the model.")
        try:
            made = made()
        except Exception as error:  # whatever the user's own code raises
            raise _fails(name, error, "calling it without arguments fails") from error
    if not isinstance(made, nn.Module):
        limit = f"it returns {type(made).__name__}, not a torch.nn.Module"
        raise _wrong(name, limit, "Return the model itself.")
    return made


def _wrong(name: str, limit: str, fix: str) -> UserInputError:
    return UserInputError("--module", name, limit, fix)


def _fails(name: str, error: Exception, what: str) -> UserInputError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = "" if Path(last.filename) == Path(__file__) else f" at {last.filename}:{last.lineno}"
    return _wrong(name, f"{what}{inside}: {error_line(error).rstrip('.: ')}", "Correct the module.")
