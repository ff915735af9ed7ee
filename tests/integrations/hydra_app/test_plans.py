"""Plans of composed configurations, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from nest_megatron.config.compose import compose
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.memory_flags import not_modelled
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra import plans, register
from nest_megatron.integrations.hydra.plans import Plans, num_gpus, require_expressible
from nest_megatron.integrations.hydra.read import read_app
from nest_megatron.integrations.hydra.view import view_of
from nest_megatron.integrations.plan_output import values_report
from nest_megatron.layout.dims import RankOrder
from nest_megatron.planner.pins import Pin, PinnedPlan, write_pinned
from nest_megatron.report.console import show
from nest_megatron.version import __version__
from tests.cli.runs import ROOT
from tests.integrations.hydra_app.apps import GPT

GROUP = ROOT / "hydra_configs" / "hydra_app" / "nest"


def composed(**more: Any) -> DictConfig:
    """NeMo's names with our group, as Hydra merges them; more values by path, ``__`` for dots."""
    register()
    parts = [OmegaConf.create(textwrap.dedent(GPT))]
    parts += [OmegaConf.load(GROUP / f"{name}.yaml") for name in ("settings", "auto")]
    config = OmegaConf.merge(*parts)
    assert isinstance(config, DictConfig)
    del config["defaults"], config["hydra"]
    for path, value in {"nest__cluster": "dgx_h100", **more}.items():
        OmegaConf.update(config, path.replace("__", "."), value, force_add=True)
    return config


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every search of a test, and none known before it."""
    done: list[object] = []

    found = plans.plan_app

    def plan_app(*arguments: Any) -> plans.AppPlan:
        done.append(arguments)
        return found(*arguments)

    monkeypatch.setattr(plans, "PLANS", Plans())
    monkeypatch.setattr(plans, "plan_app", plan_app)
    return done


def test_one_configuration_is_planned_once(searches: list[object]) -> None:
    config = composed()
    values = OmegaConf.to_container(config.model, resolve=True)
    again = OmegaConf.to_container(composed().model, resolve=True)
    assert values == again
    assert len(searches) == 1


def test_another_job_is_planned_anew(searches: list[object]) -> None:
    config = composed()
    first = plans.PLANS.of(config).plan
    config.model.num_layers = 20
    assert plans.PLANS.of(config).plan.model.num_layers == 20
    assert first.model.num_layers == 40
    assert len(searches) == 2


def test_a_planned_field_that_is_changed_later_changes_no_plan(searches: list[object]) -> None:
    """NeMo takes recomputation back while it validates."""
    config = composed()
    before = config.model.tensor_model_parallel_size
    config.model.activations_checkpoint_granularity = None
    config.model.sequence_parallel = False
    assert config.model.tensor_model_parallel_size == before
    assert len(searches) == 1


def test_what_is_given_before_is_held(searches: list[object]) -> None:
    config = composed(
        model__tensor_model_parallel_size=4,
        model__activations_checkpoint_granularity="full",
        model__activations_checkpoint_method="uniform",
        model__activations_checkpoint_num_layers=1,
    )
    plan = plans.PLANS.of(config).plan
    assert plan.layout.dims.tensor_model_parallel_size == 4
    assert plan.arguments["recompute_method"] == "uniform"


def test_a_whole_model_by_its_name(searches: list[object]) -> None:
    plan = plans.PLANS.of(composed(nest__model="llama3_8b")).plan
    assert plan.model.name == "llama3_8b"
    assert plan.layout.global_batch_size == 256
    assert plan.train.seq_length == 4096


FOREIGN = """
    arch: {depth: 32, width: 4096, ffn: 14336, heads: 32, groups: 8, glu: true, vocab: 128256}
    data: {tokens: 8192, batch: 128}
    layout:
      tp: ${nest:tensor_model_parallel_size}
      pp: ${nest:pipeline_model_parallel_size}
      sp: ${nest:sequence_parallel}
      micro: ${nest:micro_batch_size}
      dp: ${nest:data_parallel_size}
      stages: ${nest:pipeline_model_parallel_layout}
    label: tp${nest:tensor_model_parallel_size}
    nest:
      cluster: dgx_h100
      num_gpus: 16
      root: arch
      fields:
        num_layers: arch.depth
        hidden_size: arch.width
        ffn_hidden_size: arch.ffn
        num_attention_heads: arch.heads
        num_query_groups: arch.groups
        swiglu: arch.glu
        padded_vocab_size: arch.vocab
        seq_length: data.tokens
        global_batch_size: data.batch
        tensor_model_parallel_size: layout.tp
        pipeline_model_parallel_size: layout.pp
        sequence_parallel: layout.sp
        micro_batch_size: layout.micro
        data_parallel_size: layout.dp
        pipeline_model_parallel_layout: layout.stages
