"""A plan in a Megatron-Bridge configuration, as an overlay, and from the words of a command."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from nest_megatron import Plan
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_for
from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge as config
from nest_megatron.integrations.megatron_bridge import (
    apply_plan,
    auto_recipe,
    hook,
    plan_changes,
    read_recipe,
    to_dotlist,
    to_yaml,
)
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.megatron_lm.present_layout import typed_plan
from nest_megatron.integrations.megatron_lm.ranks import launched_job
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.planner.layouts import Variant
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.contract.test_adapters import laid_out
from tests.integrations.frameworks import CommOverlapConfig, bridge_config

AUTO = ["+nest=auto", "nest.cluster=dgx_h100", "nest.cluster.num_gpus=16"]


def llama() -> Any:
    return bridge_config(catalogue.model("llama3_8b"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_plan_is_taken_as_it_was_found_and_as_it_was_loaded() -> None:
    cfg, plan = llama(), laid_out(tp=2, pp=4, vpp=4)
    assert plan_changes(cfg, Plan(record=plan)) == plan_changes(cfg, plan)
    with pytest.raises(UserInputError, match="it is no plan"):
        apply_plan(cfg, "plan.yaml")  # type: ignore[arg-type]


def test_a_single_override_is_a_list_of_one() -> None:
    with pytest.raises(UserInputError, match=r"search\.max_second.*Did you mean"):
        auto_recipe(llama(), cluster="dgx_h100", overrides="search.max_second=5")


def test_the_launcher_knows_the_ranks() -> None:
    assert read_recipe(llama()).num_gpus is None
    variables = {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}
    found = read_recipe(llama(), environment=variables)
    assert (found.num_gpus, found.gpus_per_node) == (64, 8)


@pytest.mark.parametrize(
    ("target", "legacy", "rows"),
    [
        (TARGETS["megatron_bridge_0.3"], False, 32_001),
        (TARGETS["megatron_bridge_0.3"], True, 32_000),
        (TARGETS["megatron_bridge_0.6"], None, 32_000),
    ],
)
def test_a_null_tokenizer_adds_a_row_before_megatron_core_0_18(
    target: Target, legacy: bool | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "installed_name", lambda _: target.name)
    cfg = llama()
    cfg.model.vocab_size, cfg.tokenizer.vocab_size = None, 32_000
    if legacy is not None:
        cfg.tokenizer.legacy_tokenizer = legacy
    assert read_recipe(cfg).spec.vocab_size == rows


def test_a_tokenizer_may_replace_the_vocabulary_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "installed_name", lambda _: "megatron_bridge_0.6")
    cfg = llama()
    cfg.tokenizer.vocab_size, cfg.tokenizer.use_tokenizer_vocab_size = 999, True
    assert read_recipe(cfg).spec.vocab_size == 999
    cfg.tokenizer.use_tokenizer_vocab_size = False
    assert read_recipe(cfg).spec.vocab_size == cfg.model.vocab_size


def test_a_vocabulary_that_is_stated_is_not_padded() -> None:
    """Training turns ``should_pad_vocab`` off (``_validate_and_set_vocab_size``)."""
    cfg = llama()
    cfg.model.vocab_size, cfg.model.should_pad_vocab = 50_257, True
    spec = read_recipe(cfg).spec
    assert (spec.vocab_size, spec.vocab_is_padded) == (50_257, True)


def test_the_size_of_a_null_tokenizer_is_the_recipes_own() -> None:
    cfg = llama()
    cfg.model.vocab_size, cfg.tokenizer.vocab_size = None, 32_000
    assert read_recipe(cfg, vocab_size=152_000).spec == read_recipe(cfg).spec


@pytest.mark.parametrize("rows", [32_000, 256_000])
def test_a_plan_for_another_vocabulary_is_refused(rows: int) -> None:
    cfg = llama()
    cfg.model.vocab_size = rows
    with pytest.raises(UserInputError, match=rf"padded_vocab_size {rows} \(plan: 128512\)"):
        apply_plan(cfg, laid_out(tp=4))


def test_padding_alone_makes_no_other_vocabulary() -> None:
    """The plan of a laptop pads the catalogue's 128,256 rows, and training these does not."""
    assert plan_changes(llama(), laid_out(tp=4))


