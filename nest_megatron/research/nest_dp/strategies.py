"""Ways to divide a layer over the devices of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nest_megatron.parallel.degree_rules import is_legal_grid
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.research.nest_dp.job import ResearchJob
from nest_megatron.research.nest_dp.topology import Block

#: Largest degrees tried where nobody says otherwise; tensor-parallel sizes go up to one node.
_LIMITS = {"context_parallel_size": 8, "expert_model_parallel_size": 64, "micro_batch_size": 8}


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
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        return Block(tp, cp, self.expert_model_parallel_size)

    @property
    def samples(self) -> int:
        """Sequences of one micro batch of the pipeline."""
        return self.micro_batch_size * self.expert_model_parallel_size

    def label(self) -> str:
        """A short name for tables.

        >>> Strategy(tensor_model_parallel_size=4, sequence_parallel=True).label()
        'tp 4 sp, micro batch 1'
        """
        tp, cp, ep = self.block
        words = [f"tp {tp} sp" if self.sequence_parallel else f"tp {tp}"]
        words += [f"cp {cp}"] * (cp > 1) + [f"ep {ep}"] * (ep > 1)
        return ", ".join([*words, f"micro batch {self.micro_batch_size}"])


def strategies(job: ResearchJob) -> Iterator[Strategy]:
    """Every strategy that Megatron's rules allow: degrees that are powers of two, or those fixed.

    None takes more devices than there are.
    """
    spec, choices = job.spec, job.choices

    def values(name: str) -> list[int]:
        if name in choices.fixed:
            return [choices.fixed[name]]
        most = choices.limits.get(name, _LIMITS.get(name, max(8, job.cluster.gpus_per_node)))
        return [1 << power for power in range(most.bit_length()) if 1 << power <= most]

    for tp, cp, ep, sequence_parallel in product(
        values("tensor_model_parallel_size"),
        values("context_parallel_size"),
        values("expert_model_parallel_size") if spec.is_moe else [1],
        (False, True),
    ):
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=ep,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp if spec.is_moe else 1,
        )
        if (
            tp * cp * ep > job.cluster.num_gpus
            or (sequence_parallel and tp == 1)
            or not is_legal_grid(spec, dims, sequence_parallel=sequence_parallel)
        ):
            continue
        for micro in values("micro_batch_size"):
            if job.global_batch_size % (micro * ep) == 0:
                yield Strategy(
                    tensor_model_parallel_size=tp,
                    context_parallel_size=cp,
                    expert_model_parallel_size=ep,
                    micro_batch_size=micro,
                    sequence_parallel=sequence_parallel,
                )
