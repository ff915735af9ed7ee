"""``extract``: what it prints and draws, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nest_megatron import packages
from nest_megatron.errors import BAD_INPUT, UserInputError
from nest_megatron.megatron_core.chain import read_inputs
from nest_megatron.model.graph import TensorShape
from tests.cli.runs import Run, run

LLAMA = ("extract", "model=llama3_70b", "parallel.tensor_model_parallel_size=8")
EXPERTS = (
    "extract",
    "model=mixtral_8x7b",
    "parallel.tensor_model_parallel_size=2",
    "parallel.expert_model_parallel_size=4",
    "parallel.expert_tensor_parallel_size=1",
    "--closed-form",
)
MODEL = """
import torch
from torch import nn

class Chooses(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def build():
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

def untraceable():
    return nn.Sequential(nn.Linear(8, 8), Chooses())

def broken():
    raise RuntimeError("no weights here")

number = 3
whole = nn.Linear(8, 2)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extracted layers are kept where no other test and no user sees them."""
    folder = tmp_path_factory.mktemp("extracted")
    monkeypatch.setenv("NEST_MEGATRON_EXTRACT_CACHE", str(folder))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model in it, which no other test sees."""
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "own_model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "spoilt_model.py").write_text("import own_model\n1 / 0\n", encoding="utf-8")
    (tmp_path / "lacking_model.py").write_text("import not_there_at_all\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_model", "spoilt_model", "lacking_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def refused(done: Run, *words: str) -> None:
    assert (done.code, done.out) == (BAD_INPUT, "")
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, done.err


def test_closed_form_prints_every_layer() -> None:
    done = run(*LLAMA, "--closed-form")
    assert (done.code, done.err) == (0, "")
    for words in ("embedding layer:", "dense layer (80 of them): TP 8 SP, 1 x 8,192", "head layer"):
        assert words in done.out
    assert "core_attention" in done.out
    assert "reduce_scatter" in done.out


def test_json_holds_the_records() -> None:
    document = run(*EXPERTS, "--layer", "moe", "--json").json()
    (layer,) = document["layers"]
    assert (layer["kind"], layer["count"]) == ("moe", 32)
    assert document["shard"]["expert_model_parallel_size"] == 4
    assert document["shard"]["sequence_parallel"] is True
    by_name = {op["name"]: op for op in layer["graph"]["operators"]}
    routed = 4096 / 2 * 2  # tokens of a rank, twice routed
    assert by_name["expert_fc1"]["flops"] == 2 * routed * 4096 * 2 * 14336
    assert layer["parameters"]["expert"] == 2 * 3 * 4096 * 14336
    assert layer["total_saved_bytes"] > 0


def test_settings_of_the_job_matter() -> None:
    def flops(*settings: str) -> float:
        done = run(*LLAMA, "--closed-form", "--layer", "dense", "--json", *settings)
        operators = done.json()["layers"][0]["graph"]["operators"]
        return sum(op["flops"] for op in operators if op["kind"] == "gemm")

    assert flops("train.micro_batch_size=2") == 2 * flops()
    assert flops("train.seq_length=4096") == flops() / 2
    assert flops("parallel.context_parallel_size=2") == flops() / 2


def test_settings_that_do_not_matter_are_named() -> None:
    idle = "parallel.pipeline_model_parallel_size=4"
    assert "parallel.pipeline_model_parallel_size does not change" in (
        run(*LLAMA, "--closed-form", "--layer", "head", idle).out
    )


def test_one_picture_for_each_layer(tmp_path: Path) -> None:
    done = run(*EXPERTS, "--draw", str(tmp_path / "mixtral.svg"))
    assert done.code == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["mixtral-embedding.svg", "mixtral-head.svg", "mixtral-moe.svg"]
    assert all(str(tmp_path / name) in done.out for name in names)
    assert "expert_fc1" in (tmp_path / "mixtral-moe.svg").read_text(encoding="utf-8")
    run(*EXPERTS, "--layer", "moe", "--draw", str(tmp_path / "one.svg"))
    assert (tmp_path / "one.svg").is_file()


def test_megatron_core_gives_the_same_products() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = run(*LLAMA, "--layer", "dense", "--json")
    assert (done.code, done.err) == (0, "")
    (layer,) = done.json()["layers"]
    (ours,) = run(*LLAMA, "--layer", "dense", "--json", "--closed-form").json()["layers"]

    def products(one: object) -> list[float]:
        operators = one["graph"]["operators"]  # type: ignore[index]
        return sorted(op["flops"] for op in operators if op["kind"] == "gemm")

    assert products(layer) == products(ours)
    assert layer["parameters"] == ours["parameters"]
    assert "megatron_core" in layer["provenance"]
    assert layer["recompute"]


@pytest.mark.parametrize("missing", ["torch", "megatron"])
def test_without_the_framework_the_fix_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"torch": "torch", "megatron": "megatron.core"}[missing]
    is_installed = packages.is_installed
    monkeypatch.setattr(packages, "is_installed", lambda n: n != name and is_installed(n))
    refused(run(*LLAMA), "pip install 'nest-megatron[megatron]'", "--closed-form", missing)
    assert run(*LLAMA, "--closed-form").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("model", "no model is given")),
        (("model=llama3_8b", "--layer", "moe", "--closed-form"), ("--layer", "embedding, dense")),
        (("model=llama3_8b", "parallel.tensor_model_parallel_size=7"), ("attention heads",)),
        (("model=llama3_8b", "parallel.tensor_model_parallel_size=0"), ("at least 1",)),
        (("model=llama3_8b", "train.micro_batch_size=0"), ("train.micro_batch_size", "at least 1")),
        (("model=llama3_8b", "parallel.sequence_parallel=true"), ("sequence_parallel",)),
        (("model=mixtral_8x7b", "parallel.expert_model_parallel_size=3"), ("experts (8)",)),
        (("model=llama3_8b,llama3_70b",), ("several values",)),
        (("model=lama3_8b",), ("llama3_8b",)),
        (("model=llama3_8b", "--input", "1,8"), ("--module",)),
        (("model=llama3_8b", "--dtype", "int64"), ("--module",)),
        (("model=llama3_8b", "--closed-form", "--draw", "x.gif"), (".png, .svg",)),
        (("model=llama3_8b", "--closed-form", "--draw", "no/where/x.svg"), ("mkdir -p no/where",)),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("extract", *arguments), *words)


