"""Empty libraries of CUDA for PyTorch's wheel, which loads them and without a GPU calls none.

With them the wheel of the package index does without 3.6 GB of nvidia's. Usage::

    python .ci/cuda_stand_ins.py FOLDER-OF-PYTORCH-LIBRARIES

Every function of a stand-in returns 100, CUDA's ``cudaErrorNoDevice``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

#: Begin of the names of functions -> the library that has them, where they carry no version.
_UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
}
_CUDA = re.compile(r"lib(cu|nccl|nv)")


def main(folder: Path) -> None:
    """Write a stand-in for each library of CUDA that those of a folder need and nothing has."""
    files = sorted(folder.glob("*.so*"))
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)
    functions: dict[str, set[str]] = defaultdict(set)
    for file in files:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", file)))
        library = ""
        for where, name in re.findall(r"File: (\S+)|Name: (\S+)", _output("readelf", "-V", file)):
            library = where or library
            if name:
                versions[library].add(name)
        undefined = _output("nm", "-D", "--undefined-only", file)
        for name, version in re.findall(r" U ([^@\s]+)(?:@(\S+))?", undefined):
            begin = next((each for each in _UNVERSIONED if name.startswith(each)), "")
            functions[version or _UNVERSIONED.get(begin, "")].add(name)
    for library in needed - {file.name for file in files} - {"libcuda.so.1"}:
        if _CUDA.match(library):
            own = {name for each in (library, *versions[library]) for name in functions[each]}
            _compile(folder / library, own, versions[library])


def _output(*command: object) -> str:
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return done.stdout


def _compile(library: Path, functions: set[str], versions: set[str]) -> None:
    source = "\n".join(f"long {name}(void) {{ return 100; }}" for name in sorted(functions))
    with tempfile.TemporaryDirectory() as work:
        code, script = Path(work, "stand_in.c"), Path(work, "versions")
        code.write_text(source or "int nothing;", encoding="utf-8")
        script.write_text("".join(f"{each} {{ global: *; }};" for each in sorted(versions)))
        versioned = [f"-Wl,--version-script={script}"] if versions else []
        options = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        _output("gcc", *options, *versioned, "-o", library, code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
