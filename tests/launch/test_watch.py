"""Measured beside predicted."""

from __future__ import annotations

import pytest

from nest_megatron.integrations.megatron_lm import watch
from nest_megatron.integrations.megatron_lm.watch import Expected, watched

PREDICTION = Expected(iteration_time_s=2.0, memory_bytes=10 << 30)


def test_one_line_after_the_watched_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 9.0, 11.5, 14.0, 16.5, 19.0])
    monkeypatch.setattr(watch.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(watch, "peak_memory_bytes", lambda: 11 << 30)
    step = watched(lambda number: number, 4, PREDICTION)
    assert [step(n) for n in range(9)] == list(range(9))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "nest: measured over iterations 2 to 4: 2.500 s a step (predicted 2.000 s, +25.0 %), "
        "peak memory of rank 0 11.0 GiB (predicted 10.0 GiB, +10.0 %)"
    ]


def test_without_a_device_there_is_no_memory_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "peak_memory_bytes", lambda: None)
    step = watched(lambda: None, 1, PREDICTION)
    for _ in range(3):
        step()
    assert "memory" not in capsys.readouterr().out
