"""The Python API: the same plans, and the same errors, as the command line."""

from __future__ import annotations

import math
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nest_megatron
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.plain import to_plain
from nest_megatron.report.failure import NothingFitsError
from tests import catalogue
from tests.cli.runs import ROOT, environment, run
from tests.integrations.frameworks import (
    MegatronCommOverlapCallback,
    bridge_config,
    nemo_recipe,
)

PUBLIC = [
    *("Explanation", "Plan", "PlanTable", "Scaling", "WhatIf", "__version__", "clusters"),
    *("estimate", "estimate_command", "load_plan", "models", "plan", "plan_command"),
    *("plan_for_gpus", "plan_table", "whatif", "whatif_command"),
]
JOB: dict[str, Any] = {"num_gpus": 16, "global_batch_size": 128, "num_alternatives": 2}
NAMES: dict[str, Any] = {"model": "llama3_8b", "cluster": "dgx_h100"}
UNIFORM: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
COMMAND = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 "
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --data-cache-path /tmp/x "
    "--tokenizer-type NullTokenizer --global-batch-size 128 --micro-batch-size 1 "
)
WORDS = (
    "model=llama3_8b",
    "cluster=dgx_h100",
    "cluster.num_gpus=16",
    "train.global_batch_size=128",
    "search.num_alternatives=2",
)


@pytest.fixture(scope="module")
def plan() -> nest_megatron.Plan:
    return nest_megatron.plan(**NAMES, **JOB)


def lasting(document: dict[str, Any]) -> dict[str, Any]:
    """A plan without what differs between two runs."""
    kept = {key: value for key, value in document.items() if key != "explained"}
    own = ("created", "checksum")
    kept["provenance"] = {k: v for k, v in kept["provenance"].items() if k not in own}
    kept["search"] = {k: v for k, v in kept["search"].items() if k != "seconds"}
    return kept


