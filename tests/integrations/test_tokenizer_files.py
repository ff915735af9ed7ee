"""Vocabularies counted in tokenizers' files, beside the readers that their makers keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.vocabulary import vocabulary_rows

BASE = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --bf16 "
)


def rows(kind: str, version: str = "0.16", **values: Any) -> int | None:
    found = vocabulary_rows(
        {n: str(v) if isinstance(v, Path) else v for n, v in values.items()}, kind, version
    )
    return None if found is None else found[0]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_tokenizer_json_counts_as_tokenizers_does(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    kept = tokenizers.Tokenizer(model)
    kept.add_special_tokens(["<s>", "a"])
    kept.add_tokens(["new"])
    kept.save(str(tmp_path / "tokenizer.json"))
    assert rows("HuggingFaceTokenizer", tokenizer_model=tmp_path) == kept.get_vocab_size()
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("x", -1.0)], 0))
    file = tmp_path / "unigram.json"
    unigram.save(str(file))
    assert rows("HuggingFaceTokenizer", tokenizer_model=file) == unigram.get_vocab_size()


def test_tokens_beside_the_vocabulary_are_counted_once(tmp_path: Path) -> None:
    vocab = {"model": {"vocab": {"a": 0, "</s>": 1}}, "added_tokens": [{"id": 2, "content": "<p>"}]}
    write(tmp_path / "tokenizer.json", vocab)
    assert rows("SFTTokenizer", tokenizer_model=tmp_path) == 3
    config = {
        "added_tokens_decoder": {"2": {"content": "<p>"}, "3": {"content": "<q>"}},
        "eos_token": "</s>",
        "pad_token": {"content": "<pad>"},
        "additional_special_tokens": ["<r>", "a"],
    }
    write(tmp_path / "tokenizer_config.json", config)
    assert rows("HuggingFaceTokenizer", tokenizer_model=tmp_path) == 6
    more = {"tokenizer_model": tmp_path, "special_tokens": ["<new>", "a"]}
    assert rows("HuggingFaceTokenizer", **more) == 6
    assert rows("HuggingFaceTokenizer", "0.20", **more) == 7


def test_a_sentencepiece_model_counts_as_sentencepiece_does(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    library.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=30, minloglevel=2
    )
    path = tmp_path / "m.model"
    count = library.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    for kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        assert rows(kind, tokenizer_model=path) == count
    assert rows("SentencePieceTokenizer", "0.20", tokenizer_model=path) == count
    assert rows("SentencePieceTokenizer", tokenizer_model=path) is None  # it adds tokens of its own
    path.rename(tmp_path / "tokenizer.model")
    write(tmp_path / "added_tokens.json", {"<new>": 30})
    assert rows("HuggingFaceTokenizer", tokenizer_model=tmp_path) == count + 1


def test_other_files_and_flags(tmp_path: Path) -> None:
    vocab = write(tmp_path / "vocab.json", {"a": 0, "<|endoftext|>": 1})
    assert rows("GPT2BPETokenizer", vocab_file=vocab) == 2
    lines = tmp_path / "vocab.txt"
    lines.write_text("[PAD]\n[CLS]\n[BOS]\n")
    assert rows("BertWordPieceLowerCase", vocab_file=lines, vocab_extra_ids=2) == 6
    assert rows("TikTokenizer", vocab_size=None) == 131_072
    assert rows("TikTokenizer", vocab_size=1000) == 1000
    assert rows("HuggingFaceTokenizer", tokenizer_model="meta-llama/Llama-3-8B") is None


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x0a\x7f", b"plain text"])
def test_damaged_files_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserInputError, match=r"tokenizer\.json"):
        rows("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    with pytest.raises(UserInputError, match=r"no SentencePiece model|it is empty"):
        rows("Llama2Tokenizer", tokenizer_model=path)


def test_a_job_takes_the_files_before_the_flag(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer.json", {"model": {"vocab": {str(n): n for n in range(500)}}})
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --vocab-size 9"
    job = read_job(read_command(BASE + flags))
    assert job.spec.vocab_size == 500
    assert any("500 tokens" in note for note in job.notes)
    absent = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /absent"
    with pytest.raises(UserInputError, match="not on this host \\(/absent\\)"):
        read_job(read_command(BASE + absent))
    null = BASE + "--tokenizer-type NullTokenizer --vocab-size 128"
    assert read_job(read_command(null, "0.17")).spec.vocab_size == 129
    assert read_job(read_command(null)).spec.vocab_size == 128  # the last is the end
