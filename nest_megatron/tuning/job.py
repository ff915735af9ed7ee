"""The job that is tuned: what the user's command is, and its plans as files and commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.errors import UserInputError
from nest_megatron.files import now
from nest_megatron.integrations.typed_command import command_of_plan, read_request
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import require_allowed
from nest_megatron.planner import Progress, Ranked, ranked
from nest_megatron.planner.choice import Candidate
from nest_megatron.planner.pins import TUNE, Pin, PinnedPlan, write_pinned
from nest_megatron.report.failure import require_plan
from nest_megatron.tuning.command import RunCommand, run_command
from nest_megatron.tuning.session import TuneRequest
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

#: Layouts that are compared, the plan among them.
_LAYOUTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedJob:
    """A job read from a command, and the plans that could be its fastest."""

    job: Job
    composed: Settings
    ranked: Ranked

    def plan(self, candidate: Candidate) -> ParallelPlan:
        """A candidate as a plan with its command.

        Raises:
            NestError: if Megatron, the checkpoint that is loaded, or a policy would refuse it.
        """
        found, request = self.ranked.plan(candidate), self.ranked.request
        require_allowed(found, request.policy)
        return command_of_plan(self.job, request, self.composed, found).plan

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the whole job, where its command says so."""
        assert self.job.command is not None
        values = self.job.command.values
        if values.get("train_iters"):
            return int(values["train_iters"])
        samples = values.get("train_samples")
        return int(samples) // self.ranked.request.global_batch_size if samples else None

    def command(
        self, plan: ParallelPlan, pinned: Path, iterations: int, history: Path
    ) -> RunCommand:
        """What starts a short run of a plan, whose file is written."""
        assert self.job.command is not None
        made = Pin(
            created=now(),
            by=TUNE,
            note="a short run",
            nest_megatron_version=__version__,
            megatron_lm=self.job.version,
        )
        write_pinned(PinnedPlan(pin=made, plan=plan), pinned)
        return run_command(self.job.command, plan, pinned, iterations, history)


def read_tuned(
    started: TuneRequest,
    composed: Settings,
    begun_s: Seconds | None = None,
    on_progress: Progress | None = None,
    trials: Collection[str] = (),
) -> TunedJob:
    """Read a command and rank its plans.

    Args:
        trials: ids of the tuning's own runs, which a calibration of the site may hold since then
            and would count twice.
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.

    Raises:
        NothingFitsError: if no plan is predicted to fit in memory.
        UserInputError: for a command that cannot be read or planned.
    """
    names = [name for name in started.free.split(",") if name.strip()]
    job, request = read_request(
        started.command, composed, free=names, version=started.megatron_version
    )
    if job.command is None:
        raise UserInputError(
            "--from",
            job.script,
            "a run is a Megatron-LM command",
            "Measure the recipe's plans by hand.",
        )
    if job.batch_schedule is not None:
        raise UserInputError(
            "--from",
            "--rampup-batch-size",
            "the batch grows, so that the first steps are not those that are planned for",
            "Leave --rampup-batch-size out to tune at the batch where it ends.",
        )
    if "search.num_alternatives" not in composed.given:
        request = dataclasses.replace(request, num_alternatives=_LAYOUTS - 1)
    site = None if request.site is None else request.site.without(trials)
    request = dataclasses.replace(request, begun_s=begun_s, site=site)
    found = require_plan(ranked(request, on_progress), request.notes)
    return TunedJob(job=job, composed=composed, ranked=found)