def test_a_file_of_somebody_else_is_replaced_as_a_call_says(
    plan: nest_megatron.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    with pytest.raises(UserInputError, match="force=True"):
        plan.save(path)
    plan.save(path, force=True)
    plan.save(path)


def test_the_public_names_are_frozen() -> None:
    assert sorted(nest_megatron.__all__) == PUBLIC
    for name in nest_megatron.__all__:
        assert getattr(nest_megatron, name) is not None
        assert name in dir(nest_megatron)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = nest_megatron.plam


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_help_shows_each_public_name(name: str) -> None:
    assert name in pydoc.render_doc(getattr(nest_megatron, name))


def test_a_search_says_how_far_it_is_and_is_ended_by_what_that_raises() -> None:
    told: list[tuple[int, float | None, float]] = []
    found = nest_megatron.plan(**NAMES, **JOB, on_progress=lambda *each: told.append(each))
    assert told[-1][0] == found.search.solved
    assert told[-1][2] <= min(best for _, best, _ in told if best is not None)

    def end(solved: int, best: float | None, bound: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        nest_megatron.plan_command(COMMAND, cluster="dgx_h100", num_gpus=16, on_progress=end)


@pytest.mark.parametrize("sizes", ["8,16", 8, ["8"], [], b"8", [8.5]])
def test_numbers_of_gpus_and_nodes_are_whole(sizes: Any) -> None:
    with pytest.raises(UserInputError, match="it holds whole numbers of at least 1"):
        nest_megatron.plan_for_gpus(**NAMES, gpus=sizes)
    with pytest.raises(UserInputError, match="it holds whole numbers of at least 1"):
        nest_megatron.plan_table(**NAMES, nodes=sizes)


def test_what_was_assumed_is_told_of_an_estimate_and_kept_in_files(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 256,
        "vision_config": {},
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    }
    sizes: dict[str, Any] = {"cluster": "dgx_h100", "num_gpus": 8, "num_alternatives": 0}
    priced = nest_megatron.estimate(model=config, **sizes)
    planned = nest_megatron.plan(model=config, target="nemo_2.7", **sizes)
    for found in (priced, planned):
        assert any("the text model alone is read" in note for note in found.notes)
        assert any("mm_tokens_per_image; the model is planned without" in n for n in found.notes)
    planned.save(tmp_path / "plan.yaml")
    loaded = nest_megatron.load_plan(tmp_path / "plan.yaml")
    assert loaded.notes == planned.notes
    assert "the text model alone is read" in " ".join(str(loaded.explain()).split())


def test_attention_in_chunks_is_nemos_alone() -> None:
    model = {"model_type": "llama4_text", "attention_chunk_size": 8192, "num_hidden_layers": 4}
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    job: dict[str, Any] = {
        **{"model": {**model, **sizes, **heads}, "cluster": "dgx_h100", "num_gpus": 8},
        **{"global_batch_size": 8, "seq_length": 65536, "num_alternatives": 0},
    }
    own = nest_megatron.plan(target="nemo_2.7", **job)
    assert own.layout.dims.context_parallel_size == 1
    assert own.model.attention_chunk_size == 8192
    with pytest.raises(UserInputError, match="attends to whole sequences alone"):
        nest_megatron.plan(target="nemo_2.7", cp=2, **job)
    with pytest.raises(UserInputError, match="attends to whole sequences alone"):
        nest_megatron.estimate(target="nemo_2.7", cp=2, **job)
    whole = nest_megatron.plan(**job)
    assert whole.model.attention_chunk_size is None
    assert any("has no attention in chunks" in note for note in whole.notes)
    short = nest_megatron.plan(**{**job, "seq_length": 8192})
    assert not any("chunks" in note for note in short.notes)


def test_a_single_flag_may_be_freed_as_a_text() -> None:
    sizes: dict[str, Any] = {"cluster": "dgx_h100", "num_gpus": 16, "num_alternatives": 0}
    one = nest_megatron.plan_command(COMMAND, free="all", **sizes)
    assert one.layout == nest_megatron.plan_command(COMMAND, free=["all"], **sizes).layout


def test_a_page_and_a_picture_replace_no_file_of_the_users(
    plan: nest_megatron.Plan, tmp_path: Path
) -> None:
    explained = plan.explain()
    for write, name in ((explained.write_html, "p.html"), (explained.write_timeline, "p.json")):
        (tmp_path / name).write_text("precious")
        with pytest.raises(UserInputError, match="this file exists"):
            write(tmp_path / name)
        write(tmp_path / name, force=True)
        assert (tmp_path / name).read_text() != "precious"


def test_a_number_of_gpus_is_not_said_twice() -> None:
    said = r"cluster\.num_gpus = '8': another argument says 16"
    with pytest.raises(UserInputError, match=said):
        nest_megatron.plan_for_gpus(**NAMES, gpus=[16, 32], **{"cluster.num_gpus": 8})
    with pytest.raises(UserInputError, match=said):
        nest_megatron.plan(**NAMES, num_gpus=16, **{"cluster.num_gpus": 8})
    with pytest.raises(UserInputError, match=r"train\.global_batch_size = '8': another argument"):
        nest_megatron.estimate(**NAMES, global_batch_size=16, train={"global_batch_size": 8})
    tensor = {"tensor_model_parallel_size": 4}
    for twice in (
        tensor,
        {"parallel": tensor},
        {"overrides": ["parallel.tensor_model_parallel_size=4"]},
    ):
        with pytest.raises(UserInputError, match="another argument says 2"):
            nest_megatron.plan(**NAMES, num_gpus=16, tp=2, **twice)


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import nest_megatron;"
        "print(*sorted(name for name in set(sys.modules) - before if 'nest' in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.split() == ["nest_megatron", "nest_megatron.version"]


def test_a_plan_loads_no_framework_and_no_page() -> None:
    code = (
        "import sys, nest_megatron as n; p = n.plan(model='llama3_8b', cluster='dgx_h100',"
        " num_gpus=8, num_alternatives=0); assert p.predicted.fits; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    heavy = {"torch", "megatron", "nemo", "matplotlib", "nest_megatron.report.html"}
    optional = {"nest_megatron.research", "nest_megatron.validation", "nest_megatron.cli"}
    assert not set(done.stdout.split()) & (heavy | optional)


def test_the_plan_is_that_of_the_command_line(plan: nest_megatron.Plan) -> None:
    assert lasting(plan.to_dict()) == lasting(run("plan", *WORDS, "--json").json())


def test_an_estimate_is_that_of_the_command_line() -> None:
    priced = nest_megatron.estimate(**NAMES, **JOB, tensor_model_parallel_size=2)
    document = run("estimate", *WORDS, "parallel.tensor_model_parallel_size=2", "--json").json()
    assert lasting(priced.to_dict()) == lasting(document)


@pytest.mark.parametrize("target", ["nemo_2.7", "megatron_bridge_0.3"])
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (UNIFORM | {"recompute_num_layers": 5}, "uniform groups must divide"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "it needs"),
    ],
)
def test_an_estimate_for_a_framework_refuses_what_its_megatron_core_refuses(
    target: str, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(UserInputError, match=rule):
        nest_megatron.estimate(**NAMES, **JOB, target=target, **changes)


def test_a_release_that_cuts_the_last_uniform_group_prices_it() -> None:
    release: dict[str, Any] = {"target": "megatron_bridge_0.6", "recompute_num_layers": 5}
    priced = nest_megatron.estimate(**NAMES, **JOB, **UNIFORM, **release)
    assert priced.arguments["recompute_num_layers"] == 5


def test_a_command_is_planned_as_on_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "our train.sh"
    script.write_text(f"GPUS=8\ntorchrun --nproc-per-node $GPUS --nnodes 2 {COMMAND}\n")
    words = ("--free", "all", "cluster=dgx_h100", "search.num_alternatives=2", "--json")
    freed: dict[str, Any] = {"cluster": "dgx_h100", "free": ["all"], "num_alternatives": 2}
    found = nest_megatron.plan_command(script, **freed)
    told = run("plan", *words, "--", "bash", str(script)).json()
    assert lasting(found.to_dict()) == lasting(told)
    assert found.layout.num_gpus == 16
    assert "--data-cache-path" in found.to_megatron_args()
    text = COMMAND + "--our-own 1"
    assert nest_megatron.plan_command(text, num_gpus=16, **freed).layout == found.layout
    with pytest.raises(UserInputError, match="no such flag"):
        nest_megatron.plan_command(text, num_gpus=16, strict=True, **freed)
    with pytest.raises(UserInputError, match="nowhere"):
        nest_megatron.plan_command(Path("nowhere.sh"), **freed)


def test_objects_names_paths_and_fields_are_accepted_alike(
    plan: nest_megatron.Plan, tmp_path: Path
) -> None:
    model, cluster = nest_megatron.models()["llama3_8b"], nest_megatron.clusters()["dgx_h100"]
    own = tmp_path / "model"
    own.mkdir()
    (own / "model.yaml").write_text((ROOT / "hydra_configs/model/llama3_8b.yaml").read_text())
    for source in (model, own / "model.yaml", str(own / "model.yaml"), to_fields(model)):
        found = nest_megatron.plan(model=source, cluster=cluster, **JOB)
        assert lasting(found.to_dict()) == lasting(plan.to_dict()), source
    found = nest_megatron.plan(model=model, cluster=to_plain(cluster), **JOB)
    assert found.cluster == plan.cluster


def to_fields(model: Any) -> dict[str, Any]:
    fields: dict[str, Any] = to_plain(model)
    del fields["moe_layer_pattern"]
    return fields


@pytest.mark.parametrize("name", nest_megatron.models())
def test_every_model_may_be_given_as_its_record(name: str) -> None:
    from nest_megatron.config.catalogue import read_spec
    from nest_megatron.config.keywords import compose_keywords

    spec = nest_megatron.models()[name]
    assert read_spec(compose_keywords(spec, "dgx_h100", {})) == spec


@pytest.mark.parametrize("name", nest_megatron.clusters())
def test_every_cluster_may_be_given_as_its_record(name: str) -> None:
    from nest_megatron.config.catalogue import read_cluster
    from nest_megatron.config.keywords import compose_keywords

    cluster = nest_megatron.clusters()[name]
    assert read_cluster(compose_keywords("llama3_8b", cluster, {})) == cluster


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"model": "llama3_8"}, ("model=llama3_8",)),
        ({"tensor_parallel": 8}, ("tensor_parallel=8",)),
        ({"tensor_model_parallel_size": 3}, ("parallel.tensor_model_parallel_size=3",)),
        ({"parallel": {"rank_order": "pp"}}, ("parallel.rank_order=pp",)),
        ({"micro_batch_size": "1,2"}, ("train.micro_batch_size=1,2",)),
        ({"num_gpus": -8}, ("cluster.num_gpus=-8",)),
        ({"cluster.speed": 3}, ("cluster.speed=3",)),
    ],
)
def test_errors_are_those_of_the_command_line(
    keywords: dict[str, Any], words: tuple[str, ...]
) -> None:
    said = run("plan", *WORDS, *words, "--json")
    assert said.code == 2
    with pytest.raises(UserInputError) as caught:
        nest_megatron.plan(**{**NAMES, **JOB, **keywords})
    error = said.json()["error"]
    assert (caught.value.what, caught.value.limit, caught.value.fix) == (
        error["what"],
        error["limit"],
        error["fix"],
    )
    assert caught.value.exit_code == said.code


