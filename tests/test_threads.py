"""Threads of one process, and an application of Hydra that runs us: each has its own job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.version import getbase, setbase

import nest_megatron
from tests.cli.runs import run

NUM_THREADS = 16
MODEL = """\
name: tiny
hidden_size: {hidden}
num_layers: 4
num_attention_heads: 8
ffn_hidden_size: 1024
seq_length: 1024
vocab_size: 1024
"""


def in_threads(call: Callable[[int], object], num_threads: int = NUM_THREADS) -> list[object]:
    """What a call returns in each of the threads, which begin together."""
    together = threading.Barrier(num_threads)

    def run(number: int) -> object:
        together.wait()
        return call(number)

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(run, range(num_threads)))


def test_each_thread_gets_the_model_that_it_names(tmp_path: Path) -> None:
    def size(number: int) -> int:
        return 512 + 64 * number

    for number in range(NUM_THREADS):
        (tmp_path / f"{number}.yaml").write_text(MODEL.format(hidden=size(number)))

    def estimated(number: int) -> int:
        found = nest_megatron.estimate(
            model=tmp_path / f"{number}.yaml", cluster="dgx_h100", num_gpus=8, global_batch_size=64
        )
        return found.model.hidden_size

    assert in_threads(estimated) == [size(number) for number in range(NUM_THREADS)]


def test_threads_plan_at_once() -> None:
    def planned(number: int) -> int:
        given = {"search.max_seconds": 2, "tensor_model_parallel_size": 4}
        found = nest_megatron.plan(
            model="llama3_8b", cluster="dgx_h100", num_gpus=8 + 8 * number, **given
        )
        return found.cluster.num_gpus

    assert in_threads(planned, 4) == [8, 16, 24, 32]


@pytest.fixture
def host(tmp_path: Path):
    """An application of Hydra 1.1 in the middle of its work, with a store that holds our names."""
    (tmp_path / "app.yaml").write_text("size: 3\n")
    before, repo = getbase(), dict(ConfigStore.instance().repo)
    ConfigStore.instance().store(name="plan", node={"defaults": ["other"], "mine": 1})
    ConfigStore.instance().store(group="model", name="llama3_8b", node={"hidden_size": "wide"})
    with hydra.initialize_config_dir(str(tmp_path), job_name="theirs", version_base="1.2"):
        yield
    ConfigStore.instance().repo = repo
    GlobalHydra.instance().clear()
    setbase(str(before)) if hasattr(before, "major") else None


@pytest.mark.usefixtures("host")
def test_an_application_of_hydra_keeps_its_own() -> None:
    outer, name, base = GlobalHydra.instance().hydra, JobRuntime.instance().get("name"), getbase()
    entries = set(ConfigStore.instance().repo)
    found = nest_megatron.estimate(
        model="llama3_8b", cluster="dgx_h100", num_gpus=8, global_batch_size=64
    )
    assert found.model.hidden_size == 4096
    assert GlobalHydra.instance().hydra is outer
    assert (JobRuntime.instance().get("name"), getbase()) == (name, base)
    assert set(ConfigStore.instance().repo) == entries
    assert hydra.compose("app").size == 3


@pytest.mark.usefixtures("host")
def test_a_sweep_inside_an_application_of_hydra(tmp_path: Path) -> None:
    outer, name = GlobalHydra.instance().hydra, JobRuntime.instance().get("name")
    words = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8,16", f"out={tmp_path}/out")
    done = run("plan", "-m", *words, "parallel.tensor_model_parallel_size=8")
    assert done.code == 0, done.err
    assert GlobalHydra.instance().hydra is outer
    assert JobRuntime.instance().get("name") == name
    assert not HydraConfig.initialized()
