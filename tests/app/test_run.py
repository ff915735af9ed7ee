"""A form is answered by a process of its own, which can be ended."""

from __future__ import annotations

import asyncio

from nest_megatron.app.asked import Answer, Asked, Work
from nest_megatron.app.run import Run
from nest_megatron.parallel import plan_file

SMALL = {"cluster": "dgx_h100", "num_gpus": "8"}


async def answer(run: Run) -> Answer:
    *_, last = [message async for message in run.messages()]
    assert isinstance(last, Answer)
    return last


def test_two_at_once_do_not_mix() -> None:
    async def both() -> list[Answer]:
        models = ("llama3_8b", "mixtral_8x7b")
        asked = [Asked(work=Work.ESTIMATE, model=model, **SMALL) for model in models]
        return await asyncio.gather(*(answer(Run(each)) for each in asked))

    found = [plan_file.load(each.plan_file).model.name for each in asyncio.run(both())]
    assert found == ["llama3_8b", "mixtral_8x7b"]


def test_an_error_is_told_as_on_the_command_line() -> None:
    found = asyncio.run(answer(Run(Asked(work=Work.PLAN, model="llama3_9b", **SMALL))))
    assert found.is_error
    assert found.text.startswith("error: model = llama3_9b: there is no such model")
    assert "Did you mean llama3_8b" in found.text


def test_what_does_not_fit_is_said_with_what_lacks() -> None:
    settings = "cluster.accelerator.memory=16GiB"
    asked = Asked(work=Work.PLAN, model="llama3_70b", settings=settings, **SMALL)
    found = asyncio.run(answer(Run(asked)))
    assert found.is_error
    assert "lacks" in found.text.lower() or "GiB" in found.text


def test_a_fault_is_told_without_a_traceback() -> None:
    broken = Asked(work=Work.PLAN, model=8, **SMALL)  # type: ignore[arg-type]
    found = asyncio.run(answer(Run(broken)))
    assert "This is a fault of nest-megatron" in found.text
    assert "Traceback" not in found.text


def test_a_cancelled_run_ends() -> None:
    run = Run(Asked(work=Work.PLAN, model="deepseek_v3", cluster="dgx_h100", num_gpus="1024"))
    run.cancel()
    assert asyncio.run(answer(run)) == Answer(text="Cancelled.", is_error=True)
    run.cancel()  # a button that is pressed twice


def test_a_process_that_dies_is_no_endless_wait() -> None:
    run = Run(Asked(work=Work.PLAN, model="deepseek_v3", cluster="dgx_h100", num_gpus="1024"))
    run._process.kill()
    found = asyncio.run(answer(run))
    assert found.is_error
    assert "-9" in found.text
