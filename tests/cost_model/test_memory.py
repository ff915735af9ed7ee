"""What a job's traits make of its memory and its traffic: one formula, whose parts add up."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.data_parallel import replica_traffic
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.memory import ranks_of_states, static_bytes, stays_whole
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings, restored_settings, stored_settings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.estimate import Estimate
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import FULL_RECOMPUTE, RecomputeModule
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.execution import PLAIN, Execution, FlexBackend, TokenDispatcher
from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.operators.ends import embedding_graph, head_graph
from nest_megatron.model.shard import LayerShard, fits_fused_attention
from nest_megatron.solver.space import recompute_settings
from tests import catalogue

TRAITS = {
    "as Megatron is": ExecutionTraits(),
    "two optimizer instances": ExecutionTraits(optimizer_instances=2),
    "16-bit gradients": ExecutionTraits(gradient_bytes=2),
    "fp8 weights": ExecutionTraits(fp8_weights=True, fp8_gather=True),
    "Muon": ExecutionTraits(matrix_optimizer_bytes=8.0, layer_wise_optimizer=True),
    "states on the host": ExecutionTraits(optimizer_bytes=6.0),
}


def settings_of(traits: ExecutionTraits, precision: Precision = Precision.BF16) -> CostSettings:
    return CostSettings(precision=precision, traits=traits)


def priced(settings: CostSettings, model: str, zero: ZeroStage) -> tuple[Estimate, list[int]]:
    dims = ParallelDims(
        pipeline_model_parallel_size=2,
        data_parallel_size=16,
        expert_model_parallel_size=4 if model == "mixtral_8x7b" else 1,
    )
    grid = PartialLayout(
        dims=dims, global_batch_size=64, micro_batch_size=1, sequence_parallel=False, zero=zero
    )
    spec = catalogue.model(model)
    cost = CostModel(spec, catalogue.cluster("dgx_h100", 32), settings)
    partition = uniform_partition(spec, 2, 1)
    problem = stage_problem(cost, grid)
    held = [
        sum(
            problem.costs[problem.unit_kinds[unit]].static_bytes
            for chunk in partition.chunks_of_rank(rank)
            for unit in chunk
        )
        for rank in range(2)
    ]
    return estimate(cost, grid.with_stages(partition)), held


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
@pytest.mark.parametrize("zero", list(ZeroStage))
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP8])
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
def test_the_report_says_what_the_search_charged(
    traits: ExecutionTraits, precision: Precision, zero: ZeroStage, model: str
) -> None:
    """No term of rounding: it was 4.21 GiB with two instances and -8.88 GiB with LoRA."""
    found, held = priced(settings_of(traits, precision), model, zero)
    for stage, static in zip(found.stages, held, strict=True):
        terms = dict(stage.memory_bytes)
        del terms["activations"], terms["working"]
        assert set(terms) == {"weights", "gradients", "optimizer"}
        assert sum(terms.values()) == static
        assert all(num >= 0 for num in terms.values())


@pytest.mark.parametrize(
    ("traits", "precision", "kept"),
    [
        ({}, "bf16", (2, 4, 12 / 8)),
        ({"gradient_bytes": 2}, "bf16", (2, 2, 12 / 8)),
        ({"matrix_optimizer_bytes": 8.0}, "bf16", (2, 4, 8 / 8)),
        ({"params_bytes": 4, "optimizer_bytes": 8.0}, "fp32", (4, 4, 8 / 8)),
        ({"keeps_narrow_gradients": True}, "bf16", (2, 4 + 2, 12 / 8)),
        ({}, "fp8", (2 + 2, 4, 12 / 8)),
        ({"fp8_weights": True}, "fp8", (1 + 1, 4, 12 / 8)),
        ({"fp8_weights": True, "fp8_transpose_cache": False}, "fp8", (1, 4, 12 / 8)),
        ({"fp8_transpose_cache": False}, "fp8", (2 + 2, 4, 12 / 8)),
        ({"fp8_weight_copies": 1}, "fp8", (2 + 1, 4, 12 / 8)),
        ({"fp8_weight_copies": 1, "fp8_weights": True}, "fp8", (1, 4, 12 / 8)),
    ],
)
def test_bytes_of_a_parameter_of_a_layer(
    traits: dict[str, object], precision: str, kept: tuple[float, float, float]
) -> None:
    settings = settings_of(ExecutionTraits(**traits), Precision(precision))  # type: ignore[arg-type]
    assert static_bytes(ZeroStage.OPTIMIZER, 8, settings, in_layer=True) == kept


def test_outside_layers_nothing_is_in_fp8_and_adam_stays() -> None:
    traits = ExecutionTraits(fp8_weights=True, matrix_optimizer_bytes=8.0)
    settings = settings_of(traits, Precision.FP8)
    assert static_bytes(ZeroStage.NONE, 8, settings, in_layer=False) == (2, 4, 12)


def test_muon_without_zero_divides_its_states_where_it_is_distributed() -> None:
    alone = settings_of(ExecutionTraits(matrix_optimizer_bytes=8.0))
    shared = settings_of(ExecutionTraits(matrix_optimizer_bytes=8.0, layer_wise_optimizer=True))
    assert static_bytes(ZeroStage.NONE, 4, alone, in_layer=True).optimizer == 8
    assert static_bytes(ZeroStage.NONE, 4, shared, in_layer=True).optimizer == 2


def test_transposes_that_megatron_fsdp_keeps() -> None:
    plain = ExecutionTraits(fp8_weights=True)
    keeping = ExecutionTraits(fp8_weights=True, keep_fp8_transpose_cache=True)
    kept = [
        static_bytes(
            ZeroStage.WEIGHTS, 8, settings_of(traits, Precision.FP8), in_layer=True
        ).weights
        for traits in (plain, keeping)
    ]
    assert kept == [1 / 8, 1 / 8 + 1]


@pytest.mark.parametrize(
    ("num_stages", "kept"), [(1, (2 / 8, 4 / 8, 12 / 8)), (4, (2 / 8 + 2, 4 / 8 + 4, 12 / 8))]
)
def test_what_fsdp2_gathers_stays_under_a_pipeline(
    num_stages: int, kept: tuple[float, float, float]
) -> None:
    settings = settings_of(ExecutionTraits(torch_fsdp2=True))
    whole = stays_whole(ZeroStage.WEIGHTS, num_stages, settings)
    assert static_bytes(ZeroStage.WEIGHTS, 8, settings, in_layer=True, whole=whole) == kept
    assert not stays_whole(ZeroStage.OPTIMIZER, num_stages, settings)


def shard_of(traits: ExecutionTraits, execution: Execution = PLAIN, **dims: int) -> LayerShard:
    grid = PartialLayout(
        dims=ParallelDims(**dims),
        global_batch_size=64,
        micro_batch_size=1,
        sequence_parallel=False,
        execution=execution,
    )
    spec = catalogue.model("mixtral_8x7b")
    return CostModel(spec, catalogue.cluster("dgx_h100", 8), settings_of(traits)).shard(grid)


def test_chunks_of_the_loss_bound_its_logits() -> None:
    spec = catalogue.model("mixtral_8x7b")
    tokens, act = spec.seq_length, 2
    whole, chunked = (
        head_graph(spec, shard_of(ExecutionTraits(loss_chunk_tokens=chunk))).working_bytes
        for chunk in (0, 256)
    )
    assert chunked == whole * 256 / tokens + tokens * spec.hidden_size * act
    longer = shard_of(ExecutionTraits(loss_chunk_tokens=2 * tokens))
    assert head_graph(spec, longer).working_bytes == whole


def test_each_cross_entropy_has_its_traffic() -> None:
    spec = catalogue.model("mixtral_8x7b")
    flags = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    logits = spec.seq_length * spec.padded_vocab_size(1)
    for said, moved in (({}, 52), (flags, 10)):
        graph = head_graph(spec, shard_of(execution_traits(said, Precision.BF16)))
        loss = next(op for op in graph.operators if op.name == "cross_entropy")
        assert loss.bytes_moved + loss.backward_bytes_moved == pytest.approx(moved * logits)


@pytest.mark.parametrize(("fused", "halves"), [(True, 2), (False, 3)])
def test_a_gated_activation_that_is_not_fused_keeps_one_half_more(fused: bool, halves: int) -> None:
    spec = catalogue.model("llama3_8b")
    shard = shard_of(ExecutionTraits(fused_activation=fused))
    kept = dict(layer_graph(spec, LayerKind.DENSE, shard).saved_bytes)[Part.MLP]
    assert kept == spec.seq_length * spec.ffn_hidden_size * 2 * (halves + 1)
    flags = {"bias_swiglu_fusion": fused}
    assert execution_traits(flags, Precision.BF16).fused_activation is fused


def test_hybrid_ep_has_a_place_for_every_token_of_its_group_twice() -> None:
    spec = catalogue.model("mixtral_8x7b")
    flex = Execution(
        moe_token_dispatcher_type=TokenDispatcher.FLEX,
        moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
    )
    dims = {"data_parallel_size": 8, "expert_model_parallel_size": 8}
    graphs = [
        (head_graph(spec, shard), layer_graph(spec, LayerKind.MOE, shard))
        for shard in (shard_of(ExecutionTraits(), each, **dims) for each in (PLAIN, flex))
    ]
    buffers = 2 * 8 * spec.seq_length * spec.hidden_size * 2
    for plain, with_buffers in zip(*graphs, strict=True):
        assert with_buffers.working_bytes == plain.working_bytes + buffers


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "gpt_oss_120b"])
def test_a_price_does_not_depend_on_what_was_priced_before(model: str) -> None:
    """The first layer of DeepSeek V2 and every head have no experts, and work beside buffers."""
    spec, cluster = catalogue.model(model), catalogue.cluster("gb200_nvl72", 64)
    flex = Execution(
        moe_token_dispatcher_type=TokenDispatcher.FLEX,
        moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
    )
    grids = [
        PartialLayout(
            dims=ParallelDims(data_parallel_size=64, expert_model_parallel_size=experts),
            global_batch_size=1024,
            micro_batch_size=2,
            sequence_parallel=False,
            execution=execution,
        )
        for execution in (PLAIN, flex)
        for experts in (1, 8, 32)
    ]
    partition = uniform_partition(spec, 1)
    alone = [
        estimate(CostModel(spec, cluster, CostSettings()), g.with_stages(partition)) for g in grids
    ]
    for order in (1, -1):
        together = CostModel(spec, cluster, CostSettings())
        assert [estimate(together, g.with_stages(partition)) for g in grids[::order]] == alone[
            ::order
        ]


@pytest.mark.parametrize(
    ("recipe", "qkv", "output"),
    [("delayed", 1, 1), ("tensorwise", 1, 2), ("mxfp8", 2, 2), (None, 2, 2)],
)
@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_v2_lite"])
def test_attention_in_fp8_saves_what_it_takes_and_makes_in_fp8(
    model: str, recipe: str | None, qkv: int, output: int
) -> None:
    spec = catalogue.model(model)
    flags = {"fp8_recipe": recipe or "delayed", "fp8_dot_product_attention": recipe is not None}
    traits = execution_traits(flags, Precision.FP8)
    settings = settings_of(traits, Precision.FP8)
    grid = PartialLayout(
        dims=ParallelDims(),
        global_batch_size=8,
        micro_batch_size=1,
        sequence_parallel=False,
    )
    shard = CostModel(spec, catalogue.cluster("dgx_h100", 8), settings).shard(grid)
    saved = [layer_graph(spec, kind, shard).saved_by_part() for kind in set(spec.layer_kinds())]
    part = Part.MLA_UP if spec.multi_latent_attention else Part.QKV
    wide = [
        layer_graph(
            spec,
            kind,
            dataclasses.replace(shard, qkv_bytes=None, attention_output_bytes=None),
        ).saved_by_part()
        for kind in set(spec.layer_kinds())
    ]
    for narrow, usual in zip(saved, wide, strict=True):
        if part in usual:
            assert narrow[part] == usual[part] * qkv / 2
            heads, width = spec.num_attention_heads, spec.v_head_dim or spec.head_dim
            gained = usual[Part.PROJECTION] - narrow[Part.PROJECTION]
            assert gained == spec.seq_length * heads * width * (2 - output)


def test_a_stage_of_deepspeed_keeps_what_it_sent() -> None:
    spec = catalogue.model("mixtral_8x7b")
    kept = [
        embedding_graph(spec, shard_of(ExecutionTraits(keeps_stage_outputs=keeps))).saved_bytes
        for keeps in (False, True)
    ]
    assert kept == [(), ((Part.EMBEDDING, spec.seq_length * spec.hidden_size * 2),)]


def test_inputs_of_layers_on_the_host_leave_two_of_them() -> None:
    spec = catalogue.model("llama3_8b")
    runs = []
    for traits in (ExecutionTraits(), ExecutionTraits(offloads_layer_inputs=True)):
        model = CostModel(spec, catalogue.cluster("dgx_h100", 8), settings_of(traits))
        grid = PartialLayout(
            dims=ParallelDims(data_parallel_size=8),
            global_batch_size=8,
            micro_batch_size=1,
            sequence_parallel=False,
            recompute=FULL_RECOMPUTE,
        )
        _, kinds = model.unit_kinds(grid)
        runs.append(next(each.own.run for each in kinds if each.kind is LayerKind.DENSE))
    plain, moved = runs
    assert moved.saved_bytes == 0 < plain.saved_bytes
    assert moved.working_bytes == plain.working_bytes + 2 * plain.saved_bytes


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b", "deepseek_v3"])
def test_what_modules_offload_is_kept_no_longer(model: str) -> None:
    """Bytes that go to the host and those that stay are what the layer kept before."""
    spec = catalogue.model(model)
    kind = LayerKind.MOE if spec.is_moe else LayerKind.DENSE
    plain = layer_graph(spec, kind, LayerShard())
    every = (
        "attn_norm",
        "qkv_linear",
        "core_attn",
        "attn_proj",
        "mlp_norm",
        "expert_fc1",
        "moe_act",
    )
    for modules in ((), ("core_attn",), ("expert_fc1", "moe_act"), every):
        shard = LayerShard(execution=Execution(offload_modules=modules))
        graph = layer_graph(spec, kind, shard)
        kept, before = graph.total_saved_bytes(), plain.total_saved_bytes()
        assert kept + graph.offloaded_bytes == pytest.approx(before)
        assert min(graph.saved_by_part().values()) >= 0
        assert plain.working_bytes <= graph.working_bytes
        # one layer at work, one on its way back, and the last, which stays
        assert graph.working_bytes <= plain.working_bytes + 3 * graph.offloaded_bytes
    assert graph.offloaded_bytes > before * (0.7 if spec.is_moe else 0.25)


def test_queries_keys_and_values_go_with_core_attention() -> None:
    spec = catalogue.model("llama3_8b")
    shard = LayerShard(execution=Execution(offload_modules=("core_attn",)))
    moved = layer_graph(spec, LayerKind.DENSE, shard).offloaded_bytes
    assert moved == spec.seq_length * (32 + 2 * 8) * 128 * 2


def test_unfused_attention_moves_its_scores_as_well() -> None:
    spec = catalogue.model("llama3_8b")
    moved, kept = (
        layer_graph(spec, LayerKind.DENSE, LayerShard(flash_attention=False, execution=execution))
        for execution in (Execution(offload_modules=("core_attn",)), Execution())
    )
    scores = kept.saved_by_part()[Part.CORE_ATTENTION]
    assert moved.saved_by_part()[Part.CORE_ATTENTION] == 0
    assert moved.offloaded_bytes > scores > 0


@pytest.mark.parametrize(
    ("heads", "seq_length", "bytes_a_score"),
    [
        (12, 1601, 4 + 2),  # the language model of multimodal_llava_mcore_te_tp1_pp1
        (12, 1600, 2),
        (13, 1601, 0),  # of size 48
    ],
)
def test_heads_that_no_fused_kernel_takes_keep_their_scores(
    heads: int, seq_length: int, bytes_a_score: int
) -> None:
    """That test's golden peak is 15.8 GB, of which 9 GB are these scores, kept by 12 layers."""
    spec = dataclasses.replace(
        catalogue.model("gpt3_175b"),
        hidden_size=624,
        num_attention_heads=heads,
        num_query_groups=None,
        kv_channels=624 // heads,
        seq_length=seq_length,
        attention_dropout=0.0,
    )
    graph = layer_graph(spec, LayerKind.DENSE, LayerShard(micro_batch_size=4))
    scores = 4 * heads * seq_length**2
    kept = graph.saved_by_part()[Part.CORE_ATTENTION] / scores
    assert kept == pytest.approx(bytes_a_score, abs=0.01)
    assert fits_fused_attention(spec) is (bytes_a_score == 0)
    dims = ParallelDims(context_parallel_size=2)
    split = LaunchRequest(spec=spec, dims=dims, micro_batch_size=1, global_batch_size=1)
    broken = {rule.id for rule, _ in check(split)}
    assert ("head_sizes_under_cp" in broken) is (bytes_a_score > 0)
    recomputed = {m for r in recompute_settings(spec, 1) for m in r.modules}
    assert (RecomputeModule.CORE_ATTN in recomputed) is (bytes_a_score > 0)