"""


def foreign(**more: Any) -> DictConfig:
    register()
    config = OmegaConf.create(textwrap.dedent(FOREIGN))
    for path, value in more.items():
        OmegaConf.update(config, path.replace("__", "."), value)
    return config


def test_an_application_with_names_of_its_own(searches: list[object]) -> None:
    config = foreign()
    layout = config.layout
    assert layout.tp * layout.pp * layout.dp == 16
    assert config.label == f"tp{layout.tp}"
    plan = plans.PLANS.of(config).plan
    assert plan.model.num_query_groups == 8
    assert (
        plan.arguments["virtual_pipeline_model_parallel_size"] is None
    )  # there is no field for it
    assert plan.arguments["recompute_granularity"] is None
    assert plan.layout.dims.rank_order is RankOrder.TP_CP_EP_DP_PP
    assert len(searches) == 1


def test_what_it_leaves_open_is_said(searches: list[object]) -> None:
    notes = plans.PLANS.of(foreign(arch__rope=True, arch__moe=False)).notes
    (assumed,) = [note for note in notes if "leaves these open" in note]
    assert "position_embedding_type (learned positions)" in assumed
    assert "untie_embeddings_and_output_weights (embeddings shared with the output)" in assumed
    assert "num_query_groups" not in assumed
    assert "Fields beside those of the model that are not read: arch.rope." in notes
    said = plans.PLANS.of(composed()).notes
    assert not any("leaves these open" in note or "not read" in note for note in said)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("nest.fields.num_layer", "arch.depth", "Did you mean num_layers"),
        ("arch.num_query_group", 8, r"num_query_groups is not given\. Write num_query_groups"),
        ("arch.use_kitchen", True, "quantized layers"),
    ],
)
def test_misspelt_and_unplannable_fields_are_refused(path: str, value: object, said: str) -> None:
    config = foreign(**{path: value})
    if path.startswith("arch"):
        del config.nest.fields.num_query_groups
    with pytest.raises(UserInputError, match=said):
        plans.PLANS.of(config)


def test_its_values_given_by_hand_are_held(searches: list[object]) -> None:
    plan = plans.PLANS.of(foreign(layout__pp=4)).plan
    assert plan.layout.dims.pipeline_model_parallel_size == 4


def test_a_choice_without_a_place_is_refused(searches: list[object]) -> None:
    config = foreign()
    del config.nest.fields["tensor_model_parallel_size"]
    with pytest.raises(InterpolationResolutionError, match=r"nest.fields.tensor_model_parallel"):
        _ = config.layout.tp


def test_sequence_parallelism_is_needed_for_tensor_parallelism(searches: list[object]) -> None:
    assert (
        plans.PLANS.of(foreign(layout__sp=False)).plan.layout.dims.tensor_model_parallel_size == 1
    )
    with pytest.raises(UserInputError, match=r"sequence_parallel|layout.sp|max_tensor"):
        plans.PLANS.of(foreign(layout__sp=False, layout__tp=2))


def test_a_model_computed_from_the_plan_is_refused(searches: list[object]) -> None:
    config = foreign(data__batch="${layout.dp}")
    with pytest.raises(InterpolationResolutionError, match="made for that model"):
        _ = config.layout.tp


def test_a_value_that_no_plan_has(searches: list[object]) -> None:
    config = foreign()
    with open_dict(config):
        config.other = "${nest:tensor_parallel}"
        config.nest.fields.tensor_parallel = "other"
    with pytest.raises(InterpolationResolutionError, match="tensor_model_parallel_size"):
        _ = config.other


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("nest.mode", "off", "one of auto, pinned"),
        ("nest.num_gpus", 0, "at least 1"),
        ("nest.cluster", 3, "it must be text"),
        ("nest.fields.num_layers", 3, "it must be text"),
        ("nest.overrides", [1], "it must be a mapping"),
        ("nest.clusters", "x", "Did you mean cluster"),
        ("nest.plan", "plan.yaml", r"nest=auto makes a plan.* Type \+nest=pinned"),
    ],
)
def test_wrong_settings_are_named(path: str, value: object, said: str) -> None:
    config = foreign()
    OmegaConf.update(config, path, value, force_add=True)
    with pytest.raises(UserInputError, match=said):
        plans.PLANS.of(config)


def test_more_settings_of_the_planner(searches: list[object]) -> None:
    overrides = {"search": {"max_tensor_model_parallel_size": 2}, "cost": {"dp_overlap": 0.5}}
    plan = plans.PLANS.of(composed(nest__overrides=overrides)).plan
    assert plan.layout.dims.tensor_model_parallel_size <= 2
    assert plan.provenance.settings["dp_overlap"] == 0.5


def pinned_file(folder: Path, plan: Any) -> str:
    pin = Pin(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        by="ada",
        note="",
        nest_megatron_version=__version__,
        megatron_lm="0.16",
    )
    write_pinned(PinnedPlan(pin=pin, plan=plan), folder / "pinned.yaml")
    return str(folder / "pinned.yaml")


def test_a_pinned_plan_is_taken_as_it_is(searches: list[object], tmp_path: Path) -> None:
    plan = plans.PLANS.of(composed(nest__overrides={"parallel": {"rank_order": "tp-cp-ep-dp-pp"}}))
    path = pinned_file(tmp_path, plan.plan)
    pinned = plans.PLANS.of(composed(nest__mode="pinned", nest__plan=path))
    assert pinned.plan == plan.plan
    assert pinned.values == plan.values


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__num_layers": 20}, "num_layers is 20, pinned 40"),
        ({"trainer__num_nodes": 4}, "number of GPUs is 32, pinned 64"),
        ({"model__tensor_model_parallel_size": 8}, "the plan needs 2"),
        ({"nest__plan": None}, "nest.plan"),
    ],
)
def test_a_pinned_plan_refuses_any_other_job(
    searches: list[object], tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    plan = plans.PLANS.of(composed(model__tensor_model_parallel_size=2)).plan
    path = pinned_file(tmp_path, plan)
    with pytest.raises(UserInputError, match=said):
        plans.PLANS.of(composed(**{"nest__mode": "pinned", "nest__plan": path, **changed}))


def test_a_plan_that_time_decided_is_refused(searches: list[object]) -> None:
    plan = plans.PLANS.of(composed()).plan
    late = dataclasses.replace(plan.search, certificate="gap", gap_percent=1.0, seconds=60.0)
    with pytest.raises(UserInputError, match="every rank searches for itself"):
        plans.require_decided(dataclasses.replace(plan, search=late), 60.0)
    soon = dataclasses.replace(late, seconds=54.0)  # some time is kept for what follows
    with pytest.raises(UserInputError, match="max_seconds"):
        plans.require_decided(dataclasses.replace(plan, search=soon), 60.0)
    limited = dataclasses.replace(late, certificate="node-limit")
    plans.require_decided(dataclasses.replace(plan, search=limited), 60.0)
    plans.require_decided(plan, 60.0)


def test_without_torchrun_there_is_no_place_to_compare(searches: list[object]) -> None:
    plan = plans.PLANS.of(composed()).plan
    assert not plans.require_same_plan(plan, "job", {"WORLD_SIZE": "8"})


def test_experts_are_cut_as_far_as_layers_where_there_is_no_field(searches: list[object]) -> None:
    experts = {"model__num_moe_experts": 8, "model__hidden_size": 2560, "model__bias": False}
    with pytest.raises(UserInputError, match="so it is the tensor-parallel size, which is free"):
        plans.PLANS.of(composed(**experts))
    plan = plans.PLANS.of(composed(**experts, model__tensor_model_parallel_size=2)).plan
    assert plan.layout.dims.expert_tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.num_layers", None, "num_layers"),
        ("model.global_batch_size", None, r"\+nest.fields.global_batch_size=PATH"),
        ("model.activation", "reglu", "reglu"),
        ("model.mcore_gpt", False, "NeMo's own layers"),
        ("model.fsdp", True, "torch's FSDP"),
        ("model.drop_layers", [3], "left out"),
        ("trainer.precision", 64, "trainer.precision"),
        ("nest.num_gpus", 32, "they are the same number of ranks"),
        ("nest.overrides", {"model": "llama3_8b"}, "nest.model"),
        ("nest.overrides", {"serch": {"max_seconds": 3}}, "search.max"),  # codespell:ignore serch
        ("nest.overrides", {"parallel": {"zero_stage": 3}}, "parallel.zero_stage"),
        ("model.pipeline_model_parallel_layout", "Et|tL", "nothing to search for"),
        ("nest.fields.sequence_parallel", "model.micro_batch_size", "the place of sequence"),
    ],
)
def test_jobs_that_cannot_be_planned(path: str, value: object, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        plans.PLANS.of(composed(**{path.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("trainer", "size"),
    [
        ({"devices": 4, "num_nodes": 2}, 8),
        ({"devices": [0, 1], "num_nodes": 4}, 8),
        ({"devices": -1, "num_nodes": 4}, None),
        ({"devices": "auto"}, None),
    ],
)
def test_the_trainer_says_how_many_gpus(trainer: dict[str, Any], size: int | None) -> None:
    view = view_of(composed(trainer={**trainer, "precision": "bf16"}))
    if size is None:
        with pytest.raises(UserInputError, match=r"nest.num_gpus=64"):
            num_gpus(view, {})
        assert num_gpus(view, {"WORLD_SIZE": "16"}) == 16
    else:
        assert num_gpus(view, {"WORLD_SIZE": str(size)}) == size


def test_settings_of_memory_are_read() -> None:
    view = view_of(
        composed(
            trainer__precision=32,
            model__optimizer="sgd",
            model__fine_grained_activation_offloading=True,
        )
    )
    job = read_app(view, compose(view.settings.settings(None)))
    traits = execution_traits(job.memory_flags, job.precision)
    assert (traits.params_bytes, traits.optimizer_bytes) == (4, 4)
    assert not_modelled(job.memory_flags) == ("--fine-grained-activation-offloading",)


def test_choices_are_made_where_the_application_asks_for_them(searches: list[object]) -> None:
    asks = "${nest:tp_comm_overlap}"
    config = composed(model__tensor_model_parallel_size=4, model__ub_tp_comm_overlap=asks)
    assert plans.PLANS.of(config).plan.layout.execution.tp_comm_overlap
    assert config.model.ub_tp_comm_overlap is True
    silent = composed(model__tensor_model_parallel_size=4)
    assert not plans.PLANS.of(silent).plan.layout.execution.tp_comm_overlap
    given = composed(model__tensor_model_parallel_size=4, model__ub_tp_comm_overlap=True)
    assert plans.PLANS.of(given).plan.layout.execution.tp_comm_overlap
    held = composed(
        model__tensor_model_parallel_size=4,
        model__ub_tp_comm_overlap=asks,
        nest__overrides__search={"keep": ["tp_comm_overlap"]},
    )
    assert plans.PLANS.of(held).values["tp_comm_overlap"] is False


def test_a_plan_with_choices_that_the_application_does_not_make_is_refused(
    searches: list[object],
) -> None:
    asks = "${nest:tp_comm_overlap}"
    config = composed(model__tensor_model_parallel_size=4, model__ub_tp_comm_overlap=asks)
    plan = plans.PLANS.of(config).plan
    silent = view_of(composed())
    job = read_app(silent, compose(silent.settings.settings(None)))
    with pytest.raises(UserInputError, match="priced with True"):
        require_expressible(plan, silent, job)


#: A field of the model's node -> what the model that is read has.
READ = {
    "hybrid_override_pattern": ("M*-M*-M*-M*-", {"hybrid_layer_pattern": "M*-M*-M*-M*-"}),
    "linear_num_value_heads": (48, {"linear_num_value_heads": 48}),
    "attention_output_gate": (True, {"attention_output_gate": True}),
    "no_rope_freq": (4, {"no_rope_freq": 4}),
    "window_size": ([1023, 0], {"window_size": 1024}),
    "kv_channels": (256, {"kv_channels": 256}),
}
#: A field that changes a model or a job and that is not read.
UNREAD = {
    "model__attention_chunk_size": 8192,
    "model__interleaved_attn_pattern": [5, 1],
    "model__attn_logit_softcapping": 50.0,
    "model__vision_config": {"depth": 32},
    "model__mrope_section": [16, 24, 24],
    "model__step_batch_size_schedule": "0:768 250B:1536",
    "model__peft": {"peft_scheme": "lora"},
    "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 16},
}


def app_with(**more: Any) -> Any:
    config = composed(**more)
    view = view_of(config)
    return read_app(view, compose(view.settings.settings(None)))


@pytest.mark.parametrize("name", READ)
def test_a_field_of_the_model_is_read(name: str) -> None:
    value, wanted = READ[name]
    more = {"model__num_layers": 12} if name.startswith("hybrid") else {}
    spec = app_with(**{f"model__{name}": value, **more}).spec
    assert {field: getattr(spec, field) for field in wanted} == wanted


@pytest.mark.parametrize("path", UNREAD)
def test_a_field_that_would_change_the_plan_is_refused(path: str) -> None:
    with pytest.raises(UserInputError, match=path.rpartition("__")[2]):
        app_with(**{path: UNREAD[path]})


def test_an_unread_field_may_stand_for_one_that_is_read() -> None:
    fields = {"nest__fields": {"kv_channels": "model.head_dim"}, "model__head_dim": 256}
    assert app_with(**fields).spec.kv_channels == 256


def test_a_named_model_leaves_nothing_unsaid() -> None:
    config = composed(
        nest__model="llama3_8b",
        model__encoder_seq_length=None,
        actor={"param_offload": True, "grad_offload": False, "use_dynamic_bsz": True},
        lora={"rank": 16, "alpha": 32},
        rollout={"gpu_memory_utilization": 0.4},
        nest__overrides={"train": {"sequence_length_mean": 900, "sequence_length_std": 300}},
        trainer__num_nodes=1,
    )
    said = " ".join(plans.PLANS.of(config).notes)
    for words in (
        "sequences of 8,192 tokens are planned, as llama3_8b has them",
        "actor.param_offload=true, actor.use_dynamic_bsz=true, lora.rank=16, "
        "rollout.gpu_memory_utilization=0.4",
        "lengths of data change no time of a step",
    ):
        assert words in said


@pytest.mark.usefixtures("searches")
def test_the_planning_job_takes_values_of_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUM_GPUS", "16")
    del_trainer = {"trainer": {"precision": "bf16-mixed"}}
    config = composed(nest__num_gpus="${oc.env:NUM_GPUS}", nest__cluster="${machine}")
    OmegaConf.update(config, "machine", "dgx_h100", force_add=True)
    OmegaConf.update(config, "trainer", None)
    OmegaConf.update(config, "trainer", del_trainer["trainer"])
    assert num_gpus(view_of(config), {}) == 16
    assert view_of(config).settings.cluster == "dgx_h100"
    for wrong, words in (("${nest:num_gpus}", "asks for the plan"), ("${nowhere}", "nowhere")):
        OmegaConf.update(config, "nest.num_gpus", wrong)
        with pytest.raises(UserInputError, match=words):
            view_of(config)


def test_a_long_path_is_no_reason_to_break_a_value() -> None:
    plan = plans.PLANS.of(composed()).plan
    path = f"{'node.' * 18}tensor_model_parallel_size"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(*values_report(plan, [(path, "recompute_everything", "why")], ["a note"]))
    assert f"  {path} = recompute_everything\n      why\n" in out.getvalue()
    assert re.search("MFU [0-9.]+ %", out.getvalue())
