"""Policies: what they leave of the search, what they refuse to launch, and where it is written."""

from __future__ import annotations

import dataclasses
import getpass
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron.config import defaults
from nest_megatron.config.launch import Mode
from nest_megatron.config.policy import VARIABLE, read_policy
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_output import read_launched, require_launch, require_tune
from nest_megatron.layout.policy import PolicyError, violations
from nest_megatron.minisign import SignatureError
from nest_megatron.planner.pins import TUNE, read_pinned, write_pinned
from tests.cli.runs import ROOT, SMALL, run


@pytest.fixture(autouse=True)
def no_other_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' folder, and the user's, are of this test alone."""
    monkeypatch.setattr(defaults, "SYSTEM_FOLDER", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)


def write(path: Path, **rules: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(rules, sort_keys=False))
    return path


def of_operators(tmp_path: Path, **rules: Any) -> Path:
    return write(tmp_path / "etc" / "policy.yaml", **rules)


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pinned") / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    assert run("pin", str(path)).code == 0
    return path


RULES: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    (
        {"ranges": {"tensor_model_parallel_size": [1, 2]}},
        ("tensor_model_parallel_size=8",),
        "1 to 2",
    ),
    ({"ranges": {"data_parallel_size": [2, 8]}}, ("data_parallel_size=1",), "2 to 8"),
    ({"forbidden_sharding": ["megatron_fsdp"]}, ("zero_stage=3",), "forbidden"),
    (
        {"forbidden_recompute": ["full"]},
        ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
        "forbidden",
    ),
]


@pytest.mark.parametrize(("rules", "settings", "words"), RULES)
def test_a_setting_that_a_rule_forbids_is_refused(
    tmp_path: Path, rules: dict[str, Any], settings: tuple[str, ...], words: str
) -> None:
    typed = [f"parallel.{setting}" for setting in settings]
    assert run("plan", *SMALL, *typed).code in (0, 1)
    path = of_operators(tmp_path, plan=rules)
    refused = run("plan", *SMALL, *typed)
    assert refused.code == 16
    assert words in refused.err
    (rule,) = rules
    assert f"plan.{rule}" in refused.err
    assert f"{path}:" in refused.err.replace("\n       ", " ")


def test_the_search_stays_within_the_policy_and_says_so(tmp_path: Path) -> None:
    free = run("plan", *SMALL, "--json").json()
    path = of_operators(
        tmp_path,
        plan={
            "ranges": {"pipeline_model_parallel_size": [4, 8], "micro_batch_size": [1, 1]},
            "least_memory_free": 0.3,
            "forbidden_precision": ["fp8"],
        },
    )
    held = run("plan", *SMALL, "--json").json()
    assert free["layout"]["dims"]["pipeline_model_parallel_size"] < 4
    assert held["layout"]["dims"]["pipeline_model_parallel_size"] >= 4
    assert held["layout"]["micro_batch_size"] == 1
    found = held["predicted"]
    assert found["peak_memory_bytes"] <= 0.7 * held["cluster"]["accelerator"]["memory_bytes"]
    assert held["search"]["certificate"] in ("optimal", "chosen")
    assert held["search"]["space"]["policy"] == f"within {path}"
    assert ">= 4" in held["search"]["space"]["pipeline_model_parallel_size"]
    assert any("fp8-format" in offer for offer in free["offers"])
    assert not any("fp8-format" in offer for offer in held["offers"])


def test_no_planner_beside_ours_leaves_the_policy(tmp_path: Path) -> None:
    of_operators(tmp_path, plan={"ranges": {"tensor_model_parallel_size": [4, 8]}})
    job = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=64")
    found = run("compare", *job, "train.global_batch_size=256", "planners=[manual]", "--json")
    sizes = [each["parallel"]["tensor_model_parallel_size"] for each in found.json()["planners"]]
    assert sizes == [4, 4]


def test_no_file_lifts_what_another_forbids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tensor_model_parallel_size"
    of_operators(tmp_path, plan={"ranges": {name: [1, 2]}})
    own = write(tmp_path / "own.yaml", plan={"ranges": {name: [1, 8]}})
    monkeypatch.setenv(VARIABLE, str(own))
    assert run("plan", *SMALL, f"parallel.{name}=4").code == 16
    write(own, plan={"ranges": {name: [1, 1]}})
    assert run("plan", *SMALL, f"parallel.{name}=2").code == 16
    assert [file.path for file in read_policy()] == [str(tmp_path / "etc/policy.yaml"), str(own)]


@pytest.mark.parametrize(
    "text",
    [
        "plan: {ranges: {tensor_size: [1, 2]}}",
        "plan: {ranges: {tensor_model_parallel_size: [4, 2]}}",
        "plan: {least_mfu: high}",
        "plan: {least_mfu: 30}",
        "plan: {least_mfu: -0.1}",
        "plan: {least_memory_free: 8}",
        "plan: {least_memory_free: .nan}",
        "plan: {forbidden_sharding: [zero]}",
        "launch: {pinned: true}",
        "rules: {}",
        "launch: {pinned_only: true}\nlaunch: {}",
        "launch: {pinned_only: true, pinned_only: false}",
        '{"launch": {"pinned_only": true}, "launch": {}}',
        "launch: {signers: [keys]}",
        "launch: {signers: [~/keys]}",
        "launch: {signers: ['']}",
        "launch: {signers: []}",
        "launch: {plan_folders: [plans]}",
        "launch: {plan_folders: [' ']}",
        "launch: {may_free: {'': [all]}}",
        "launch: {may_tune: ['']}",
        "launch: false",
        "[]",
        "- plan",
        "plan: [",
    ],
)
def test_nothing_is_planned_under_a_policy_that_is_not_understood(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "etc" / "policy.yaml"
    path.parent.mkdir()
    path.write_text(text)
    refused = run("plan", *SMALL)
    assert refused.code == 2
    assert f"error: {path}" in refused.err or f"policy = {path}" in refused.err


def test_a_policy_that_cannot_be_followed_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "etc" / "policy.yaml"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "gone.yaml")
    assert run("plan", *SMALL).code == 2
    link.unlink()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone.yaml"))
    assert run("plan", *SMALL).code == 2


def test_what_is_planned_breaks_no_rule_or_is_refused(tmp_path: Path) -> None:
    of_operators(tmp_path, plan={"least_mfu": 0.99})
    refused = run("plan", *SMALL)
    assert refused.code == 16
    assert "MFU" in refused.err


def test_every_broken_rule_of_a_plan_is_named(tmp_path: Path, pinned: Path) -> None:
    of_operators(
        tmp_path,
        plan={
            "ranges": {"pipeline_model_parallel_size": [4, 8], "micro_batch_size": [16, 16]},
            "least_memory_free": 0.9,
            "least_mfu": 0.9,
            "forbidden_sharding": ["ddp"],
            "forbidden_precision": ["bf16"],
            "tensor_parallel_inside_node": True,
        },
    )
    (file,) = read_policy()
    broken = [error.what for error in violations(read_pinned(pinned).plan, file)]
    assert broken == [
        "pipeline_model_parallel_size",
        "micro_batch_size",
        "sharding",
        "precision",
        "free memory",
        "MFU",
    ]


def test_only_pinned_plans_of_trusted_signers_and_folders_are_launched(
    tmp_path: Path, pinned: Path
) -> None:
    require_launch(Mode.AUTO)
    assert read_launched(pinned).plan.model.name == "llama3_8b"
    rules: dict[str, Any] = {"pinned_only": True}
    of_operators(tmp_path, launch=rules)
    with pytest.raises(PolicyError, match="pinned_only"):
        require_launch(Mode.AUTO)
    require_launch(Mode.PINNED)

    rules["plan_folders"] = [str(tmp_path / "plans")]
    of_operators(tmp_path, launch=rules)
    with pytest.raises(PolicyError, match="plan_folders"):
        read_launched(pinned)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "link.yaml").symlink_to(pinned)
    with pytest.raises(PolicyError, match="plan_folders"):  # a link leads out of the folder
        read_launched(tmp_path / "plans" / "link.yaml")
    plan = tmp_path / "plans" / "plan.yaml"
    plan.write_bytes(pinned.read_bytes())
    read_launched(plan)

    key = tmp_path / "ada.key"
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    rules["signers"] = [str(key.with_suffix(".pub"))]
    of_operators(tmp_path, launch=rules)
    with pytest.raises(SignatureError):
        read_launched(plan)
    assert run("pin", str(plan), "--sign", str(key)).code == 0
    read_launched(plan)

    of_operators(tmp_path, launch=rules, plan={"forbidden_precision": ["bf16"]})
    with pytest.raises(PolicyError, match="forbidden_precision"):
        read_launched(plan)


@pytest.mark.parametrize("which", ["policy", "folder", "above"])
@pytest.mark.parametrize("changed", ["mode", "owner", "mode of a link's file"])
def test_a_policy_that_others_may_write_to_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, changed: str
) -> None:
    path = of_operators(tmp_path / "site", launch={"pinned_only": True})
    monkeypatch.setenv(VARIABLE, str(path))
    assert read_policy()
    found = {"policy": path, "folder": path.parent, "above": path.parent.parent}[which]
    if changed == "owner":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(found, 4321, -1)
    elif changed == "mode":
        found.chmod(0o777 if found.is_dir() else 0o666)
    else:
        found.chmod(0o777 if found.is_dir() else 0o666)
        link = tmp_path / "etc2" / "policy.yaml"
        link.parent.mkdir()
        link.symlink_to(path)
        monkeypatch.setenv(VARIABLE, str(link))
    with pytest.raises(UserInputError, match="could change what it says"):
        read_policy()


@pytest.mark.parametrize("folder", ["etc", "home/nest-megatron"])
def test_a_policy_in_a_folder_that_may_not_be_entered_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    closed = tmp_path / folder
    assert read_policy() == ()
    closed.mkdir(parents=True)
    assert read_policy() == ()
    access, lexists = os.access, os.path.lexists  # root enters every folder
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    monkeypatch.setattr(os.path, "lexists", lambda path: path == closed or lexists(path))
    with pytest.raises(UserInputError, match="cannot be read"):
        read_policy()


@pytest.mark.parametrize("which", ["key", "folder", "owner"])
def test_keys_that_others_may_write_to_are_not_trusted(
    tmp_path: Path, pinned: Path, which: str
) -> None:
    keys, plan = tmp_path / "keys", tmp_path / "plan.yaml"
    keys.mkdir()
    plan.write_bytes(pinned.read_bytes())
    assert run("keygen", "--out", str(tmp_path / "ada.key"), "--no-password").code == 0
    public = (tmp_path / "ada.pub").rename(keys / "ada.pub")
    assert run("pin", str(plan), "--sign", str(tmp_path / "ada.key")).code == 0
    of_operators(tmp_path, launch={"signers": [str(keys)]})
    assert read_launched(plan).signer is not None
    if which == "owner":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(public, 4321, -1)
    else:
        (public if which == "key" else keys).chmod(0o777)
    with pytest.raises(UserInputError, match="could change what it says"):
        read_launched(plan)


def test_a_tab_after_a_colon_is_read(tmp_path: Path) -> None:
    path = of_operators(tmp_path)
    path.write_text('{"launch":\t{"pinned_only"\t: true}}')
    assert read_policy()[0].launch.pinned_only


def test_a_folder_with_the_sticky_bit_is_no_way_in(tmp_path: Path) -> None:
    path = of_operators(tmp_path, launch={"pinned_only": True})
    tmp_path.chmod(0o1777)
    assert read_policy()[0].path == str(path)


def test_the_file_that_is_judged_is_the_one_that_is_launched(
    tmp_path: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a plan of the folder, which leads to another by the time it is asked for again."""
    inside, link = tmp_path / "plans" / "plan.yaml", tmp_path / "link.yaml"
    inside.parent.mkdir()
    inside.write_bytes(pinned.read_bytes())
    outside = pinned_by(pinned, "mallory", tmp_path / "outside.yaml")
    of_operators(tmp_path, launch={"plan_folders": [str(inside.parent)]})
    opened = os.open

    def swapping(name: Any, flags: int, *args: Any, **options: Any) -> int:
        if Path(name) != link:
            return opened(name, flags, *args, **options)
        relink(outside)
        descriptor = opened(name, flags, *args, **options)
        relink(inside)
        return descriptor

    def relink(target: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    relink(inside)
    assert read_launched(link).pin.by != "mallory"
    monkeypatch.setattr(os, "open", swapping)
    with pytest.raises(PolicyError, match="plan_folders"):
        read_launched(link)


def pinned_by(plan: Path, by: str, target: Path) -> Path:
    found = read_pinned(plan)
    pin = dataclasses.replace(found.pin, by=by)
    write_pinned(dataclasses.replace(found, pin=pin), target)
    return target


@pytest.mark.parametrize("rule", ["pinned_only", "signers", "plan_folders"])
def test_tuning_needs_the_operators_leave_where_plans_are_reviewed(
    tmp_path: Path, pinned: Path, rule: str
) -> None:
    key = tmp_path / "ada.key"
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    rules: dict[str, Any] = {
        "pinned_only": True,
        "signers": [str(key.with_suffix(".pub"))],
        "plan_folders": [str(tmp_path / "plans")],
    }
    launch = {rule: rules[rule]}
    path = of_operators(tmp_path, launch=launch)
    words = ("tune", "--from", "torchrun pretrain_gpt.py --num-layers 2", "cluster=dgx_h100")
    refused = run(*words, "--out", str(tmp_path / "runs"))
    assert refused.code == 16
    said = " ".join(refused.err.split())
    assert f"(launch.{rule}, {path}:2)" in said
    assert f"launch.may_tune: [{getpass.getuser()}] in {path}" in said
    assert not (tmp_path / "runs").exists()
    assert run("tune", "--resume", str(tmp_path / "runs")).code == 16
    assert run(*words, "--dry-run").code != 16

    trial = pinned_by(pinned, TUNE, tmp_path / "trial.yaml")
    if rule != "pinned_only":
        with pytest.raises(UserInputError):
            read_launched(trial)
    of_operators(tmp_path, launch={**launch, "may_tune": [getpass.getuser()]})
    require_tune(tmp_path)
    assert read_launched(trial).pin.by == TUNE
    if rule != "pinned_only":  # nobody else's plan
        with pytest.raises(UserInputError):
            read_launched(pinned)
    of_operators(tmp_path, launch={**launch, "may_tune": ["somebody"]})
    with pytest.raises(PolicyError):
        require_tune(tmp_path)


def test_a_launch_knows_the_key_that_signed_its_plan(tmp_path: Path, pinned: Path) -> None:
    key, plan = tmp_path / "ada.key", tmp_path / "plan.yaml"
    plan.write_bytes(pinned.read_bytes())
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    assert run("pin", str(plan), "--sign", str(key)).code == 0
    assert read_launched(plan).signer is None  # nobody asked whether it holds
    public = key.with_suffix(".pub")
    of_operators(tmp_path, launch={"signers": [str(public)]})
    assert read_launched(plan).signer in public.read_text()


def test_releases_and_freed_flags(tmp_path: Path) -> None:
    of_operators(
        tmp_path,
        launch={
            "megatron_lm": ["0.20"],
            "may_free": {
                "*": ["recompute"],
                getpass.getuser(): ["micro_batch_size"],
                "nobody": ["all"],
            },
        },
    )
    require_launch(Mode.AUTO, ["recompute", "micro_batch_size"], "0.20")
    require_launch(Mode.AUTO)
    with pytest.raises(PolicyError, match="megatron_lm"):
        require_launch(Mode.AUTO, release="0.16")
    with pytest.raises(PolicyError, match="you may free micro_batch_size, recompute"):
        require_launch(Mode.AUTO, ["stage_layout"])
    with pytest.raises(PolicyError):
        require_launch(Mode.AUTO, ["all"])


def test_a_plan_is_asked_what_if_although_a_policy_came_or_went(tmp_path: Path) -> None:
    before, under = tmp_path / "before.yaml", tmp_path / "under.yaml"
    assert run("plan", *SMALL, f"out={before}").code == 0
    policy = of_operators(tmp_path, plan={"ranges": {"tensor_model_parallel_size": [1, 2]}})
    assert run("plan", *SMALL, f"out={under}").code == 0
    found = run("whatif", str(before), "memory=141GiB", "--json")
    assert found.code == 0, found.err
    policy.unlink()
    found = run("whatif", str(under), "memory=141GiB", "--json")
    assert found.code == 0, found.err


def test_rules_that_leave_nothing_say_so(tmp_path: Path) -> None:
    ranges = {"tensor_model_parallel_size": [16, 32]}
    of_operators(tmp_path, plan={"ranges": ranges, "tensor_parallel_inside_node": True})
    refused = run("plan", *SMALL)
    assert refused.code == 16
    assert "with other limits it is at least 16" in " ".join(refused.err.split())
    path = of_operators(tmp_path, plan={"ranges": {"tensor_model_parallel_size": [3, 3]}})
    assert f"nothing divides the GPUs; within the policy of {path}" in run("plan", *SMALL).err


def test_the_largest_number_of_replicas_is_kept() -> None:
    found = run("plan", *SMALL, "search.max_data_parallel_size=2", "--json").json()
    assert found["layout"]["dims"]["data_parallel_size"] <= 2
    limits = [f"search.max_{name}_parallel_size=1" for name in ("tensor_model", "pipeline_model")]
    limits += ["search.max_context_parallel_size=1", "search.max_data_parallel_size=2"]
    refused = run("plan", *SMALL, *limits)
    assert refused.code == 2
    assert "data_parallel_size" in refused.err
    assert "Widen" in refused.err


def test_the_example_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes((ROOT / "recipes" / "slurm" / "policy.yaml").read_bytes())
    monkeypatch.setenv(VARIABLE, str(path))
    (file,) = read_policy()
    assert file.launch.pinned_only
    assert file.lines["launch.pinned_only"] == 6


def test_a_tab_behind_a_colon_is_a_space(tmp_path: Path) -> None:
    """The parser in C reads it so, and that in Python, which knew the lines, refused it."""
    path = tmp_path / "etc" / "policy.yaml"
    path.parent.mkdir()
    path.write_text("plan:\n  ranges:\t{tensor_model_parallel_size: [1, 2]}\n")
    (found,) = read_policy()
    assert found.plan.ranges == {"tensor_model_parallel_size": (1, 2)}
    assert found.lines["plan.ranges"] == 2
