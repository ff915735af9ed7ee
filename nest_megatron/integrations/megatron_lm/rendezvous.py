"""The key-value store where the ranks of a job meet, and what must be the same on all of them.

Each operation of the store ends. Under torchrun the store is the agent's, which is there already;
elsewhere rank 0 hosts one where torch wants its own, which then is the same.
What must be the same is text that can be compared and shown.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import platform
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import arguments_of
from nest_megatron.plain import frozen
from nest_megatron.profile.installed import installed_versions
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

Result = TypeVar("Result")

#: Megatron's arguments that may differ from rank to rank; all others must not.
MAY_DIFFER = frozenset(arguments_of("may_differ"))
#: Of these, names that mean something else in other people's configurations (LoRA's ``rank``).
_OF_MEGATRON_ALONE = frozenset({"rank", "profile"})
ABSENT = "not set"
_DEEPEST = 8
_LONGEST_VALUE, _MOST_NAMES, _MOST_HOSTS = 160, 60, 6
_PLAIN = (type(None), bool, int, float, str)


def versions() -> dict[str, str]:
    """Versions that all ranks must share, by what a message calls them."""
    installed = installed_versions()
    major, minor, _ = platform.python_version_tuple()
    found = {"nest-megatron": __version__, "Python": f"{major}.{minor}"}
    for name in ("megatron_core", "torch", "transformer_engine"):
        found[name.replace("_", "-")] = installed.get(name, ABSENT)
    return {f"version of {name}": version for name, version in found.items()}


def comparable_fields(config: Any, may_differ: Collection[str] = ()) -> dict[str, str]:
    """The leaves of a configuration made of records and mappings, by their dotted names.

    Args:
        may_differ: more leaves that may differ by rank, by their last name, or whole dotted names
            of leaves and sections.
    """
    left_out = {*(MAY_DIFFER - _OF_MEGATRON_ALONE), *may_differ}
    return {
        path: text
        for path, text in _leaves(config, "", ())
        if path.rpartition(".")[2] not in left_out
        and not any(path == one or path.startswith(f"{one}.") for one in may_differ)
    }


def comparable_text(value: object, above: tuple[int, ...] = ()) -> str:
    """A value as text that is the same in every process that has an equal one.

    Objects are shown by their class and their own attributes, never by where they lie in memory.

    Args:
        above: what it is a part of, by ``id``.

    >>> comparable_text([None, 1e-4, "a", {"x", "y"}])
    "[None, 0.0001, 'a', {'x', 'y'}]"
    >>> comparable_text(Namespace(depth=2)), comparable_text(comparable_text)
    ('Namespace(depth=2)', 'nest_megatron.integrations.megatron_lm.rendezvous.comparable_text')
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if type(value) in _PLAIN:
        return repr(value)
    kind = type(value).__name__
    if id(value) in above or len(above) > _DEEPEST:
        return kind
    inside = (*above, id(value))

    def joined(parts: Mapping[Any, Any], pair: str) -> str:
        pairs = (pair.format(key, comparable_text(each, inside)) for key, each in parts.items())
        return ", ".join(sorted(pairs))

    if isinstance(value, Mapping):
        return f"{{{joined(value, '{!r}: {}')}}}"
    if isinstance(value, list | tuple | set | frozenset):
        texts = [comparable_text(item, inside) for item in value]
        is_list = isinstance(value, list | tuple)
        return f"[{', '.join(texts)}]" if is_list else f"{{{', '.join(sorted(texts))}}}"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a class or a function
        return f"{getattr(value, '__module__', '')}.{name}"
    if (attributes := _attributes(value)) is not None:
        return f"{kind}({joined(attributes, '{}={}')})"
    if isinstance(value, _PLAIN) or kind in ("dtype", "device", "timedelta", "Size"):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return kind if shape is None else f"{kind}({shape}, {dtype})"


