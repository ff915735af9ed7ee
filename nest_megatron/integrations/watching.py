"""The recorder in a training loop that is neither Megatron-LM's nor Megatron-Bridge's.

>>> from nest_megatron.integrations.watching import watching
>>> with watching() as watched:  # doctest: +SKIP
...     for batch in batches:
...         with watched.step():
...             train(batch)

What is kept is true of the plan alone, so that a run of another layout or batch is not recorded.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from nest_megatron.errors import NestError, UserInputError, require_at_least
from nest_megatron.history.records import Launch, RunRecord
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore, propagating_errors
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.process_variables import with_rank_variables
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import PolicyError
from nest_megatron.printing import print_cleaned

#: Steps that are watched where nothing else is asked for, as ``nest.watch``.
STEPS = 20


class WatchedLoop:
    """The first steps of a loop, next to what the plan predicts of them.

    Nothing here stops the job but a policy that has to have an audit of it.

    Args:
        plan: the one that the loop runs.
        steps: how many to watch.
        launch: how the job was launched, where that is known.
        run: the record of the run, where an audit has it already.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        steps: int = STEPS,
        launch: Launch | None = None,
        run: RunRecord | None = None,
    ) -> None:
        require_at_least("steps", steps, 1, "Give at least 1, or do not watch it.")
        self.plan = plan
        self._steps = steps
        self._launch = launch
        self._run = run
        self._recorder: Recorder | None = None
        self._has_begun = False

    def begin(self, rank: int, num_ranks: int) -> None:
        """Meet the other ranks, and begin the record; every rank comes here.

        Raises:
            PolicyError: where a policy has to have an audit, and it cannot be written.
        """
        context = RankContext(
            rank=rank,
            world_size=num_ranks,
            environment=with_rank_variables(os.environ),
            rendezvous_timeout_s=120.0,  # ranks begin to train at nearly one time
        )
        try:
            with contextlib.ExitStack() as meeting:
                store = RendezvousStore(context) if num_ranks > 1 else None
                if store is not None:
                    meeting.callback(store.stop_heartbeat)
                with propagating_errors(store):
                    require_planned(self.plan, num_ranks)
                recorder = Recorder(
                    steps=self._steps, rank=rank, num_ranks=num_ranks, store=store, plan=self.plan
                )
                recorder.begin(self._launch, run=self._run)
                self._recorder = recorder
        except Exception as error:
            if isinstance(error, NestError) and error.exit_code == PolicyError.exit_code:
                raise
            self._stop(error)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of the optimizer."""
        if not self._has_begun:
            self._has_begun = True
            if (batch := _other_batch(self.plan)) is not None:  # the first step shows it
                self._stop(batch)
        with contextlib.nullcontext() if self._recorder is None else self._recorder.step():
            yield

    def end(self, error: BaseException | None = None) -> None:
        """Training ends, or an error ends it."""
        if self._recorder is not None:
            self._recorder.end(error)
            self._recorder = None

    def _stop(self, error: Exception) -> None:
        if self._recorder is not None or not self._has_begun:
            print_cleaned(f"nest: this run is not recorded: {error}")
        self._recorder = None


@contextlib.contextmanager
def watching(plan: Any = None, *, steps: int = STEPS) -> Iterator[WatchedLoop]:
    """Watch a loop in here, in a process that a launcher started; errors that end it are kept.

    Args:
        plan: the one that the loop runs, as ``auto_recipe`` or ``nest_megatron.load_plan`` returns
            it; that of the Hydra application if not given.
        steps: how many to watch.

    Raises:
        PolicyError: where a policy has to have an audit, and it cannot be written.
        UserInputError: if there is no plan.
    """
    environment = with_rank_variables(os.environ)
    if plan is None:
        watched = loop_of_hydra(steps)
    else:
        watched = WatchedLoop(getattr(plan, "record", plan), steps=steps)
    watched.begin(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    try:
        yield watched
    except BaseException as error:
        watched.end(error)
        raise
    watched.end()


def loop_of_hydra(steps: int) -> WatchedLoop:
    """The loop of the Hydra application that was planned in this process.

    Raises:
        UserInputError: if none was.
    """
    plans = sys.modules.get("nest_megatron.integrations.hydra.plans")
    found = None if plans is None else plans.PLANS.latest
    if plans is None or found is None:
        raise UserInputError(
            "plan",
            None,
            "no Hydra application was planned in this process",
            "Give the plan, or start the application with +nest=auto.",
        )
    return WatchedLoop(found.plan, steps=steps, launch=plans.PLANS.launch, run=plans.PLANS.run)


def require_planned(plan: ParallelPlan, num_ranks: int) -> None:
    """Refuse a job of another size, or of other process groups where megatron-core has made any.

    Raises:
        NestError: if it is another layout than the plan's.
    """
    if num_ranks != plan.layout.num_gpus:
        raise UserInputError(
            "ranks",
            num_ranks,
            f"the plan is for {plan.layout.num_gpus}",
            "Plan for the ranks that run.",
        )
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        from nest_megatron.integrations.megatron_lm.ranks import compare_groups

        compare_groups(plan, state)


def _other_batch(plan: ParallelPlan) -> UserInputError | None:
    """An error for another batch than the plan's, or micro batch, where megatron-core knows it."""
    calculator: Any = sys.modules.get("megatron.core.num_microbatches_calculator")
    try:
        batch = calculator.get_current_global_batch_size(), calculator.get_num_microbatches()
    except AttributeError:  # there is none
        return None
    planned = plan.layout.global_batch_size, plan.layout.num_microbatches
    if batch == planned:
        return None
    return UserInputError(
        "batch",
        "{} sequences in {} micro batches".format(*batch),
        "the plan is for {} in {}".format(*planned),
        "Plan for the batch that runs.",
    )
