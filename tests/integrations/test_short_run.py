"""What a training command keeps, and what it loses, as a short run."""

from __future__ import annotations

import shlex

import pytest

from nest_megatron.config.launch import read_words
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import changed_command as module
from nest_megatron.integrations.megatron_lm.changed_command import short_run
from nest_megatron.integrations.megatron_lm.parser import load_arguments, read_argv
from nest_megatron.layout.rulebook.facts import RELEASES

EVERY_RELEASE = pytest.mark.parametrize("version", RELEASES)
WRITING = shlex.split(
    "--save /ckpt --save-interval 500 --async-save --non-persistent-save-interval 10 "
    "--tensorboard-dir /tb --wandb-project p --wandb-exp-name e --profile --use-pytorch-profiler "
    "--log-progress --full-validation --inprocess-restart --exit-interval 7 --eval-iters 32 "
    "--load /ckpt --finetune --no-load-optim"
)
KEPT = shlex.split("--bf16 --train-iters 500 --lr-warmup-iters 100 --log-interval 5 --mine 3")


@EVERY_RELEASE
def test_a_run_is_short_and_leaves_nothing_behind(version: str) -> None:
    argv = short_run([*KEPT, *WRITING], version, 21)
    values = read_argv("", argv, version).values
    assert argv[: len(KEPT)] == tuple(KEPT)
    assert (values["exit_interval"], values["eval_iters"]) == (21, 0)
    assert values["enable_one_logger"] is False
    for name in (
        "save",
        "load",
        "tensorboard_dir",
        "wandb_project",
        "non_persistent_save_interval",
    ):
        assert not values[name], name
    for name in ("async_save", "profile", "full_validation", "inprocess_restart", "finetune"):
        assert not values[name], name


@EVERY_RELEASE
def test_what_it_adds_is_megatrons(version: str) -> None:
    argv = short_run(["--use-checkpoint-args", "--load", "/ckpt"], version, 21)
    assert not read_argv("", argv, version).unknown


@EVERY_RELEASE
def test_a_model_from_a_checkpoint_is_loaded_without_its_iteration(version: str) -> None:
    argv = short_run(["--use-checkpoint-args", "--load", "/ckpt", "--ckpt-step", "9"], version, 21)
    values = read_argv("", argv, version).values
    assert (values["load"], values["ckpt_step"]) == ("/ckpt", 9)
    assert all(values[name] for name in ("finetune", "no_load_optim", "no_load_rng"))


@EVERY_RELEASE
def test_a_growing_batch_is_refused(version: str) -> None:
    with pytest.raises(UserInputError, match="another batch"):
        short_run(["--rampup-batch-size", "8", "8", "1000"], version, 21)


def test_a_rank_starts_no_runs() -> None:
    with pytest.raises(UserInputError, match="nest-megatron tune --from"):
        read_words(["+nest=tune"])


def test_what_is_left_out_are_arguments_of_a_release() -> None:
    known = {argument.dest for version in RELEASES for argument in load_arguments(version)}
    assert known >= module._LEFT_OUT, sorted(module._LEFT_OUT - known)