@pytest.mark.parametrize(
    ("accelerator", "recipe", "copies"),
    [
        ("H100", "delayed", 2),
        ("B200", "delayed", 1),
        ("GB300", "tensorwise", 1),
        ("GB200", "mxfp8", 2),
        ("GB200", "blockwise", 2),
        ("MI300X", "delayed", 2),
    ],
)
def test_blackwell_needs_no_transposes_under_one_scale(
    accelerator: str, recipe: str, copies: int
) -> None:
    flags = {"fp8": "hybrid", "fp8_recipe": recipe}
    settings = TARGETS["megatron_lm_0.20"].settings(accelerator, Precision.FP8, flags)
    assert settings.traits.fp8_weight_copies == copies


def traffic_s(traits: ExecutionTraits, zero: ZeroStage = ZeroStage.OPTIMIZER) -> tuple[float, ...]:
    dims = ParallelDims(data_parallel_size=32)
    settings = settings_of(traits, Precision.FP8)
    cluster = catalogue.cluster("dgx_h100", 32)
    traffic = replica_traffic(dims, zero, cluster, ParameterCount(dense=10**8), settings)
    count = ParameterCount(dense=10**9)
    layer, head = (traffic.of_unit(kind, count) for kind in (LayerKind.DENSE, LayerKind.HEAD))
    return layer.reduce + layer.across, layer.gather, head.gather


