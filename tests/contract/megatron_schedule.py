"""The order of work that megatron-core's own pipeline schedules execute.

The schedule functions of megatron-core run unchanged, one pipeline rank at a time in this
process: communication returns at once, and the forward and backward steps only write down what they
were asked to do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from unittest import mock

from tests.contract.megatron_shims import torch

Work = tuple[Literal["F", "B"], int, int]


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group of which only the size and the own rank are asked."""

    members: int
    own: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.own


class _Done:
    """A communication that has already ended."""

    def wait(self) -> None:
        pass


class _Communicator:
    """Receives something whenever the schedule asks for it, and sends nothing."""

    def __init__(self, group: _Group, config: Any) -> None:
        self.pp_group, self.config = group, config
        vpp = config.virtual_pipeline_model_parallel_size
        self.virtual_pipeline_model_parallel_size = vpp
        self.total_stages, self.current_stage = group.size(), group.rank()  # since 0.17
        self.is_pp_first_stage = group.rank() == 0
        self.is_pp_last_stage = group.rank() == group.size() - 1

    def recv_forward(self, *_: object, **__: object) -> str:
        return "activation"

    def recv_backward(self, *_: object, **__: object) -> str:
        return "gradient"

    def send_forward(self, *_: object, **__: object) -> None:
        pass

    def send_backward(self, *_: object, **__: object) -> None:
        pass

    def send_forward_recv_backward(self, *_: object, **__: object) -> str:
        return "gradient"

    def send_backward_recv_forward(self, *_: object, **__: object) -> str:
        return "activation"

    def send_forward_recv_forward(
        self, output: object, recv_prev: bool, *_: object, overlap_p2p_comm: bool = False, **__: Any
    ) -> object:
        handles = _handles(send_next=output is not None, recv_prev=recv_prev)
        return ("activation", handles) if overlap_p2p_comm else "activation"

    def send_backward_recv_backward(
        self,
        input_tensor_grad: object,
        recv_next: bool,
        *_: object,
        overlap_p2p_comm: bool = False,
        **__: Any,
    ) -> object:
        handles = _handles(send_prev=input_tensor_grad is not None, recv_next=recv_next)
        return ("gradient", handles) if overlap_p2p_comm else "gradient"

    def send_forward_backward_recv_forward_backward(
        self, *_: object, **__: object
    ) -> tuple[str, str]:
        return "activation", "gradient"


@lru_cache(maxsize=4096)
def recorded_order(
    pipeline_model_parallel_size: int,
    virtual_pipeline_model_parallel_size: int,
    num_microbatches: int,
    rank: int,
) -> tuple[Work, ...]:
    """What one pipeline rank does in a step: ``("F" or "B", chunk on this rank, micro batch)``.

    Raises:
        ValueError, RuntimeError: what megatron-core raises for an impossible schedule.
    """
    from megatron.core.pipeline_parallel import schedules

    pp, vpp = pipeline_model_parallel_size, virtual_pipeline_model_parallel_size
    config = _config(pp, vpp)
    chunks = [_chunk(config) for _ in range(vpp)]
    work: list[Work] = []

    def forward_step(*_: object, current_microbatch: int, **more: Any) -> tuple[Any, int]:
        place = (more.get("vp_stage") or 0, current_microbatch)
        work.append(("F", *place))
        return place, 0

    def backward_step(_: object, output: tuple[int, int], *__: object) -> str:
        work.append(("B", *output))
        return "gradient"

    interleaved = vpp > 1
    name = "with" if interleaved else "without"
    run = getattr(schedules, f"forward_backward_pipelining_{name}_interleaving")
    group = _Group(pp, rank)
    with contextlib.ExitStack() as stack:
        swap = stack.enter_context
        swap(mock.patch.object(schedules, "forward_step", forward_step))
        swap(mock.patch.object(schedules, "backward_step", backward_step))
        swap(mock.patch.object(torch, "zeros", _zeros_on_cpu(torch.zeros)))
        run(
            forward_step_func=None,
            data_iterator=[None] * vpp if interleaved else None,
            model=chunks if interleaved else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=_Communicator(group, config),
            pg_collection=_collection(group),
        )
    return tuple(work)


def _zeros_on_cpu(zeros: Any) -> Any:
    """The schedules count tokens on the GPU."""

    def on_cpu(*args: Any, **options: Any) -> Any:
        return zeros(*args, **{**options, "device": "cpu"})

    return on_cpu


def _handles(**wanted: bool) -> dict[str, _Done]:
    return {name: _Done() for name, is_wanted in wanted.items() if is_wanted}


def _collection(pipeline: _Group) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = _Group(1, 0)
    groups = {"tp": alone, "cp": alone, "embd": alone, "pos_embd": alone, "dp_cp": alone}
    return ProcessGroupCollection(**groups, pp=pipeline)


def _config(pp: int, vpp: int) -> Any:
    """As Megatron's arguments set it: overlapped point-to-point exactly with virtual stages."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=pp * vpp,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        microbatch_group_size_per_vp_stage=pp,
        overlap_p2p_comm=vpp > 1,
        batch_p2p_comm=vpp == 1,
        pipeline_dtype=torch.bfloat16,
    )


def _chunk(config: Any) -> Any:
    from megatron.core.enums import ModelType

    chunk = torch.nn.Module()
    chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder
    return chunk