def test_a_plan_does_not_divide_a_vocabulary_that_stays_as_it_is() -> None:
    cfg, plan = llama(), laid_out(tp=4)
    cfg.model.vocab_size = 128_258
    model = dataclasses.replace(plan.model, vocab_size=128_258)
    with pytest.raises(UserInputError, match="padded_vocab_size 128258"):
        apply_plan(cfg, dataclasses.replace(plan, model=model))


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"num_gpus = 32.*Plan again, or launch as many\."):
        apply_plan(llama(), laid_out(), environment={"WORLD_SIZE": "32"})


@pytest.mark.parametrize("name", ["fp8_param_gather", "moe_a2a_overlap"])
def test_what_benchmarks_set_on_the_model_and_nothing_reads_is_harmless(name: str) -> None:
    """Recipes of 0.6 for Qwen3 235B and DeepSeek-V3; mixed precision says how weights travel."""
    cfg = llama()
    setattr(cfg.model, name, True)
    assert read_recipe(cfg).spec == read_recipe(llama()).spec


def as_script(monkeypatch: pytest.MonkeyPatch, benchmarks: dict[str, str]) -> None:
    """Be ``run_recipe.py``, whose benchmarks have a number format by their name."""

    def defaults(cfg: Any, precision: str, stated: list[str]) -> None:
        name = "optimizer.use_precision_aware_optimizer"
        if precision == "bf16" and name not in stated:
            cfg.optimizer.use_precision_aware_optimizer = True

    main = SimpleNamespace(
        resolved_benchmark_recipe_metadata=benchmarks.get,
        _apply_benchmark_runtime_defaults=defaults,
    )
    for name, module in (("recipe_runner", SimpleNamespace()), ("__main__", main)):
        monkeypatch.setitem(sys.modules, name, module)


def test_a_benchmark_is_planned_with_the_optimizer_that_its_script_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is set once the plan is made, and megatron-core refuses it without divided states."""
    zero = []
    for benchmarks in ({}, {"small_pretrain_1gpu_h100_bf16_config": "bf16"}):
        as_script(monkeypatch, benchmarks)
        monkeypatch.setattr(sys, "argv", ["x.py", f"--recipe={''.join(benchmarks)}"])
        cfg = llama()
        cfg.model.num_layers = 2
        planned(cfg, "+nest=auto", "nest.cluster=dgx_h100", "nest.cluster.num_gpus=1")
        zero.append(cfg.optimizer.use_distributed_optimizer)
    assert zero == [False, True]


def test_packs_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run_recipe.py`` of 0.6 makes packs as long as sequences, after it has planned."""

    def process(cfg: Any, *_: Any) -> Any:
        cfg.dataset.offline_packing_specs = SimpleNamespace(packed_sequence_size=2048)
        return cfg

    plan = hook.planning(process, lambda _: None)
    for is_script, size in ((False, 2048), (True, 8192)):
        if is_script:
            as_script(monkeypatch, {})
        cfg = plan(llama(), None, [*AUTO, "nest.search.num_alternatives=0"])
        assert read_recipe(cfg).spec.seq_length == size


def test_the_script_does_not_lay_out_the_stages_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run_recipe.py`` does where sizes are typed, and Kimi K2's function knows eight of them."""

    def layout(pp: int, vpp: int | None) -> str:
        return {(2, 1): "Et*20|t*12L"}[pp, vpp or 1]

    def process(cfg: Any, *_: Any) -> Any:
        cfg.model.pipeline_model_parallel_size = 2
        cfg.model._pipeline_model_parallel_layout_builder = layout
        return cfg

    as_script(monkeypatch, {})
    words = [*AUTO, "nest.search.num_alternatives=0", "model.pipeline_model_parallel_size=2"]
    cfg = hook.planning(process, lambda _: None)(llama(), None, words)
    assert cfg.model.pipeline_model_parallel_size == 2
    assert cfg.model.pipeline_model_parallel_layout != "Et*20|t*12L"
    assert cfg.model._pipeline_model_parallel_layout_builder is None


