"""The ranks of a job that is about to be planned: how they meet, and how they end together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.cluster.hosts import Host, this_host
from nest_megatron.config.cluster_detection import JobCluster, find_cluster
from nest_megatron.config.launch import LaunchWords, MixedGpus
from nest_megatron.config.schema import LaunchConfig
from nest_megatron.errors import exit_code_of, settings_typed_as
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore, connect, gather
from nest_megatron.integrations.megatron_lm.planning import Decision
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.layout.diff import Change
from nest_megatron.plain import from_plain
from nest_megatron.report.failure import ending_on_errors, is_first_of_host
from nest_megatron.units import Seconds

#: ``search.max_seconds`` of hydra_configs/plan.yaml.
_PLANNING_S = 60.0
#: Longest that a host may take to say what it has once rank 0 has: NVML and one short program.
_HOST_S: Seconds = 120.0


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """Where this process meets the other ranks, once it does; kept, since rank 0 may host it."""

    store: RendezvousStore | None = None

    def prints_errors(self) -> bool:
        """Whether this rank says why it ends: one of each host, or each that was started alone."""
        if self.store is None:
            return is_first_of_host()
        started_alone = not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys()
        return started_alone or self.store.prints_errors

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """End the process on any error inside, once every rank has said why.

        A launcher ends all processes of a host as soon as one has gone, and whoever is to print the
        reason may not have read it yet.
        """
        try:
            with settings_typed_as("nest."), ending_on_errors(self.prints_errors):
                yield
        except SystemExit as end:
            if self.store is not None:
                self.store.exit_together()
                if self.store.store.is_silent:  # its thread is in C++, and must not come back now
                    for stream in (sys.stdout, sys.stderr):
                        stream.flush()
                    os._exit(exit_code_of(end))
            raise
        if self.store is not None:
            self.store.stop_heartbeat()


def job_hosts(store: RendezvousStore | None) -> tuple[Host, ...]:
    """The hosts of the job in the order of their first ranks, on rank 0; nothing elsewhere.

    One rank of each host says what it has; a process without other ranks has nobody to tell.

    Raises:
        NoAgreementError: if a rank does not come.
    """
    if store is None:
        return ()

    def own_host() -> Host | None:
        # by the name that ranks have for their hosts
        return this_host(socket.gethostname()) if is_first_of_host() else None

    parts = gather(store, own_host, what="hosts", limit_s=_HOST_S)
    found = [from_plain(Host, part, "host:") for part in parts if part]
    return tuple({host.name: host for host in reversed(found)}.values())[::-1]


def words_of(words: LaunchWords) -> dict[str, str]:
    """Our own words of a command, which all ranks must share, as they are typed."""
    settings = [s for s in (*words.launch, *words.job) if s.key != "out"]  # rank 0 alone reads it
    return {"+nest": words.mode.value, **{f"nest.{s.key}": str(s.value) for s in settings}}


def last_value(words: LaunchWords, key: str) -> str | None:
    """What a command itself says of a setting of the planning job, so that all its ranks know."""
    said = [s.value for s in words.job if s.key == key and s.value is not None]
    return said[-1] if said else None


@dataclass(slots=True, kw_only=True)
class LaunchedJob:
    """This process's part in it.

    Args:
        args: Megatron's arguments, once it has parsed them.
        defaults: what the script sets where the user says nothing.
        validate: Megatron's own ``validate_args``.
        decision: what rank 0 decided, once it has.
        changes: what the plan changed of the job's flags, on the rank that planned it.
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
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    decision: Decision | None = None
    changes: tuple[Change, ...] = ()
    signer: str | None = None
    recorder: Recorder | None = None
    hosts: tuple[Host, ...] = ()
    groups_checked: bool = False

    def find_place(self, num_ranks: int) -> JobCluster:
        """Where the job runs: as ``nest.cluster`` names it, or as it is found."""
        hosts = self.hosts
        if self.launch.ranks != "by_host":  # then it is not known which ranks are near
            hosts = tuple(dataclasses.replace(host, groups=()) for host in hosts)
        return find_cluster(
            self.words.job,
            num_ranks,
            os.environ,
            dry_run=self.launch.dry_run,
            hosts=hosts,
            mixed=MixedGpus(self.launch.mixed_gpus),
        )

    @property
    def store(self) -> RendezvousStore | None:
        """Where the ranks have met, if there are several."""
        return self.rendezvous.store

    def join(self, timeout_s: Seconds) -> None:
        """Meet the other ranks, for at most ``timeout_s`` where the user names no other time."""
        planning_s = _PLANNING_S
        with contextlib.suppress(ValueError):  # rank 0 says what is wrong with it
            planning_s = float((last_value(self.words, "search.max_seconds") or "").strip("'\""))
        self.rendezvous.store = connect(
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
