"""Pickles of torch and Megatron-LM, read without running anything of them."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import IO, Any


class Inert:
    """Stands for an object of any class: keeps its attributes and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class InertUnpickler(pickle.Unpickler):
    """Runs nothing of what was pickled: every class and function is ``Inert``, tensors are out."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that does nothing, or a tuple for torch's sizes."""
        return tuple if (module, name) == ("torch", "Size") else Inert

    def persistent_load(self, pid: object) -> None:
        """Nothing: the contents of tensors are not read."""

    @classmethod
    def torch_load(cls, stream: IO[bytes]) -> Any:
        """What ``torch.save`` wrote."""
        with zipfile.ZipFile(stream) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return cls(io.BytesIO(archive.read(name))).load()
