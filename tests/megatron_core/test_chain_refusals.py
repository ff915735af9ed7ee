"""Modules that cannot be traced are refused by name and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.megatron_core.chain import extract_chain
from nest_megatron.model.graph import TensorShape
from tests.megatron_core.modules import torch

nn = torch.nn
ROWS = TensorShape(sizes=(3, 8))


class Chooses(nn.Module):
    """Does what it is told to do with its input."""

    def __init__(self, action: Callable[[Any], Any]) -> None:
        super().__init__()
        self.action = action

    def forward(self, x: Any) -> Any:
        return self.action(x)


def by_branch(x: Any) -> Any:
    if x.sum() > 0:  # the line that the error names
        return x
    return -x


def by_item(x: Any) -> Any:
    return x * x.max().item()


def by_size(x: Any) -> Any:
    return x[x > 0]


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (by_branch, "if x.sum() > 0:"),
        (by_item, "return x * x.max().item()"),
        (by_size, "return x[x > 0]"),
    ],
)
def test_what_depends_on_values_is_named(action: Callable[[Any], Any], line: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), Chooses(action)))
    with pytest.raises(UnplannableModelError) as caught:
        extract_chain(model, [ROWS])
    error = caught.value
    assert error.value == "1.1 (Chooses)"
    assert "values of a tensor" in error.limit
    assert "test_chain_refusals.py:" in error.limit
    assert line in error.limit
    assert "torch.where" in error.fix


def test_wrong_inputs_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8))
    with pytest.raises(UnplannableModelError, match="--input") as caught:
        extract_chain(model, [ROWS])
    assert caught.value.value == "1 (Linear)"
    assert "fails on these inputs" in caught.value.limit
    with pytest.raises(UnplannableModelError, match="missing 1 required"):
        extract_chain(nn.Linear(8, 8), [])


def test_lazy_modules_are_told_to_run_first() -> None:
    with pytest.raises(UnplannableModelError, match="run a batch through it"):
        extract_chain(nn.LazyLinear(4), [ROWS])


def test_hooks_are_gone_after_a_refusal() -> None:
    model = nn.Sequential(Chooses(by_item))
    with pytest.raises(UnplannableModelError):
        extract_chain(model, [ROWS])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_without_torch_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UserInputError, match=r"nest-megatron\[megatron\]"):
        extract_chain(object(), [ROWS])
