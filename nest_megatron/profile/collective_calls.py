"""Timed calls of torch.distributed's collectives, and what all ranks must agree on.

NCCL is timed with CUDA events, gloo with the processor's clock. torch is imported when a caller is
made, never with this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.clock import OUT_OF_MEMORY

Call = Callable[[], object]

#: Longest that NCCL waits for one call, which takes seconds at most: then something hangs.
LIMIT = timedelta(minutes=3)
#: What torch raises where a backend lacks a collective.
_LACKING = (RuntimeError, NotImplementedError, ValueError, AttributeError)


class Caller:
    """Makes and times calls on this rank of ``world``, the process group of all."""

    #: Tensors are of 4-byte floats, which both backends reduce.
    ITEM_BYTES = 4

    def __init__(self, world: Any) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._world = torch, dist, world
        self.rank: int = dist.get_rank(world)
        self.backend: str = dist.get_backend(world)
        if self.backend not in ("nccl", "gloo"):
            raise ProfileError(
                "world",
                self.backend,
                limit="collectives are measured over nccl or gloo",
                fix="Initialize torch.distributed with one of these backends.",
            )
        on_gpu = self.backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        #: Of one call; NCCL ends the process then, gloo's is torch's own.
        self._timeout = LIMIT if on_gpu else None

    def versions(self) -> dict[str, str]:
        """Of the software that runs the collectives."""
        found = {"torch": str(self._torch.__version__)}
        if self.backend == "nccl":
            found["nccl"] = ".".join(map(str, self._torch.cuda.nccl.version()))
            found["cuda"] = str(self._torch.version.cuda)
        return found

    def own_group(self, groups: Iterable[Sequence[int]]) -> Any:
        """This rank's of several groups; every rank makes every group, in the same order."""
        own = None
        for ranks in groups:
            group = self._dist.new_group(list(ranks), timeout=self._timeout, backend=self.backend)
            own = group if self.rank in ranks else own
        return own

    def try_out(self, kind: CollectiveKind) -> str | None:
        """Why a kind cannot be measured here; nothing if it can."""
        reason = ""
        size = self._dist.get_world_size(self._world) * self.ITEM_BYTES
        try:
            self.prepared(kind, size, self._world)()
        except _LACKING as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
        lacking = self.agree(bool(reason))
        return (reason or "another rank refused it") if lacking else None

    def prepared(self, kind: CollectiveKind, message_bytes: int, group: Any) -> Call:
        """A collective of so many bytes in all, ready to be called."""
        count = message_bytes // self.ITEM_BYTES
        size = self._dist.get_world_size(group)
        whole = self._zeros(count)
        if kind is CollectiveKind.ALL_REDUCE:
            return lambda: self._dist.all_reduce(whole, group=group)
        if kind is CollectiveKind.SEND_RECV:
            return self._ring(whole, self._zeros(count), group)
        if kind is CollectiveKind.ALL_TO_ALL:
            other = self._zeros(count)
            return lambda: self._dist.all_to_all_single(other, whole, group=group)
        part = self._zeros(count // size)
        if kind is CollectiveKind.ALL_GATHER:
            gather = _named(self._dist, "all_gather_single", "all_gather_into_tensor")
            return lambda: gather(whole, part, group=group)
        scatter = _named(self._dist, "reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(part, whole, group=group)

    def fitting(self, kind: CollectiveKind, message_bytes: int, group: Any) -> Call | None:
        """The same; nothing where a rank has too little memory for its tensors."""
        call = None
        try:
            call = self.prepared(kind, message_bytes, group)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not OUT_OF_MEMORY.search(str(error)):
                raise
        return None if self.agree(call is None) else call

    def timed(self, call: Call, calls: int) -> float:
        """Seconds of one of several calls that follow each other; all ranks start together."""
        on_gpu = self.backend == "nccl"
        # else torch warns that it takes the current one
        device_ids = [self._torch.cuda.current_device()] if on_gpu else None
        self._dist.barrier(self._world, device_ids=device_ids)
        if not on_gpu:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        cuda = self._torch.cuda
        cuda.synchronize()
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / calls

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Each time as the slowest rank of the world had it."""
        return self._reduced(times, self._dist.ReduceOp.MAX)

    def agree(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.slowest([float(flag)])[0] > 0

    def same(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(self._reduced([float(number)], self._dist.ReduceOp.MIN)[0])

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = self._torch.tensor(values, dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(tensor, op=operation, group=self._world)
        found: list[float] = tensor.tolist()
        return found

    def _ring(self, sent: Any, received: Any, group: Any) -> Call:
        """Each rank sends to the next one and receives from the one before."""
        dist = self._dist
        ranks = dist.get_process_group_ranks(group)
        place = ranks.index(dist.get_rank())
        after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]

        def call() -> None:
            pair = [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return call

    def _zeros(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.float32, device=self._device)


def _named(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))
