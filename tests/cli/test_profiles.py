"""Profiles from the command line: the store, and plans that use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nest_megatron.layout import plan_file
from nest_megatron.profile import store
from tests.cli.runs import SMALL, run, spawn
from tests.profile.profiles import CPU, profile, timing, whole_profile

NAME = "llama3_8b-h100"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_an_empty_store_is_said_and_no_fault() -> None:
    done = run("profiles", "list")
    assert (done.code, done.err) == (0, "")
    assert "no profile" in done.out
    assert run("profiles", "verify").code == 0
    assert run("profiles", "list", "--json").json()["profiles"] == []


@pytest.mark.parametrize("columns", ["80", "120"])
def test_tables_keep_within_the_terminal(folder: Path, columns: str) -> None:
    store.record(whole_profile())
    for words in (("list",), ("show", NAME)):
        done = spawn("profiles", *words, COLUMNS=columns, NEST_MEGATRON_PROFILES=str(folder))
        assert done.code == 0
        assert NAME in done.out
        assert max(map(len, done.out.splitlines())) <= int(columns)


def test_a_profile_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.record(whole_profile())
    out = tmp_path / "copy.yaml"
    assert run("profiles", "export", NAME, "--out", str(out)).code == 0
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "elsewhere"))
    assert run("profiles", "import", str(out), "--json").json()["imported"] == NAME
    shown = run("profiles", "show", NAME, "--json").json()
    assert shown["imported"] is True
    assert shown["num_timings"] == len(shown["timings"]) == 20
    (listed,) = run("profiles", "list", "--json").json()["profiles"]
    assert listed["fingerprint"] == shown["fingerprint"]
    plan = run("plan", *SMALL, "--json").json()
    words = plan["provenance"]["profile"]
    assert words.startswith(f"{NAME}: ")
    assert "4 imported" in words


def test_a_broken_file_is_named(folder: Path) -> None:
    store.record(whole_profile())
    path = folder / f"{NAME}.yaml"
    path.write_text(path.read_text().replace("repetitions: 20", "repetitions: 21", 1))
    done = run("profiles", "verify")
    assert done.code == 2
    assert "timings[0]" in done.out
    (broken,) = run("profiles", "verify", "--json").json()["broken"]
    assert broken["name"] == NAME
    assert "is broken" in run("profiles", "list").out
    shown = run("profiles", "show", NAME)
    assert (shown.code, shown.out) == (2, "")
    assert "timings[0]" in shown.err


def test_a_plan_uses_the_profile_of_its_device_and_says_so(tmp_path: Path) -> None:
    before = run("plan", *SMALL, "--json").json()
    store.record(whole_profile())
    out = tmp_path / "plan.yaml"
    done = run("plan", *SMALL, f"out={out}")
    assert done.code == 0
    assert f"layer times of {NAME}" in " ".join(done.out.split())
    assert "no profile of this one" not in " ".join(done.out.split())
    plan = plan_file.read(out)
    assert plan.provenance.profile.startswith(f"{NAME}: ")
    assert plan.predicted.iteration_time_s != before["predicted"]["iteration_time_s"]
    again = run("plan", *SMALL, "profile.mode=analytic", "--json").json()
    assert again["provenance"]["profile"] == "analytic"
    assert again["predicted"] == before["predicted"]


def test_a_plan_is_explained_with_its_profile_and_without(tmp_path: Path) -> None:
    store.record(whole_profile())
    out, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    assert run("plan", *SMALL, f"out={out}").code == 0
    explained = run("explain", str(out), "--json").json()["explained"]
    assert all(d is not None for d in explained["alternative_term_differences_s"])
    done = run("explain", str(out), "--html", str(page))
    assert f"profile      {NAME}: " in done.out
    assert "another result" not in page.read_text()
    (tmp_path / "profiles" / f"{NAME}.yaml").unlink()
    done = run("explain", str(out))
    assert done.code == 0
    assert "not in the profile store" in " ".join(done.out.split())


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_another_machines_profile_is_used_by_name_and_noted(command: str) -> None:
    store.record(dataclasses.replace(whole_profile("cpu"), machine=CPU))
    job = (*SMALL, "parallel.tensor_model_parallel_size=2")
    auto = run(command, *job)
    assert auto.code == 0
    assert "Profile cpu is not used: device Intel Xeon" in " ".join(auto.out.split())
    named = run(command, *job, "profile.name=cpu", "--json").json()
    assert named["provenance"]["profile"].startswith("cpu: ")
    assert any("another machine" in note for note in named["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["profile.mode=require"], "no profile has times of dense, embedding, head"),
        (["profile.mode=measure"], "torchrun -m nest_megatron.profile model=llama3_8b"),
        (["profile.mode=maybe"], "it must be one of auto, measure, require, analytic"),
        (["profile.name=sone"], "Did you mean some?"),
        (["profile.mode=analytic", "profile.name=some"], "Leave one of the two out"),
        (["train.seq_length=4096", "profile.name=some"], "seq_length 8192 instead of 4096"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_wishes_that_cannot_be_met_are_named(command: str, words: list[str], said: str) -> None:
    store.record(profile([timing()], name="some"))
    done = run(command, *SMALL, *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "profile." in done.err.splitlines()[0]


def test_what_is_to_be_measured_is_named_as_it_was_typed(tmp_path: Path) -> None:
    model = tmp_path / "mine.yaml"
    fields = "seq_length: 64, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 99"
    model.write_text(f"{{name: mine, num_layers: 2, hidden_size: 64, {fields}}}\n")
    words = (f"model={model}", "train.seq_length=64", "cluster=dgx_h100", "profile.mode=require")
    fix = run("plan", *words, "--json").json()["error"]["fix"]
    assert fix.endswith(f"{' '.join(words[:3])} train.precision=bf16")
    command = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 "
        "--max-position-embeddings 64 --vocab-size 100 --bf16 --tokenizer-type NullTokenizer"
    )
    done = run("plan", "--from", command, "cluster.num_gpus=8", *words[2:])
    assert "--from <your script and its flags>" in done.err
