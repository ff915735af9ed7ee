"""``models`` and ``clusters``: how a name or a file was read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.config.catalogue import named_model
from nest_megatron.cost_model.target_defaults import TARGETS
from nest_megatron.integrations.megatron_lm.attach import target_refusals
from tests import catalogue
from tests.cli.runs import LIMITS, ROOT, SMALL, run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "intermediate_size": 6144,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
CATALOGUE = ROOT / "hydra_configs"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a Hugging Face config.json that has a field which nobody reads."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "a_new_thing": 3}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_config_json_or_its_folder(config: Path, name: str) -> None:
    path = str(config / name) if name else str(config)
    found = run("models", path, "--json").json()
    counts = found["num_layers"], found["layer_kinds"]
    assert (found["name"], *counts) == ("mine", 4, {"dense": 4})
    # embedding, head, final norm, and of each layer its projections and two norms
    layer = 4 * 2048**2 + 3 * 2048 * 6144 + 2 * 2048
    assert found["parameters"] == 2 * 32000 * 2048 + 2048 + 4 * layer
    assert found["active_parameters"] == found["parameters"]
    assert found["notes"] == [
        f"Not read of {config / 'config.json'}: a_new_thing; the model is planned without."
    ]
    assert "note: Not read of" in run("models", path).out


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("deepseek_v3", {"dense": 3, "moe": 58, "mtp": 1}),
        ("llama4_maverick", None),
        ("mixtral_8x7b", {"moe": 32}),
    ],
)
def test_layers_are_counted_by_kind(name: str, kinds: dict[str, int] | None) -> None:
    for each in (name, str(CATALOGUE / "model" / f"{name}.yaml")):
        found = run("models", each, "--json").json()
        layers = {kind: count for kind, count in found["layer_kinds"].items() if kind != "mtp"}
        assert sum(layers.values()) == found["num_layers"]
        assert kinds in (None, found["layer_kinds"])
        assert found["active_parameters"] < found["parameters"]


def test_a_plan_tells_its_model_and_cluster(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    job = ("model=mixtral_8x1b", "cluster=gb300_nvl72", "cluster.num_gpus=8")
    assert run("plan", *job, f"out={path}", *LIMITS).code == 0
    assert run("models", path, "--json").json() == run("models", "mixtral_8x1b", "--json").json()
    cluster = run("clusters", path, "--json").json()
    assert (cluster["name"], cluster["gpus_per_node"]) == ("gb300_nvl72", 8)
    named = run("clusters", "gb300_nvl72", "--json").json()
    assert cluster["levels"] == named["levels"]
    again = (f"model={path}", f"cluster={path}", "parallel.expert_model_parallel_size=8")
    assert (
        run("estimate", *again, "--json").json()["model"]
        == run("estimate", *job, again[2], "--json").json()["model"]
    )


def test_a_cluster_shows_what_narrows_its_links() -> None:
    mesh = " ".join(run("clusters", "alps_gh200").out.split())
    assert "64, 4 in each node, 4 on each host" in mesh
    assert "links of 2, 3, ... GPUs" in mesh
    rack = " ".join(run("clusters", str(CATALOGUE / "cluster" / "gb200_nvl72.yaml")).out.split())
    assert "64, 64 in each node, 4 on each host" in rack


DAMAGED = {
    "cut.json": ('{"model_type": "llama"', "not readable JSON"),
    "list.json": ("[1]", "not a JSON object"),
    "cut.yaml": ("levels: [1", "not a readable YAML file"),
    "text.yaml": ("just words", "no such field"),
    "untyped.json": (
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}',
        "architectures says LlamaForCausalLM: if that is so, set model_type to llama",
    ),
    "other.json": ('{"model_type": "whisper"}', "encoder-decoder"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_cannot_be_read_is_an_error_with_a_fix(tmp_path: Path, name: str) -> None:
    text, limit = DAMAGED[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    for command in ("models", "clusters"):
        done = run(command, str(tmp_path / name))
        assert (done.code, done.out) == (2, "")
        message, *fix = done.err.splitlines()
        assert message.startswith("error: ")
        assert fix, "what to do stands below"
        if command == "models":
            assert limit in " ".join(done.err.split())


@pytest.mark.parametrize("command", ["models", "clusters"])
def test_a_path_that_is_not_there(command: str, tmp_path: Path) -> None:
    done = run(command, str(tmp_path / "none.yaml"))
    assert done.code == 2
    assert "No such file" in done.err


def test_a_network_profile_is_no_cluster_yet(tmp_path: Path) -> None:
    log, path = ROOT / "tests" / "profile" / "data" / "h100_node.log", tmp_path / "network.yaml"
    assert run("network", "import", str(log), "--profile", str(path)).code == 0
    done = run("clusters", str(path))
    assert done.code == 2
    assert f"network import {path} --cluster" in done.err
    assert run("plan", f"model={path}", *SMALL[1:]).code == 2


def test_what_is_shown_is_what_is_planned(config: Path) -> None:
    shown = run("models", str(config), "--json").json()
    assert named_model(str(config))[0].hidden_size == shown["hidden_size"] == 2048


@pytest.mark.parametrize(("command", "group"), [("models", "model"), ("clusters", "cluster")])
def test_a_list_has_one_line_for_each_name_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, command: str, group: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    head, _, *lines = run(command).out.splitlines()
    assert "Source" not in head
    assert [line.split()[0] for line in lines] == [*catalogue_names(group)]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("command", "group"), [("models", "model"), ("clusters", "cluster")])
def test_a_list_on_60_columns_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, command: str, group: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = run(command).out.split()
    monkeypatch.setenv("COLUMNS", "60")
    shown = run(command).out
    assert max(map(len, shown.splitlines())) <= 60
    assert {*shown.split()} >= {*catalogue_names(group)}
    figures = [word for word in wide if word[0].isdigit()]
    assert {*shown.split()} >= {*figures}


def test_a_word_lists_the_names_that_contain_it() -> None:
    shown = [line.split()[0] for line in run("models", "Qwen2.5").out.splitlines()[2:]]
    assert shown == [name for name in catalogue_names("model") if "qwen2_5" in name]
    assert len(shown) > 3
    found = run("clusters", "aws", "--json").json()["clusters"]
    assert [each["entry"] for each in found] == [
        n for n in catalogue_names("cluster") if "aws" in n
    ]


def test_a_word_that_no_name_contains_is_an_error_with_the_nearest() -> None:
    done = run("models", "lama3_80b")
    assert (done.code, done.out) == (2, "")
    assert "error: model = lama3_80b: no model of the catalogue has it in its name" in done.err
    assert "llama3_8b" in done.err
    assert len(done.err.splitlines()) == 2
    assert run("clusters", "xyzzy").code == 2


def test_what_says_nothing_of_a_model_is_not_shown() -> None:
    dense, experts = run("models", "llama3_8b").out, run("models", "mixtral_8x7b").out
    assert "moe_" not in dense
    assert "kv_lora_rank" not in dense
    assert "moe_router_topk" in experts
    assert "kv_lora_rank" in run("models", "deepseek_v3").out


def test_a_model_of_nearly_a_billion_parameters_is_told_in_billions() -> None:
    lines = run("models", "gemma3").out.splitlines()
    (line,) = (line for line in lines if line.startswith("gemma3_1b "))
    assert line.split()[1:3] == ["1.0", "B"]


@pytest.mark.parametrize(
    ("model", "target", "part"),
    [
        ("gemma3_1b", "megatron_lm_0.19", "norm_placement sandwich"),
        ("gemma_2b", "megatron_lm_0.20", "activation gated gelu"),
        ("nemotron3_super", "megatron_lm_0.15", "num_experts 512"),
        ("olmo2_7b", "nemo_2.7", "qk_norm_full_width True"),
    ],
)
def test_a_model_is_shown_with_the_releases_that_take_it(
    model: str, target: str, part: str
) -> None:
    found = run("models", model, "--json").json()
    assert found["refused_by"][target].startswith(f"{part}: ")
    assert "megatron_bridge_0.6" in found["targets"]
    assert {*found["targets"], *found["refused_by"]} == {*TARGETS}
    shown = " ".join(run("models", model).out.split())
    assert "megatron_bridge_0.3 to 0.7 takes it" in shown
    assert f"not taken: {part}" in shown
    small = (f"model={model}", f"target={target}", "cluster=dgx_h100", "cluster.num_gpus=64")
    planned = run("plan", *small, "search.max_seconds=10", "--json")
    assert planned.code == 2 or "--num-layers" not in str(planned.json()["launch"])


def test_rules_of_a_model_are_asked_of_every_framework() -> None:
    sparse = {
        **{"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64},
        **{"dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048},
    }
    spec = dataclasses.replace(catalogue.model("deepseek_v3"), **sparse)
    found = target_refusals(spec)
    taken = {name for name, why in found.items() if not why}
    assert not taken & {"megatron_lm_0.17", "megatron_bridge_0.4", "nemo_2.7"}
    assert taken >= {"megatron_lm_0.18", "megatron_bridge_0.5"}
    assert "before 0.18" in found["megatron_bridge_0.4"]
