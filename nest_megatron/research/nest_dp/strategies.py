"""Ways to divide a layer over the devices of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nest_megatron.cluster.records import Cluster
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.degree_rules import is_legal_grid
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.research.nest_dp.group_shapes import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Degrees of a stage, spelled as Megatron spells them.

    Each expert rank works on tokens of its own, so a micro batch of the pipeline has
    ``micro_batch_size * expert_model_parallel_size`` sequences.
    """

    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False

    @property
    def block(self) -> Block:
        """Its devices."""
        return Block(
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
        )

    @property
    def samples(self) -> int:
        """Sequences of one micro batch of the pipeline."""
        return self.micro_batch_size * self.expert_model_parallel_size

    def shard(self, spec: TransformerSpec, *, flash_attention: bool, loss_bytes: int) -> LayerShard:
        """What one rank computes; experts are split over the tensor ranks as well."""
        tp = self.tensor_model_parallel_size
        return LayerShard(
            tensor_model_parallel_size=tp,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=tp if spec.is_moe else 1,
            micro_batch_size=self.micro_batch_size,
            sequence_parallel=self.sequence_parallel,
            flash_attention=flash_attention,
            loss_bytes=loss_bytes,
        )

    def label(self) -> str:
        """A short name for tables.

        >>> Strategy(tensor_model_parallel_size=4, sequence_parallel=True).label()
        'tp 4 sp, micro batch 1'
        """
        tp = self.tensor_model_parallel_size
        words = [f"tp {tp} sp" if self.sequence_parallel else f"tp {tp}"]
        words += [f"cp {self.context_parallel_size}"] * (self.context_parallel_size > 1)
        words += [f"ep {self.expert_model_parallel_size}"] * (self.expert_model_parallel_size > 1)
        return ", ".join([*words, f"micro batch {self.micro_batch_size}"])


#: Largest degrees tried where nobody says otherwise; tensor-parallel sizes go up to one node.
LIMITS = {
    "context_parallel_size": 8,
    "expert_model_parallel_size": 64,
    "micro_batch_size": 8,
}


def strategies(
    spec: TransformerSpec,
    cluster: Cluster,
    global_batch_size: int,
    fixed: Mapping[str, int],
    limits: Mapping[str, int],
) -> Iterator[Strategy]:
    """Every strategy that Megatron's rules allow: degrees that are powers of two, or those fixed.

    Args:
        fixed, limits: by the degree's name.
    """

    def values(name: str) -> list[int]:
        if name in fixed:
            return [fixed[name]]
        most = limits.get(name, LIMITS.get(name, max(8, cluster.gpus_per_node)))
        return [1 << power for power in range(most.bit_length()) if 1 << power <= most]

    for tp in values("tensor_model_parallel_size"):
        for cp in values("context_parallel_size"):
            for ep in values("expert_model_parallel_size") if spec.is_moe else [1]:
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    if not _is_legal(spec, tp, cp, ep, sequence_parallel):
                        continue
                    for micro in values("micro_batch_size"):
                        if global_batch_size % (micro * ep) == 0:
                            yield Strategy(
                                tensor_model_parallel_size=tp,
                                context_parallel_size=cp,
                                expert_model_parallel_size=ep,
                                micro_batch_size=micro,
                                sequence_parallel=sequence_parallel,
                            )


def _is_legal(spec: TransformerSpec, tp: int, cp: int, ep: int, sequence_parallel: bool) -> bool:
    dims = ParallelDims(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        data_parallel_size=ep,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp if spec.is_moe else 1,
    )
    return is_legal_grid(spec, dims, sequence_parallel=sequence_parallel)
