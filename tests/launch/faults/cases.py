"""Every way in which a job of several ranks was tried to break, and how it must end."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tests.launch.faults.ranks import NUM_RANKS, Launcher

#: Short deadlines, for tests; those of a job are 20 s and --distributed-timeout-minutes.
HEARTBEAT_S, RENDEZVOUS_S = 8, 30
#: Those where nothing is awaited in vain.
LONG_HEARTBEAT_S, LONG_RENDEZVOUS_S = 120, 200
BOTH = (Launcher.TORCHRUN, Launcher.BY_HAND)
ALONE = (Launcher.COMMAND,)
#: torchrun ends all other ranks at once, and says which one was killed.
_OF_TORCHRUN = r"exitcode\s*: -9"
_TALK = "2 s + grace period"
_SILENCE = "heartbeat + grace period"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to break a job.

    Args:
        what: what was done, in words.
        fault: for ``faulty_rank.py``.
        said: what every rank that can still speak prints (a regular expression).
        trains: whether the job goes on; otherwise every process ends with a code other than 0.
        bound: how long after the fault the ranks end at the latest, in the words of the page.
        words: of the command, besides ``+nest=auto``.
        silent: ranks that cannot say it, or have no part in it.
        special: a case that ``test_reliability`` sets up itself.
        on_megatron: whether it is also tried on Megatron-LM's own script, which takes a minute.
    """

    name: str
    what: str
    said: str
    fault: str = ""
    trains: bool = False
    bound: str = ""
    launchers: tuple[Launcher, ...] = BOTH
    words: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    special: str = ""
    on_megatron: bool = False
    rendezvous_s: int = LONG_RENDEZVOUS_S

    @property
    def heartbeat_s(self) -> int:
        """Short where silence is the matter; elsewhere a busy machine must not be taken for it."""
        is_short = any(word in self.name for word in ("killed", "stopped", "slow"))
        return HEARTBEAT_S if is_short else LONG_HEARTBEAT_S

    @property
    def identifier(self) -> str:
        """The name as part of a test's."""
        return re.sub(r"\W+", "-", self.name)


