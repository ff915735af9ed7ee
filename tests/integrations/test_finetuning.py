"""What packed data, fine-tuning and a restored checkpoint fix of a plan, without the frameworks."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.restore import restored_by_bridge, restored_by_nemo
from nest_megatron.layout.plan import ParallelPlan
from tests import catalogue
from tests.integrations.frameworks import GPTModelProvider, bridge_config, nemo_recipe


@dataclass
class PackedSequenceSpecs:
    """Both frameworks'."""

    packed_sequence_size: int = -1


@dataclass
class PaddedSequenceSpecs(PackedSequenceSpecs):
    """Megatron-Bridge's, which can pad for context parallelism."""

    pad_seq_to_mult: int | None = 1
    packed_train_data_path: str | None = None


@dataclass
class FinetuningDatasetConfig:
    """Megatron-Bridge's."""

    seq_length: int = 2048
    packed_sequence_specs: Any = None
    pack_sequences_in_batch: bool = False
    packing_buffer_size: int | None = None
    dataset_kwargs: dict[str, Any] | None = None


@dataclass
class FineTuningDataModule:
    """NeMo's."""

    seq_length: int = 2048
    micro_batch_size: int = 1
    global_batch_size: int = 128
    tokenizer: Any = None
    packed_sequence_specs: Any = field(default_factory=lambda: PackedSequenceSpecs(2048))


SIZE = "cluster.num_gpus=64"


def _bridge(**data: Any) -> Any:
    cfg = bridge_config(catalogue.model("llama3_8b"), batch=128)
    cfg.dataset = FinetuningDatasetConfig(**data)
    cfg.model.calculate_per_token_loss = False
    cfg.checkpoint.load = cfg.checkpoint.pretrained_checkpoint = None
    return cfg


def _planned(cfg: Any, **settings: Any) -> ParallelPlan:
    plan, _ = megatron_bridge.auto_recipe(
        cfg,
        cluster="dgx_h100",
        overrides=[SIZE, *settings.pop("overrides", ())],
        environment={},
        **settings,
    )
    return plan


def test_a_micro_batch_is_one_pack() -> None:
    assert _planned(_bridge(seq_length=1024)).layout.micro_batch_size > 1
    packed = _bridge(seq_length=1024, packed_sequence_specs=PaddedSequenceSpecs(1024))
    assert _planned(packed).layout.micro_batch_size == 1
    assert _planned(_bridge(seq_length=1024, packing_buffer_size=8)).layout.micro_batch_size == 1


def test_a_pack_is_as_long_as_it_is_said_to_be() -> None:
    cfg = _bridge(seq_length=512, packed_sequence_specs=PaddedSequenceSpecs(4096))
    assert _planned(cfg).train.seq_length == 4096
    assert cfg.dataset.seq_length == 512


def test_packs_that_nobody_describes_are_as_long_as_sequences() -> None:
    """``run_recipe.py`` of Megatron-Bridge 0.6 describes them so."""
    cfg = _bridge(seq_length=1024)
    cfg.dataset.enable_offline_packing = True
    assert _planned(cfg).layout.micro_batch_size == 1


def test_packs_of_one_batch_keep_its_size() -> None:
    cfg = _bridge(seq_length=1024, pack_sequences_in_batch=True)
    with pytest.raises(UserInputError, match=r"dataset.pack_sequences_in_batch.*two sequences"):
        _planned(cfg)
    cfg.train.micro_batch_size = 4
    assert _planned(cfg).layout.micro_batch_size == 4


def test_samples_of_other_lengths_get_no_user_buffers() -> None:
    fixed = ["parallel.tensor_model_parallel_size=4", "parallel.context_parallel_size=2"]
    settings = {"free": ["all"], "overrides": [*fixed, "search.num_alternatives=0"]}
    found = _planned(_bridge(seq_length=2048), **settings).layout.execution
    assert not found.tp_comm_overlap
    assert found.cp_comm_type == "p2p"
    pretrained = bridge_config(catalogue.model("llama3_8b"), batch=128)
    pretrained.checkpoint.load = pretrained.checkpoint.pretrained_checkpoint = None
    assert _planned(pretrained, **settings).layout.execution.tp_comm_overlap
    stated = _bridge(seq_length=2048)
    stated.model.tp_comm_overlap = True  # its user's own
    assert _planned(stated, **settings).layout.execution.tp_comm_overlap


@pytest.mark.parametrize(
    "data",
    [
        {"packed_sequence_specs": PaddedSequenceSpecs(2048)},
        {},  # samples of other lengths
    ],
)
def test_no_graphs_are_chosen_where_lengths_change(data: dict[str, Any]) -> None:
    assert not megatron_bridge.read_recipe(_bridge(**data)).capturable
    padded = _bridge(dataset_kwargs={"pad_to_max_length": True})
    assert megatron_bridge.read_recipe(padded).capturable