@pytest.mark.parametrize("switch", ["ddp", "optimizer"])
def test_either_switch_of_the_distributed_optimizer_turns_on_both(switch: str) -> None:
    """``_validate_and_sync_distributed_optimizer_settings``."""
    cfg = llama()
    for name in ("ddp", "optimizer"):
        getattr(cfg, name).use_distributed_optimizer = name == switch
    assert read_recipe(cfg).zero is ZeroStage.OPTIMIZER


def test_user_buffers_of_the_overlap_settings_are_off_without_sequence_parallelism() -> None:
    """``CommOverlapConfig.setup`` turns them off, where Megatron-LM ends."""
    cfg = llama()
    cfg.model.tensor_model_parallel_size = 2
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    for on in (False, True):
        cfg.model.sequence_parallel = on
        assert read_recipe(cfg).memory_flags["tp_comm_overlap"] is on
    cfg.model.sequence_parallel = False
    plan, _ = auto_recipe(
        cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=8"], free=["recompute"]
    )
    assert not any("tp_comm_overlap" in note for note in plan.notes)
    apply_plan(cfg, laid_out(tp=2))  # which has them off beside sequence parallelism
    assert (cfg.model.sequence_parallel, cfg.comm_overlap.tp_comm_overlap) == (True, False)


@pytest.mark.parametrize(("cp", "overlaps"), [(2, True), (1, None)])
def test_one_replica_of_several_context_ranks_overlaps_what_it_reduces(
    cp: int, overlaps: bool | None
) -> None:
    """``_get_optimizer_overlap_cfgs`` counts replicas alone, and gradients are those of both."""
    cfg = llama()
    cfg.comm_overlap = CommOverlapConfig()
    apply_plan(cfg, laid_out(tp=8 // cp, cp=cp, pp=8))
    assert cfg.comm_overlap.overlap_grad_reduce is overlaps
    assert cfg.comm_overlap.overlap_param_gather is overlaps


def test_one_replica_with_several_of_the_experts_overlaps_what_it_reduces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "installed_name", lambda _: "megatron_bridge_0.6")
    cfg = bridge_config(catalogue.model("mixtral_8x7b"))
    cfg.comm_overlap = CommOverlapConfig()
    apply_plan(cfg, laid_out("mixtral_8x7b", tp=8, pp=8))
    assert cfg.comm_overlap.overlap_grad_reduce is True


@pytest.mark.parametrize(
    ("gpus", "sharded", "stated", "overlaps"),
    [
        (8, True, None, False),
        (8, True, True, True),
        (8, False, None, True),  # the settings of ddp stay
        (16, True, None, True),
        (16, True, False, False),
    ],
)
def test_one_replica_overlaps_what_its_settings_state(
    gpus: int, sharded: bool, stated: bool | None, overlaps: bool
) -> None:
    """``CommOverlapConfig.setup``: with the distributed optimizer, ddp's settings are replaced."""
    cfg = llama()
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = sharded
    cfg.model.tensor_model_parallel_size, cfg.model.context_parallel_size = 4, 2
    cfg.model.sequence_parallel = True
    cfg.comm_overlap = CommOverlapConfig(overlap_grad_reduce=stated, overlap_param_gather=stated)
    assert today(cfg, gpus).layout.overlap_grad_reduce is overlaps


def today(cfg: Any, num_gpus: int) -> Variant:
    """The job as it is, which its plans are compared with."""
    composed = compose(parse(["cluster=dgx_h100"]))
    request = job_request(read_recipe(cfg), catalogue.cluster("dgx_h100", num_gpus), composed)
    assert request.present is not None
    return Variant(settings=request.present_settings or request.settings, layout=request.present)


@pytest.mark.parametrize(
    ("virtual", "stated", "overlaps"), [(None, None, False), (None, True, True), (2, None, True)]
)
def test_virtual_stages_of_a_layout_alone_do_not_send_during_their_work(
    virtual: int | None, stated: bool | None, overlaps: bool
) -> None:
    """``CommOverlapConfig.setup`` looks before ``finalize`` counts the stages of the layout."""
    cfg = llama()
    cfg.comm_overlap = CommOverlapConfig(overlap_p2p_comm=stated)
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = virtual
    cfg.model.pipeline_model_parallel_layout = "Et*3|t*5|(t*4|)*5t*4L"
    assert today(cfg, 16).settings.traits.overlap_p2p_comm is overlaps
    auto_recipe(
        cfg,
        cluster="dgx_h100",
        overrides=["cluster.num_gpus=16"],
        free=["micro_batch_size", "recompute"],
    )
    assert cfg.model.pipeline_model_parallel_layout == "Et*3|t*5|(t*4|)*5t*4L"
    assert cfg.model.virtual_pipeline_model_parallel_size == 2, "its plan overlaps them"


@pytest.mark.parametrize(("release", "size"), [("0.5", 4), ("0.6", 1)])
def test_experts_are_not_divided_where_nothing_says_it(
    monkeypatch: pytest.MonkeyPatch, release: str, size: int
) -> None:
    """``_set_moe_expert_tensor_parallel_default`` came with 0.6; megatron-core takes the dense."""
    monkeypatch.setattr(config, "installed_name", lambda _: f"megatron_bridge_{release}")
    cfg = bridge_config(catalogue.model("mixtral_8x7b"))
    cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel = 4, True
    cfg.model.expert_model_parallel_size = 2
    assert today(cfg, 16).layout.dims.expert_tensor_parallel_size == size
    cfg.model.expert_tensor_parallel_size = 2
    assert today(cfg, 16).layout.dims.expert_tensor_parallel_size == 2


def test_errors_name_the_fields_of_other_options() -> None:
    cfg = llama()
    cfg.model.context_parallel_size, cfg.model.attention_backend = 2, "unfused"
    cluster, composed = catalogue.cluster("dgx_h100", 16), compose(parse(["cluster=dgx_h100"]))
    job = read_recipe(cfg)
    request = request_for(job, cluster, composed, SearchSpace(), choose_execution=False)
    with pytest.raises(UserInputError, match=r"and model\.attention_backend unfused"):
        typed_plan(job, request, composed)


def test_shared_weights_take_what_bridge_asks_for() -> None:
    cfg = llama()
    cfg.checkpoint.async_save = True
    apply_plan(cfg, laid_out(zero=ZeroStage.GRADIENTS))
    assert (cfg.dist.use_megatron_fsdp, cfg.ddp.use_megatron_fsdp) == (True, True)
    assert (cfg.checkpoint.ckpt_format, cfg.checkpoint.async_save) == ("fsdp_dtensor", False)
    assert not cfg.model.gradient_accumulation_fusion
    assert cfg.model.init_model_with_meta_device
    apply_plan(cfg, laid_out())
    assert not cfg.model.init_model_with_meta_device


def test_weights_that_a_hook_loads_are_not_made_on_the_meta_device() -> None:
    """``AutoBridge.to_megatron_provider(load_weights=True)`` registers such a hook."""
    cfg = llama()
    cfg.model._pre_wrap_hooks = [print]
    with pytest.raises(UserInputError, match="register_pre_wrap_hook"):
        apply_plan(cfg, laid_out(zero=ZeroStage.WEIGHTS))
    assert not cfg.model.init_model_with_meta_device
    apply_plan(cfg, laid_out())


def test_shared_weights_keep_the_width_of_gradients() -> None:
    """megatron-core 0.20 has the field, and would take the width of the weights."""
    cfg = llama()
    cfg.ddp.megatron_fsdp_main_grads_dtype = None
    apply_plan(cfg, laid_out(zero=ZeroStage.WEIGHTS))
    assert str(cfg.ddp.megatron_fsdp_main_grads_dtype) == "torch.float32"


def test_stale_overlap_settings_are_cleared() -> None:
    cfg = llama()
    cfg.comm_overlap = CommOverlapConfig(
        tp_comm_overlap=True,
        tp_comm_overlap_cfg="tuned",
        defer_embedding_wgrad_compute=True,
        wgrad_deferral_limit=50,
    )
    apply_plan(cfg, laid_out(tp=2, execution=Execution(tp_comm_overlap=True)))
    assert cfg.comm_overlap == CommOverlapConfig(
        tp_comm_overlap=True, defer_embedding_wgrad_compute=False
    )


def test_torch_fsdp2_is_planned_as_it_is_or_left() -> None:
    cfg = llama()
    cfg.dist.use_torch_fsdp2 = True
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    other = copy.deepcopy(cfg)
    plan, _ = auto_recipe(cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"])
    assert plan.layout.sharding is DataParallelSharding.TORCH_FSDP2
    assert plan.layout.dims.pipeline_model_parallel_size == 1
    assert (cfg.dist.use_torch_fsdp2, cfg.ddp.use_distributed_optimizer) == (True, False)
    words = ["cluster.num_gpus=64", "parallel.zero_stage=1"]
    plan, _ = auto_recipe(other, cluster="dgx_h100", overrides=words)
    assert plan.layout.sharding is DataParallelSharding.DDP
    assert (other.dist.use_torch_fsdp2, other.ddp.use_distributed_optimizer) == (False, True)


def test_process_groups_without_megatrons_state_have_one_order() -> None:
    cfg = llama()
    cfg.dist.use_decentralized_pg = cfg.dist.use_tp_pp_dp_mapping = True
    assert not read_recipe(cfg, environment={}).stated["use_tp_pp_dp_mapping"]
    words = ["cluster.num_gpus=64", "parallel.pipeline_model_parallel_size=4"]
    other = copy.deepcopy(cfg)
    plan, _ = auto_recipe(cfg, cluster="dgx_h100", overrides=words)
    assert plan.layout.dims.rank_order is RankOrder.TP_CP_EP_DP_PP
    assert cfg.dist.use_tp_pp_dp_mapping is False
    with pytest.raises(UserInputError, match="makes no groups in the other order"):
        auto_recipe(
            other, cluster="dgx_h100", overrides=[*words, "parallel.rank_order=tp-cp-ep-pp-dp"]
        )


def test_the_second_version_of_megatron_fsdp_is_not_planned() -> None:
    cfg = llama()
    cfg.dist.use_megatron_fsdp, cfg.ddp.megatron_fsdp_version = True, 2
    with pytest.raises(UserInputError, match="is not planned"):
        read_recipe(cfg, environment={})


def test_the_states_of_muon_are_divided_where_the_optimizer_says_so() -> None:
    """Megatron-LM's meaning of ``use_distributed_optimizer`` beside it is not the recipes'."""
    whole = ["cluster.num_gpus=16", "search.num_alternatives=0"]
    whole += [f"parallel.{n}_parallel_size={s}" for n, s in (("tensor_model", 8), ("context", 1))]
    peaks = []
    for layer_wise in (True, False):
        cfg = llama()
        cfg.optimizer.optimizer = "muon"
        cfg.optimizer.use_layer_wise_distributed_optimizer = layer_wise
        plan, _ = auto_recipe(cfg, cluster="dgx_h100", overrides=whole, keep=["recompute"])
        peaks.append(plan.predicted.stages[0].memory_bytes["optimizer"])
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("optimizer", ["dist_muon", "muon", "soap", "lion"])
def test_optimizers_of_whole_matrices_keep_gradients_whole(optimizer: str) -> None:
    """Megatron-LM divides layers instead where the flag is set; ``ConfigContainer`` does not."""
    cfg = llama()
    cfg.optimizer.optimizer = optimizer
    cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
    auto_recipe(cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"])
    assert cfg.optimizer.use_distributed_optimizer is cfg.ddp.use_distributed_optimizer is False
    assert not cfg.ddp.overlap_param_gather
    with pytest.raises(UserInputError, match="gives it a part of each gradient"):
        auto_recipe(
            cfg,
            cluster="dgx_h100",
            overrides=["cluster.num_gpus=64", "parallel.zero_stage=1"],
        )


def test_a_plan_that_cuts_gradients_is_not_for_optimizers_of_whole_matrices() -> None:
    cfg = llama()
    cfg.optimizer.optimizer = "muon"
    with pytest.raises(UserInputError, match="gives it a part of each gradient"):
        apply_plan(cfg, laid_out(zero=ZeroStage.OPTIMIZER))
    assert apply_plan(cfg, laid_out(zero=ZeroStage.NONE))


@pytest.mark.parametrize(
    ("batch", "micro", "context"),
    [(16, None, None), (None, 8, None), (24, 1, 2), (None, None, 8), (128, 2, 1), (256, 1, 1)],
)
def test_evaluation_goes_with_the_plan(
    batch: int | None, micro: int | None, context: int | None
) -> None:
    """As ``ConfigContainer.validate`` asks; what goes with it stays."""
    cfg = llama()
    stated = {"eval_global_batch_size": batch, "eval_micro_batch_size": micro}
    cfg.validation = SimpleNamespace(**stated)
    cfg.dist.eval_context_parallel_size = context
    plan, changes = auto_recipe(cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"])
    dims = plan.layout.dims
    evaluated = cfg.dist.eval_context_parallel_size or dims.context_parallel_size
    inside = dims.tensor_model_parallel_size * dims.pipeline_model_parallel_size * evaluated
    sizes = [cfg.validation.eval_global_batch_size, cfg.validation.eval_micro_batch_size]
    own = [plan.layout.global_batch_size, plan.layout.micro_batch_size]
    whole, part = (size or other for size, other in zip(sizes, own, strict=True))
    assert whole % (part * (64 // inside)) == 64 % inside == 0
    told = {change.field for change in changes}
    for name, value in stated.items():
        kept = getattr(cfg.validation, name)
        assert kept in (value, None)
        assert (f"validation.{name}" in told) is (kept != value)


def test_the_data_of_energon_and_evaluation_state_one_size() -> None:
    cfg = llama()
    cfg.validation = SimpleNamespace(eval_global_batch_size=None, eval_micro_batch_size=4)
    cfg.dataset.micro_batch_size = 4
    plan, _ = auto_recipe(cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"])
    assert cfg.dataset.micro_batch_size == plan.layout.micro_batch_size != 4
    assert cfg.validation.eval_micro_batch_size is None


def test_overlay_and_dotlist_say_the_same() -> None:
    changes = plan_changes(llama(), laid_out(tp=2, pp=4, vpp=4))
    overlay = yaml.safe_load(to_yaml(changes))
    for word in to_dotlist(changes):
        path, _, text = word.partition("=")
        node: Any = overlay
        for step in path.split("."):
            node = node[step]
        assert node == yaml.safe_load(text)


def test_options_are_words_for_each_key_that_hydra_reads() -> None:
    options = {"add_bos": True, "pad_seq_length_to_mult": 32}
    before = {"add_bos": True}
    change = Change(field="dataset.dataset_kwargs", before=before, after=options, reason="")
    (word,) = to_dotlist([change])
    assert word == "++dataset.dataset_kwargs.pad_seq_length_to_mult=32"
    read = OverridesParser.create().parse_override(word)
    assert read.value() == 32


def planned(cfg: Any, *words: str) -> Any:
    """As a script does it, whose framework sets typed fields and nothing else."""

    def process(config: Any, path: str | None = None, overrides: list[str] | None = None) -> Any:
        for word in overrides or []:
            name, _, value = word.partition("=")
            part, _, field = name.partition(".")
            setattr(getattr(config, part), field, int(value))
        return config

    return hook.planning(process, lambda _: None)(cfg, cli_overrides=list(words))


def test_the_word_plans_and_keeps_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = planned(llama(), "model.tensor_model_parallel_size=4", *AUTO)
    assert cfg.model.tensor_model_parallel_size == 4
    assert "tensor_model_parallel_size" not in capsys.readouterr().out
    freed = planned(
        llama(), "model.tensor_model_parallel_size=4", *AUTO, "nest.free=tensor_model_parallel_size"
    )
    assert freed.model.tensor_model_parallel_size != 4


def test_off_is_off() -> None:
    before = llama()
    assert planned(copy.deepcopy(before), "+nest=off") == before


@pytest.mark.parametrize("word", ["+nest=atuo", "nest.clustr=x", "nest.mixed_gpus=slowest"])
def test_a_wrong_word_ends_the_job(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planned(llama(), *AUTO, word)
    assert word.partition("=")[0] in capsys.readouterr().err


def test_a_dry_run_ends_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        planned(llama(), *AUTO, "nest.dry_run=true")
    assert end.value.code == 0
    assert "this job runs as" in capsys.readouterr().out


def test_the_plan_is_kept_where_asked(tmp_path: Any) -> None:
    file = tmp_path / "plan.yaml"
    cfg = planned(llama(), *AUTO, f"nest.out={file}")
    assert plan_changes(cfg, plan_file.read(file)) == ()


def test_a_pinned_plan_must_be_named() -> None:
    job = launched_job(["+nest=pinned"])
    assert job is not None
    with pytest.raises(UserInputError, match=r"nest\.plan"):
        hook.run(job, llama(), [])


def test_without_a_size_it_is_asked_for() -> None:
    with pytest.raises(UserInputError, match=r"cluster\.num_gpus"):
        auto_recipe(llama(), cluster="dgx_h100")


def test_the_model_of_another_framework_is_refused() -> None:
    cfg = llama()
    cfg.model = SimpleNamespace(hidden_size=8)
    with pytest.raises(UserInputError, match="megatron-core"):
        read_recipe(cfg)


def test_an_installed_release_is_named_where_it_is_newer_than_those_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"megatron-bridge": "0.99.1"}
    monkeypatch.setattr(importlib.metadata, "version", said.__getitem__)
    job = read_recipe(llama())
    assert job.target is not None
    assert job.target.name == "megatron_bridge_0.7"
    assert [note for note in job.notes if note.startswith("megatron_bridge_0.99.1 is newer")]
    said["megatron-bridge"] = "0.2.1"
    with pytest.raises(UserInputError, match=r"0\.3 is the oldest release of megatron_bridge"):
        read_recipe(llama())


def test_a_virtual_size_beside_another_layout_is_corrected() -> None:
    cfg = llama()
    plan = laid_out(tp=2, pp=4, vpp=4)
    apply_plan(cfg, plan)
    cfg.model.pipeline_model_parallel_layout = plan.arguments["pipeline_model_parallel_layout"]
    cfg.model.virtual_pipeline_model_parallel_size = 2
    apply_plan(cfg, plan)
    assert cfg.model.virtual_pipeline_model_parallel_size in (None, 4)


def test_weights_of_8_bits_are_cast_by_the_distributed_optimizer_alone() -> None:
    cfg = llama()
    cfg.mixed_precision = SimpleNamespace(
        bf16=True,
        fp8="e4m3",
        fp8_recipe="mxfp8",
        fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=True,
    )
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = True
    words = ["cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8"]
    plan, _ = auto_recipe(cfg, cluster="b200", overrides=words)
    assert plan.layout.dims.data_parallel_size == 1
    assert plan.layout.zero is ZeroStage.OPTIMIZER
    for optimizer in ("muon", "sgd"):
        cfg.optimizer.optimizer = optimizer
        with pytest.raises(UserInputError, match=r"n\.fp8_param_gather = True.*Drop this one"):
            auto_recipe(cfg, cluster="b200", overrides=words)


def test_a_batch_that_no_longer_grows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core since 0.18 logs that the ramp is deprecated, and has no ramp."""
    monkeypatch.setattr(config, "installed_name", lambda _: "megatron_bridge_0.6")
    cfg = bridge_config(catalogue.model("llama3_8b"))
    assert not any("rampup" in note for note in read_recipe(cfg).notes)
    cfg.train.rampup_batch_size = [16, 16, 1000]
    job = read_recipe(cfg)
    assert job.batch_schedule is None
    told = [note for note in job.notes if "rampup" in note]
    assert told == [
        "train.rampup_batch_size = [16, 16, 1000] is ignored by megatron-core "
        f"{job.version}: every step has train.global_batch_size."
    ]
