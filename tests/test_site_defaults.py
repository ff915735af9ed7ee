"""Defaults of a site: below what a user types, above what is shipped, and named in plans."""

from __future__ import annotations

from pathlib import Path

import pytest

import nest_megatron
from nest_megatron.config import defaults
from nest_megatron.config.defaults import VARIABLE, read_defaults, with_defaults
from nest_megatron.config.launch import read_launch, read_words
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.plain import to_plain
from tests.cli.runs import SMALL, run

MODEL = ("model=llama3_8b", "cluster.num_gpus=8")


@pytest.fixture(autouse=True)
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operators' file, of this test alone."""
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(defaults, "SYSTEM_FOLDER", folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return folder / "defaults.yaml"


def test_a_default_stands_until_a_user_says_otherwise(etc: Path, tmp_path: Path) -> None:
    assert run("plan", *MODEL).code == 2  # no cluster
    etc.write_text("cluster: dgx_h100\nsearch:\n  # runners-up\n  num_alternatives: 1\n")
    out = tmp_path / "plan.yaml"
    done = run("plan", *MODEL, f"out={out}")
    assert done.code == 0, done.err
    told = "".join(done.out.split())  # a path may be broken over lines
    assert f"search.num_alternatives=1from{etc}line4" in told
    plan = plan_file.read(out)
    assert plan.cluster.name == "dgx_h100"
    assert len(plan.alternatives) == 1
    assert plan.provenance.defaults == (
        f"cluster=dgx_h100 from {etc} line 1",
        f"search.num_alternatives=1 from {etc} line 4",
    )
    explained = "".join(run("explain", str(out)).out.split())  # a path may be broken over lines
    assert f"search.num_alternatives=1from{etc}line4" in explained
    typed = run("plan", *SMALL, "search.num_alternatives=2", "--json").json()
    assert len(typed["alternatives"]) == 2
    assert "defaults" not in typed["provenance"]


def test_a_python_call_makes_the_plan_of_the_command(etc: Path, tmp_path: Path) -> None:
    etc.write_text("cluster: h100_spine_leaf\nsearch.num_alternatives: 1\nmemory.margin: 0.1\n")
    out = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={out}").code == 0
    typed = plan_file.read(out)
    clusters = ("dgx_h100", typed.cluster, to_plain(typed.cluster))  # a name, a record, its fields
    for cluster in clusters:
        found = nest_megatron.plan(model="llama3_8b", cluster=cluster, num_gpus=8).record
        assert found.cluster.name == "dgx_h100"
        assert len(found.alternatives) == 1
        assert found.layout == typed.layout
        assert found.predicted == typed.predicted
        assert found.provenance.defaults == typed.provenance.defaults
    own = nest_megatron.plan(
        model="llama3_8b", cluster="dgx_h100", num_gpus=8, num_alternatives=2, margin=0.2
    )
    assert len(own.alternatives) == 2
    assert own.record.provenance.defaults == ()


def test_a_comparison_is_of_the_job_that_is_planned(etc: Path) -> None:
    etc.write_text("cluster: dgx_h100\n")
    done = run("compare", *MODEL, "planners=[manual]", "--json")
    assert done.code == 0, done.err
    assert done.json()["cluster"] == "dgx_h100"
    assert f"cluster=dgx_h100 from {etc} line 1" in " ".join(done.json()["notes"])


def test_what_is_said_of_a_cluster_is_of_no_other(etc: Path) -> None:
    etc.write_text("cluster: h100_spine_leaf\ncluster.oversubscription: 2\n")
    keys = [setting.key for setting in with_defaults(parse(["model=llama3_8b"]))]
    assert keys == ["cluster", "cluster.oversubscription", "model"]
    assert [each.key for each in with_defaults(parse(["cluster=dgx_h100"]))] == ["cluster"]
    assert with_defaults((), names_cluster=True) == ()


def test_a_later_file_wins(etc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, named = tmp_path / "home" / "nest-megatron" / "defaults.yaml", tmp_path / "named.yaml"
    own.parent.mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(named))
    etc.write_text("cluster: a\ncluster.oversubscription: 2\nsearch.max_seconds: 1\nwatch: 1\n")
    own.write_text("search.max_seconds: 2\nwatch.steps: 2\n")
    named.write_text("cluster: b\nwatch: 3\n")
    found = {setting.key: setting.value for setting in read_defaults()}
    assert found == {"cluster": "b", "search.max_seconds": "2", "watch.steps": "3"}
    named.unlink()
    with pytest.raises(UserInputError, match=r"named\.yaml"):  # named, and not there
        read_defaults()


def test_a_launch_has_them(etc: Path) -> None:
    etc.write_text("cluster: dgx_h100\nwatch: 7\nrendezvous_timeout_s: 99\nmay_differ: [x, y]\n")
    words = read_words(["+nest=auto", "nest.watch=5"])
    launch = read_launch(words)
    assert (launch.watch.steps, launch.rendezvous_timeout_s) == (5, 99)
    assert launch.may_differ == ["x", "y"]
    assert [str(setting) for setting in words.job] == ["cluster=dgx_h100"]
    assert read_words(["+nest=off"]).job == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("search.max_second: 5", "Did you mean search.max_seconds"),
        ("wach: 5", "there is no such setting"),
        ("clustr: dgx_h100", "Did you mean cluster"),
        ("train.global_batch_size: 5", "a site has no default of it"),
        ("cluster.num_gpus: 8", "a site has no default of it"),
        ("free: [all]", "a site has no default of it"),
        ("search.max_seconds: soon", "search.max_seconds"),
        ("memory.margin: 7", "memory.margin"),
        ("cluster: nowhere", "there is no such cluster"),
    ],
)
def test_what_is_wrong_names_its_file_and_line(etc: Path, line: str, said: str) -> None:
    etc.write_text(f"# of this site\n{line}\n")
    named = () if line.startswith("cluster:") else ("cluster=dgx_h100",)
    refused = run("plan", *MODEL, *named)
    assert refused.code == 2
    told = " ".join(refused.err.split())
    assert f"{etc} line 2" in told
    assert said in told


@pytest.mark.parametrize("text", ["- cluster", "cluster: [", "x"])
def test_a_file_that_is_not_understood_ends_everything(etc: Path, text: str) -> None:
    etc.write_text(text)
    refused = run("plan", *SMALL)
    assert refused.code == 2
    assert "defaults" in refused.err


def test_text_is_taken_as_it_stands(etc: Path) -> None:
    etc.write_text("profile.name: a, (b)\nsearch.keep: [micro_batch_size]\n")
    name, keep = read_defaults()
    assert name.value == "'a, (b)'"
    assert keep.value == "[micro_batch_size]"


def test_what_plans_and_prices_reads_them_and_what_shows_does_not(
    etc: Path, tmp_path: Path
) -> None:
    """As docs/policy.md says of defaults, and of policies."""
    out = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={out}").code == 0
    etc.write_text("no_such_setting: 1\n")
    one = ("parallel.tensor_model_parallel_size=8",)
    for words in (("plan", *SMALL), ("estimate", *SMALL, *one), ("compare", *SMALL)):
        assert run(*words).code == 2
    for words in (("explain", str(out)), ("models", "llama3_8b"), ("clusters",)):
        assert run(*words).code == 0
