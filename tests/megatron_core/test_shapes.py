"""What torch has no shapes of is given them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
shapes = pytest.importorskip("nest_megatron.megatron_core.shapes")


@pytest.mark.parametrize("name", shapes.COLLECTIVES)
def test_collectives_have_shapes(name: str) -> None:
    """Releases 2.6 to 2.9 register none: no layer that communicates would be recorded."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta")