def test_a_job_that_fits_nowhere_is_an_error_with_the_refusal() -> None:
    with pytest.raises(NothingFitsError) as caught:
        nest_megatron.plan(model="llama3_70b", cluster="dgx_h100", num_gpus=8, global_batch_size=8)
    assert caught.value.refusal.missing_bytes > 0
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("settings", [{}, {"tp": 3}, {"max_seconds": 1e-9}])
def test_errors_reach_another_process_as_they_are(settings: dict[str, Any]) -> None:
    with pytest.raises(NestError) as raised:
        nest_megatron.plan(model="llama3_70b", cluster="dgx_h100", num_gpus=8, **settings)
    there = pickle.loads(pickle.dumps(raised.value))
    assert (type(there), str(there)) == (raised.type, str(raised.value))
    assert vars(there) == vars(raised.value)


def test_gemma_3_is_planned_where_it_is_built() -> None:
    job: dict[str, Any] = {"model": "gemma3_1b", "cluster": "dgx_h100", **JOB}
    with pytest.raises(NestError, match=r"norm_placement.*Megatron-LM 0.19 cannot build"):
        nest_megatron.plan(**job)
    staged = {**job, "target": "nemo_2.7", "pipeline_model_parallel_size": 2}
    found = nest_megatron.plan(**staged).layout
    assert found.dims.virtual_pipeline_model_parallel_size == 1
    with pytest.raises(UserInputError, match="takes no virtual stages"):
        nest_megatron.plan(**staged, virtual_pipeline_model_parallel_size=2)


