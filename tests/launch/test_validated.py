"""Who is to blame where Megatron's own validation refuses a job that is launched with a plan."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.errors import RefusedByMegatronError, exit_code_of
from nest_megatron.integrations.megatron_lm import launch
from nest_megatron.integrations.megatron_lm.launch import validate_arguments
from tests import catalogue


def validate(args: Namespace, defaults: Any) -> str:
    if args.lr <= args.min_lr:
        raise AssertionError  # as a bare ``assert``: its own line is all there is to tell
    if args.tensor_model_parallel_size >= 4:
        raise AssertionError(f"no groups for {args.tensor_model_parallel_size}")
    return "validated"


def job(**values: object) -> Namespace:
    return Namespace(**{"lr": 1.0, "min_lr": 0.0, "tensor_model_parallel_size": 1, **values})


def test_a_flag_of_the_user_s_is_bad_input() -> None:
    with pytest.raises(RefusedByMegatronError, match="validation refuses") as refused:
        validate_arguments(validate, job(min_lr=2, tensor_model_parallel_size=2), {}, job(min_lr=2))
    assert exit_code_of(refused.value) == 2
    assert "raise AssertionError" in str(refused.value)
    assert str(refused.value).endswith("(try without +nest)")


def test_a_flag_of_the_plan_s_is_no_fault_of_the_user_s() -> None:
    with pytest.raises(AssertionError, match="no groups for 4") as refused:
        validate_arguments(validate, job(tensor_model_parallel_size=4), {}, job())
    assert exit_code_of(refused.value) == 70
    with pytest.raises(AssertionError, match="no groups for 4"):  # refused without it, for another
        validate_arguments(validate, job(tensor_model_parallel_size=4), {}, job(min_lr=2))
    assert validate_arguments(validate, job(), {}, job()) == "validated"


HOPPER = LocalGpus(device_name="NVIDIA H100 80GB HBM3", memory_bytes=85520809984, count=8)


@pytest.mark.parametrize("here", [None, HOPPER])
@pytest.mark.parametrize(("cluster", "major"), [("dgx_h100", 9), ("gb200_nvl72", 10)])
def test_a_dry_run_is_validated_for_the_planned_device(
    here: LocalGpus | None, cluster: str, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(launch, "known_gpus", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here is not None)
    local = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: local)
    plan = SimpleNamespace(cluster=catalogue.cluster(cluster, 72))
    with launch._device_of(plan):  # type: ignore[arg-type]
        assert torch.cuda.get_device_properties("cuda:0").major == major
    assert torch.cuda.get_device_properties("cuda:0") is local