def _attributes(value: object) -> Mapping[str, Any] | None:
    """What an object is made of; ``None`` for one that keeps it to itself, such as a tensor."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) and own and not hasattr(value, "dtype") else None


def _leaves(node: Any, name: str, above: tuple[int, ...]) -> Iterable[tuple[str, str]]:
    inside = node if isinstance(node, Mapping) else None
    if dataclasses.is_dataclass(node) or isinstance(node, SimpleNamespace):
        inside = _attributes(node)
    if not inside or id(node) in above or len(above) > _DEEPEST:
        yield name, comparable_text(node)
        return
    for key, value in inside.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key), (*above, id(node)))


#: What to do about ranks that were started differently.
ADVICE = (
    "Start all ranks with the same command in the same environment; an argument of your own that "
    "has to differ goes into nest.may_differ=[NAME]"
)


def differences(
    of_ranks: Mapping[int, Mapping[str, str]],
    hosts: Mapping[int, str],
    *,
    head: str = "the ranks were not started with the same job",
    advice: str = ADVICE,
) -> str:
    """What differs between ranks, one name a line, with who has which value."""
    lines = []
    for name in dict.fromkeys(itertools.chain.from_iterable(of_ranks.values())):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in of_ranks.items():
            ranks_of.setdefault(values.get(name, ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            shown = (
                f"{text[:_LONGEST_VALUE]}{'...' * (len(text) > _LONGEST_VALUE)} on "
                f"{rank_words(ranks, hosts)}"
                for text, ranks in ranks_of.items()
            )
            lines.append(f"\n  {name}: {'; '.join(shown)}")
    if len(lines) > _MOST_NAMES:
        lines[_MOST_NAMES:] = [f"\n  ... and {len(lines) - _MOST_NAMES} more"]
    return f"{head}:{''.join(lines)}\n{advice}"


def rank_words(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their hosts where these are known.

    >>> rank_words([0, 1, 2, 5], {0: "a", 1: "a", 2: "b", 5: "b"}), rank_words([3], {})
    ('ranks 0-2, 5 (a, b)', 'rank 3')
    """
    ranks = sorted(ranks)
    grouped = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    found = [[rank for _, rank in run] for _, run in grouped]
    runs = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
    known = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    shown = [*known[:_MOST_HOSTS], *(["..."] if len(known) > _MOST_HOSTS else [])]
    there = f" ({', '.join(shown)})" if shown else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(runs)}{there}"


#: Within this the store says that the time of a blocking request is over.
_ANSWER_S = 2.0
#: Variables that tell one attempt of one job from all others. Each agent counts restarts for
#: itself: one that joined late counts fewer than the others, so they tell attempts apart only where
#: these share its store.
_OF_ATTEMPT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "NEST_MEGATRON_PASSES",
)
_OF_AGENTS_STORE = "TORCHELASTIC_RESTART_COUNT"


class NoAgreementError(NestError):
    """A rank failed, sent no heartbeat or did not come, or ranks were started differently."""


class LostStoreError(NoAgreementError):
    """The store is gone."""


class SilentStoreError(LostStoreError):
    """The store is there and does not answer."""


@frozen
class RankContext:
    """Which rank of which job this process is, and how long it waits for others.

    Args:
        rendezvous_timeout_s: longest wait for another rank.
        planning_s: how long rank 0 may plan meanwhile.
        heartbeat_timeout_s: longest time without a heartbeat of a rank that is awaited, or without
            an answer of the store.
        port: of the store, where torchrun hosts none; ``MASTER_PORT`` if not given.
    """

    rank: int
    world_size: int
    environment: Mapping[str, str]
    rendezvous_timeout_s: Seconds = 600.0
    planning_s: Seconds = 0.0
    heartbeat_timeout_s: Seconds = 20.0
    port: int | None = None

    @property
    def agent_hosts_store(self) -> bool:
        """Whether torchrun's agent hosts the store at ``MASTER_ADDR:MASTER_PORT``."""
        return self.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def key(self) -> str:
        """A name for this attempt of this job, the same on all its ranks."""
        names = (*_OF_ATTEMPT, _OF_AGENTS_STORE) if self.agent_hosts_store else _OF_ATTEMPT
        words = [self.environment.get(name, "") for name in names]
        return hashlib.sha256("|".join([*words, str(self.world_size)]).encode()).hexdigest()[:16]


