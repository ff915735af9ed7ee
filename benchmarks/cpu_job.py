"""The job and the layouts that ``cpu_end_to_end.py`` predicts and runs, and what it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.cluster.records import Accelerator, Cluster, NetworkLevel, Precision
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.network import NetworkProfile
from nest_megatron.profile.network_import import fit_network
from nest_megatron.solver.space import SearchSpace

NUM_RANKS = 2
#: Bytes of a number here over those that the cost model counts for it.
WIDTH = 2
#: Every number format that the cost model knows has 16 bits or fewer; this job's numbers have 32.
#: So all bytes that it is told of (messages, memory, bandwidth) are divided by ``WIDTH``: one of
#: its bytes stands for two of this machine's.
PRECISION = Precision.BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to lay the job over two ranks.

    Args:
        layers: decoder layers of each virtual stage, along the model.
    """

    name: str
    tp: int = 1
    pp: int = 1
    micro: int = 1
    sequence_parallel: bool = False
    zero: ZeroStage = ZeroStage.NONE
    recompute: Recompute = NO_RECOMPUTE
    layers: tuple[int, ...] = ()

    def grid(self, global_batch_size: int) -> PartialLayout:
        """Its degrees and how it divides a batch."""
        chunks = max(1, len(self.layers))
        dims = ParallelDims(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=chunks // self.pp,
            data_parallel_size=NUM_RANKS // (self.tp * self.pp),
        )
        return PartialLayout(
            dims=dims,
            global_batch_size=global_batch_size,
            micro_batch_size=self.micro,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            zero=self.zero,
        )

    def partition(self, spec: TransformerSpec) -> StagePartition:
        """Its stages; the embedding lies on the first one and the head on the last."""
        ends = [1]
        for count in self.layers or (spec.num_layers,):
            ends.append(ends[-1] + count)
        marks = (0, *ends[1:-1], len(spec.layer_kinds()))
        return StagePartition(boundaries=marks, pipeline_model_parallel_size=self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is measured, predicted and run.

    Args:
        micro_batch_sizes: those that blocks are timed with, and that the planner may choose.
        rounds: how often all blocks and all layouts have their turn. The quicker turn counts, of
            blocks as of layouts, so that what disturbs the machine for a while does not.
        passes: timed passes of each block in a turn.
        network_s: time for the collectives.
        largest_bytes: of their messages.
        warm_up, steps: optimizer steps of a layout's turn before those that count, and those.
    """

    spec: TransformerSpec
    global_batch_size: int
    layouts: tuple[Layout, ...]
    micro_batch_sizes: tuple[int, ...]
    rounds: int
    passes: int
    network_s: float
    largest_bytes: int
    warm_up: int
    steps: int

    def shards(self) -> Iterator[LayerShard]:
        """All ways in which a layer is divided."""
        for tp, sequence_parallel in ((1, False), (2, True), (2, False)):
            for micro in self.micro_batch_sizes:
                yield LayerShard(
                    tensor_model_parallel_size=tp,
                    micro_batch_size=micro,
                    sequence_parallel=sequence_parallel,
                    flash_attention=False,
                )

    def space(self) -> SearchSpace:
        """What the planner chooses among: all that Megatron's own layers run without a GPU.

        Context parallelism needs Transformer Engine, ZeRO-2 and 3 need Megatron-FSDP on GPUs.
        """
        return SearchSpace(
            fixed={
                "context_parallel_size": 1,
                "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": 1,
            },
            limits={"micro_batch_size": max(self.micro_batch_sizes)},
            zero_stages=(ZeroStage.NONE, ZeroStage.OPTIMIZER),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the machine's cores reach, all at work at once.

    Args:
        flops_per_s: of a float32 matrix product on one core.
        copy_bytes_per_s: read and written by one core that copies what no cache holds.
        call_s: time of an operator that has nothing to do.
        hidden_share: share of an all-reduce that runs beside the work of a core that started it.
    """

    flops_per_s: float
    copy_bytes_per_s: float
    call_s: float
    hidden_share: float


def cluster_of(figures: Figures, network: NetworkProfile, memory_bytes: int) -> Cluster:
    """This machine as a node of two devices, its network as measured."""
    device = Accelerator(
        name="CPU core",
        memory_bytes=memory_bytes // NUM_RANKS // WIDTH,
        peak_flops_per_s={PRECISION: figures.flops_per_s},
        gemm_efficiency={PRECISION: 1.0},
        attention_efficiency=1.0,
        memory_bandwidth_bytes_per_s=figures.copy_bytes_per_s / WIDTH,
        memory_efficiency=1.0,
        kernel_floor_s=figures.call_s,
        flash_attention=False,
        source="measured: a matrix product, a copy and an empty operator, on all cores at once",
    )
    node = NetworkLevel(
        name="node",
        num_devices=None,
        bandwidth_bytes_per_s=figures.copy_bytes_per_s / WIDTH,
        latency_s=1e-5,
        source="a copy in memory; to be measured",
    )
    described = Cluster(name="cpu", num_gpus=NUM_RANKS, accelerator=device, levels=(node,))
    samples = tuple(
        dataclasses.replace(each, message_bytes=each.message_bytes // WIDTH)
        for each in network.samples
    )
    measured = fit_network(dataclasses.replace(network, samples=samples), described).cluster
    assert measured is not None
    return measured


def settings_of(figures: Figures) -> CostSettings:
    """What holds for float32 training on processor cores.

    Traffic takes the cores that compute, so what hides of it is measured. A parameter has a float32
    weight and two moments, no master weight beside it. The host is the device: its work is part of
    what is timed.
    """
    hidden = figures.hidden_share
    return CostSettings(
        precision=PRECISION,
        dp_overlap=hidden,
        optimizer_bytes_per_parameter=7 * 4 / WIDTH,  # 4 tensors read, 3 written
        memory_reserve_bytes=0,
        memory_margin=0.0,
        iteration_floor_s=0.0,
        traits=ExecutionTraits(
            async_tensor_traffic=hidden > 0.5,
            gradient_bytes=4 // WIDTH,
            loss_bytes=8 // WIDTH,
            optimizer_bytes=8 // WIDTH,
        ),
    )


_ZERO = ZeroStage.OPTIMIZER

#: About 24 million parameters; a step takes between one and three seconds on two cores.
TRIAL = Trial(
    spec=TransformerSpec(
        name="gpt_24m",
        num_layers=6,
        hidden_size=512,
        ffn_hidden_size=1408,
        num_attention_heads=8,
        seq_length=256,
        vocab_size=4096,
    ),
    global_batch_size=8,
    layouts=(
        Layout(name="dp2 mbs1"),
        Layout(name="dp2 mbs2", micro=2),
        Layout(name="dp2 mbs4", micro=4),
        Layout(name="dp2 mbs1 zero1", zero=_ZERO),
        Layout(name="dp2 mbs4 zero1", micro=4, zero=_ZERO),
        Layout(name="dp2 mbs2 full recompute", micro=2, recompute=FULL_RECOMPUTE),
        Layout(name="tp2 mbs1", tp=2),
        Layout(name="tp2 mbs4", tp=2, micro=4),
        Layout(name="tp2 sp mbs1", tp=2, sequence_parallel=True),
        Layout(name="tp2 sp mbs4", tp=2, micro=4, sequence_parallel=True),
        Layout(name="pp2 mbs1 3+3", pp=2, layers=(3, 3)),
        Layout(name="pp2 mbs2 3+3", pp=2, micro=2, layers=(3, 3)),
        Layout(name="pp2 mbs1 5+1", pp=2, layers=(5, 1)),
        Layout(name="pp2 mbs4 4+2", pp=2, micro=4, layers=(4, 2)),
        Layout(name="pp2 vpp2 mbs1 1+2+2+1", pp=2, layers=(1, 2, 2, 1)),
    ),
    micro_batch_sizes=(1, 2, 4, 8),
    rounds=2,
    passes=5,
    network_s=30.0,
    largest_bytes=256 << 20,
    warm_up=1,
    steps=3,
)
