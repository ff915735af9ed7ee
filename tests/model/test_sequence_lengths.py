"""Lengths of sequences: what packing them does to attention, by counting."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from nest_megatron.config.catalogue import with_seq_length
from nest_megatron.config.compose import compose
from nest_megatron.config.schema import TrainConfig, with_values
from nest_megatron.config.train import read_lengths
from nest_megatron.errors import UserInputError
from nest_megatron.model.graph import OperatorKind
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.sequence_lengths import lengths_from_counts, lengths_from_moments
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from tests import catalogue


def train(**values: object) -> TrainConfig:
    return with_values(compose(()).train, **values)


def attention_flops(spec: TransformerSpec, attended: float | None) -> float:
    graph = layer_graph(spec, LayerKind.DENSE, LayerShard(attended_tokens=attended))
    return sum(op.flops for op in graph.operators if op.kind is OperatorKind.ATTENTION)


def test_attention_of_a_pack_is_that_of_its_sequences() -> None:
    lengths = [100, 300, 624, 1024, 1024, 1024]
    pack = catalogue.model("llama3_8b")
    counts = {length: lengths.count(length) for length in lengths}
    found = lengths_from_counts(counts, 8192, packed=True, source="here")
    alone = sum(attention_flops(with_seq_length(pack, length), None) for length in lengths)
    packed = attention_flops(with_seq_length(pack, sum(lengths)), found.attended)
    assert packed == pytest.approx(alone, rel=1e-12)
    assert packed < 0.3 * attention_flops(with_seq_length(pack, sum(lengths)), None)


@pytest.mark.parametrize(("mean", "deviation"), [(300, 50), (300, 300), (900, 1500)])
def test_the_spread_of_packs_is_that_of_packs_that_were_made(mean: int, deviation: int) -> None:
    longest, size, rng = 8192, 65_536, random.Random(5)
    found = lengths_from_moments(mean, deviation, longest, packed=True)
    spread = np.log(1 + (deviation / mean) ** 2)
    location = np.log(mean) - spread / 2
    works = []
    for _ in range(1500):
        left, work = size, 0
        while left:
            drawn = round(rng.lognormvariate(location, spread**0.5))
            length = min(left, max(1, min(drawn, longest)))
            left, work = left - length, work + length**2
        works.append(work)
    assert statistics.mean(works) == pytest.approx(size * found.attended, rel=0.04)
    relative = statistics.stdev(works) / statistics.mean(works)
    assert found.attention_deviation / size**0.5 == pytest.approx(relative, rel=0.1)


def test_equal_lengths_have_no_spread() -> None:
    found = lengths_from_moments(500, 0, 8192, packed=False)
    assert (found.mean, found.attended, found.attention_deviation) == (500, 500, 0)
    assert found.real_share(2000) == 0.25


LENGTHS = [3, 5, 5, 700]


def _npy(kind: str) -> object:
    def write(path: Path) -> Path:
        np.save(path.with_suffix(".npy"), np.array(LENGTHS, dtype=kind))
        return path.with_suffix(".npy")

    return write


def _text(content: str) -> object:
    def write(path: Path) -> Path:
        path.write_text(content)
        return path

    return write


@pytest.mark.parametrize(
    "write",
    [
        *map(_npy, ("<i8", ">i4", "<u2")),
        _text("3\n5\n5\n700\n"),
        _text("3,1\n5,2\n700,1\n"),
        _text('{"input_ids": [1, 2, 3]}\n{"length": 5}\n\n{"num_tokens": 5}\n{"length": 700}\n'),
    ],
)
def test_files_of_lengths(write: object, tmp_path: Path) -> None:
    path = write(tmp_path / "lengths.txt")  # type: ignore[operator]
    found = read_lengths(train(sequence_lengths=str(path)), 512, packed=True)
    assert found is not None
    cut = [3, 5, 5, 512]
    assert found.mean == statistics.mean(cut)
    assert found.attended == pytest.approx(sum(n * n for n in cut) / sum(cut))
    assert found.packed


@pytest.mark.parametrize(
    ("train", "limit"),
    [
        (train(sequence_length_mean=300), "on the standard deviation"),
        (train(sequence_length_mean=9000, sequence_length_std=1), "between 1 and 8192"),
        (train(sequence_length_mean=10, sequence_length_std=-1), "between 0 and inf"),
        (train(sequence_lengths="x", sequence_length_std=1), "are given as well"),
    ],
)
def test_settings_that_say_too_little_or_too_much(train: TrainConfig, limit: str) -> None:
    with pytest.raises(UserInputError, match=limit):
        read_lengths(train, 8192, packed=True)


@pytest.mark.parametrize(
    ("content", "limit"), [("12\nmany\n", "line 2 is 'many'"), ("0\n", "at least 1 token")]
)
def test_files_that_hold_no_lengths(content: str, limit: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(UserInputError, match=limit):
        read_lengths(train(sequence_lengths=str(path)), 8192, packed=True)


def test_nothing_that_was_pickled_is_read(tmp_path: Path) -> None:
    path = tmp_path / "packed.npy"
    np.save(path, np.array([{"input_ids": [1]}], dtype=object))
    with pytest.raises(UserInputError, match="no array of one whole number"):
        read_lengths(train(sequence_lengths=str(path)), 8192, packed=True)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an array at all, but long enough"])
def test_broken_arrays_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.npy"
    path.write_bytes(content)
    with pytest.raises(UserInputError, match="no array of one whole number"):
        read_lengths(train(sequence_lengths=str(path)), 8192, packed=True)
