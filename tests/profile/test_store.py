"""The store: exact round trips, broken files named, nothing lost by many writers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.profile import store
from tests import catalogue
from tests.profile.profiles import H200, profile, timing, whole_profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_v3", "mixtral_8x7b"])
def test_round_trip_is_exact(model: str) -> None:
    original = whole_profile(spec=catalogue.model(model))
    text = store.dump(original)
    again = store.load(text)
    assert again == original
    assert store.dump(again) == text


TEXT = store.dump(whole_profile())


def test_every_way_of_cutting_a_file_short_is_noticed() -> None:
    for length in [*range(0, len(TEXT) - 1, 61), len(TEXT) - 2]:
        with pytest.raises(ProfileError):
            store.load(TEXT[:length])


@settings(max_examples=250, deadline=None)
@given(
    place=st.integers(0, len(TEXT) - 1),
    length=st.integers(0, 3),
    misprint=st.text(alphabet="0159.-+e_ \n:#'\"{}[],&*!|%@abxyz\u00e9", max_size=3),
)
def test_a_misprint_is_refused_or_changes_nothing(place: int, length: int, misprint: str) -> None:
    damaged = TEXT[:place] + misprint + TEXT[place + length :]
    try:
        found = store.load(damaged)
    except ProfileError:
        return
    assert found == whole_profile()


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("forward_s: 0.002", "forward_s: 0.003", r"timings\[\d+\]"),
        ("forward_s: 0.002", "forward_s: -0.002", "forward_s"),
        ("forward_s: 0.002", "forward_s: .nan", "forward_s"),
        ("hidden_size: 4096", "hidden_size: 8192", "model"),
        ("hidden_size: 4096", "hidden_size: many", "model.hidden_size"),
        ("device_name: NVIDIA H100", "device_name: NVIDIA H200", "machine"),
        ("imported: false", "imported: true", "imported"),
        ("piece: head", "piece: tail", "piece"),
        ("driver:", "drivers:", "drivers"),
        ("schema: 1", "schema: 2", "Upgrade"),
        ("checksum:", "checksums:", "checksums"),
    ],
)
def test_an_edited_field_is_named(before: str, after: str, named: str) -> None:
    assert before in TEXT
    with pytest.raises(ProfileError, match=named):
        store.load(TEXT.replace(before, after, 1))


@pytest.mark.parametrize("text", ["hi", "", "[1]", "name: site\nlevels: []\n"])
def test_a_file_that_is_no_profile_is_named(text: str) -> None:
    with pytest.raises(ProfileError, match=r"profile = 'x\.yaml': it is no profile, which is"):
        store.load(text, "x.yaml")


def test_a_plan_in_the_place_of_a_profile_is_named() -> None:
    with pytest.raises(ProfileError, match=r"profile = 'x\.yaml': it is a plan file"):
        store.load("schema: 2\nlayout: {}\npredicted: {}\n", "x.yaml")


def test_timings_are_merged_and_the_newest_stay(folder: Path) -> None:
    first = profile([timing(), timing(LayerBlock.HEAD)], name="first")
    assert store.record(first) == first
    later = "2026-05-02T10:00:00+00:00"
    again = profile([timing(forward_s=7.0), timing(LayerBlock.DENSE)], name="second", created=later)
    found = store.record(again)
    assert [entry.name for entry in store.stored_entries()] == ["first"]
    assert found == store.find_entry("first").read()
    assert (found.name, found.created) == ("first", later)
    assert {t.block: t.forward_s for t in found.timings} == {
        LayerBlock.ATTENTION: 7.0,
        LayerBlock.HEAD: 1e-3,
        LayerBlock.DENSE: 1e-3,
    }
    stale = profile([timing(forward_s=9.0)], name="first", created="2026-04-01T10:00:00+00:00")
    assert store.record(stale) == found


def test_another_machine_is_another_profile() -> None:
    store.record(profile([timing()], name="one"))
    store.record(profile([timing()], name="two", machine=H200))
    assert [entry.name for entry in store.stored_entries()] == ["one", "two"]
    with pytest.raises(ProfileError, match="another device"):
        store.record(profile([timing()], name="one", machine=H200))


def test_imported_times_never_mix_with_measured_ones(tmp_path: Path) -> None:
    store.record(profile([timing()], name="mine"))
    store.write(store.find_entry("mine").read(), tmp_path / "copy.yaml")
    with pytest.raises(ProfileError, match="another name"):
        store.import_profile(tmp_path / "copy.yaml")
    found = store.import_profile(tmp_path / "copy.yaml", name="theirs")
    assert found.imported
    assert not store.find_entry("mine").read().imported
    original = store.find_entry("mine").read()
    assert dataclasses.replace(found, name="mine", imported=False) == original
    store.record(profile([timing(LayerBlock.HEAD)], name="new"))
    assert len(store.find_entry("mine").read().timings) == 2
    assert len(store.find_entry("theirs").read().timings) == 1


def test_a_broken_file_is_named_and_not_written_over(folder: Path) -> None:
    store.record(profile([timing()], name="mine"))
    path = folder / "mine.yaml"
    path.write_text(path.read_text().replace("forward_s: 0.001", "forward_s: 0.002"))
    damaged = path.read_text()
    ((entry, error),) = store.read_all()
    assert entry.name == "mine"
    assert "timings[0]" in str(error)
    with pytest.raises(ProfileError, match=re.escape("timings[0]")):
        store.record(profile([timing(LayerBlock.HEAD)], name="more"))
    assert path.read_text() == damaged


def test_a_file_under_another_name_is_refused(folder: Path) -> None:
    store.record(profile([timing()], name="mine"))
    (folder / "mine.yaml").rename(folder / "yours.yaml")
    with pytest.raises(ProfileError, match="it holds the profile 'mine'"):
        store.find_entry("yours").read()


def test_an_unknown_name_brings_the_nearest() -> None:
    store.record(profile([timing()], name="llama3_8b-h100"))
    with pytest.raises(UserInputError, match="Did you mean llama3_8b-h100"):
        store.find_entry("llama3_8b-h101")


def test_a_store_that_cannot_be_locked_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.05)
    with FileLock(folder / ".lock"), pytest.raises(ProfileError, match="held the lock"):
        store.record(profile([timing()]))


def test_a_store_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "file" / "profiles"))
    with pytest.raises(ProfileError, match=store.FOLDER_VARIABLE):
        store.record(profile([timing()]))


WRITERS, SHAPES = 5, 6


def write_some(number: int) -> None:
    """What one rank does: each of its shapes as soon as it is measured."""
    for shape in range(SHAPES):
        micro = number * SHAPES + shape + 1
        store.record(profile([timing(micro_batch_size=micro)], name=f"writer{number}"))


def test_many_writers_at_once_lose_nothing(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_some, args=(n,)) for n in range(WRITERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=600)
    assert [worker.exitcode for worker in workers] == [0] * WRITERS
    (entry,) = store.stored_entries()
    sizes = {timing.micro_batch_size for timing in entry.read().timings}
    assert sizes == set(range(1, WRITERS * SHAPES + 1))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", entry.path.name]