def test_traffic_follows_the_widths() -> None:
    reduced, gathered, outside = traffic_s(ExecutionTraits())
    assert gathered == outside
    assert reduced / 2 < traffic_s(ExecutionTraits(gradient_bytes=2))[0] < 0.7 * reduced
    fp8 = traffic_s(ExecutionTraits(fp8_weights=True, fp8_gather=True))
    assert fp8[0] == reduced
    assert gathered / 2 < fp8[1] < 0.75 * gathered
    assert fp8[2] == outside
    assert traffic_s(ExecutionTraits(), ZeroStage.NONE)[1] == 0
    assert traffic_s(ExecutionTraits(layer_wise_optimizer=True), ZeroStage.NONE)[1] == gathered


def test_optimizer_instances_gather_within_themselves_and_sum_over_each_other() -> None:
    reduced, gathered, _ = traffic_s(ExecutionTraits())
    by_node = traffic_s(ExecutionTraits(optimizer_instances=4))
    assert by_node[1] < gathered
    assert by_node[0] > reduced  # the sum over instances is an all-reduce


def test_an_optimizer_by_layers_has_no_instances() -> None:
    """A plan leaves the job's out, and is priced without."""
    by_layers = ExecutionTraits(layer_wise_optimizer=True)
    with_instances = ExecutionTraits(layer_wise_optimizer=True, optimizer_instances=4)
    assert traffic_s(with_instances) == traffic_s(by_layers)
    assert ranks_of_states((64, 8), CostSettings(traits=with_instances)) == (64, 8)


