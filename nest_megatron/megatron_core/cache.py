"""Extracted layers, kept in files by everything that they depend on.

A file is found again without torch: versions are read from the installed packages' metadata. Two
processes that extract the same layer write the same file, whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import Any

from nest_megatron.documents import read_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, user_folder, write_text
from nest_megatron.megatron_core import layers
from nest_megatron.megatron_core.layers import ExtractedLayer
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import one_layer
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.version import __version__

#: A folder for the files, instead of the user's cache.
FOLDER_VARIABLE = "NEST_MEGATRON_EXTRACT_CACHE"


def layer(
    spec: TransformerSpec,
    kind: LayerKind,
    shard: LayerShard,
    *,
    implementation: Implementation = Implementation.LOCAL,
) -> ExtractedLayer:
    """A unit's graph as ``extract_layer`` records it, from its file where there is one.

    Raises:
        UserInputError: for what cannot be extracted, naming it.
    """
    path = folder() / f"{fingerprint(spec, kind, shard, implementation)}.json"
    # a file that cannot be read is as good as none, and is written anew
    with contextlib.suppress(UserInputError):
        return from_plain(ExtractedLayer, read_json(path, "extracted layer"))
    extracted = layers.extract_layer(spec, kind, shard, implementation=implementation)
    # a cache that cannot be written is no reason to stop
    with contextlib.suppress(UserInputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(_finite(to_plain(extracted)), indent=1))
    return extracted


def folder() -> Path:
    """Where the files are."""
    own = os.environ.get(FOLDER_VARIABLE)
    return expanded(Path(own), FOLDER_VARIABLE) if own else user_folder("cache") / "extract"


def fingerprint(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, implementation: Implementation
) -> str:
    """A name for everything that an extracted unit depends on.

    That is: the shape of the unit, how it is divided, the implementation, and the versions of
    megatron-core, torch and this package.
    """
    shape = to_plain(one_layer(spec, kind))
    del shape["name"], shape["source"]
    packages = ("megatron-core", "torch", "transformer-engine")
    words = {
        "kind": kind.value,
        "shape": shape,
        "shard": to_plain(shard),
        "implementation": implementation.value,
        "versions": {name: _version(name) for name in packages},
        "nest_megatron": __version__,
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """Plain data without its infinite numbers, which are defaults and come back as such."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item != math.inf}
        return {key: _finite(item) for key, item in kept.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
