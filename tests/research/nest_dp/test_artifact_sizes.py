"""The paper's Table 7 with the layers of its own artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.authors_layers import authors_row
from nest_megatron.research.nest_artifact.files import read_instance
from nest_megatron.research.nest_dp.search import has_kernel
from nest_megatron.units import GIB

DATA = Path(__file__).parents[1] / "nest_artifact" / "data"


@pytest.mark.skipif(not has_kernel(), reason="the kernel is not built; minutes without it")
@pytest.mark.parametrize(
    ("name", "memory_bytes", "replicas", "first", "scarcest", "stages", "devices", "in_table"),
    [
        # The first layer joins the embedding, where no input is kept: one stage less.
        ("llama3_128", 24 * GIB, 1, (3, 2), (3, 8), 80, 230, 641),
        ("bertlarge_128", 120 * GIB // 1024, 10, (2, 2), (3, 4), 25, 600, 980),
    ],
)
def test_table_7(
    name: str,
    memory_bytes: int,
    replicas: int,
    first: tuple[int, int],
    scarcest: tuple[int, int],
    stages: int,
    devices: int,
    in_table: int,
) -> None:
    """No plan without ZeRO. With it the table's settings, where memory is scarcest.

    There all layers have that setting, here those have a lower one that keep fewer micro batches,
    so that fewer devices do.
    """
    instance = read_instance(DATA / f"{name}.json")
    row = authors_row(instance, memory_bytes, replicas)
    assert not row.fits_without
    assert row.settings[0] == first
    assert max(row.settings, key=lambda setting: setting[1]) == scarcest
    assert len(row.settings) == stages
    assert row.num_devices == devices <= in_table
