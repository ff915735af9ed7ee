"""The versions that the running job has, found without loading a framework."""

from __future__ import annotations

import sys

from nest_megatron.cluster.discovery import open_nvml
from nest_megatron.packages import installed_version

_PACKAGES = {
    "torch": ("torch", "torch"),
    "megatron_core": ("megatron.core", "megatron-core"),
    "transformer_engine": ("transformer_engine", "transformer-engine"),
}
#: torch's, for each release of CUDA.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


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


def nccl_version() -> dict[str, str]:
    """NCCL's: of torch if that is loaded, or else of the package that torch would load."""
    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        except (RuntimeError, AttributeError, ImportError, AssertionError):
            return {}
    version = next(filter(None, map(installed_version, _NCCL)), None)
    return {} if version is None else {"nccl": version}


def _version(module: str, package: str) -> str | None:
    """What the loaded module says, or else the installed package's metadata.

    A checkout of Megatron-LM has no metadata, but is loaded by the time that anybody asks.
    """
    loaded = getattr(sys.modules.get(module), "__version__", None)
    # torch's is no plain text
    return str(loaded) if isinstance(loaded, str) else installed_version(package)