def within(limit_s: Seconds, work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, in a thread of its own, which ends with the process.

    Raises:
        TimeoutError: without words, if it takes longer.
    """
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(limit_s)


class TimedStore:
    """The store of a job, a ``torch.distributed.Store``, of which each operation has a deadline.

    A client of torch's ``TCPStore`` waits without end for a server that is stopped (SIGSTOP, a
    frozen host): its own timeout does not cover the answer to a request. Operations therefore run
    in threads of their own, one after another as they do on the client's one socket anyway, and
    whoever calls stops waiting.

    Attributes:
        server: who hosts the store and where, for errors.
        is_silent: an operation is still waiting for its answer.

    Raises:
        NoAgreementError: if rank 0's store cannot be found in time; from every method, if the store
            is lost or does not answer.
        UserInputError: if the port is not free on its host, or nothing says where that is.
    """

    server = "the store"

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.is_silent = False
        self._limit_s = context.heartbeat_timeout_s
        self._socket = threading.Lock()
        self._store = self._connect()

    def _connect(self) -> Any:
        """Torch's store under the job's own keys; where rank 0 hosts it, torch finds it later."""
        import torch

        context = self.context
        agent = context.agent_hosts_store
        limit_s = context.rendezvous_timeout_s
        places: dict[str, Any] = {
            "nest.port": None if agent else context.port,
            **context.environment,
        }
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in places:
                raise UserInputError(
                    name,
                    None,
                    f"{context.world_size} ranks meet there",
                    "Export rank 0's host and a free port there, as for any launch without "
                    "torchrun.",
                )
        name = "MASTER_PORT" if places["nest.port"] is None else "nest.port"
        address, port = places["MASTER_ADDR"], int(places[name])
        is_host = not (agent or context.rank)
        host = "torchrun's agent" if agent else "rank 0"
        self.server = f"the store of {host} at {address}:{port}"

        def make() -> Any:
            ended = time.monotonic() + limit_s
            while True:
                left = timedelta(seconds=max(1.0, ended - time.monotonic()))
                server = torch.distributed.TCPStore(
                    address,
                    port,
                    world_size=context.world_size,
                    is_master=is_host,
                    wait_for_workers=False,
                    multi_tenant=True,
                    timeout=left,
                )
                store = torch.distributed.PrefixStore(f"nest/{context.key}", server)
                if is_host:
                    store.set("hello", "yes")
                if is_host or agent:
                    return store
                try:
                    store.wait(["hello"], left)
                    return store
                except torch.distributed.DistError:  # of an attempt that ends: the next one comes
                    if time.monotonic() > ended:
                        raise

        try:
            return self._answer(make, limit_s + 1.0)  # torch's own end of a connection comes first
        except LostStoreError as error:
            if agent:
                raise
            if is_host:
                raise UserInputError(
                    name,
                    port,
                    f"it is not free on rank 0's host ({socket.gethostname()})",
                    "Give a free one with nest.port, or launch with torchrun.",
                ) from error
            taken = f"; port {port} belongs to another program there, or rank 0 is stopped"
            raise NoAgreementError(
                f"rank 0 did not appear at {address} within {limit_s:g} s"
                f"{taken if isinstance(error, SilentStoreError) else ''}. Look at rank "
                "0's own output: it may have ended, or was started without +nest or with another "
                "nest.port, MASTER_ADDR or MASTER_PORT"
            ) from error

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the store returns; bytes come as text."""
        return self._answer(lambda: getattr(self._store, method)(*arguments), self._limit_s)

    def wait_for(self, key: str, limit_s: Seconds) -> str | None:
        """Block until a key has a value; ``None`` if it has none after a time."""

        def blocking() -> Any:
            self._store.wait([key], timedelta(seconds=limit_s))
            return self._store.get(key)

        started = time.monotonic()
        try:
            value: str = self._answer(blocking, max(limit_s, self._limit_s), _ANSWER_S)
        except LostStoreError as error:
            if isinstance(error, SilentStoreError) or time.monotonic() - started < limit_s:
                raise
            return None
        return value

    def _answer(self, operation: Callable[[], Any], limit_s: Seconds, more_s: Seconds = 0.0) -> Any:
        import torch

        def work() -> Any:
            with self._socket:
                return operation()

        try:
            found = within(0 if self.is_silent else limit_s + more_s, work)
        except TimeoutError:
            self.is_silent = True
            raise SilentStoreError(
                f"{self.server} has not answered for {limit_s:g} s: the process is stopped, its "
                "host is frozen, or the network between them is down"
            ) from None
        except torch.distributed.DistError as error:
            raise LostStoreError(
                f"the connection to {self.server} was lost; that process has ended, and its own "
                "output says why"
            ) from error
        return found.decode() if isinstance(found, bytes) else found
