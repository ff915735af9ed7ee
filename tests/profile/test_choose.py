"""Which profile a job gets, and what it is told where it gets none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import ProfileError, UserInputError, settings_typed_as
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.profile import store
from nest_megatron.profile.choose import TimedJob, choose_times, machine_differences, times_of
from nest_megatron.profile.records import ProfileMode
from tests import catalogue
from tests.profile.profiles import CPU, H100, H200, profile, timing, whole_profile

LLAMA = catalogue.model("llama3_8b")
AUTO, REQUIRE = ProfileMode.AUTO, ProfileMode.REQUIRE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def wanted(cluster: str = "dgx_h100", **changes: object) -> TimedJob:
    base = TimedJob(
        spec=LLAMA,
        accelerator=catalogue.cluster(cluster, 8).accelerator,
        precision=Precision.BF16,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_an_empty_store_is_analytic_without_words() -> None:
    times, notes = choose_times(wanted(), AUTO)
    assert (times, notes) == (None, ())


def test_the_matching_profile_is_found_for_any_depth() -> None:
    store.record(whole_profile("mine"))
    store.record(whole_profile("theirs", spec=catalogue.model("mixtral_8x7b")))
    deeper = dataclasses.replace(LLAMA, name="deeper", num_layers=64)
    times, notes = choose_times(wanted(spec=deeper), AUTO)
    assert times is not None
    assert times.name == "mine"
    assert notes == ()


@pytest.mark.parametrize("content", [b"schema: 1\n", b"\xff\xfe", b""])
def test_a_file_that_is_no_profile_is_told(content: bytes) -> None:
    store.profiles_folder().mkdir(parents=True, exist_ok=True)
    (store.profiles_folder() / "cut.yaml").write_bytes(content)
    times, notes = choose_times(wanted(), AUTO)
    assert times is None
    assert any("cut.yaml" in note for note in notes)


def test_analytic_asks_no_profile() -> None:
    store.record(whole_profile("mine"))
    assert choose_times(wanted(), ProfileMode.ANALYTIC) == (None, ())
    with pytest.raises(UserInputError, match=r"profile\.name"):
        choose_times(wanted(), ProfileMode.ANALYTIC, "mine")


def test_own_times_come_before_imported_ones(tmp_path: Path) -> None:
    store.write(whole_profile("theirs"), tmp_path / "theirs.yaml")
    store.import_profile(tmp_path / "theirs.yaml")
    store.record(profile([timing()], name="mine"))
    times, _notes = choose_times(wanted(), REQUIRE)
    assert times is not None
    assert times.name == "mine + theirs"
    again = times_of("mine + theirs: 1 measured, 3 imported", LLAMA)
    assert again == times


@pytest.mark.parametrize(("machine", "said"), [(H200, "NVIDIA H200"), (CPU, "Intel Xeon")])
def test_another_device_is_used_only_by_name(machine: object, said: str) -> None:
    made = dataclasses.replace(whole_profile("other"), machine=machine)  # type: ignore[arg-type]
    store.record(made)
    times, notes = choose_times(wanted(), AUTO)
    assert times is None
    (note,) = notes
    assert said in note
    assert "H100-SXM-80GB" in note
    assert "profile.name=other" in note
    named, notes = choose_times(wanted(), REQUIRE, "other")
    assert named is not None
    assert all(p.imported for p in named.profiles)
    assert said in notes[0]


def test_a_cpu_is_never_a_gpu_of_its_name() -> None:
    cpu = dataclasses.replace(H100, is_cpu=True)
    (found,) = machine_differences(cpu, wanted())
    assert found.startswith("device ")


def test_versions_are_compared_where_they_are_known() -> None:
    store.record(whole_profile("mine"))
    same = {"torch": "2.6.0", "megatron_core": "0.16", "driver": "550.54.15"}
    assert choose_times(wanted(versions=same), AUTO)[0] is not None
    newer = {**same, "torch": "2.7.1"}
    with settings_typed_as("nest.{}".format):
        times, notes = choose_times(wanted(versions=newer), AUTO)
    assert times is None
    assert "torch 2.6.0+cu124 instead of 2.7.1" in notes[0]
    assert "nest.profile.name=mine" in notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": catalogue.model("llama3_70b")}, "hidden_size 4096 instead of 8192"),
        ({"spec": dataclasses.replace(LLAMA, seq_length=4096)}, "seq_length 8192 instead of 4096"),
        ({"precision": Precision.FP8}, "precision bf16 instead of fp8"),
    ],
)
def test_other_layers_are_refused_even_by_name(changes: dict[str, object], said: str) -> None:
    store.record(whole_profile("mine"))
    assert choose_times(wanted(**changes), AUTO)[0] is None
    with pytest.raises(ProfileError, match=said):
        choose_times(wanted(**changes), AUTO, "mine")


def test_require_names_the_blocks_and_the_command() -> None:
    store.record(profile([timing(), timing(LayerBlock.HEAD)], name="some"))
    asked = wanted(command="model=llama3_8b cluster=dgx_h100")
    with settings_typed_as("nest.{}".format), pytest.raises(UserInputError) as caught:
        choose_times(asked, REQUIRE)
    assert caught.value.what == "nest.profile.mode"
    assert "dense, embedding on H100" in caught.value.limit
    command = "torchrun -m nest_megatron.profile model=llama3_8b cluster=dgx_h100"
    assert command in caught.value.fix


def test_measure_is_refused_with_the_command() -> None:
    with pytest.raises(UserInputError, match=r"torchrun -m nest_megatron\.profile"):
        choose_times(wanted(), ProfileMode.MEASURE)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    store.record(whole_profile("mine"))
    with pytest.raises(UserInputError, match="Did you mean mine"):
        choose_times(wanted(), AUTO, "mines")


def test_a_broken_profile_of_these_layers_is_told(folder: Path) -> None:
    store.record(whole_profile("mine"))
    path = folder / "mine.yaml"
    path.write_text(path.read_text().replace("repetitions: 20", "repetitions: 21", 1))
    times, notes = choose_times(wanted(), AUTO)
    assert times is None
    assert "timings[0]" in notes[0]


def test_the_newest_of_two_installations_is_used() -> None:
    store.record(whole_profile("old"))
    newer = dataclasses.replace(
        whole_profile("new"),
        machine=dataclasses.replace(H100, driver="560.1"),
        created="2026-06-01T10:00:00+00:00",
    )
    store.record(newer)
    times, _notes = choose_times(wanted(), AUTO)
    assert times is not None
    assert times.name == "new"


def test_a_plan_whose_profile_is_gone_has_no_times() -> None:
    assert times_of("analytic", LLAMA) is None
    assert times_of("gone: 4 measured", LLAMA) is None


def test_shipped_profiles_stand_in_for_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile").mkdir()
    store.write(whole_profile("shipped"), tmp_path / "profile" / "shipped.yaml")
    monkeypatch.setattr(store, "catalogue_root", lambda: tmp_path)
    times, _notes = choose_times(wanted(), REQUIRE)
    assert times is not None
    assert times.name == "shipped"
    assert all(p.imported for p in times.profiles)
    store.record(whole_profile("mine"))
    both, _ = choose_times(wanted(), AUTO)
    assert both is not None
    assert both.name == "mine + shipped"


def test_what_is_shipped_is_sound() -> None:
    broken = [read for _, read in store.read_all() if isinstance(read, ProfileError)]
    assert not broken


def test_times_of_layers_that_the_job_does_not_run_are_said_to_be_so() -> None:
    store.record(whole_profile("mine"))
    _, notes = choose_times(wanted(implementation="transformer_engine"), AUTO)
    assert notes == ()
    _, (note,) = choose_times(wanted(implementation="local"), AUTO)
    assert "Profile mine is of the layers of --transformer-impl transformer_engine" in note
    assert "the job's are of local" in note
