"""A job that was started with ``+nest=...``, from its command line to its process groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_megatron.config.launch import LaunchWords
from nest_megatron.config.schema import LaunchConfig
from nest_megatron.integrations.megatron_lm.messages import Decision
from nest_megatron.integrations.megatron_lm.ranks import Rendezvous


@dataclass(slots=True, kw_only=True)
class LaunchedJob:
    """This process's part in it.

    Args:
        argv: the script's own arguments.
        rendezvous: where the ranks meet.
        decision: what rank 0 decided, once it has.
        groups_checked: Megatron's process groups were compared with the plan's.
    """

    words: LaunchWords
    launch: LaunchConfig
    script: str
    argv: tuple[str, ...]
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    decision: Decision | None = None
    groups_checked: bool = False
