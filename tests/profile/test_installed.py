"""What is installed here, and whether a site's calibration is asked about it; no GPU is needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from nest_megatron.cluster import discovery
from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.config import request
from nest_megatron.profile import installed
from tests import catalogue

H100 = LocalGpus(device_name="NVIDIA H100 80GB HBM3", memory_bytes=85520809984, count=8)
A100 = LocalGpus(device_name="NVIDIA A100-SXM4-80GB", memory_bytes=85899345920, count=8)


def packages(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    """No package is installed but these, and none is loaded."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    for module in ("torch", "megatron.core", "transformer_engine"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def torch_with(version: Callable[[], tuple[int, ...]]) -> Any:
    return SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace(version=version)))


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({}, {}),
        ({"nvidia-nccl-cu12": "2.26.2"}, {"nccl": "2.26.2"}),
        ({"nvidia-nccl-cu12": "2.26.2", "nvidia-nccl-cu13": "2.28.9"}, {"nccl": "2.28.9"}),
    ],
)
def test_nccl_is_the_package_that_torch_would_load(
    versions: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(monkeypatch, versions)
    assert installed.nccl_version() == found


@pytest.mark.parametrize("error", [None, RuntimeError, AttributeError, ImportError, AssertionError])
def test_torch_says_which_nccl_it_has_loaded(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without NCCL has none, whatever package lies there."""

    def version() -> tuple[int, ...]:
        if error is not None:
            raise error("no NCCL")
        return 2, 27, 3

    packages(monkeypatch, {"nvidia-nccl-cu12": "2.26.2"})
    monkeypatch.setitem(sys.modules, "torch", torch_with(version))
    assert installed.nccl_version() == ({} if error else {"nccl": "2.27.3"})


def test_what_is_loaded_is_before_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of Megatron-LM has no metadata; torch's version is a subclass of ``str``."""
    packages(monkeypatch, {"torch": "2.12.0", "transformer-engine": "2.8"})
    text = type("TorchVersion", (str,), {})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=text("2.13.0")))
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__="0.16"))
    monkeypatch.setattr(installed, "driver_version", lambda: None)
    found = installed.installed_versions()
    assert found == {"torch": "2.13.0", "megatron_core": "0.16", "transformer_engine": "2.8"}
    assert {type(version) for version in found.values()} == {str}


@pytest.mark.parametrize("said", [b"580.95.05", "580.95.05", None])
def test_the_driver_says_its_version_where_there_is_one(
    said: bytes | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def open_nvml() -> Iterator[Any]:
        if said is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        yield SimpleNamespace(nvmlSystemGetDriverVersion=lambda: said)

    packages(monkeypatch, {})
    monkeypatch.setattr(installed, "open_nvml", open_nvml)
    assert installed.installed_versions() == ({} if said is None else {"driver": "580.95.05"})


@pytest.mark.parametrize(
    ("gpus", "job", "found"),
    [
        (None, None, None),  # a laptop: the versions of the last run are taken
        (A100, None, None),  # another machine than the cluster's
        (H100, None, {"torch": "2.13.0", "nccl": "2.28.9"}),
        (H100, {"torch": "2.14.0"}, {"torch": "2.14.0", "nccl": "2.28.9"}),
        (None, {"torch": "2.14.0"}, {"torch": "2.14.0", "nccl": "2.28.9"}),
    ],
)
def test_versions_are_those_of_the_job_or_of_a_machine_of_the_cluster(
    gpus: LocalGpus | None,
    job: dict[str, str] | None,
    found: dict[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "known_gpus", lambda: gpus)
    monkeypatch.setattr(installed, "installed_versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(installed, "nccl_version", lambda: {"nccl": "2.28.9"})
    monkeypatch.setattr(request, "find_site", lambda _: (Path("site.yaml"), None))
    monkeypatch.setattr(request, "Site", lambda _calibration, _name, versions: versions)
    assert request.site_calibration(catalogue.cluster("dgx_h100", 16), job) == (found, ())
