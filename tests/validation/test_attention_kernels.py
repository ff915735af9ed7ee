"""Which framework runs which attention, and what that costs on Hopper."""

from __future__ import annotations

import pytest

from nest_megatron.validation.frameworks import FLASH_ATTENTION_2_ON_HOPPER, rule_of


@pytest.mark.parametrize(
    ("framework", "device", "slowdown"),
    [
        ("Composer FSDP (DEFAULT)", "H100-SXM-80GB", FLASH_ATTENTION_2_ON_HOPPER),
        ("torchtitan 9dec370", "H200-SXM-141GB", FLASH_ATTENTION_2_ON_HOPPER),
        ("InternEvo v0.2", "H800-SXM-80GB", FLASH_ATTENTION_2_ON_HOPPER),
        ("nanotron v0.5", "GH200-96GB", FLASH_ATTENTION_2_ON_HOPPER),
        ("Composer FSDP (DEFAULT)", "A100-SXM-80GB", 1.0),
        ("torchtitan 9dec370", "B200-SXM-180GB", 1.0),
        ("NeMo 24.07", "H100-SXM-80GB", 1.0),
        ("NeMo AutoModel (FSDP2, TE, DeepEP)", "H100-SXM-80GB", 1.0),
    ],
)
def test_flash_attention_2_is_slower_on_hopper_alone(
    framework: str, device: str, slowdown: float
) -> None:
    kernels = rule_of(framework, device).kernels(device)
    assert kernels.get("attention_slowdown", 1.0) == slowdown
