"""Extracted layers are kept by everything that they depend on, and found again without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.megatron_core import layers
from nest_megatron.megatron_core.layers import ExtractedLayer
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.shard import LayerShard
from tests import catalogue

SPEC = catalogue.model("llama3_8b")
SHARD = LayerShard(tensor_model_parallel_size=2, sequence_parallel=True)
LOCAL = Implementation.LOCAL


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(layers.CACHE_VARIABLE, str(tmp_path / "extract"))
    return tmp_path / "extract"


@pytest.fixture
def extractions(monkeypatch: pytest.MonkeyPatch) -> list[LayerKind]:
    """The kinds that were really extracted."""
    done: list[LayerKind] = []
    extract = layers.extract_layer

    def counted(spec: object, kind: LayerKind, *args: object, **options: object) -> ExtractedLayer:
        done.append(kind)
        return extract(spec, kind, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(layers, "extract_layer", counted)
    return done


def test_a_layer_is_extracted_once(extractions: list[LayerKind]) -> None:
    first = layers.cached_layer(SPEC, LayerKind.DENSE, SHARD)
    assert layers.cached_layer(SPEC, LayerKind.DENSE, SHARD) == first
    assert extractions == [LayerKind.DENSE]


def test_the_number_of_layers_and_names_make_no_difference(extractions: list[LayerKind]) -> None:
    layers.cached_layer(SPEC, LayerKind.DENSE, SHARD)
    layers.cached_layer(
        dataclasses.replace(SPEC, num_layers=3, name="mine", source=""), LayerKind.DENSE, SHARD
    )
    assert len(extractions) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"spec": dataclasses.replace(SPEC, hidden_size=2048)},
        {"spec": dataclasses.replace(SPEC, seq_length=1024)},
        {"kind": LayerKind.HEAD},
        {"shard": dataclasses.replace(SHARD, micro_batch_size=2)},
        {"shard": dataclasses.replace(SHARD, flash_attention=False)},
        {"implementation": Implementation.TRANSFORMER_ENGINE},
    ],
)
def test_whatever_changes_the_layer_changes_its_name(change: dict[str, object]) -> None:
    plain = {
        "spec": SPEC,
        "kind": LayerKind.DENSE,
        "shard": SHARD,
        "implementation": LOCAL,
    }
    assert layers.fingerprint(**plain) != layers.fingerprint(**plain | change)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["torch", "megatron-core", "transformer-engine"])
def test_another_version_changes_the_name(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = layers.fingerprint(SPEC, LayerKind.DENSE, SHARD, LOCAL)
    version = layers.installed_version
    monkeypatch.setattr(
        layers, "installed_version", lambda name: "9.9" if name == package else version(name)
    )
    assert layers.fingerprint(SPEC, LayerKind.DENSE, SHARD, LOCAL) != before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"graph": 1}'])
def test_a_broken_file_is_written_anew(
    text: str, folder: Path, extractions: list[LayerKind]
) -> None:
    first = layers.cached_layer(SPEC, LayerKind.DENSE, SHARD)
    (path,) = folder.glob("*.json")
    path.write_text(text, encoding="utf-8")
    assert layers.cached_layer(SPEC, LayerKind.DENSE, SHARD) == first
    assert layers.cached_layer(SPEC, LayerKind.DENSE, SHARD) == first
    assert len(extractions) == 2


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(layers.CACHE_VARIABLE, str(tmp_path / "file" / "inside"))
    assert layers.cached_layer(SPEC, LayerKind.DENSE, SHARD).parameters.dense > 0


def test_a_kept_layer_is_found_without_torch() -> None:
    layers.cached_layer(SPEC, LayerKind.DENSE, SHARD)
    program = (
        "import sys\n"
        "from nest_megatron.megatron_core import layers\n"
        "from nest_megatron.model.spec import LayerKind\n"
        "from nest_megatron.model.shard import LayerShard\n"
        "from tests import catalogue\n"
        "shard = LayerShard(tensor_model_parallel_size=2, sequence_parallel=True)\n"
        "found = layers.cached_layer(catalogue.model('llama3_8b'), LayerKind.DENSE, shard)\n"
        "assert found.graph.operators\n"
        "assert not {'torch', 'megatron'} & set(sys.modules), 'loaded'\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
