"""The ranks of a job: how they meet, which process is which, how they record and end together.

The functions of the loop are those of core_v0.16.1 and 0.20, and of Megatron-Bridge 0.3 and 0.5.
Megatron's own timers of passes (``--timing-log-level 2``) synchronize the device twice a pass;
``forward_step`` and ``backward_step``, which they surround, are timed by events instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any

from nest_megatron.cluster.hosts import Host, this_host
from nest_megatron.cluster.placement import network_order
from nest_megatron.config.launch import LaunchWords, Mode, read_launch, read_words
from nest_megatron.config.schema import LaunchConfig
from nest_megatron.errors import OK, NestError, UserInputError, exit_code_of, settings_typed_as
from nest_megatron.history.records import Launch
from nest_megatron.integrations.megatron_lm.agreement import (
    Hosts,
    RendezvousStore,
    broadcast,
    gather,
    propagating_errors,
    require_equal,
)
from nest_megatron.integrations.megatron_lm.planning import Decision
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext, versions
from nest_megatron.integrations.process_variables import set_rank_variables
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.integrations.run_record import auditing_refusals, changed_flags, figures
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from nest_megatron.plain import from_plain
from nest_megatron.report.failure import ending_on_errors, is_first_of_host
from nest_megatron.units import Seconds

#: ``search.max_seconds`` of hydra_configs/plan.yaml.
_PLANNING_S = 60.0
#: Longest that a host may take to say what it has once rank 0 has: NVML and one short program.
_HOST_S: Seconds = 120.0


def job_hosts(store: RendezvousStore | None) -> tuple[Host, ...]:
    """The hosts of the job in the order of their first ranks, on rank 0; nothing elsewhere.

    One rank of each host says what it has; a process without other ranks has nobody to tell.

    Raises:
        NoAgreementError: if a rank does not come.
    """
    if store is None:
        return ()

    # by the name that ranks have for their hosts
    parts = gather(
        store,
        lambda: this_host(socket.gethostname()) if is_first_of_host() else None,
        what="hosts",
        limit_s=_HOST_S,
    )
    found = [from_plain(Host, part, "host:") for part in parts if part]
    return tuple({host.name: host for host in reversed(found)}.values())[::-1]


@dataclass(slots=True, kw_only=True)
class LaunchedJob:
    """This process's part in a job that plans itself.

    Args:
        args: Megatron's arguments once it has parsed them; of a recipe this rank and their number.
        defaults: what the script sets where the user says nothing.
        validate: Megatron's own ``validate_args``.
        store: where the ranks have met, if there are several; kept, since rank 0 may host it.
        decision: what rank 0 decided, once it has.
        changes: what the plan changed of the job's flags or fields, on the rank that planned it.
        signer: id of the trusted key that signed the plan, there.
        recorder: of this rank, once training may begin.
        hosts: of the job, on rank 0, where several ranks met.
    """

    words: LaunchWords
    launch: LaunchConfig
    script: str
    argv: tuple[str, ...]
    args: Namespace = field(default_factory=Namespace)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    validate: Callable[..., Any] | None = None
    store: RendezvousStore | None = None
    decision: Decision | None = None
    changes: tuple[Change, ...] = ()
    signer: str | None = None
    recorder: Recorder | None = None
    hosts: tuple[Host, ...] = ()
    groups_checked: bool = False

    def run(
        self,
        comparable: Callable[[], Mapping[str, str]],
        decide: Callable[[Hosts], Decision],
        write: Callable[[Decision], Any],
        finish: Callable[[], None],
        *,
        what: str,
        measure: Callable[[], None] | None = None,
    ) -> Any:
        """Plan on rank 0, and write the plan into the job on every rank.

        Args:
            comparable: what must be the same on all ranks, by the name that a user knows.
            decide: the plan, on the rank that decides for all.
            write: writes it on this rank; what its framework's own function returns.
            finish: what every rank does once all have the same.
            what: what is compared, for errors.
            measure: times layers, on every rank.

        Raises:
            NestError: if no plan can be made or written; nothing has touched a GPU then.
        """
        launch = self.launch
        args = self.args
        is_fake = getattr(args, "fake_process_group", False)  # none in 0.15
        if args.world_size > 1 and "RANK" in os.environ and not (launch.dry_run or is_fake):
            self.join(60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10))
        store = self.store

        def solve(hosts: Hosts) -> Decision:
            # what is not to train is no launch
            if launch.dry_run or launch.stop_before_training:
                return decide(hosts)
            with auditing_refusals(self.words.mode.value, launch.plan, args.world_size):
                return decide(hosts)

        with propagating_errors(store):
            self.require_same_command(comparable())
            if measure is not None:
                measure()
            self.decision = decision = from_plain(Decision, broadcast(store, solve))
            if launch.stop_before_training:
                require_equal(store, {"plan": plan_file.checksum(decision.plan)}, what="plan")
                sys.exit(OK)  # no rank ends before the others
            result = write(decision)
            require_equal(store, comparable(), what=what)
            finish()
            return result

    def prints_errors(self) -> bool:
        """Whether this rank says why it ends: one of each host, or each that was started alone."""
        if self.store is None:
            return is_first_of_host()
        return not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys() or self.store.prints_errors

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """End the process on any error inside, once every rank has said why.

        A launcher ends all processes of a host as soon as one has gone, and whoever is to print the
        reason may not have read it yet.
        """
        try:
            with settings_typed_as("nest.{}".format), ending_on_errors(self.prints_errors):
                yield
        except SystemExit as end:
            if self.store is not None:
                self.store.exit_together()
                if self.store.is_silent:  # its thread is in C++, and must not come back now
                    for stream in (sys.stdout, sys.stderr):
                        stream.flush()
                    os._exit(exit_code_of(end))
            raise

    def last_value(self, key: str) -> str | None:
        """What the command itself says of a setting, so that all its ranks know."""
        values = (each.value for each in reversed(self.words.job) if each.key == key)
        return next((value for value in values if value is not None), None)

    @property
    def unordered_hosts(self) -> tuple[Host, ...]:
        """The hosts where it is not known which of them are near."""
        return tuple(replace(host, groups=()) for host in self.hosts)

    def require_same_command(self, own: Mapping[str, str]) -> None:
        """Return once all ranks have come with the same command and versions; rank 0 has the hosts.

        Args:
            own: what else must be the same, by the name that a user knows.

        Raises:
            NoAgreementError: if any differs, or does not come.
        """
        settings = (*self.words.launch, *self.words.job)
        words = {"+nest": self.words.mode.value} | {  # rank 0 alone reads nest.out
            f"nest.{each.key}": str(each.value) for each in settings if each.key != "out"
        }
        require_equal(self.store, {**versions(), **words, **own}, what="command")
        self.hosts = job_hosts(self.store)

    def join(self, timeout_s: Seconds) -> None:
        """Meet the other ranks, for at most ``timeout_s`` where the user names no other time."""
        planning_s = _PLANNING_S
        with contextlib.suppress(ValueError):  # rank 0 says what is wrong with it
            planning_s = float((self.last_value("search.max_seconds") or "").strip("'\""))
        self.store = RendezvousStore(
            RankContext(
                rank=self.args.rank,
                world_size=self.args.world_size,
                environment=dict(os.environ),
                rendezvous_timeout_s=self.launch.rendezvous_timeout_s or timeout_s,
                planning_s=planning_s,
                heartbeat_timeout_s=self.launch.heartbeat_timeout_s,
                port=self.launch.port,
            )
        )

    def begin_record(self) -> None:
        """Begin the record of a job that is about to train; every rank comes here.

        Raises:
            PolicyError: where a policy has to have an audit, and it cannot be written.
        """
        decision = self.decision
        assert decision is not None
        self.recorder = Recorder(
            steps=self.launch.watch.steps,
            rank=self.args.rank,
            num_ranks=self.args.world_size,
            store=self.store,
            plan=decision.plan,
            prometheus=self.launch.watch.prometheus,
        )
        launch = Launch(
            mode=self.words.mode.value, signer=self.signer, changes=changed_flags(self.changes)
        )
        self.recorder.begin(launch, order=decision.ranks)
        if self.store is not None:
            self.store.stop_heartbeat()


def launched_job(words: Sequence[str]) -> LaunchedJob | None:
    """The job of this process, whose command has these words; ``None`` for ``+nest=off``."""
    with settings_typed_as("nest.{}".format), ending_on_errors():
        read = read_words(words)
        launch = read_launch(read)
        if read.mode is Mode.OFF:
            return None
        set_rank_variables()
        script, *argv = sys.argv
        return LaunchedJob(words=read, launch=launch, script=script, argv=tuple(argv))


class Watch:
    """Megatron's training loop with the recorder of a job in it.

    Args:
        training: the module whose ``train_step`` this takes the place of.
        job_of: the job, once there is one.
    """

    def __init__(self, training: ModuleType, job_of: Callable[[], LaunchedJob | None]) -> None:
        self._training = training
        self._job_of = job_of

    def pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The whole of training; what ends it is kept."""
        ended: BaseException | None = None
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            ended = error
            raise
        finally:
            if (job := self._job_of()) is not None and job.recorder is not None:
                job.recorder.end(ended)

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step; of a batch that grows, one of the size that the plan is for."""
        job = self._job_of()
        recording = None if job is None else job.recorder
        if job is None or recording is None or not recording.steps:
            return original(*args, **kwargs)
        if job.decision is not None and job.decision.plan.train.batch_schedule is not None:
            from megatron.core.num_microbatches_calculator import get_current_global_batch_size

            if get_current_global_batch_size() != job.decision.plan.layout.global_batch_size:
                return original(*args, **kwargs)
        was_done = recording.is_done
        with recording.step():
            if recording.is_done != was_done:
                self._training.train_step = original  # type: ignore[attr-defined]
                _log(recording, getattr(job.args, "curr_iteration", 0))
            return original(*args, **kwargs)


def _log(recording: Recorder, iteration: int) -> None:
    """Tell the job's TensorBoard and Weights & Biases, which Megatron-LM opens on the last rank."""
    with recording.reporting_errors("logged"):
        global_vars = sys.modules.get("megatron.training.global_vars")
        board, wandb = (
            getattr(global_vars, f"get_{name}_writer", lambda: None)()
            for name in ("tensorboard", "wandb")
        )
        if board is wandb or recording.measured is None or (run := recording.run()) is None:
            return
        values = figures(run, recording.measured)
        if board is not None:
            for name, value in values.items():
                board.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(values, iteration)


