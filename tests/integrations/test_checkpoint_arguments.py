"""``--use-checkpoint-args``: what a command takes from a checkpoint that lies on this host.

Megatron's own ``load_args_from_checkpoint`` is asked in ``tests/megatron_lm``.
"""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.changed_command import with_checkpoint_arguments
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from tests.integrations.test_checkpoint import Bomb, legacy, torch_dist

MODEL: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 12,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "num_query_groups": 4,
    "group_query_attention": True,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "num_experts": None,
    "padded_vocab_size": 50_432,
    "hidden_dropout": 0.0,
}
COMMAND = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --use-checkpoint-args --micro-batch-size 1 "
    "--global-batch-size 64 --bf16 "
)


def merged(folder: Path, flags: str = "", version: str = "0.16") -> ReadCommand:
    return with_checkpoint_arguments(read_command(f"{COMMAND} --load {folder} {flags}", version))


@pytest.mark.parametrize("save", [torch_dist, legacy], ids=["torch_dist", "torch"])
def test_the_model_is_that_of_the_checkpoint(tmp_path: Path, save: Any) -> None:
    folder = save(tmp_path, *([""] if save is legacy else ["fully"]), **MODEL)
    job = read_job(read_command(f"{COMMAND} --load {folder}"))
    spec = job.spec
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size) == (12, 768, 2048)
    assert (spec.query_groups, spec.gated_linear_unit, spec.seq_length) == (4, True, 1024)
    assert (spec.vocab_size, spec.vocab_is_padded) == (50_432, True)
    assert any("the model is read from" in note for note in job.notes)


def test_metadata_without_common_pt_is_enough(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path, "fully", common=False, **MODEL)
    assert merged(folder, version="0.20").values["hidden_size"] == 768


def test_what_the_command_says_stands_only_where_megatron_lets_it(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path, "fully", **MODEL)
    values = merged(folder, "--seq-length 512 --num-query-groups 2 --hidden-dropout 0.3").values
    assert values["seq_length"] == 512
    assert (values["num_query_groups"], values["hidden_dropout"]) == (4, 0.0)


def test_saved_degrees_become_flags_that_a_plan_can_change(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path, "fully", tp=4, pp=2, **MODEL)
    assert merged(folder).values["tensor_model_parallel_size"] == 1
    command = merged(folder, "--use-mp-args-from-checkpoint-args")
    assert command.values["tensor_model_parallel_size"] == 4
    assert "--use-mp-args-from-checkpoint-args" not in command.argv
    again = read_command(command.argv).values
    assert (again["tensor_model_parallel_size"], again["pipeline_model_parallel_size"]) == (4, 2)
    assert "tensor_model_parallel_size" in command.explicit


def test_what_megatron_leaves_in_the_checkpoint_is_said(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path, "fully", multi_latent_attention=True, **MODEL)
    notes = merged(folder).notes
    assert any("multi_latent_attention = True" in note for note in notes)


def test_without_a_checkpoint_the_message_says_where_it_was_sought(tmp_path: Path) -> None:
    absent, empty = tmp_path / "absent", tmp_path / "empty"
    empty.mkdir()
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    for folder, flags, said in (
        (absent, "", "there is no such folder on this host"),
        (empty, "", "no latest_checkpointed_iteration.txt"),
        (empty, f"{shape} --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint"),
        (empty, "--ckpt-step 5", "cannot be opened"),
        (empty, "--non-persistent-ckpt-type local", "--non-persistent-ckpt-type local"),
    ):
        with pytest.raises(UserInputError) as caught:
            merged(folder, flags)
        assert said in str(caught.value)
        assert str(folder) in str(caught.value) or "local" in flags
    for folder, said in ((empty, "holds no checkpoint"), (absent, "There is no folder")):
        own = merged(folder, shape)  # as Megatron, which says so and goes on
        assert own.values["num_layers"] == 2
        assert said in own.notes[-1]
    with pytest.raises(UserInputError, match="Add --load"):
        with_checkpoint_arguments(read_command(COMMAND))


def test_a_checkpoint_to_finetune_from_counts_where_load_is_empty(tmp_path: Path) -> None:
    pretrained = torch_dist(tmp_path / "base", "fully", **MODEL)
    values = merged(tmp_path / "new", f"--pretrained-checkpoint {pretrained}").values
    assert values["num_layers"] == 12