def test_gemma_3_of_megatron_bridge_recomputes_no_whole_layers() -> None:
    job: dict[str, Any] = {"model": "gemma3_27b", "cluster": "dgx_h100", **JOB, "seq_length": 32768}
    found = nest_megatron.plan(**job, target="megatron_bridge")
    layouts = [found.layout, *(each.layout for each in found.alternatives)]
    assert RecomputeGranularity.FULL not in {each.recompute.granularity for each in layouts}
    for entry in (nest_megatron.plan, nest_megatron.estimate):
        with pytest.raises(UserInputError, match="two rotary embeddings"):
            entry(**job, target="megatron_bridge", **UNIFORM, recompute_num_layers=1)
    other = nest_megatron.estimate(**job, target="nemo", **UNIFORM, recompute_num_layers=1)
    assert other.layout.recompute.granularity is RecomputeGranularity.FULL


@pytest.mark.parametrize(
    ("model", "target", "degree"),
    [
        ("olmo2_7b", "megatron_bridge", "context"),  # its layers are those of EXAONE 4
        ("bert_large", "nemo", "virtual_pipeline_model"),
    ],
)
def test_degrees_that_a_class_lacks_are_not_planned(model: str, target: str, degree: str) -> None:
    job = {"model": model, "cluster": "dgx_h100", **JOB, "target": target}
    name = f"{degree}_parallel_size"
    with pytest.raises(UserInputError, match=rf"{name} = 2: {model} in \S+ \S+ needs 1: it"):
        nest_megatron.plan(**job, pipeline_model_parallel_size=2, **{name: 2})


