"""The ranks of a job that is about to be planned: how they meet, and how they end together."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.config.launch import LaunchWords, read_launch
from nest_megatron.errors import exit_code_of, settings_typed_as
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore, connect
from nest_megatron.report.failure import ending_on_errors, is_first_of_host
from nest_megatron.units import Seconds

#: Our own words that only one rank reads.
_OF_ONE_RANK = ("out",)
#: ``search.max_seconds`` of hydra_configs/plan.yaml.
_PLANNING_S = 60.0


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """Where this process meets the other ranks, once it does; kept, since rank 0 may host it."""

    store: RendezvousStore | None = None

    def join(
        self, rank: int, world_size: int, words: LaunchWords, timeout_s: Seconds
    ) -> RendezvousStore:
        """Meet the other ranks.

        Args:
            words: the command's own.
            timeout_s: longest wait for them where the user names none.

        Raises:
            NestError: if rank 0 is not found.
        """
        launch = read_launch(words)
        context = RankContext(
            rank=rank,
            world_size=world_size,
            environment=dict(os.environ),
            rendezvous_timeout_s=launch.rendezvous_timeout_s or timeout_s,
            planning_s=_planning_s(words),
            heartbeat_timeout_s=launch.heartbeat_timeout_s,
            port=launch.port,
        )
        self.store = connect(context)
        return self.store

    def prints_errors(self) -> bool:
        """Whether this rank says why it ends: one of each host, or each where none knows its own.

        Without a launcher every rank has a terminal or a log file to itself.
        """
        if self.store is None:
            return is_first_of_host()
        started_alone = not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys()
        return started_alone or self.store.prints_errors()


@contextlib.contextmanager
def ending_together(rendezvous: Rendezvous) -> Iterator[None]:
    """End the process on any error inside, once every rank has said why.

    A launcher ends all processes of a host as soon as one has gone, and whoever is to print the
    reason may not have read it yet.
    """
    try:
        with settings_typed_as("nest."), ending_on_errors(rendezvous.prints_errors):
            yield
    except SystemExit as end:
        if rendezvous.store is not None:
            rendezvous.store.exit_together()
            if rendezvous.store.store.is_silent:  # its thread is in C++, and must not come back now
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(exit_code_of(end))
        raise
    if rendezvous.store is not None:
        rendezvous.store.stop_heartbeat()


def words_of(words: LaunchWords) -> dict[str, str]:
    """Our own words of a command, which all ranks must share, as they are typed."""
    settings = [*words.launch, *words.job]
    return {
        "+nest": words.mode.value,
        **{f"nest.{s.key}": str(s.value) for s in settings if s.key not in _OF_ONE_RANK},
    }


def _planning_s(words: LaunchWords) -> Seconds:
    """How long rank 0 may plan; said in the command itself, so that no other rank composes it."""
    said = [s.value for s in words.job if s.key == "search.max_seconds" and s.value is not None]
    with contextlib.suppress(ValueError):  # rank 0 says what is wrong with it
        return float(said[-1].strip("'\"")) if said else _PLANNING_S
    return _PLANNING_S
