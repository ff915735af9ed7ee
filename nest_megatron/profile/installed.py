"""The versions that the running job has, found without loading a framework."""

from __future__ import annotations

import sys
from importlib import metadata

from nest_megatron.cluster.discovery import open_nvml

_PACKAGES = {
    "torch": ("torch", "torch"),
    "megatron_core": ("megatron.core", "megatron-core"),
    "transformer_engine": ("transformer_engine", "transformer-engine"),
}


def installed_versions() -> dict[str, str]:
    """Versions by the names of ``Machine``; what is not installed, or does not say, is left out."""
    found = {name: _version(*where) for name, where in _PACKAGES.items()}
    found["driver"] = driver_version()
    return {name: version for name, version in found.items() if version is not None}


def driver_version() -> str | None:
    """The version of NVIDIA's driver, where there is one."""
    import pynvml

    try:
        with open_nvml() as nvml:
            version = nvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _version(module: str, package: str) -> str | None:
    """What the loaded module says, or else the installed package's metadata.

    A checkout of Megatron-LM has no metadata, but is loaded by the time that anybody asks.
    """
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(loaded, str):
        return str(loaded)  # torch's is no plain text
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
