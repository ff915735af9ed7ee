"""Network profiles: what their records refuse, and their file."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.profile import network
from nest_megatron.profile.network import CollectiveSample, NetworkProfile
from nest_megatron.profile.network_fit import fit_hosts
from tests.profile.networks import profile_of, samples

SAMPLE = CollectiveSample(
    kind=CollectiveKind.ALL_REDUCE, num_ranks=8, shape=(4, 2), message_bytes=1024, seconds=1e-5
)


@pytest.fixture(scope="module")
def profile() -> NetworkProfile:
    found = samples()
    return dataclasses.replace(
        profile_of(found),
        fits=fit_hosts(found).fits,
        not_measured={CollectiveKind.ALL_TO_ALL: "no such call"},
        notes=("a note",),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"seconds": -1.0},
        {"message_bytes": 0},
        {"spread": math.inf},
        {"repetitions": 0},
        {"num_ranks": 4},
        {"num_ranks": 1, "shape": (1, 1)},
        {"shape": (8, 0)},
        {"shape": ()},
    ],
)
def test_a_sample_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProfileError):
        dataclasses.replace(SAMPLE, **change)  # type: ignore[arg-type]


def test_a_file_comes_back_as_it_was(profile: NetworkProfile, tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    network.write(profile, path)
    assert network.read(path) == network.sealed(profile)
    assert network.is_profile(path.read_text())
    assert network.dump(network.read(path)) == path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema: 1", "schema: 2", "up to schema 1"),
        ("schema: 1", "schema: true", "up to schema 1"),
        ("backend: nccl", "backend: mpi", "one of nccl"),
        ("message_bytes: 1024", "message_bytes: 1025", "does not match the contents"),
        ("num_ranks: 2", "num_ranks: two", "a whole number"),
        ("created:", "made:", "no such field"),
        ("name: test", "name: [", "not a readable YAML"),
    ],
)
def test_a_file_that_was_changed_is_refused(
    profile: NetworkProfile, old: str, new: str, words: str
) -> None:
    text = network.dump(profile).replace(old, new, 1)
    with pytest.raises(ProfileError, match=words):
        network.load(text)


def test_a_file_that_was_cut_short_is_refused(profile: NetworkProfile) -> None:
    text = network.dump(profile)
    for length in range(0, len(text) - 1, len(text) // 40):
        with pytest.raises(ProfileError):
            network.load(text[:length])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"nowhere\.yaml"):
        network.read(tmp_path / "nowhere.yaml")