def test_the_optimizers_own_traffic_follows_its_states() -> None:
    assert ExecutionTraits().optimizer_traffic_bytes == CostSettings().optimizer_bytes_per_parameter
    assert ExecutionTraits(params_bytes=4, optimizer_bytes=8.0).optimizer_traffic_bytes == 24


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
def test_traits_survive_a_plan_file(traits: ExecutionTraits) -> None:
    settings = settings_of(traits)
    stored = stored_settings(settings)
    assert restored_settings(stored) == settings
    assert any(name.startswith("traits.") for name in stored) == (traits != ExecutionTraits())


@pytest.mark.parametrize("field", ["params_bytes", "gradient_bytes", "optimizer_instances"])
def test_impossible_traits_are_refused(field: str) -> None:
    with pytest.raises(UserInputError, match=field):
        ExecutionTraits(**{field: 0})  # type: ignore[arg-type]


def test_products_in_fp8_keep_their_inputs_in_fp8() -> None:
    """A layer of Llama 3 8B keeps, in units of tokens times hidden size, 34 bytes or 29.5."""
    spec = catalogue.model("llama3_8b")
    kept = []
    for precision, traits in (
        (Precision.BF16, ExecutionTraits()),
        (Precision.FP8, ExecutionTraits()),
        (Precision.FP8, ExecutionTraits(fp8_inputs=False)),
    ):
        cost = CostModel(spec, catalogue.cluster("dgx_h100", 8), settings_of(traits, precision))
        grid = PartialLayout(
            dims=ParallelDims(data_parallel_size=8),
            global_batch_size=8,
            micro_batch_size=1,
            sequence_parallel=False,
        )
        graph = layer_graph(spec, LayerKind.DENSE, cost.shard(grid))
        scores = 4 * spec.num_attention_heads / spec.hidden_size  # the softmax's statistics
        total = graph.input_bytes + sum(num for _, num in graph.saved_bytes)
        kept.append(total / (spec.seq_length * spec.hidden_size) - scores)
    assert kept == [pytest.approx(34), pytest.approx(29.5), pytest.approx(34)]