def test_a_module_of_the_current_folder(folder: Path) -> None:
    given = ("--module", "own_model:build", "--input", "2,16", "--dtype", "int64")
    done = run("extract", *given, "--draw", "chain.svg")
    assert (done.code, done.err) == (0, "")
    assert "Sequential on [2, 16] int64" in done.out
    assert "Wrote chain.svg." in done.out
    assert (folder / "chain.svg").is_file()
    chain = run("extract", *given, "--json").json()["chain"]
    flops = [op["flops"] for op in chain["operators"]]
    assert flops == [0, 2 * 32 * 8 * 16, 0, 2 * 32 * 16 * 4]


@pytest.mark.usefixtures("folder")
def test_a_module_itself_may_be_named() -> None:
    assert run("extract", "--module", "own_model:whole", "--input", "3,8").code == 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_model", ("colon",)),
        ("nowhere_to_be_found:build", ("no Python module nowhere_to_be_found",)),
        ("own_model:bild", ("has no bild", "build")),
        ("own_model:number", ("int", "cannot be called")),
        ("own_model:Chooses", ("1 (", "--input")),
        ("own_model:broken", ("RuntimeError: no weights here", "own_model.py:")),
        ("spoilt_model:build", ("ZeroDivisionError", "spoilt_model.py:2")),
        ("lacking_model:build", ("not_there_at_all", "lacking_model.py:1")),
        ("json:dumps", ("TypeError",)),
        ("builtins:dict", ("returns dict, not a torch.nn.Module",)),
        ("own_model:untraceable", ("1 (Chooses)", "own_model.py:7", "values of a tensor")),
    ],
)
def test_bad_modules(name: str, words: tuple[str, ...]) -> None:
    inputs = ("--input", "3,8") if name != "own_model:Chooses" else ("--input", "3", "--input", "3")
    if name == "own_model:Chooses":
        words = ("Chooses", "--input")
    refused(run("extract", "--module", name, *inputs), *words)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--input", "none is given")),
        (("--input", "1,x"), ("whole numbers",)),
        (("--input", "1,0"), ("at least 1",)),
        (("--input", "1,-2"), ("whole numbers",)),
        (("--input", "3,8", "--dtype", "flaot32"), ("float32",)),
        (("--input", "3,8", "--dtype", "int8", "--dtype", "int8"), ("1 inputs",)),
        (("--input", "3,8", "model=llama3_8b"), ("no settings",)),
        (("--input", "3,8", "--closed-form"), ("no settings",)),
        (("--input", "3,9"), ("fails on these inputs", "--dtype")),
    ],
)
def test_bad_inputs_of_a_module(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("extract", "--module", "own_model:whole", *arguments), *words)


def test_inputs_as_typed() -> None:
    assert read_inputs(["ids=2,16", "3"], ["int64", "bool"]) == [
        TensorShape(sizes=(2, 16), dtype="int64", keyword="ids"),
        TensorShape(sizes=(3,), dtype="bool"),
    ]
    assert [each.dtype for each in read_inputs(["1", "2"], [])] == ["float32"] * 2
    assert [each.dtype for each in read_inputs(["1", "2"], ["int64"])] == ["int64"] * 2
    with pytest.raises(UserInputError, match="whole numbers"):
        read_inputs([""], [])


COMMAND = (
    "pretrain_gpt.py --bf16 --num-layers 4 --hidden-size 1024 --num-attention-heads 16"
    " --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2"
    " --tensor-model-parallel-size 2 --vocab-size 1000 --tokenizer-type NullTokenizer"
)


def test_a_command_s_model_is_divided_as_the_command_divides_it() -> None:
    done = run("extract", "--from", COMMAND, "--layer", "dense", "--closed-form", "--json")
    assert done.code == 0, done.err
    (layer,) = done.json()["layers"]
    hidden, ffn = 1024, 4096
    weights = 4 * hidden * hidden // 2 + 2 * hidden * ffn // 2
    biases = 3 * hidden // 2 + hidden + ffn // 2 + hidden
    assert layer["parameters"]["dense"] == weights + biases + 4 * hidden
    mine = run(
        "extract",
        "parallel.tensor_model_parallel_size=4",
        "--from",
        COMMAND,
        "--layer",
        "dense",
        "--closed-form",
        "--json",
    )
    assert mine.json()["layers"][0]["parameters"]["dense"] < layer["parameters"]["dense"]


def test_a_command_and_a_model_are_one_too_many() -> None:
    done = run("extract", "model=llama3_8b", "--from", COMMAND)
    assert done.code == BAD_INPUT
    assert "the model comes from the command" in done.err


def test_attention_in_two_products_keeps_its_scores() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    asked = ("extract", "model=llama3_8b", "train.seq_length=1024", "--layer", "dense", "--json")
    fused, unfused = (run(*asked, *more) for more in ((), ("--unfused",)))
    scores = 1024 * 1024 * 32 * 2
    kept = [
        sum(part[1] for part in r.json()["layers"][0]["graph"]["saved_bytes"])
        for r in (fused, unfused)
    ]
    assert kept[1] - kept[0] > 0.9 * scores