def test_a_recipes_own_graphs_hold_no_attention_of_packs() -> None:
    cfg = _bridge(packed_sequence_specs=PaddedSequenceSpecs(2048))
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = "transformer_engine", ["attn"]
    with pytest.raises(NestError, match="graphs hold neither attention"):
        _planned(cfg)
    cfg.model.cuda_graph_scope = ["mlp"]
    assert _planned(cfg).layout.execution.cuda_graph_scope == ("mlp",)


def test_another_micro_batch_than_the_data_need_is_refused_with_the_reason() -> None:
    cfg = _bridge(packed_sequence_specs=PaddedSequenceSpecs(2048))
    cfg.train.micro_batch_size = 2
    with pytest.raises(UserInputError, match="the data needs 1: a micro batch is one pack"):
        _planned(cfg, keep=["micro_batch_size"])


def test_context_parallel_finetuning_takes_the_loss_per_token() -> None:
    cfg = _bridge(packed_sequence_specs=PaddedSequenceSpecs(2048))
    cfg.ddp.average_in_collective = True
    _planned(cfg, overrides=["parallel.context_parallel_size=4"])
    assert cfg.model.calculate_per_token_loss
    assert cfg.ddp.average_in_collective is False
    assert cfg.dataset.packed_sequence_specs.pad_seq_to_mult == 8


def test_short_sequences_are_padded_to_what_ranks_divide() -> None:
    fixed = ["parallel.tensor_model_parallel_size=4", "parallel.context_parallel_size=8"]
    cfg = _bridge(seq_length=4096, dataset_kwargs={"add_bos": True})
    _planned(cfg, overrides=fixed)
    assert cfg.dataset.dataset_kwargs == {"add_bos": True, "pad_seq_length_to_mult": 32}
    for padded in ({"pad_to_max_length": True}, {"pad_seq_length_to_mult": 64}):
        cfg = _bridge(seq_length=4096, dataset_kwargs=padded)
        _planned(cfg, overrides=fixed)
        assert cfg.dataset.dataset_kwargs == padded
    packed = _bridge(packed_sequence_specs=PaddedSequenceSpecs(4096))
    _planned(packed, overrides=fixed)
    assert packed.dataset.dataset_kwargs == {"pad_to_max_length": True}


def test_a_plan_of_another_micro_batch_is_not_written_beside_packs() -> None:
    plan = _planned(_bridge(seq_length=1024))
    packed = _bridge(packed_sequence_specs=PaddedSequenceSpecs(1024))
    with pytest.raises(UserInputError, match="the data needs 1: a micro batch is one pack"):
        megatron_bridge.apply_plan(packed, plan)


def test_without_the_field_there_is_no_context_parallelism() -> None:
    cfg = _bridge()
    del cfg.model.calculate_per_token_loss
    with pytest.raises(UserInputError, match="calculate_per_token_loss"):
        _planned(cfg, overrides=["parallel.context_parallel_size=4"])


def test_packs_of_nemo_keep_the_jobs_context_parallelism() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.data = FineTuningDataModule()
    recipe.model.config.calculate_per_token_loss = False
    plan, _ = nemo.auto_recipe(recipe, cluster="dgx_h100", vocab_size=128_256)
    assert plan.layout.micro_batch_size == plan.layout.dims.context_parallel_size == 1


@pytest.mark.parametrize("field_name", ["pretrained_checkpoint", "load"])
def test_what_bridge_restores_keeps_megatron_fsdp_away(field_name: str) -> None:
    cfg = _bridge()
    setattr(cfg.checkpoint, field_name, "/elsewhere")
    assert _planned(cfg, free=["all"]).arguments["use_megatron_fsdp"] is False
    with pytest.raises(UserInputError, match="checkpoint to be loaded needs False: Megatron-FSDP"):
        _planned(cfg, free=["all"], overrides=["parallel.zero_stage=3"])


@dataclass
class Gemma2ModelProvider(GPTModelProvider):
    """Megatron-Bridge's, whose attention splits no sequence."""

    calculate_per_token_loss: bool = False


def test_what_a_family_fixes_is_not_advised_to_be_kept() -> None:
    cfg = _bridge()
    assert "Keep micro_batch_size and context_parallel_size" in _notes(cfg)
    cfg.model = Gemma2ModelProvider(**vars(cfg.model))
    assert "another micro batch weighs samples otherwise. Keep micro_batch_size to" in _notes(cfg)
    assert "context_parallel_size" not in _notes(cfg)


