"""What the flags that a user keeps cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_lm import planning as kept
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.planner import Request
from tests.integrations.test_sharding import WIDE, job


def test_a_freed_choice_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = compose(parse(["cluster=dgx_h100"]))
    read, request = read_request(TypedCommand(text=job(WIDE), version="0.16"), composed)
    assert request.offer is not None
    asked: list[Request] = []
    monkeypatch.setattr(kept, "running_request", lambda *_: request)
    monkeypatch.setattr(kept, "find_plan", asked.append)
    searched: Any = SimpleNamespace(
        job=read,
        place=SimpleNamespace(settings=composed),
        kept=(),
    )
    assert kept.costs(searched) == []
    (wanted,) = asked
    assert wanted.offer is None
    assert wanted.num_alternatives == 0