@pytest.mark.parametrize("target", ["megatron_bridge_0.4", "megatron_bridge"])
def test_hybrid_models_of_megatron_bridge_have_no_virtual_stages(target: str) -> None:
    job = {"model": "nemotron_h_8b", "cluster": "dgx_h100", **JOB, "target": target}
    staged = {**job, "pipeline_model_parallel_size": 2}
    assert nest_megatron.plan(**staged).layout.dims.virtual_pipeline_model_parallel_size == 1
    with pytest.raises(
        UserInputError, match=r"Megatron-Bridge 0\.\d needs 1: it takes no virtual stages"
    ):
        nest_megatron.plan(**staged, virtual_pipeline_model_parallel_size=2)
    assert nest_megatron.plan(
        **{**staged, "target": "megatron_lm"}, virtual_pipeline_model_parallel_size=2
    )


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"out": "plan.yaml"}, "Plan.save"),
        ({"model": 7}, "none of a name, a path"),
        ({"cluster": nest_megatron.models}, "nest_megatron.clusters"),
        ({"config_dir": 5}, "config_dir = 5: it is no path"),
        ({"config_dir": "a\0b"}, "it is no path"),
        ({"flags": [5]}, r"flags = \[5\]: it is neither a text nor a list of texts"),
        ({"overrides": [5]}, "override = '5': settings are written key=value"),
        ({"on_progress": 5}, "on_progress = 5: it is no function"),
    ],
)
def test_what_only_a_call_can_get_wrong(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        nest_megatron.plan(**{**NAMES, **keywords})


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"command": None}, "command = None: it is neither a text nor a list"),
        ({"command": ["bash", "train.sh", 8]}, "command = .*: it is neither a text nor a list"),
        ({"free": None}, "free = None: it is neither a text nor a list"),
        ({"megatron_version": 0.2}, "megatron_version = 0.2: a release is a text"),
    ],
)
def test_a_call_of_a_command_with_a_wrong_type(keywords: dict[str, Any], words: str) -> None:
    job: dict[str, Any] = {"command": COMMAND, "cluster": "dgx_h100", "num_gpus": 8, **keywords}
    with pytest.raises(UserInputError, match=words):
        nest_megatron.plan_command(**job)
    with pytest.raises(UserInputError, match=words):
        nest_megatron.whatif_command(**{**job, "changes": {"gpus": [8, 16]}})


def test_a_call_of_what_if_with_a_wrong_type() -> None:
    path: Any = "recipes/mixtral_8x7b_dgx_h100_64.yaml"
    changes: Any
    for changes in ([5], {5: 64}):
        with pytest.raises(UserInputError, match="no mapping of settings"):
            nest_megatron.whatif(path, changes)
    with pytest.raises(UserInputError, match="plan = 5: it is no path"):
        nest_megatron.whatif(5, {"gpus": 64})  # type: ignore[arg-type]


def test_what_is_called_on_a_plan_with_a_wrong_type(plan: nest_megatron.Plan) -> None:
    wrong: Any = 5
    for call in (nest_megatron.load_plan, plan.save, plan.explain().write_html):
        with pytest.raises(UserInputError, match="path = 5: it is no path"):
            call(wrong)
    with pytest.raises(UserInputError, match="--versus = 5: a layout is a text"):
        plan.explain().versus(wrong)
    assert nest_megatron.models().get(wrong) is None


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"nodes": 2}, "Give num_gpus=16; nest_megatron.plan_table(nodes=[2, 4])"),
        ({"num_nodes": 2}, "Give num_gpus=16"),
        ({"model": "Qwen/Qwen3-8B"}, "nothing is fetched from a hub. Give its config.json"),
        ({"model": "Qwen/Qwen3-8B"}, "Did you mean qwen3_8b"),
        ({"num_layers": 8}, "Did you mean model.num_layers?"),
        ({"overrides": ["tp=2"]}, "Did you mean parallel.tensor_model_parallel_size?"),
    ],
)
def test_a_word_that_is_guessed_wrong_is_told_the_right_one(
    keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserInputError) as raised:
        nest_megatron.plan(**{**NAMES, **keywords})
    assert words in str(raised.value)