JOB_ENDS = r"\n?nest: rank \d stops before training"
CASES = (
    Case(
        name="rank 0 killed",
        what="rank 0 is killed (SIGKILL) while it plans",
        fault="0:plan:kill",
        said=r"connection to the store of rank 0 .* was lost|no heartbeat from rank 0|"
        + _OF_TORCHRUN,
        bound=_SILENCE,
        silent=(0,),
    ),
    Case(
        name="rank 1 killed",
        what="rank 1 is killed (SIGKILL) once it has the plan",
        fault="1:validate:kill",
        said=rf"no heartbeat from rank 1 \(\S+\) for 8 s|{_OF_TORCHRUN}",
        bound=_SILENCE,
        silent=(1,),
    ),
    Case(
        name="rank 0 stopped",
        on_megatron=True,
        what="rank 0 is stopped (SIGSTOP) while it plans; by hand it hosts the store",
        fault="0:plan:stop",
        said=r"has not answered for 8 s: the process is stopped|no heartbeat from rank 0",
        bound=_SILENCE,
        silent=(0,),
    ),
    Case(
        name="rank 1 stopped",
        what="rank 1 is stopped (SIGSTOP) once it has the plan",
        fault="1:validate:stop",
        said=r"no heartbeat from rank 1 \(\S+\) for 8 s",
        bound=_SILENCE,
        silent=(1,),
    ),
    Case(
        name="launcher stopped",
        what="torchrun itself, which hosts the store, is stopped (SIGSTOP) while rank 0 plans",
        fault="0:plan:stop the launcher",
        said=r"store of torchrun's agent at \S+ has not answered for 8 s",
        bound=_SILENCE,
        launchers=(Launcher.TORCHRUN,),
    ),
    Case(
        name="slow start",
        what="rank 1 starts 15 s after the others",
        fault="1:start:sleep 15",
        said=r"TRAINS: rank 0 of 3",
        trains=True,
        bound="as long as the rendezvous timeout",
    ),
    Case(
        name="slow plan",
        what="rank 0 plans for 15 s, longer than the heartbeat timeout",
        fault="0:plan:sleep 15",
        said=r"TRAINS: rank 0 of 3",
        trains=True,
        bound="as long as the rendezvous timeout",
    ),
    Case(
        name="missing rank",
        on_megatron=True,
        what="rank 2 is never started",
        missing=(2,),
        said=r"1 of 3 ranks have not arrived: rank 2\. Arrived: ranks 0-1 \(\S+\)",
        bound="rendezvous timeout + grace period",
        launchers=(Launcher.BY_HAND,),
        rendezvous_s=RENDEZVOUS_S,
    ),
    Case(
        name="missing rank 0",
        what="rank 0 is never started",
        missing=(0,),
        said=r"rank 0 did not appear at localhost within 30 s",
        bound="rendezvous timeout",
        launchers=(Launcher.BY_HAND,),
        rendezvous_s=RENDEZVOUS_S,
    ),
    Case(
        name="another version",
        what="rank 1 has megatron-core 0.15.0",
        fault="1:start:megatron-core 0.15.0",
        said=r"version of megatron-core: 0\.16\.1 on ranks 0, 2 \(\S+\); 0\.15\.0 on rank 1 ",
        bound=_TALK,
    ),
    Case(
        name="another argv",
        on_megatron=True,
        what="rank 1 has another --lr and --num-attention-heads",
        fault="1:start:arguments --lr 0.5 --num-attention-heads 4",
        said=r"--lr: 0\.001 on ranks 0, 2 \(\S+\); 0\.5 on rank 1 [^§]*"
        r"--num-attention-heads: 8 on ranks 0, 2 \(\S+\); 4 on rank 1 ",
        bound=_TALK,
    ),
    Case(
        name="one without +nest",
        what="rank 1 is started without +nest",
        fault="1:start:without +nest",
        said=r"1 of 3 ranks have not arrived: rank 1\. .* without \+nest never arrives",
        bound="rendezvous timeout + grace period",
        rendezvous_s=RENDEZVOUS_S,
        silent=(1,),
    ),
    Case(
        name="port taken",
        what="another program listens on nest.port",
        said=r"nest\.port|port \d+ belongs to another program there",
        bound="rank 0 at once, the others the rendezvous timeout",
        launchers=(Launcher.BY_HAND,),
        rendezvous_s=RENDEZVOUS_S,
        special="port",
    ),
    Case(
        name="two jobs on one host",
        what="two jobs start at the same time",
        said=r"TRAINS: rank 0 of 3",
        trains=True,
        special="twice",
    ),
    Case(
        name="full disk, plan file",
        what="nest.out is on a disk that is full",
        said=r"No space left on device",
        bound=_TALK,
        special="full out",
    ),
    Case(
        name="full disk, cache",
        what="the user's cache is on a disk that is full",
        said=r"the full plan could not be kept .*No space left on device[^§]*TRAINS: rank 0 of 3",
        trains=True,
        special="full cache",
    ),
    Case(
        name="read-only home",
        what="the home folder is on a disk that is mounted read-only",
        said=r"the full plan could not be kept .*Read-only file system[^§]*TRAINS: rank 0 of 3",
        trains=True,
        special="read-only home",
    ),
    Case(
        name="stale lock",
        what="a process was killed (SIGKILL) while it held the profile store's lock",
        said=r"timings on",
        trains=True,
        launchers=ALONE,
        special="SIGKILL",
    ),
    Case(
        name="lock of a stopped process",
        what="a process is stopped (SIGSTOP) while it holds the profile store's lock",
        said=r"another process has held the lock for 60 s",
        bound="60 s",
        launchers=ALONE,
        special="SIGSTOP",
    ),
    Case(
        name="64 processes, one profile",
        what="64 processes plan with one profile at the same time, while timings are added to it",
        said=r"",
        trains=True,
        launchers=ALONE,
        special="64",
    ),
)

#: A job that three ranks hold.
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 12 "
    "--train-iters 3 --lr 0.001 --bf16 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--distributed-timeout-minutes 1 --transformer-impl local"
)
assert NUM_RANKS == 3


def words_of(case: Case) -> tuple[str, ...]:
    """What a case adds to the training script's own arguments."""
    return (
        "+nest=auto",
        "nest.cluster=dgx_h100",
        f"nest.heartbeat_timeout_s={case.heartbeat_s}",
        f"nest.rendezvous_timeout_s={case.rendezvous_s}",
        *case.words,
    )
