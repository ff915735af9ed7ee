"""Models and jobs out of Megatron's arguments."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.write import model_argv
from nest_megatron.layout.recompute import RecomputeGranularity, RecomputeModule
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import ModelFamily
from tests.contract import hand_models
from tests.integrations import commands

BASE = (
    "python pretrain_gpt.py --num-layers 4 --hidden-size 768 --num-attention-heads 12 "
    "--seq-length 128 --max-position-embeddings 128 --vocab-size 1000 --bf16 "
)


def test_llama() -> None:
    job = read_job(read_command(commands.LLAMA3_8B, "0.16"))
    spec = job.spec
    assert (spec.hidden_size, spec.query_groups, spec.head_dim) == (4096, 8, 128)
    assert (spec.activation, spec.gated_linear_unit, spec.add_bias_linear) == ("silu", True, False)
    assert spec.apply_layernorm_1p
    assert spec.normalization == "LayerNorm"
    assert spec.vocab_size == 128257  # the null tokenizer adds an end-of-document token
    assert job.precision is Precision.FP8
    assert job.memory_flags["fp8_recipe"] == "delayed"
    assert job.zero is ZeroStage.OPTIMIZER
    assert job.memory_flags["grad_reduce_in_bf16"]
    assert (job.num_gpus, job.global_batch_size, job.micro_batch_size) == (8, 128, 1)
    assert job.fixed["tensor_model_parallel_size"] == 1
    assert "pipeline_model_parallel_size" not in job.fixed


@pytest.mark.parametrize("words", [("--fp8-format", "e4m3"), ("--fp4-format", "e2m1")])
def test_narrow_products_of_weights_in_32_bits_are_refused(words: tuple[str, str]) -> None:
    job = f"{BASE.replace('--bf16', '')} {' '.join(words)}"
    with pytest.raises(UserInputError, match=rf"{words[0]} = '{words[1]}'.*Add --bf16"):
        read_job(read_command(job))


def test_mixtral() -> None:
    job = read_job(read_command(commands.MIXTRAL))
    spec = job.spec
    assert spec.moe_layer_pattern == (1,) * 32
    assert (spec.num_experts, spec.expert_ffn_hidden_size) == (8, 14336)
    assert spec.position_embedding_type == "rope"
    assert job.fixed["expert_model_parallel_size"] == 8
    assert job.num_gpus == 32
    assert any("32000" in note for note in job.notes)


def test_gpt3() -> None:
    job = read_job(read_command(commands.GPT3_175B, "0.16"))
    spec = job.spec
    assert (spec.ffn_hidden_size, spec.query_groups, spec.vocab_size) == (49152, 96, 50257)
    assert (spec.activation, spec.add_bias_linear) == ("gelu", True)
    assert not spec.untie_embeddings_and_output_weights
    assert job.precision is Precision.FP16
    assert job.batch_schedule is not None
    assert (job.batch_schedule.batch_unit, job.batch_schedule.last) == (16, 1536)


def test_bert() -> None:
    job = read_job(read_command(commands.BERT_340M))
    spec = job.spec
    assert spec.family is ModelFamily.BERT
    assert spec.position_embedding_type == "learned_absolute"
    assert job.num_gpus == 128


@pytest.mark.parametrize("spec", hand_models.ALL, ids=lambda spec: spec.name)
def test_written_models_are_read_back(spec: object) -> None:
    argv = [f"pretrain_{spec.family.value}.py"]
    argv += [*model_argv(spec), "--bf16", "--micro-batch-size", "1"]  # type: ignore[arg-type]
    read = read_job(read_command(argv)).spec
    expected = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    for name, value in expected.items():
        if name in ("name", "source", "max_position_embeddings"):
            continue
        if name == "moe_ffn_hidden_size" and value is None:
            continue
        assert getattr(read, name) == value, name


@pytest.mark.parametrize(
    ("extra", "ffn"), [("", 3072), ("--swiglu", 2048), ("--ffn-hidden-size 100", 100)]
)
def test_default_ffn(extra: str, ffn: int) -> None:
    assert read_job(read_command(BASE + extra)).spec.ffn_hidden_size == ffn


def test_query_groups_count_only_with_the_switch() -> None:
    assert read_job(read_command(BASE + "--num-query-groups 4")).spec.query_groups == 12
    grouped = BASE + "--num-query-groups 4 --group-query-attention"
    assert read_job(read_command(grouped)).spec.query_groups == 4


def test_expert_rhythm() -> None:
    spec = read_job(read_command(BASE + "--num-experts 4 --moe-layer-freq 2")).spec
    assert spec.moe_layer_pattern == (1, 0, 1, 0)
    assert read_job(read_command(BASE + "--num-experts 0")).spec.num_experts is None


def test_recompute() -> None:
    job = read_job(read_command(BASE + "--recompute-activations"))
    assert job.recompute is not None
    assert job.recompute.modules == (RecomputeModule.CORE_ATTN,)
    full = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    job = read_job(read_command(BASE + full))
    assert job.recompute is not None
    assert job.recompute.granularity is RecomputeGranularity.FULL
    assert job.recompute.num_layers == 2
    assert read_job(read_command(BASE)).recompute is None


def test_fsdp_defaults_differ_by_release() -> None:
    fsdp = BASE + "--use-megatron-fsdp"
    assert read_job(read_command(fsdp, "0.16")).zero is ZeroStage.NONE
    assert read_job(read_command(fsdp, "0.20")).zero is ZeroStage.WEIGHTS


@pytest.mark.parametrize(
    "extra",
    [
        "--is-hybrid-model",
        "--hybrid-override-pattern M-M-",
        "--heterogeneous-layers-config-encoded-json {}",
        "--yaml-cfg x.yaml",
        "--export-kd-teacher-load /teacher",
        "--flextron",
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        "--spec megatron.core.models.vision.vit_layer_specs x",
    ],
)
def test_models_that_are_not_described_are_refused_by_name(extra: str) -> None:
    with pytest.raises(UnplannableModelError):
        read_job(read_command(BASE + extra))


@pytest.mark.parametrize(
    "module", ["mindspeed_llm.tasks.models.spec.qwen3_spec", "pearl.specs", "my_inference.spec"]
)
def test_layers_of_a_fork_are_no_other_job(module: str) -> None:
    assert read_job(read_command(f"{BASE} --spec {module} layer_spec")).spec.num_layers == 4


def test_rotary_positions_by_their_older_flag_go_without_learned_ones() -> None:
    flags = "--no-position-embedding --use-rotary-position-embeddings"
    assert read_job(read_command(BASE + flags)).spec.position_embedding_type == "rope"
    with pytest.raises(UserInputError, match="no-position-embedding"):
        read_job(read_command(BASE + "--no-position-embedding"))


def test_the_rows_of_a_tokenizer_that_a_fork_names_are_not_those_of_gpt2() -> None:
    command = BASE.replace("--vocab-size 1000", "--patch-tokenizer-type Qwen2Tokenizer")
    with pytest.raises(UserInputError, match=r"vocab-size.*files of Qwen2Tokenizer"):
        read_job(read_command(command))
    files = BASE.replace("--vocab-size 1000", "--vocab-file /data/nordic/vocab.json")
    notes = " ".join(read_job(read_command(files)).notes)
    assert "/data/nordic/vocab.json is not read here; 50257 is assumed" in notes


def test_sparse_attention_needs_the_sizes_of_its_indexer() -> None:
    sparse = "--multi-latent-attention --experimental-attention-variant dsa --disable-bias-linear "
    with pytest.raises(UserInputError, match="dsa_indexer_n_heads"):
        read_job(read_command(BASE + sparse))
    sizes = "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
    spec = read_job(read_command(BASE + sparse + sizes, "0.20")).spec
    assert (spec.experimental_attention_variant, spec.dsa_indexer_topk) == ("dsa", 2048)


def test_prediction_layers_that_share_their_weights_are_told() -> None:
    flags = "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope"
    job = read_job(read_command(BASE + flags, "0.20"))
    assert job.spec.num_mtp_layers == 2
    assert any("share their weights" in note for note in job.notes)


@pytest.mark.parametrize(
    "script",
    [
        "pretrain_mamba.py",
        "./examples/mimo/train.py",
        "examples/multimodal/train.py",
        "pretrain_ict.py",
        "train_rl.py",
        "pretrain_vision_dino.py",
        "pretrain_retro.py",
    ],
)
def test_scripts_that_are_not_described(script: str) -> None:
    with pytest.raises(UnplannableModelError):
        read_job(read_command(BASE.replace("pretrain_gpt.py", script)))


def test_two_stacks_are_those_that_the_script_builds() -> None:
    """``pretrain_t5.py`` gives the decoder the encoder's layers, whatever it is told."""
    job = read_job(read_command(commands.T5_220M))
    spec = job.spec
    assert (spec.family, spec.encoder_num_layers, spec.num_layers) == (ModelFamily.T5, 12, 12)
    assert (spec.seq_length, spec.decoder_seq_length) == (512, 128)
    assert spec.padded_vocab_size(1) == 29_184
    assert any("--decoder-num-layers 6 has no effect" in note for note in job.notes)
    with pytest.raises(UserInputError, match="decoder-seq-length"):
        read_job(read_command(commands.T5_220M.replace("--decoder-seq-length 128", "")))


@pytest.mark.parametrize(
    "missing", ["--num-layers 4", "--vocab-size 1000", "--max-position-embeddings 128"]
)
def test_what_is_missing_is_named(missing: str) -> None:
    command = BASE.replace(missing, "") + "--tokenizer-type HuggingFaceTokenizer"
    with pytest.raises(UserInputError) as caught:
        read_job(read_command(command))
    assert missing.partition(" ")[0] in str(caught.value)
