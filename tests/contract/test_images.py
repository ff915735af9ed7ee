"""An encoder of images: parameters are megatron-core's, and it weighs on the first stage alone."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

import pytest

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, with_launch
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators import block_graph
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, plan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.contract.megatron_shims import meta_megatron, torch

COMMAND = (
    "pretrain_vlm.py --num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 576 "
    "--max-position-embeddings 4096 --tokenizer-type NullTokenizer --vocab-size 8193 --bf16 "
    "--img-h 336 --img-w 336 --patch-dim 14 --dataloader-seq-length 1232 --micro-batch-size 1 "
    "--global-batch-size 8 --ckpt-format torch "
)


def llava(extra: str = "") -> TransformerSpec:
    return read_job(read_command(COMMAND + extra)).spec


@pytest.mark.parametrize(
    ("extra", "tokens", "length"), [("", 577, 1809), ("--disable-vision-class-token", 576, 1808)]
)
def test_patches_are_tokens_of_the_language_model(extra: str, tokens: int, length: int) -> None:
    spec = llava(extra)
    assert spec.vision is not None
    assert (spec.vision.num_tokens, spec.vision.num_projected_tokens) == (577, tokens)
    assert spec.seq_length == length


@pytest.mark.parametrize("tp", [1, 4])
def test_parameters_are_those_that_megatron_core_builds(tp: int) -> None:
    """Its local projector has no norm, which Transformer Engine's has."""
    spec = llava()
    alone = dataclasses.replace(spec, vision=None)
    here, there = (unit_parameters(s, tp, 1, 1, single_stage=True)[0] for s in (spec, alone))
    norm = 2 * spec.hidden_size
    assert here.dense - there.dense - norm == _built(spec, tp)


def _built(spec: TransformerSpec, tp: int) -> int:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.vision import clip_vit_model
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.models.vision.vit_layer_specs import LNImpl, get_vit_layer_with_local_spec

    from nest_megatron.megatron_core.stage import as_rank, transformer_config

    dims = ParallelDims(tensor_model_parallel_size=tp)
    with meta_megatron(), as_rank(spec, dims, 0):
        config = transformer_config(spec, dims, sequence_parallel=False)
        encoder = clip_vit_model.CLIPViTModel(
            config, get_vit_layer_with_local_spec(), ln_pre_impl=LNImpl, img_h=336, img_w=336
        )
        mlp = get_gpt_layer_local_spec().submodules.mlp
        # a ModuleSpec, and since 0.18 a functools.partial
        mlp = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
        projector = MultimodalProjector(config, mlp, "mlp", config.hidden_size)
        models = torch.nn.ModuleList([encoder, projector])
        return sum(parameter.numel() for parameter in models.parameters())


def test_the_first_stage_alone_has_the_encoder() -> None:
    settings = CostSettings()
    cluster = catalogue.cluster("dgx_h100", 8)
    spec = llava()
    dims = ParallelDims(pipeline_model_parallel_size=4, data_parallel_size=2)
    costs = []
    for each in (spec, dataclasses.replace(spec, vision=None)):
        model = CostModel(each, cluster, settings)
        shard = LayerShard()
        places = model.places(dims)
        times = [model.unit_time(kind, places, shard) for kind in each.layer_kinds()]
        costs.append([time.whole_forward.total + time.backward.total for time in times])
    with_images, without = costs
    assert with_images[0] > without[0] + 2 * with_images[1]
    assert with_images[1:] == without[1:]


def test_a_frozen_encoder_has_weights_and_a_forward_pass() -> None:
    trained, frozen = llava(), llava("--freeze-ViT")
    counts = [unit_parameters(s, 1, 1, 1, single_stage=True)[0] for s in (trained, frozen)]
    graphs = [block_graph(s, LayerBlock.ENCODER, LayerShard()) for s in (trained, frozen)]
    assert counts[0].total == counts[1].total
    assert (counts[0].frozen.total, graphs[1].total_saved_bytes()) == (0, 0.0)
    alone = unit_parameters(dataclasses.replace(trained, vision=None), 1, 1, 1, single_stage=True)
    projector = 2 * 1024 + 8 * 1024 * 1024 + 5 * 1024
    assert counts[1].trained.dense == alone[0].dense + projector
    assert graphs[1].flops() == graphs[0].flops()
    assert not any(op.backward_flops for op in graphs[1].operators)


@pytest.mark.parametrize(
    ("extra", "named"),
    [("--freeze-LM", "freeze-LM"), ("--fp8-format hybrid", "precision"), ("--img-h 335", "img-h")],
)
def test_what_is_not_priced_is_refused(extra: str, named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        llava(extra)


@pytest.mark.parametrize("model", [llava(), catalogue.model("t5_220m")], ids=lambda m: m.name)
def test_plans_have_what_the_scripts_take(model: TransformerSpec) -> None:
    """No layout or virtual stages, and no buffers for lengths that differ between stacks."""
    found = plan(
        Request(
            spec=model,
            cluster=catalogue.cluster("dgx_h100", 8),
            global_batch_size=8,
            space=SearchSpace(fixed={"tensor_model_parallel_size": 2}),
        )
    )
    assert isinstance(found, ParallelPlan)
    assert not found.layout.execution.tp_comm_overlap
    launch = with_launch(found).launch[LAUNCHER]
    assert "--pipeline-model-parallel-layout" not in launch.argv
    script = "pretrain_t5.py" if model.vision is None else "pretrain_vlm.py"
    assert (PurePath(launch.script).name, "--num-layers" in launch.argv) == (script, False)


def test_every_context_rank_encodes_all_images() -> None:
    spec = llava()
    graphs = [
        block_graph(spec, LayerBlock.ENCODER, LayerShard(context_parallel_size=cp)) for cp in (1, 2)
    ]
    assert graphs[0] == graphs[1]
    layers = 577 * 2 * 12 * 1024 * 1024 * 12 + 12 * 4 * 577 * 577 * 1024
    assert graphs[0].flops() == layers + 2 * 576 * 588 * 1024


def test_flags_of_the_script_are_known_and_checked() -> None:
    job = read_job(read_command(COMMAND + "--freeze-ViT --disable-vision-class-token"))
    assert not job.passthrough
    assert not job.notes
    assert job.spec.vision is not None
    assert job.spec.vision.frozen
    for extra in ("--dataloader-seq-length x", "--dataloader-seq-length", "--patch-dim 0"):
        with pytest.raises(UserInputError):
            llava(extra)


def test_a_frozen_encoder_takes_no_time_backward() -> None:
    cluster, dims = catalogue.cluster("dgx_h100", 8), ParallelDims(data_parallel_size=8)
    backward = []
    for spec in (llava(), llava("--freeze-ViT")):
        model = CostModel(spec, cluster, CostSettings())
        blocks, places = model._blocks, model.places(dims)
        backward.append(blocks.of_block(LayerBlock.ENCODER, places, LayerShard()).backward.total)
    assert backward[1] == 0.0 < backward[0]
