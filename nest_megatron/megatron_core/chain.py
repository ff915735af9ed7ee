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
from collections.abc import Sequence
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.fx_blocks import block_of, chain_blocks
from nest_megatron.megatron_core.fx_operators import chain_work
from nest_megatron.megatron_core.fx_trace import traced
from nest_megatron.model.chain import ChainGraph, TensorShape
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
