"""Predicted beside measured times of a layer's GEMMs in each number format.

Both are those of tests/cost_model/test_formats.py.

usage: python formats.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import catalogue
from tests.cost_model.test_formats import FILES, MEASURED_MS, predicted_ms

FORMATS = sorted({recipe for _, recipe in MEASURED_MS if recipe}, key=str)


def show(device: str, what: str, *times: str) -> None:
    """One line of the table."""
    print(f"{device:<10}{what:<10}{''.join(f'{time:>12}' for time in times)}".rstrip())


show("ms", "", "bf16", *map(str, FORMATS))
for device, name in FILES.items():
    accelerator = catalogue.accelerator(name)
    known = [each for each in (None, *FORMATS) if (device, each) in MEASURED_MS]
    for what, times in (
        ("measured", {each: MEASURED_MS[device, each] for each in known}),
        ("predicted", {each: predicted_ms(accelerator, each) for each in known}),
    ):
        cells = (f"{times[each]:.1f}" if each in times else "" for each in (None, *FORMATS))
        show(device.upper(), what, *cells)