def test_words_that_people_guess() -> None:
    keywords = {"tp": 2, "pp": 1, "dp": 8, "mbs": 1, "zero": 1, "max_seconds": 20, "gpus": 16}
    texts = ["train.seq_length=4096", "train.global_batch_size=64", "search.num_alternatives=0"]
    found = nest_megatron.plan(**NAMES, **keywords, overrides=texts)
    assert found.layout.dims.tensor_model_parallel_size == 2
    assert found.layout.dims.data_parallel_size == 8
    assert (found.layout.micro_batch_size, found.layout.global_batch_size) == (1, 64)
    assert found.model.seq_length == 4096
    with pytest.raises(AttributeError, match=r"nest_megatron.load_plan\(path\).apply\(recipe\)"):
        _ = nest_megatron.apply_plan  # type: ignore[attr-defined]


def test_a_plan_is_asked_what_if(tmp_path: Path) -> None:
    fixed = {"tp": 2, "pp": 1, "cp": 1, "mbs": 1, "zero": 1, "num_alternatives": 0}
    found = nest_megatron.plan(**NAMES, **fixed, num_gpus=16, global_batch_size=64)
    found.save(tmp_path / "plan.yaml")
    of_object = nest_megatron.whatif(found, {"gpus": 8})
    of_file = nest_megatron.whatif(tmp_path / "plan.yaml", {"gpus": 8})
    steps = [
        [each.row.plan and each.row.plan.predicted.iteration_time_s for each in asked.variants]
        for asked in (of_object, of_file)
    ]
    assert steps[0] == steps[1]
    assert steps[0][0] == found.predicted.iteration_time_s


def test_a_plan_is_saved_loaded_and_explained(plan: nest_megatron.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan.save(path)
    loaded = nest_megatron.load_plan(path)
    assert loaded.record == plan.record
    assert run("explain", str(path)).out == f"{loaded.explain()}\n"
    assert run("explain", str(path), "--json").json() == loaded.explain().to_dict()
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(UserInputError):
        plan.save(other)
    plan.save(other, force=True)
    with pytest.raises(NestError):
        nest_megatron.load_plan(tmp_path / "absent.yaml")


def test_printing_a_plan_is_what_the_command_prints(plan: nest_megatron.Plan) -> None:
    def untimed(text: str) -> list[str]:
        return " ".join(text.split()).partition(" in ")[0].split()

    assert untimed(str(plan)) == untimed(run("plan", *WORDS).out)
    assert repr(plan).startswith("<Plan of llama3_8b on 16 x H100-SXM-80GB")
    degrees = dict(re.findall(r"\b(TP|PP|CP|DP) (\d+)", repr(plan)))
    assert math.prod(map(int, degrees.values())) == 16, "no degree is left out"


def test_a_notebook_shows_tables_and_pages(plan: nest_megatron.Plan) -> None:
    shown = plan._repr_html_()
    assert shown.startswith("<pre")
    assert "--tensor-model-parallel-size" in shown
    assert "<script" not in shown
    page = plan.explain()._repr_html_()
    assert page.startswith("<iframe")
    assert 'sandbox=""' in page
    assert "<html" not in page, "the page is escaped inside its frame"
    assert "<pre" in nest_megatron.clusters()._repr_html_()


def test_flags_are_those_of_the_launch_command(plan: nest_megatron.Plan) -> None:
    flags = plan.to_megatron_args()
    assert flags == list(plan.record.launch["megatron_lm"].argv)
    layout = plan.to_megatron_args(layout_only=True)
    assert set(layout) < set(flags)
    assert "--hidden-size" not in layout
    other = nest_megatron.plan(**NAMES, **JOB, target="nemo_2.7")
    with pytest.raises(UserInputError, match="no command of Megatron-LM"):
        other.to_megatron_args()


def test_flags_of_the_layout_are_those_of_the_release_of_the_plan() -> None:
    plan = nest_megatron.plan(
        model="nemotron_h_8b",
        cluster="dgx_h100",
        num_gpus=8,
        global_batch_size=64,
        target="megatron_lm_0.15",
        **{"parallel.tensor_model_parallel_size": 4},
    )
    args = plan.to_megatron_args(layout_only=True)
    assert {word for word in args if word.startswith("--")} <= {*plan.to_megatron_args()}
    assert "--hybrid-layer-pattern" not in " ".join(map(str, plan.report()))


@pytest.mark.parametrize("kind", ["nemo", "bridge"])
def test_a_plan_is_applied_to_a_recipe(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    target = {"nemo": "nemo_2.7", "bridge": "megatron_bridge_0.3"}[kind]
    spec = catalogue.model("llama3_8b")
    found = nest_megatron.plan(model=spec, cluster="dgx_h100", **JOB, target=target)
    if kind == "nemo":
        recipe = nemo_recipe(spec, num_nodes=2, batch=128)
        recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=True))
    else:
        recipe = bridge_config(spec, batch=128)
    changes = found.apply(recipe)
    assert changes
    assert all(change.reason for change in changes)
    assert found.apply(recipe) == ()