def test_damaged_and_hostile_files_are_refused_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match="missing or damaged"):
        merged(legacy(tmp_path / "a", ""))
    with pytest.raises(UserInputError, match="holds an object there"):
        merged(torch_dist(tmp_path / "b", "fully", **{**MODEL, "num_query_groups": Bomb()}))
    assert not (tmp_path / "ran").exists()


def archive(content: bytes, kind: int = zipfile.ZIP_DEFLATED, entries: int = 0) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as made:
        made.writestr("x/data.pkl", content)
        for number in range(entries):
            made.writestr(f"x/data/{number:0200d}", b"")
    return stream.getvalue()


#: A few bytes, or an archive of a few MB, that would take gigabytes, a stack or hours.
LARGE: dict[str, tuple[bytes, str]] = {
    "memo": (archive(b"\x80\x02}r" + struct.pack("<I", 500_000_000) + b"."), "its memo goes to"),
    "text memo": (archive(b"\x80\x02}p500000000\n."), "its memo goes to"),
    "sets": (archive(b"\x80\x04(" + b"\x8f" * 14_000_000 + b"t."), "takes too much memory"),
    "zeros": (archive(b"\x80\x04" + b"N0" * 40_000_000 + b"N."), "larger than 32 MiB"),
    "bzip2": (archive(b"\x80\x04" + b"N0" * 20_000_000 + b"N.", zipfile.ZIP_BZIP2), "compressed"),
    "deep": (archive(b"\x80\x04})" + b"\x85" * 100_000 + b"Ns."), "a tuple in it"),
    "laughs": (archive(b"\x80\x04})" + b"2\x86" * 60 + b"Ns."), "a tuple in it"),
    "files": (archive(b"\x80\x04}.", entries=40_000), "a part of the archive"),
    "stored": (archive(b"\x80\x04" + b"N0" * 20_000_000 + b"N.", zipfile.ZIP_STORED), "32 MiB"),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_checkpoint_takes_bounded_memory(tmp_path: Path, case: str) -> None:
    content, said = LARGE[case]
    folder = torch_dist(tmp_path, "fully", **MODEL)
    (folder / "iter_0000007" / "common.pt").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserInputError, match=said):
            merged(folder)
        assert tracemalloc.get_traced_memory()[1] < 500e6
    finally:
        tracemalloc.stop()


def test_the_list_of_tensors_is_bounded_and_names_no_file_elsewhere(tmp_path: Path) -> None:
    folder = torch_dist(tmp_path / "a", "fully", common=False, **MODEL)
    metadata = folder / "iter_0000007" / ".metadata"
    moved = metadata.with_name("__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    metadata.write_bytes(metadata.read_bytes().replace(b"\x8c\x0c__0_0.distcp", _text(moved)))
    with pytest.raises(UserInputError, match="missing or damaged"):
        merged(folder, version="0.20")
    metadata.write_bytes(b"\x80\x02}r" + struct.pack("<I", 500_000_000) + b".")
    with pytest.raises(UserInputError, match="its memo goes to"):
        merged(folder, version="0.20")


def _text(path: Path) -> bytes:
    return b"X" + struct.pack("<I", len(str(path))) + str(path).encode()


def test_values_of_any_form_are_read_or_named(tmp_path: Path) -> None:
    """Lists that hold themselves, or one another many times, and numbers of a million digits."""
    circle: list[Any] = []
    circle.append(circle)
    many: list[Any] = []
    for _ in range(40):
        many = [many, many]
    for value in (circle, many, 1 << 4_000_000, "x" * 1_000_000):
        folder = torch_dist(tmp_path / str(id(value)), "fully", **{**MODEL, "kv_channels": value})
        with pytest.raises(UserInputError, match="holds an object there"):
            merged(folder)
    sizes = torch_dist(tmp_path / "sizes", "fully", sizes={"a.bucket_idx_0.param": ()}, **MODEL)
    assert merged(sizes).values["num_layers"] == 12
    assert pickle.dumps(many)


def test_experts_that_stay_apart_are_refused(tmp_path: Path) -> None:
    experts = {**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 512}
    folder = torch_dist(tmp_path / "a", "fully", **experts, moe_grouped_gemm=True)
    assert merged(folder).values["moe_ffn_hidden_size"] == 512
    apart = torch_dist(tmp_path / "b", "fully", **experts, moe_grouped_gemm=False)
    with pytest.raises(UserInputError, match="the checkpoint turns it off"):
        merged(apart)