#: Megatron's function for each kind of group; the last two are those of experts.
_GETTERS = {
    GroupKind.TP: "get_tensor_model_parallel_group",
    GroupKind.CP: "get_context_parallel_group",
    GroupKind.PP: "get_pipeline_model_parallel_group",
    GroupKind.DP_CP: "get_data_parallel_group",
    GroupKind.EP: "get_expert_model_parallel_group",
    GroupKind.EDP: "get_expert_data_parallel_group",
}


def ranks_by_host(
    hosts: Sequence[str], groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[int, ...] | None:
    """New global ranks that keep the ranks of each host together; ``None`` if they already are.

    Args:
        groups: switches above each host, innermost first, whose hosts stay together as well.

    >>> ranks_by_host(["a", "b", "a", "b"]), ranks_by_host(["a", "a", "b", "b"])
    ((0, 2, 1, 3), None)
    >>> ranks_by_host(["a", "b", "c"], {"a": ("s1",), "b": ("s2",), "c": ("s1",)})
    (0, 2, 1)
    """
    names = list(dict.fromkeys(hosts))
    in_order = network_order([groups.get(name, ()) for name in names])
    order = {names[host]: place for place, host in enumerate(in_order)}
    launched = sorted(range(len(hosts)), key=lambda rank: order[hosts[rank]])
    if launched == list(range(len(hosts))):
        return None
    return tuple(sorted(range(len(hosts)), key=launched.__getitem__))


def check_permutation(ranks: Sequence[int], world_size: int, *, zero_may_move: bool) -> None:
    """Raise for a list that is no permutation, or moves rank 0 where it hosts the store of all."""
    if sorted(ranks) != list(range(world_size)):
        limit = f"it names each of the ranks 0 to {world_size - 1} once"
        fix = "Correct the list, or use by_host."
    elif ranks[0] != 0 and not zero_may_move:
        limit = "global rank 0 hosts the store at MASTER_ADDR and cannot move"
        fix = "Begin the list with 0, or launch with torchrun."
    else:
        return
    raise UserInputError("nest.ranks", list(ranks)[:16], limit, fix)


def compare_groups(plan: ParallelPlan, parallel_state: ModuleType) -> None:
    """Raise for the first process group that Megatron made otherwise than planned.

    Args:
        parallel_state: ``megatron.core.parallel_state`` after ``initialize_model_parallel``.
    """
    import torch

    rank = torch.distributed.get_rank()
    # megatron-core before 0.10, which NeMo 1 runs on, makes the experts' groups in another way
    has_experts = plan.model.is_moe and hasattr(parallel_state, "get_expert_data_parallel_group")
    for kind, name in _GETTERS.items():
        if kind in (GroupKind.EP, GroupKind.EDP) and not has_experts:
            continue
        options = {"with_context_parallel": True} if kind is GroupKind.DP_CP else {}
        group = getattr(parallel_state, name)(**options)
        made = [int(member) for member in torch.distributed.get_process_group_ranks(group)]
        planned = group_of_rank(plan.layout.dims, kind, rank)
        if sorted(made) != sorted(planned):
            raise NestError(
                f"rank {rank}: Megatron's {kind.value} group is {made[:16]}, the plan's is "
                f"{list(planned)[:16]}. Either the program did not take all of the plan's degrees, "
                "or this Megatron numbers its ranks in another way; launch without nest and "
                "report it."
            )
