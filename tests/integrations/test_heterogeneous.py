"""``--heterogeneous-layers-config-path``: its file, read as Megatron reads it, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.write import model_argv
from tests import catalogue

BASE = (
    "python pretrain_gpt.py --num-layers 3 --hidden-size 768 --ffn-hidden-size 3072 "
    "--num-attention-heads 12 --group-query-attention --num-query-groups 4 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --use-rotary-position-embeddings "
    "--use-rope-scaling --rotary-base 500000 --untie-embeddings-and-output-weights "
    "--seq-length 128 --max-position-embeddings 128 --vocab-size 1000 --bf16 "
)
BLOCKS = [
    {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 2.0}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": None}},
]
FILE = {
    "hidden_act": "silu",
    "num_hidden_layers": 3,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0},
    "block_configs": BLOCKS,
}


def _command(folder: Path, extra: str = "", **changes: Any) -> str:
    path = folder / "layers.json"
    path.write_text(json.dumps({**FILE, **changes}))
    return f"{BASE} --heterogeneous-layers-config-path {path} {extra}"


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_layers_are_read_from_the_file(tmp_path: Path, version: str) -> None:
    spec = read_job(read_command(_command(tmp_path), version)).spec
    kinds = [kind.value for kind in spec.heterogeneous_layers]
    assert kinds == ["attention[4]+dense[1024]", "dense[512]", "attention[4]+dense[3072]"]


@pytest.mark.parametrize(
    ("extra", "changes", "named"),
    [
        ("", {"hidden_size": 1024}, "--hidden-size = 768.*1024"),
        ("", {"rope_theta": 10000}, "--rotary-base"),
        ("", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("", {"block_configs": BLOCKS[:2]}, "2 layers"),
        ("", {"rope_scaling": None}, "Megatron cannot read it"),
        ("--num-experts 4", {}, "num_experts"),
        ("--mtp-num-layers 1", {}, "mtp_num_layers"),
    ],
)
def test_what_megatron_refuses_is_refused(
    tmp_path: Path, extra: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserInputError, match=named):
        read_job(read_command(_command(tmp_path, extra, **changes)))


def test_layers_of_several_groups_are_refused_as_megatron_does(tmp_path: Path) -> None:
    other = {"attention": {"n_heads_in_group": 6}, "ffn": {"ffn_mult": 2.0}}
    with pytest.raises(UserInputError, match="the same in all layers"):
        read_job(read_command(_command(tmp_path, block_configs=[*BLOCKS[:2], other])))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.json"
    with pytest.raises(UserInputError, match=r"nowhere\.json") as missing:
        read_job(read_command(f"{BASE} --heterogeneous-layers-config-path {path}"))
    assert missing.value.limit == "it cannot be read: No such file or directory"


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    command = _command(tmp_path)
    (tmp_path / "layers.json").write_text("{")
    with pytest.raises(UserInputError, match=r"layers\.json") as broken:
        read_job(read_command(command))
    assert "UserInputError" not in str(broken.value)


def test_text_without_a_path_builds_plain_layers() -> None:
    flag = "--heterogeneous-layers-config-encoded-json {}"
    with pytest.raises(UnplannableModelError, match="builds plain layers"):
        read_job(read_command(f"{BASE} {flag}"))


def test_a_catalogue_model_has_no_file_to_name() -> None:
    with pytest.raises(UnplannableModelError, match=r"config-path.*target=nemo"):
        model_argv(catalogue.model("llama33_nemotron_super_49b"))
