"""A launched job plans with the profile of its device, its versions and its layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nest_megatron.config.cluster_detection import JobCluster, find_cluster
from nest_megatron.config.launch import read_words
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.planning import LaunchPlan, decide
from nest_megatron.profile import store
from nest_megatron.profile.installed import installed_versions
from nest_megatron.profile.records import LayerProfile
from tests import catalogue
from tests.launch.jobs import job_argv, namespace, pad_like_megatron, running
from tests.profile.profiles import H100, whole_profile

LLAMA = catalogue.model("llama3_8b")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    pad_like_megatron(monkeypatch)
    return tmp_path / "profiles"


def measured_here(name: str) -> LayerProfile:
    """A profile of the versions that this process has, on an H100."""
    machine = dataclasses.replace(H100, **installed_versions())
    return dataclasses.replace(whole_profile(name), machine=machine)


def place(*words: str) -> JobCluster:
    settings = read_words(["+nest=auto", "nest.cluster=dgx_h100", *words]).job
    return find_cluster(settings, 64, {}, dry_run=False)


def decided(*words: str) -> LaunchPlan:
    argv = job_argv(LLAMA, "--global-batch-size", "256")
    args = namespace(argv)
    return decide(running(args, argv), place(*words), free=(), alternative=0)


def test_the_profile_of_this_job_is_used() -> None:
    store.record(measured_here("mine"))
    plan = decided().decision.plan
    assert plan.provenance.profile.startswith("mine: ")
    assert "analytic" not in plan.provenance.profile
    analytic = decided("nest.profile.mode=analytic").decision.plan
    assert analytic.provenance.profile == "analytic"
    assert analytic.predicted.iteration_time_s != plan.predicted.iteration_time_s


def test_one_of_another_version_is_used_by_name_alone() -> None:
    machine = dataclasses.replace(H100, **{**installed_versions(), "torch": "1.0"})
    store.record(dataclasses.replace(whole_profile("old"), machine=machine))
    if "torch" not in installed_versions():
        pytest.skip("torch is not installed, so its version is not compared")
    outcome = decided()
    assert outcome.decision.plan.provenance.profile == "analytic"
    assert any("torch 1.0 instead of" in note for note in outcome.notes)
    named = decided("nest.profile.name=old")
    assert named.decision.plan.provenance.profile.startswith("old: ")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nest.profile.mode=require"], "nest.profile.mode"),
        (["nest.profile.mode=measure"], "nest.profile.mode"),
        (["nest.profile.mode=some"], "nest.profile.mode"),
        (["nest.profile.name=none_such"], "nest.profile.name"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(words: list[str], what: str) -> None:
    with pytest.raises(UserInputError) as caught:
        decided(*words)
    assert caught.value.what == what
