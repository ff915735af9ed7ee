"""What is read of a device, and the command on two ranks, on GPUs that stand in."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import yaml

from nest_megatron.cli.profile_device import measuring_here
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import recorder
from nest_megatron.integrations.megatron_lm import measure_child, measure_store
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.profile import network, session, store
from nest_megatron.profile.clock import job_clock
from nest_megatron.profile.ranks import Ranks
from nest_megatron.profile.session import this_machine
from tests.cli.runs import ROOT, environment
from tests.gpu import stand_in
from tests.gpu.stand_in import BYTES_PER_S, H100, H100_BYTES, stand_in_gpu

ALONE = Ranks(0, 1, 0, 1)
MODEL = {
    "name": "tiny",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 512,
}


def test_the_machine_is_what_the_driver_says() -> None:
    with stand_in_gpu():
        machine = this_machine(Where.GPU, Implementation.LOCAL)
        here = measure_store.here(Implementation.LOCAL)
    assert (machine.device_name, machine.memory_bytes) == (H100, H100_BYTES)
    assert (machine.driver, machine.nccl) == (stand_in.DRIVER, "2.27.5")
    assert machine.graphics_mhz == stand_in.GRAPHICS_MHZ
    assert machine.memory_mhz == stand_in.MEMORY_MHZ
    assert not machine.is_cpu
    assert here.is_of(machine), "what is known before CUDA starts is the same machine"


def test_clocks_that_the_driver_does_not_tell_are_not_known() -> None:
    with stand_in_gpu():
        assert session._clocks("of a MIG instance") == (None, None)


def test_the_peak_counts_what_lies_outside_the_allocator() -> None:
    """Reserved at most 4 MiB, then 2; CUDA itself and others hold 1 GiB."""
    with stand_in_gpu() as gpu:
        kept = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        more = torch.zeros(2 << 20, dtype=torch.uint8, device="cuda")
        del more
        assert torch.cuda.memory_allocated() == kept.nbytes
        assert recorder.peak_memory_bytes() == gpu.foreign_bytes + (4 << 20)


def test_a_job_s_clock_waits_for_the_device_when_it_is_read_alone() -> None:
    with stand_in_gpu() as gpu:
        clock = job_clock()
        marks = [clock.mark()]
        gpu.works(0.25)
        marks.append(clock.mark())
        assert "synchronize" not in gpu.calls
        assert clock.read([marks]) == [pytest.approx((0.25,))]


def test_each_rank_has_a_gpu_of_its_own() -> None:
    with stand_in_gpu(devices=8) as gpu:
        assert measuring_here(Ranks(11, 16, 3, 8), None, on_cpu=False).where is Where.GPU
        assert "set_device 3" in gpu.calls
    with stand_in_gpu(devices=1) as gpu:  # the launcher shows each rank its own alone
        measuring_here(Ranks(11, 16, 3, 8), None, on_cpu=False)
        assert "set_device 0" in gpu.calls
    with stand_in_gpu(devices=4), pytest.raises(UserInputError, match="shows 4 GPUs"):
        measuring_here(Ranks(0, 8, 0, 8), None, on_cpu=False)


def test_nothing_is_timed_on_the_processor_in_place_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in_gpu(devices=8):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UserInputError, match=r"none of this host's GPUs: 8 x NVIDIA H100"):
            measuring_here(ALONE, None, on_cpu=False)
        assert measuring_here(ALONE, None, on_cpu=True).where is Where.CPU
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        orders: Any = type("Orders", (), {"where": Where.CPU})
        with pytest.raises(RuntimeError, match="NVIDIA_DRIVER_CAPABILITIES"):
            measure_child.measured(orders, 1)


def test_an_engine_that_does_not_load_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.8.0'\n", encoding="utf-8")
    (package / "pytorch.py").write_text("raise OSError('libcudnn.so.9: no such file')\n")
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "2.8.0" if name == "transformer-engine" else version(name),
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with stand_in_gpu():
        with pytest.raises(UserInputError, match=r"does not load: libcudnn.so.9"):
            measuring_here(ALONE, None, on_cpu=False)
        assert measuring_here(ALONE, "local", on_cpu=False).implementation is Implementation.LOCAL
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


@pytest.mark.slow
def test_two_ranks_time_layers_and_nccl(tmp_path: Path) -> None:
    """The command as a user types it; each collective's time is known from its bytes."""
    model, out = tmp_path / "tiny.yaml", tmp_path / "network.yaml"
    model.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    folders = (str(ROOT / "tests" / "gpu" / "host"), str(ROOT))
    variables = {
        "PYTHONPATH": os.pathsep.join(folders),
        store.FOLDER_VARIABLE: str(tmp_path / "profiles"),
        "OMP_NUM_THREADS": "1",
    }
    port = str(20_000 + os.getpid() % 10_000)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", port, "-m", "nest_megatron.profile", f"model={model}"),
            *("--max-seconds", "40", "--network-out", str(out), "--json"),
        ],
        capture_output=True,
        text=True,
        env={**environment(), **variables},
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = network.read(out)
    assert found.backend is network.NetworkBackend.NCCL
    assert (found.versions["nccl"], found.versions["cuda"]) == ("2.27.5", "12.8")
    assert found.not_measured == {}
    assert {each.kind for each in found.samples} == set(CollectiveKind)
    for each in found.samples:
        # a ring of two: each rank sends half of it, twice for a sum, or all of it to its neighbour
        share = 1.0 if each.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND_RECV) else 0.5
        assert each.seconds == pytest.approx(share * each.message_bytes / BYTES_PER_S), each
    assert [fit.name for fit in found.fits] == ["node"]
    profiles = [entry.read() for entry in stored(tmp_path / "profiles")]
    assert profiles[0].machine.device_name == H100
    assert profiles[0].timings


def stored(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.FOLDER_VARIABLE, str(folder))
        return list(store.stored_entries())