def test_a_recipe_without_the_callback_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_NTASKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    spec = catalogue.model("llama3_8b")
    found = nest_megatron.plan(model=spec, cluster="dgx_h100", **JOB, target="nemo_2.7")
    with pytest.raises(UserInputError, match=r"MegatronCommOverlapCallback.*\(auto_recipe\)"):
        found.apply(nemo_recipe(spec, num_nodes=2, batch=128))


def test_a_plan_is_applied_to_nothing_else(plan: nest_megatron.Plan) -> None:
    with pytest.raises(UserInputError, match="neither a recipe of NeMo"):
        plan.apply({"model": "llama3_8b"})


def test_the_catalogue_is_a_mapping() -> None:
    clusters = nest_megatron.clusters()
    assert "dgx_h100" in clusters
    assert "dgx_h10" not in clusters
    assert clusters.get("dgx_h10") is None
    with pytest.raises(KeyError, match="dgx_h100"):
        clusters["dgx_h10"]
    assert len(clusters) == len(list(clusters.items()))


def test_a_record_takes_other_settings_as_a_name_does() -> None:
    cluster = nest_megatron.clusters()["h100_spine_leaf"]
    slow: dict[str, Any] = {"cluster.gpus_per_host": 4, "seq_length": 2048}
    named = nest_megatron.estimate(
        model="llama3_8b", cluster="h100_spine_leaf", num_gpus=64, **slow
    )
    given = nest_megatron.estimate(model="llama3_8b", cluster=cluster, num_gpus=64, **slow)
    assert given.predicted == named.predicted
    assert given.cluster == named.cluster


def test_a_record_holds_its_oversubscription_already() -> None:
    cluster = nest_megatron.clusters()["h100_spine_leaf"]
    with pytest.raises(UserInputError, match=r"cluster\.oversubscription"):
        nest_megatron.plan(model="llama3_8b", cluster=cluster, **{"cluster.oversubscription": 4})


TYPED = """\
import nest_megatron

plan = nest_megatron.plan(model="llama3_8b", cluster="dgx_h100", num_gpus=8, zero_stage=1)
step: float = plan.predicted.iteration_time_s
flags: list[str] = plan.to_megatron_args()
names: list[str] = sorted(nest_megatron.models())
reveal_type(nest_megatron.clusters()["dgx_h100"])
wrong: int = plan.explain()
nest_megatron.plan(model=7, cluster="dgx_h100")
"""


@pytest.mark.slow
def test_mypy_sees_the_types(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TYPED)
    settings = ["--strict", "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "script.py"],
        capture_output=True,
        text=True,
        env={**environment(), "MYPYPATH": str(ROOT)},
        cwd=tmp_path,
        check=False,
    )
    said = [line.partition(": ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert said == ["script.py:8", "script.py:9"], done.stdout
    assert "nest_megatron.cluster.records.Cluster" in done.stdout