def _notes(cfg: Any) -> str:
    return " ".join(megatron_bridge.read_recipe(cfg, environment={}).notes)


def test_fine_tuning_without_a_checkpoint_is_told_what_it_lacks() -> None:
    """Recipes of Megatron-Bridge as they come name the folder that they save to, and no other."""
    cfg = _bridge()
    cfg.checkpoint.load = "/mine/nemo_experiments/default/checkpoints"
    notes = _notes(cfg)
    assert "checkpoint.pretrained_checkpoint is not set, and checkpoint.load (/mine/" in notes
    assert "holds none on this host. Set checkpoint.pretrained_checkpoint." in notes
    assert "The job restores" not in notes
    cfg.checkpoint.pretrained_checkpoint = "/elsewhere"
    notes = _notes(cfg)
    assert "The job restores /elsewhere, in the format torch_dist (as the recipe states)" in notes


def test_a_model_of_hugging_face_fits_every_layout(tmp_path: Path) -> None:
    cfg = _bridge()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
    found = restored_by_bridge(cfg)
    assert found is not None
    assert "in the format Hugging Face (as was found there)" in found.note()
    assert not found.required()


def test_an_empty_folder_to_load_from_restores_nothing(tmp_path: Path) -> None:
    cfg = bridge_config(catalogue.model("llama3_8b"))
    cfg.checkpoint.load = str(tmp_path)
    assert restored_by_bridge(cfg) is None


def test_a_planned_run_of_bridge_goes_on_under_its_plan(tmp_path: Path) -> None:
    cfg = bridge_config(catalogue.model("llama3_8b"), batch=128)
    words = ["parallel.pipeline_model_parallel_size=4"]
    plan = _planned(cfg, overrides=words)
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}', encoding="utf-8")
    names = (
        *("num_layers", "pipeline_model_parallel_layout", "pipeline_model_parallel_size"),
        *("tensor_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    )
    model = {name: getattr(cfg.model, name, None) for name in names}
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": model}), encoding="utf-8")
    (tmp_path / "latest_train_state.pt").write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    cfg.checkpoint.load = str(tmp_path)
    found = restored_by_bridge(cfg)
    assert found is not None
    dims, saved = plan.layout.dims, found.saved
    assert saved.virtual_pipeline_model_parallel_size == dims.virtual_pipeline_model_parallel_size
    assert saved.pipeline_model_parallel_layout is not None
    saved = dataclasses.replace(
        saved, use_distributed_optimizer=True, distrib_optim_sharding_type="dp_reshardable"
    )
    dataclasses.replace(found, saved=saved).check(plan, "0.19")


def test_bridges_own_checkpoint_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}', encoding="utf-8")
    (folder / "run_config.yaml").write_text(
        "model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4}", encoding="utf-8"
    )
    (tmp_path / "latest_train_state.pt").write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    cfg = bridge_config(catalogue.model("llama3_8b"))
    cfg.checkpoint.load = str(tmp_path)
    found = restored_by_bridge(cfg)
    assert found is not None
    assert found.is_seen
    assert (found.saved.format, found.saved.tensor_model_parallel_size) == ("torch_dist", 2)
    assert found.required()["use_megatron_fsdp"].value is False
    damaged = ((b"\xff\xfe", "not UTF-8"), (b"[" * 100_000, "nested more"), (b"[]", "laid out"))
    for content, said in damaged:
        (folder / "run_config.yaml").write_bytes(content)
        with pytest.raises(UserInputError, match=f"run_config.yaml.*{said}"):
            restored_by_bridge(cfg)
    shutil.rmtree(folder)


def test_what_bridges_checkpoint_asks_for_is_said_in_its_own_fields(tmp_path: Path) -> None:
    cfg = bridge_config(catalogue.model("llama3_8b"), batch=128)
    plan = _planned(cfg)
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    cfg.checkpoint.load = str(tmp_path)
    with pytest.raises(UserInputError, match="unknown") as unreadable:
        restored_by_bridge(cfg)
    assert unreadable.value.what == "checkpoint.load"
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}', encoding="utf-8")
    found = restored_by_bridge(cfg)
    assert found is not None
    sizes = {"use_distributed_optimizer": True, "distrib_optim_sharding_type": "dp_reshardable"}
    others = {"tensor_model_parallel_size": 64, "pipeline_model_parallel_size": 1}
    saved = dataclasses.replace(found.saved, **sizes, **others)
    found = dataclasses.replace(found, saved=saved)
    fixes = {each.fix for each in found.required().values()}
    assert "add checkpoint.load_optim=False to start the optimizer afresh" in fixes
    assert not any("--" in fix for fix in fixes)
    with pytest.raises(UserInputError, match="load_optim=False"):
        found.check(plan, "0.19")
    rng = dataclasses.replace(found.saved, **others, rng_shape=(7, 7))
    dims = plan.layout.dims
    same = {name: getattr(dims, name) for name in others}
    rng = dataclasses.replace(rng, **same, distrib_optim_sharding_type="fully_reshardable")
    with pytest.raises(UserInputError, match="load_rng=False"):
        dataclasses.replace(found, saved=rng).check(plan, "0.19")


