"""A form is answered by a process of its own, which can be ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from multiprocessing import Pipe
from pathlib import Path

import pytest

from nest_megatron.app.run import Run, Working, _work
from nest_megatron.app.task import Answer, Task, Work
from nest_megatron.layout import plan_file
from nest_megatron.planner import Progress

SMALL = {"cluster": "dgx_h100", "num_gpus": "8"}
#: Solves thousands of candidates.
LARGE = Task(work=Work.PLAN, model="deepseek_v3", cluster="dgx_h100", num_gpus="1024")


async def answer(run: Run) -> Answer:
    *_, last = [message async for message in run.messages()]
    assert isinstance(last, Answer)
    return last


def test_two_at_once_do_not_mix() -> None:
    async def both() -> list[Answer]:
        models = ("llama3_8b", "mixtral_8x7b")
        task = [Task(work=Work.ESTIMATE, model=model, **SMALL) for model in models]
        return await asyncio.gather(*(answer(Run(each)) for each in task))

    found = [plan_file.load(each.plan_file).model.name for each in asyncio.run(both())]
    assert found == ["llama3_8b", "mixtral_8x7b"]


def test_an_error_is_told_as_on_the_command_line() -> None:
    found = asyncio.run(answer(Run(Task(work=Work.PLAN, model="llama3_9b", **SMALL))))
    assert found.is_error
    assert found.text.startswith("error: Model: llama3_9b: there is no such model")
    assert "Did you mean llama3_8b" in found.text
    assert list(found.mistakes) == ["Model"]


def test_what_does_not_fit_is_said_with_what_lacks() -> None:
    settings = "cluster.accelerator.memory=16GiB"
    task = Task(work=Work.PLAN, model="llama3_70b", settings=settings, **SMALL)
    found = asyncio.run(answer(Run(task)))
    assert found.is_error
    assert "lacks" in found.text.lower() or "GiB" in found.text


def test_a_fault_is_told_without_a_traceback() -> None:
    broken = Task(work=Work.PLAN, model=8, **SMALL)  # type: ignore[arg-type]
    found = asyncio.run(answer(Run(broken)))
    assert "This is a bug of nest-megatron" in found.text
    assert "Traceback" not in found.text


def test_a_cancelled_run_ends() -> None:
    run = Run(LARGE)
    run.cancel()
    assert asyncio.run(answer(run)) == Answer(text="Cancelled.", is_error=True)
    run.cancel()  # a button that is pressed twice


@pytest.mark.parametrize(
    ("ended_by", "told"),
    [(signal.SIGKILL, "killed (SIGKILL), as Linux does where memory runs out"), (15, "SIGTERM")],
)
def test_a_process_that_dies_is_no_endless_wait(ended_by: int, told: str) -> None:
    run = Run(LARGE)
    assert run._process.pid is not None
    os.kill(run._process.pid, ended_by)
    found = asyncio.run(answer(run))
    assert found.is_error
    assert told in found.text
    assert "Cancelled" not in found.text
    assert "again" in found.text


def test_a_search_says_how_far_it_is_and_can_be_cancelled_then() -> None:
    async def cancelled() -> list[Working | Answer]:
        run, found = Run(LARGE), []
        async for message in run.messages():
            found.append(message)
            if isinstance(message, Working) and "solved" in message.text:
                run.cancel()
        return found

    *working, last = asyncio.run(cancelled())
    assert last == Answer(text="Cancelled.", is_error=True)
    assert isinstance(working[0], Working)
    assert working[0].text == "planning"
    assert re.fullmatch(
        r"searching: \d+ solved, (no plan yet|best .* s), bound .* s", working[-1].text
    )


def test_a_server_that_has_gone_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    def answer(task: Task, on_progress: Progress, on_part: object) -> None:
        reached.append("search")
        on_progress(1, None, 2.0)
        reached.append("answer")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(Task, "answer", answer)
    ours, theirs = Pipe(duplex=False)
    ours.close()
    with theirs:
        _work(LARGE, theirs, str(tmp_path))
    assert reached == ["search"]


def test_a_run_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def cancelled() -> None:
        run = Run(LARGE)
        async for message in run.messages():
            if isinstance(message, Working) and "solved" in message.text:
                assert [*tmp_path.rglob("nest-megatron-app-*")]
                run.cancel()

    asyncio.run(cancelled())
    assert not [*tmp_path.iterdir()]
