"""The job that is tuned: the user's command, its plans as files and as commands of short runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from nest_megatron.cluster.placement import torchrun_words
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.errors import UserInputError
from nest_megatron.files import now
from nest_megatron.history.store import VARIABLE
from nest_megatron.integrations.launchers import TORCHRUN
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.changed_command import short_run
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import command_of_plan, read_request
from nest_megatron.layout.plan import ParallelPlan, launch_size, script_words
from nest_megatron.layout.policy import require_allowed
from nest_megatron.plain import frozen
from nest_megatron.planner import Progress, Ranked, ranked
from nest_megatron.planner.choice import Candidate
from nest_megatron.planner.pins import TUNE, Pin, PinnedPlan, write_pinned
from nest_megatron.report.failure import require_plan
from nest_megatron.tuning.session import TuneRequest
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

#: Options of torchrun that say where its agents meet.
_MEETING = ("--standalone", "--rdzv", "--master-addr", "--master-port")


@frozen
class RunCommand:
    """What starts a run, in parts that launchers put together.

    Args:
        launcher: what the user starts the script with (``torchrun ...``, ``srun python``).
        script: the training script, or ``-m`` and a module.
        argv: its arguments, ours among them.
        environment: variables to set, or, where ``None``, not to set.
    """

    launcher: tuple[str, ...]
    script: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    num_nodes: int
    gpus_per_node: int

    def words(self, *meeting: str) -> list[str]:
        """The whole command, as it is started on one host; ``meeting`` are options of torchrun."""
        return [*self.launcher, *meeting, *self.script, *self.argv]

    def variables(self) -> dict[str, str]:
        """The environment of the process that is started."""
        merged = {**os.environ, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def starts_ranks(self) -> bool:
        """Whether the user's launcher starts ranks on every host (``srun``, ``mpirun``)."""
        return bool(self.launcher) and not self.is_torchrun and not _is_python(self.launcher[0])

    @property
    def is_torchrun(self) -> bool:
        """Whether the first program of the command is torchrun."""
        return is_torchrun(self.launcher)

    @property
    def meets_nowhere(self) -> bool:
        """Whether it is torchrun, and no option says where its agents meet."""
        return self.is_torchrun and not _has_option(self.launcher, *_MEETING)


def is_torchrun(launcher: tuple[str, ...]) -> bool:
    """Whether a launcher's first program is torchrun.

    >>> is_torchrun(("python", "-m", "torch.distributed.run", "--nnodes", "2"))
    True
    >>> is_torchrun(("srun", "torchrun", "--nnodes", "2"))
    False
    """
    first = launcher[0].rpartition("/")[2] if launcher else ""
    return first in TORCHRUN or (_is_python(first) and any(t in launcher for t in TORCHRUN))


def _is_python(word: str) -> bool:
    return word.rpartition("/")[2].startswith("python")


def _has_option(launcher: tuple[str, ...], *names: str) -> bool:
    return any(word.replace("_", "-").startswith(names) for word in launcher)


#: Layouts that are compared, the plan among them.
_LAYOUTS = 24


@frozen
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
        """What starts a short run of a plan; the flags of the plan are those of its ``launch``.

        Args:
            pinned: the plan's file, which is written.
            iterations: steps to watch; one more begins, which ends the last of them.
            history: the file that the run's record is added to.

        Raises:
            UserInputError: for a command without a script, or a job that cannot be run for a while.
        """
        command = self.job.command
        assert command is not None
        made = Pin(
            created=now(),
            by=TUNE,
            note="a short run",
            nest_megatron_version=__version__,
            megatron_lm=self.job.version,
        )
        write_pinned(PinnedPlan(pin=made, plan=plan), pinned)
        if not command.script:
            raise UserInputError(
                "--from",
                " ".join(command.argv[:4]),
                "it has no training script, so it cannot be started",
                "Give the whole command: torchrun ... pretrain_gpt.py <flags>.",
            )
        launch = plan.launch[LAUNCHER]
        ours = ("+nest=pinned", f"nest.plan={pinned}", f"nest.watch={iterations}")
        num_nodes, per_node = launch_size(plan)
        launcher = command.launcher or tuple(torchrun_words(num_nodes, per_node))
        if is_torchrun(launcher) and _has_option(launcher, "--max-restarts"):
            launcher = (*launcher, "--max-restarts=0")  # a run that fails would fail again
        return RunCommand(
            launcher=launcher,
            script=script_words(command.script),
            argv=(*short_run(launch.argv, command.version, iterations + 1), *ours),
            environment={**command.environment, **launch.environment, VARIABLE: str(history)},
            num_nodes=num_nodes,
            gpus_per_node=per_node,
        )


def read_tuned(
    started: TuneRequest,
    composed: Settings,
    begun_s: Seconds | None = None,
    on_progress: Progress | None = None,
    trials: Collection[str] = (),
) -> TunedJob:
    """Read a command and rank its plans.

    Args:
        trials: ids of the tuning's runs, which a calibration of the site may hold since then
            and would count twice.
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.

    Raises:
        NothingFitsError: if no plan is predicted to fit in memory.
        UserInputError: for a command that cannot be read or planned.
    """
    if composed.out is not None:
        limit = "the plan is written into the folder of the runs"
        raise UserInputError("out", composed.out, limit, "Name that folder with --out.")
    names = tuple(name for name in started.free.split(",") if name.strip())
    typed = TypedCommand(text=started.command, free=names, version=started.megatron_version)
    job, request = read_request(typed, composed)
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
