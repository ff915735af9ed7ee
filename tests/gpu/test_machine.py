"""What is read of a device, and the command on two ranks, on GPUs that stand in."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import pynvml
import torch
import yaml

from nest_megatron.cli.profile import shape_of
from nest_megatron.cli.profile_request import measuring_here, request_of_plan
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.integrations import recorder
from nest_megatron.integrations.megatron_lm import measure, measure_child
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.profile import network, session, store
from nest_megatron.profile.clock import job_clock
from nest_megatron.profile.collectives import Caller
from nest_megatron.profile.session import Ranks, this_machine
from tests.cli.runs import ROOT, environment, run
from tests.gpu import stand_in
from tests.gpu.stand_in import BYTES_PER_S, H100, H100_BYTES, stand_in_gpu
from tests.megatron_lm.training import free_port

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


def test_a_device_that_stood_in_is_gone() -> None:
    with stand_in_gpu():
        assert torch.stand_in.is_available()
    assert not torch.stand_in.is_available()


def test_the_machine_is_what_the_driver_says() -> None:
    with stand_in_gpu(devices=8) as gpu:
        torch.cuda.set_device(3)
        machine = session.with_clocks(this_machine(Where.GPU, Implementation.LOCAL))
        here = measure.machine_here(Implementation.LOCAL)
        assert session.gpu_uuid() == stand_in.uuid_of(gpu.index) == stand_in.uuid_of(3)
    assert (machine.device_name, machine.memory_bytes) == (H100, H100_BYTES)
    assert (machine.driver, machine.nccl) == (stand_in.DRIVER, "2.27.5")
    assert machine.graphics_mhz == stand_in.GRAPHICS_MHZ
    assert machine.memory_mhz == stand_in.MEMORY_MHZ
    assert not machine.is_cpu
    assert measure.is_same(here, machine), "what is known before CUDA starts is the same machine"


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


def test_the_peak_of_a_job_s_tensors_is_none_before_cuda_starts() -> None:
    with stand_in_gpu(), pytest.MonkeyPatch.context() as monkeypatch:
        kept = [torch.zeros(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
        kept.pop()
        assert recorder.peak_allocated_bytes() == 6 << 20
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert recorder.peak_allocated_bytes() is None


def test_watched_steps_are_read_when_all_are_done() -> None:
    """Steps of 0.5 s, half of it in passes of this rank's layers; capturing marks nothing."""
    with stand_in_gpu() as gpu, pytest.MonkeyPatch.context() as monkeypatch:
        watched = recorder.Recorder(steps=4, rank=1, num_ranks=2, store=None, own_run=None)
        run_layers = watched.with_timing(lambda: gpu.works(0.25))
        for capturing in (False, False, False, True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
            with watched.step():
                run_layers()
                gpu.works(0.25)
        assert watched.measured is not None
        assert watched.measured.step_times_s == pytest.approx((0.5,) * 4)
        assert watched.measured.peak_memory_bytes == gpu.foreign_bytes
        assert gpu.calls.count("synchronize") == 1 + len(watched.measured.step_times_s)


def test_a_message_that_a_device_does_not_hold_is_not_timed() -> None:
    import torch.distributed as dist

    with stand_in_gpu() as gpu:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            caller, world = Caller(dist.group.WORLD), dist.group.WORLD
            gpu.capacity = 3 << 20
            held = CollectiveKind.ALL_TO_ALL, 1 << 20, world  # a megabyte each way
            assert caller.fitting(*held) is not None
            assert caller.fitting(CollectiveKind.ALL_TO_ALL, 2 << 20, world) is None
            call = caller.fitting(*held)
            assert call is not None
            assert caller.timed(call, 3) == 0.0  # one rank sends nothing
        finally:
            dist.destroy_process_group()


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


def test_a_gpu_that_is_in_use_is_said_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stand_in_gpu(devices=8) as gpu:
        measuring_here(Ranks(3, 8, 3, 8), None, on_cpu=False)
        assert capsys.readouterr().err == ""
        gpu.foreign_bytes = 30 << 30
        measuring_here(Ranks(3, 8, 3, 8), None, on_cpu=False)
    assert f"warning: 30.0 GiB of GPU 3 ({H100}) are in use" in capsys.readouterr().err


def test_two_processes_do_not_time_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a host of one GPU is given two, or srun starts eight that take each for itself."""
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    one, other = stand_in.uuid_of(0), stand_in.uuid_of(1)
    held = pytest.raises(ProfileError, match="another process times layers on it")
    with store.timing_alone(one), store.timing_alone(other), held:
        store.timing_alone(one).__enter__()
    with store.timing_alone(one):
        assert store.stored_entries() == ()


def test_nothing_is_timed_on_the_processor_in_place_of_a_gpu() -> None:
    with stand_in_gpu(devices=8), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UserInputError, match=r"none of this host's GPUs: 8 x NVIDIA H100"):
            measuring_here(ALONE, None, on_cpu=False)
        assert measuring_here(ALONE, None, on_cpu=True).where is Where.CPU
        old = "The NVIDIA driver on your system is too old\n(found version 11040)."

        def init() -> None:
            raise RuntimeError(old)

        monkeypatch.setattr(torch.cuda, "init", init)
        divided = [pynvml.NVML_DEVICE_MIG_ENABLE] * 2
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda _: divided)
        with pytest.raises(UserInputError, match="MIG divides them") as caught:
            measuring_here(ALONE, None, on_cpu=False)
        assert "it says: The NVIDIA driver on your system is too old." in str(caught.value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        orders: Any = type("Orders", (), {"where": Where.CPU})
        with pytest.raises(RuntimeError, match="NVIDIA_DRIVER_CAPABILITIES"):
            measure_child.measure(orders, 1)


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


def on_two_gpus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, each process of it with GPUs that stand in."""
    folders = (str(ROOT / "tests" / "gpu" / "host"), str(ROOT))
    variables = {
        "NEST_TEST_GPUS": "2",
        "PYTHONPATH": os.pathsep.join(folders),
        store.FOLDER_VARIABLE: str(folder / "profiles"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", free_port(), "-m", "nest_megatron.profile", *arguments),
        ],
        capture_output=True,
        text=True,
        env={**environment(), **variables},
        timeout=2400,
        check=False,
    )


def planned(folder: Path, *words: str) -> Path:
    """A plan of eight GPUs in a file, with its runners-up."""
    model, out = folder / "tiny.yaml", folder / "plan.yaml"
    model.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    job = ("cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=64")
    assert run("plan", f"model={model}", *job, *words, f"out={out}").code == 0
    return out


@pytest.mark.slow
def test_two_ranks_time_layers_and_nccl(tmp_path: Path) -> None:
    """Each collective's time is known from its bytes."""
    plan, out = planned(tmp_path), tmp_path / "network.yaml"
    asked = request_of_plan(plan)
    shapes = {shape_of(task) for task in asked.tasks(flash_attention=False)}
    done = on_two_gpus(
        tmp_path, "--for", str(plan), "--max-seconds", "60", "--network-out", str(out)
    )
    assert done.returncode == 0, done.stderr
    assert f"Timing {len(shapes)} shapes of layers in which {asked.names} differ: " in done.stderr
    assert "none begins after 45 s" in done.stderr
    assert "Timing the network between 2 processes: no measurement begins after" in done.stderr
    assert f" of {len(shapes)} shapes timed in " in done.stdout
    assert "Not timed" not in done.stdout
    found = network.read(out)
    assert found.backend is network.NetworkBackend.NCCL
    assert (found.versions["nccl"], found.versions["cuda"]) == ("2.27.5", "12.8")
    assert found.not_measured == {}
    assert f"2 ranks on 1 host ({socket.gethostname()})" in found.source
    assert {each.kind for each in found.samples} == set(CollectiveKind)
    for each in found.samples:
        # a ring of two: each rank sends half of it, twice for a sum, or all of it to its neighbour
        share = 1.0 if each.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND_RECV) else 0.5
        assert each.seconds == pytest.approx(share * each.message_bytes / BYTES_PER_S), each
    assert [fit.name for fit in found.fits] == ["node"]
    (profile,) = (entry.read() for entry in stored(tmp_path / "profiles"))
    assert profile.machine.device_name == H100
    assert {timing.shape for timing in profile.timings} <= shapes  # a busy machine times some


@pytest.mark.slow
def test_where_no_layer_differs_the_network_is_timed_alone(tmp_path: Path) -> None:
    one = ("parallel.tensor_model_parallel_size=1", "train.micro_batch_size=1")
    plan = planned(tmp_path, *one)
    names = request_of_plan(plan).names
    done = on_two_gpus(tmp_path, "--for", str(plan), "--max-seconds", "5")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert f"No layer differs in shape between {names}: no layer is timed." in said
    assert "no measurement begins after 5 s (--max-seconds)" in said
    assert "shapes timed" not in done.stdout
    assert "The network was timed in " in done.stdout
    assert stored(tmp_path / "profiles") == []


def stored(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.FOLDER_VARIABLE, str(folder))
        return list(store.stored_entries())
