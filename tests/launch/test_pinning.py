"""Pinned plans: the same job and no other, the same bytes and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.cluster.records import Precision
from nest_megatron.errors import PlanFileError, UserInputError, settings_typed_as
from nest_megatron.integrations.plan_output import read_launched
from nest_megatron.layout import plan_file
from nest_megatron.planner.pinned_job import ActualJob, require_same_job
from nest_megatron.planner.pins import ChangedPinError, PinnedPlan, read_pinned, read_plan
from tests.altered import altered
from tests.cli.runs import SMALL, run


@pytest.fixture(scope="module")
def pinned_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pin") / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    done = run("pin", str(path), "--by", "ada", "--note", "for run 7", "--release", "0.16")
    assert done.code == 0, done.err
    assert "+nest=pinned" in done.out
    return path


@pytest.fixture(scope="module")
def pinned(pinned_path: Path) -> PinnedPlan:
    return read_pinned(pinned_path)


def job_of(pinned: PinnedPlan, **changes: Any) -> ActualJob:
    plan = pinned.plan
    same = ActualJob(
        spec=plan.model,
        num_gpus=plan.cluster.num_gpus,
        cluster=plan.cluster,
        gpus=None,
        gpus_per_host=None,
        global_batch_size=plan.layout.global_batch_size,
        precision=plan.train.precision,
        tensor_model_parallel_size=1,
        megatron_lm="0.16",
    )
    return dataclasses.replace(same, **changes)


def test_the_same_job_passes(pinned: PinnedPlan) -> None:
    require_same_job(pinned, job_of(pinned))
    renamed = dataclasses.replace(pinned.plan.model, name="pretrain_gpt", source="elsewhere")
    require_same_job(pinned, job_of(pinned, spec=renamed))


def test_a_settled_vocabulary_of_the_same_size_is_the_same_model(pinned: PinnedPlan) -> None:
    require_same_job(pinned, job_of(pinned, spec=pinned.plan.model.with_padded_vocab(1)))


def test_every_difference_is_named(pinned: PinnedPlan) -> None:
    model = dataclasses.replace(pinned.plan.model, num_layers=31, hidden_dropout=0.1)
    other = job_of(
        pinned,
        spec=model,
        num_gpus=16,
        cluster=pinned.plan.cluster.resized(16),
        global_batch_size=7,
        precision=Precision.FP16,
        megatron_lm="0.20",
    )
    with pytest.raises(UserInputError) as caught:
        require_same_job(pinned, other)
    for words in (
        "num_layers is 31, pinned 32",
        "hidden_dropout is 0.1, pinned 0.0",
        "number of GPUs is 16, pinned 8",
        "global_batch_size is 7",
        "precision is fp16, pinned bf16",
        "Megatron-LM release is 0.20, pinned 0.16",
    ):
        assert words in str(caught.value)


def test_the_network_and_the_gpus_of_this_host_are_compared(pinned: PinnedPlan) -> None:
    cluster = pinned.plan.cluster
    slower = dataclasses.replace(cluster.levels[0], bandwidth_bytes_per_s=1e9)
    other = dataclasses.replace(cluster, levels=(slower, *cluster.levels[1:]))
    with pytest.raises(UserInputError, match="network"):
        require_same_job(pinned, job_of(pinned, cluster=other))
    a100 = LocalGpus(device_name="NVIDIA A100-SXM4-80GB", memory_bytes=85 * 10**9, count=8)
    with pytest.raises(UserInputError, match=r"GPU is 8 x NVIDIA A100.*pinned H100"):
        require_same_job(pinned, job_of(pinned, cluster=None, gpus=a100))
    with pytest.raises(UserInputError, match="GPUs of a host is 4, pinned 8"):
        require_same_job(pinned, job_of(pinned, cluster=None, gpus_per_host=4))


def test_another_version_of_ours_is_a_difference(pinned: PinnedPlan) -> None:
    pin = dataclasses.replace(pinned.pin, nest_megatron_version="0.0.9")
    with pytest.raises(UserInputError, match="nest-megatron version"):
        require_same_job(PinnedPlan(pin=pin, plan=pinned.plan), job_of(pinned))


def test_a_changed_byte_is_refused(pinned_path: Path, tmp_path: Path) -> None:
    text = pinned_path.read_bytes()
    for at in range(0, len(text), max(1, len(text) // 60)):
        changed = bytearray(text)
        changed[at] = changed[at] + 1 if changed[at] < 126 else 32
        path = tmp_path / "changed.yaml"
        path.write_bytes(bytes(changed))
        with pytest.raises(PlanFileError):
            read_pinned(path)


def test_no_byte_stands_before_a_pinned_file(pinned_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.yaml"
    content = pinned_path.read_bytes()
    for changed in (b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n"), content + b"\n"):
        path.write_bytes(changed)
        for read in (read_pinned, read_plan):
            with pytest.raises(PlanFileError):
                read(path)
        assert run("verify", str(path)).code == 11
        assert run("explain", str(path)).code == 11
    path.write_bytes(content + b"\xff")  # as a byte that stands for another
    with pytest.raises(PlanFileError):
        read_pinned(path)


def test_a_cut_file_is_refused(pinned_path: Path, tmp_path: Path) -> None:
    text = pinned_path.read_text(encoding="utf-8")
    path = tmp_path / "cut.yaml"
    for size in (0, 10, len(text) // 2, len(text) - 1):
        path.write_text(text[:size], encoding="utf-8")
        with pytest.raises(PlanFileError):
            read_pinned(path)


def test_an_unpinned_plan_is_not_launched(pinned: PinnedPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_file.write(pinned.plan, path)
    assert read_plan(path) == (pinned.plan, None)
    with pytest.raises(PlanFileError, match="not pinned"):
        read_pinned(path)


def test_a_file_is_called_as_it_was_typed(tmp_path: Path) -> None:
    """A launch has ``nest.plan=FILE``, a command and a plugin a plan."""
    path = tmp_path / "plan.yaml"
    for text in (None, "schema: 2", "# nest-megatron pinned plan, sha256 of all below: 0"):
        if text is not None:
            path.write_text(text, encoding="utf-8")
        assert run("verify", str(path)).err.startswith(f"error: plan = {path}: ")
        with pytest.raises(UserInputError, match=r"^plan = "):
            read_launched(path)
        with (
            settings_typed_as("nest.{}".format),
            pytest.raises(UserInputError, match=r"^nest\.plan = "),
        ):
            read_launched(path)


def test_commands_read_pinned_files(pinned_path: Path) -> None:
    done = run("explain", str(pinned_path))
    assert done.code == 0
    assert "by ada (for run 7)" in done.out
    again = run("pin", str(pinned_path))
    assert again.code == 2
    assert "pinned already" in again.err


def test_what_does_not_fit_is_not_pinned(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    job = ("model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=8")
    assert run("estimate", *job, f"out={path}").code == 1
    done = run("pin", str(path))
    assert done.code == 2
    assert "not predicted to fit" in done.err


def test_a_pin_keeps_the_release_that_the_plan_was_made_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    command = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --bf16 "
        "--global-batch-size 32 --vocab-size 32000 --tokenizer-type NullTokenizer"
    )
    words = ["--from", command, "cluster=dgx_h100", f"out={path}", "--megatron-version", "0.20"]
    assert run("plan", *words).code == 0
    made = plan_file.read(path).provenance
    wanted = ("Megatron-LM", "0.20", "plan --from")
    assert (made.framework, made.framework_version, made.made_by) == wanted
    done = run("pin", str(path))
    assert done.code == 0, done.err
    pinned = read_pinned(path)
    assert pinned.pin.megatron_lm == "0.20"
    require_same_job(pinned, job_of(pinned, megatron_lm="0.20"))
    with pytest.raises(UserInputError, match=r"Megatron-LM release is 0\.16, pinned 0\.20"):
        require_same_job(pinned, job_of(pinned, megatron_lm="0.16"))


def test_a_reviewer_and_a_remark_take_one_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    assert run("pin", str(path), "--by", "eve\nby ada", "--note", "x\n(by ada)").code == 0
    line = next(each for each in run("explain", str(path)).out.splitlines() if "Pinned" in each)
    assert r"by eve\nby ada (x\n(by ada))" in line


@pytest.mark.parametrize("change", [lambda text: text[1:], lambda text: text.partition("\n")[2]])
def test_a_pinned_file_whose_first_line_is_damaged_was_changed(
    change: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    assert run("pin", str(path), "--by", "  ").code == 0
    assert read_pinned(path).pin.by.strip()
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    done = run("explain", str(path))
    assert done.code == ChangedPinError.exit_code
    assert "it was changed after it was pinned" in done.err


@pytest.mark.parametrize("target", ["nemo_2.7", "megatron_bridge_0.6"])
def test_a_plan_of_another_framework_is_pinned_for_no_release(target: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"target={target}", f"out={path}").code == 0
    done = run("pin", str(path), "--release", "0.19")
    assert done.err.startswith("error: --release = 0.19: the plan is not for Megatron-LM.")
    assert run("pin", str(path)).code == 0


def test_a_plan_that_was_made_for_no_framework_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    done = run("pin", str(path))
    assert "any release of Megatron-LM" in done.out
    assert "--release" in done.out
    pinned = read_pinned(path)
    assert pinned.pin.megatron_lm is None
    for release in ("0.16", "0.20"):
        require_same_job(pinned, job_of(pinned, megatron_lm=release))


def test_a_job_that_needs_more_of_each_parameter_is_refused(pinned: PinnedPlan) -> None:
    """A plan that was made for 16-bit gradients does not hold a job with float32 ones."""
    stored = {**pinned.plan.provenance.settings, "traits.gradient_bytes": 2.0}
    narrow = with_settings(pinned, stored)
    flags = {"grad_reduce_in_bf16": True}
    require_same_job(narrow, job_of(narrow, memory_flags=flags))
    require_same_job(pinned, job_of(pinned, memory_flags=flags))
    with pytest.raises(UserInputError, match="gradient_bytes is 4, pinned 2"):
        require_same_job(narrow, job_of(narrow, memory_flags={}))


def with_settings(pinned: PinnedPlan, settings: dict[str, float | str]) -> PinnedPlan:
    made = dataclasses.replace(pinned.plan.provenance, settings=settings)
    return dataclasses.replace(pinned, plan=dataclasses.replace(pinned.plan, provenance=made))


@pytest.mark.parametrize(
    ("traits", "flags", "said"),
    [
        (
            {"optimizer_bytes": 12.0, "matrix_optimizer_bytes": 8.0},
            {"optimizer": "muon"},
            "matrix_optimizer_bytes is None, pinned 8",
        ),
        (
            {"loss_bytes": 2.0},
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            "loss_bytes is 6, pinned 2",
        ),
    ],
)
def test_a_job_with_the_default_optimizer_and_loss(
    pinned: PinnedPlan, traits: dict[str, float], flags: dict[str, Any], said: str
) -> None:
    stored = {f"traits.{name}": value for name, value in traits.items()}
    other = with_settings(pinned, {**pinned.plan.provenance.settings, **stored})
    require_same_job(other, job_of(other, memory_flags=flags))
    with pytest.raises(UserInputError, match=said):
        require_same_job(other, job_of(other, memory_flags={}))


def test_an_activation_that_is_not_fused_needs_more_than_was_planned(pinned: PinnedPlan) -> None:
    require_same_job(pinned, job_of(pinned, memory_flags={}))
    with pytest.raises(UserInputError, match="fused_activation"):
        require_same_job(pinned, job_of(pinned, memory_flags={"bias_swiglu_fusion": False}))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"attention_backend": "unfused"}, "flash_attention is False, pinned True"),
        ({"fp32_residual_connection": True}, "memory not modelled is --fp32-residual-connection"),
    ],
)
def test_a_job_that_keeps_more_than_was_planned_is_refused(
    pinned: PinnedPlan, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserInputError, match=said):
        require_same_job(pinned, job_of(pinned, memory_flags=flags))


def test_more_copies_of_the_optimizer_states_are_refused_where_replicas_divide_them(
    pinned: PinnedPlan,
) -> None:
    flags, own = {"num_distributed_optimizer_instances": 8}, pinned.plan.layout
    for shards in (True, False):
        plan = altered(
            pinned.plan,
            data_parallel_size=8,
            global_batch_size=8 * own.micro_batch_size * own.dims.pipeline_model_parallel_size,
            use_distributed_optimizer=shards,
        )
        divided = dataclasses.replace(pinned, plan=plan)
        job = job_of(divided, memory_flags=flags)
        if not shards:
            require_same_job(divided, job)
            continue
        with pytest.raises(UserInputError, match="optimizer_instances is 8, pinned 1"):
            require_same_job(divided, job)