@pytest.mark.parametrize(
    "resume",
    [
        {
            "restore_config": SimpleNamespace(
                path="nemo://meta-llama/Llama-3", load_optim_state=False
            )
        },
        {"resume_from_path": "/elsewhere/last"},
    ],
)
def test_what_nemo_restores_keeps_megatron_fsdp_away(resume: dict[str, Any]) -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.resume = SimpleNamespace(**resume)
    assert read_notes(recipe)[-1].startswith("The job restores ")
    plan, _ = nemo.auto_recipe(recipe, cluster="dgx_h100", vocab_size=128_256, free=["all"])
    assert plan.layout.uses_megatron_fsdp is False


def read_notes(recipe: Any) -> tuple[str, ...]:
    """Notes of a recipe as it is read."""
    return nemo.read_recipe(recipe, vocab_size=128_256).notes


def test_a_run_of_nemo_goes_on_where_its_last_checkpoint_lies(tmp_path: Path) -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.resume = SimpleNamespace(resume_if_exists=True)
    recipe.log = SimpleNamespace(log_dir=str(tmp_path), name="mine")
    assert restored_by_nemo(recipe, {}) is None
    (tmp_path / "mine" / "checkpoints" / "step=10-last").mkdir(parents=True)
    found = restored_by_nemo(recipe, {})
    assert found is not None
    assert found.source.endswith("step=10-last")
    assert not found.saved.weights_only


def test_the_optimizer_of_a_run_of_nemo_keeps_the_layout(tmp_path: Path) -> None:
    def going_on(**strategy: Any) -> Any:
        recipe = nemo_recipe(catalogue.model("llama3_8b"), num_nodes=2)
        recipe.resume = SimpleNamespace(resume_from_path=str(tmp_path))
        recipe.trainer.strategy.tensor_model_parallel_size = 4
        recipe.trainer.strategy.pipeline_model_parallel_size = 2
        recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 4
        recipe.trainer.strategy.ddp.use_distributed_optimizer = True
        vars(recipe.trainer.strategy).update(strategy)
        plan, _ = nemo.auto_recipe(recipe, cluster="dgx_h100", vocab_size=128_256)
        return plan

    kept = going_on()
    dims = kept.layout.dims
    assert (dims.tensor_model_parallel_size, dims.pipeline_model_parallel_size) == (4, 2)
    assert dims.virtual_pipeline_model_parallel_size == 4
    assert "keeps the layout that it was saved with" in "".join(kept.notes)
    free = going_on(ckpt_optim_fully_reshardable=True)
    assert free.layout.dims.tensor_model_parallel_size != 4


def test_a_plan_that_cannot_load_what_the_job_restores_is_not_written() -> None:
    cfg = _bridge()
    sharded = _planned(cfg, free=["all"], overrides=["parallel.zero_stage=3"])
    restoring = _bridge()
    restoring.checkpoint.pretrained_checkpoint = "/elsewhere"
    with pytest.raises(UserInputError, match="checkpoint to be loaded needs False: Megatron-FSDP"):
        megatron_bridge.apply_plan(restoring, sharded)


def test_a_run_that_may_go_on_elsewhere_is_told(tmp_path: Path) -> None:
    cfg = bridge_config(catalogue.model("llama3_8b"), batch=128)
    for folder, told in (("/lustre/mine/checkpoints", True), (str(tmp_path / "new"), False)):
        cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint = folder, None
        notes = megatron_bridge.read_recipe(cfg, environment={}).notes
        assert any("is not on this host: a run that goes on" in note for note in notes) == told


def test_packs_that_exist_keep_the_context_parallel_size_they_were_made_for() -> None:
    made = PaddedSequenceSpecs(4096, packed_train_data_path="/data/train.idx.parquet")
    cfg = _bridge(packed_sequence_specs=made)
    plan = _planned(cfg, free=["all"])
    assert plan.layout.dims.context_parallel_size == 1
    assert made.pad_seq_to_mult == 1
    with pytest.raises(UserInputError, match="padded for one context-parallel size"):
        _planned(cfg, overrides=["parallel.context_parallel_size=4"])
