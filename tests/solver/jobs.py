"""Small jobs that looking at everything can solve, and searches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from nest_megatron.cluster.records import Accelerator, Cluster, NetworkLevel, Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver import backend
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace

KERNEL = backend.solver_of(backend.backend_to_run())


def small_spec(rng: random.Random) -> TransformerSpec:
    layers = rng.randint(2, 6)
    heads = rng.choice([2, 4])
    experts = rng.choice([None, None, 4])
    return TransformerSpec(
        name="small",
        num_layers=layers,
        hidden_size=64 * heads,
        ffn_hidden_size=rng.choice([256, 512]),
        num_attention_heads=heads,
        num_query_groups=rng.choice([None, 2]),
        seq_length=rng.choice([256, 1024]),
        vocab_size=rng.choice([1000, 50_000]),
        num_experts=experts,
        moe_layer_pattern=tuple(rng.choice([0, 1, 1]) for _ in range(layers)) if experts else (),
        moe_ffn_hidden_size=256 if experts else None,
        moe_shared_expert_intermediate_size=rng.choice([None, 256]) if experts else None,
        mtp_num_layers=rng.choice([None, None, 1]),
        untie_embeddings_and_output_weights=rng.random() < 0.7,
    )


def small_cluster(rng: random.Random, memory_bytes: int | None = None) -> Cluster:
    accelerator = Accelerator(
        name="toy",
        memory_bytes=memory_bytes or rng.choice([40, 80, 150, 400, 4000]) * 10**6,
        peak_flops_per_s={Precision.BF16: rng.choice([1e12, 1e14])},
        gemm_efficiency={Precision.BF16: 0.8},
        attention_efficiency=0.5,
        memory_bandwidth_bytes_per_s=1e12,
        memory_efficiency=0.9,
        kernel_floor_s=rng.choice([0.0, 1e-6]),
    )
    levels = (
        NetworkLevel(
            name="node",
            num_devices=2,
            bandwidth_bytes_per_s=rng.choice([1e9, 1e11]),
            latency_s=1e-6,
        ),
        NetworkLevel(
            name="spine",
            num_devices=None,
            bandwidth_bytes_per_s=rng.choice([1e8, 1e10]),
            latency_s=5e-6,
        ),
    )
    return Cluster(
        name="toy", num_gpus=rng.choice([1, 2, 4, 8]), accelerator=accelerator, levels=levels
    )


def small_settings() -> CostSettings:
    return CostSettings(memory_reserve_bytes=0)


def search(
    spec: TransformerSpec,
    cluster: Cluster,
    batch: int,
    space: SearchSpace,
    num_layouts: int = 11,
    solver: object = KERNEL,
) -> Search:
    model = CostModel(spec, cluster, small_settings())
    return Search(model, batch, space, solver, num_layouts=num_layouts)  # type: ignore[arg-type]


def families(grids: GridSpace) -> Iterator[PartialLayout]:
    """Every layout of a space but its recomputation and its stages."""
    for shard in grids.shards():
        for grid in grids.grids(shard):
            yield from grids.families(grid)
