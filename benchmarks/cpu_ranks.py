"""Two processes at work at the same time, one core each.

Whoever calls ``on_two_ranks`` starts one worker, which imports torch and megatron-core once and
forks two ranks for each call. Calls and results pass through pickled files in the folder.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu_job import NUM_RANKS, Figures, Trial  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.profile.network import NetworkProfile  # noqa: E402
from nest_megatron.profile.records import Machine, Timing  # noqa: E402
from nest_megatron.profile.session import Task  # noqa: E402
from tests.training.parent import end_with_parent  # noqa: E402

#: A rank that works longer on one call says where it is, and ends.
CALL_SECONDS = 300
#: What is pickled must be of this module, not of ``__main__``.
_START = "import sys; from benchmarks.cpu_ranks import main; main(*sys.argv[1:])"
_CALLS, _ENDING, _PATIENCE = "calls.pickle", ".pickle", "patience"
_LOG_CHARACTERS = 4000
#: Share of the cores above which other processes spoil a measurement.
DISTURBED = 0.05
#: Processor seconds that others may take in a second of a quiet machine.
_QUIET = 0.1


@dataclass(frozen=True, slots=True)
class Call:
    """A function of this module to call on every rank, by name.

    Args:
        label: what it is about, for whoever watches.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    label: str = ""


@dataclass(slots=True, kw_only=True)
class Limits:
    """How long calls may take, and who is told how far they are.

    Args:
        patience_s: time left to wait while other processes keep the cores busy, and to repeat what
            they spoil.
        max_seconds: from now on; ranks that still run then are ended.
    """

    patience_s: float = 0.0
    max_seconds: float = math.inf
    tell: Callable[[str], object] = lambda _: None
    started: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Time that is left."""
        return max(0.0, self.started + self.max_seconds - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one rank saw of a layout's training.

    Args:
        seconds: of each step that counts.
        memory_bytes: largest memory over what the process held before its model was made.
        loss: of the last step, on the last stage.
        busy_s: processor time of all that ran on the machine during these steps, idle time apart.
        own_s: that of this process.
    """

    seconds: tuple[float, ...]
    busy_s: float
    own_s: float
    memory_bytes: int
    loss: float | None


def on_two_ranks(folder: Path, calls: Sequence[Call], limits: Limits) -> list[list[Any]]:
    """Make the calls one after the other; what each rank returned.

    Args:
        limits: whose patience is what is left of it afterwards.

    Raises:
        RuntimeError: with the ranks' last words, if one did not finish, or the time was over.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))  # no file is ever met twice
    (folder / _CALLS).write_bytes(pickle.dumps(list(calls)))
    log = folder / "worker.log"
    command = [sys.executable, "-c", _START, str(folder), str(limits.patience_s)]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=output, text=True
        )
        over = threading.Timer(min(limits.left_s(), threading.TIMEOUT_MAX), worker.kill)
        over.start()
        try:
            _listen(worker, limits)
        finally:
            over.cancel()
            worker.kill()
            worker.wait()
    made = sum((folder / f"{i}.0{_ENDING}").exists() for i in range(len(calls)))
    if made < len(calls) and not limits.left_s():
        raise RuntimeError(
            f"not done within {limits.max_seconds:g} s: {made} of {len(calls)} calls of this part "
            "were made. Other processes keep the cores busy, or the machine is slow: give a larger "
            "--max-seconds, or a smaller --patience"
        )
    return [[_result(folder, i, rank) for rank in range(NUM_RANKS)] for i in range(len(calls))]


def _listen(worker: subprocess.Popen[str], limits: Limits) -> None:
    """Pass on what the worker says until it ends, and note what is left of the patience."""
    assert worker.stdout is not None
    for line in worker.stdout:
        word, _, rest = line.rstrip().partition(" ")
        if word == _PATIENCE:
            limits.patience_s = float(rest)
        else:
            limits.tell(line.rstrip())


def _environment() -> dict[str, str]:
    """One thread a rank, no GPU, no compiler, and gloo on the loopback."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **os.environ,
        **loopback,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
    }


def _result(folder: Path, index: int, rank: int) -> Any:
    path = folder / f"{index}.{rank}{_ENDING}"
    if not path.exists():
        log = (folder / "worker.log").read_text(errors="replace")
        raise RuntimeError(f"call {index}: a rank ended early\n{log[-_LOG_CHARACTERS:]}")
    return pickle.loads(path.read_bytes())


def main(given: str, patience_s: str) -> None:
    """The worker: make the calls that a file lists, in order, until one fails."""
    import torch

    from nest_megatron.profile import collectives, layer_timer  # noqa: F401 (once, for all ranks)
    from tests.training import cpu_megatron, job  # noqa: F401

    folder, patience = Path(given), float(patience_s)
    end_with_parent()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the ranks print goes to the log

    def say(text: str) -> None:
        print(text, file=said, flush=True)

    torch.set_num_threads(1)
    calls = pickle.loads((folder / _CALLS).read_bytes())
    for index, call in enumerate(calls):
        what = f"{index + 1:3d} of {len(calls)}: {call.name} {call.label}".rstrip()
        while True:
            waited = _wait_for_quiet(patience)
            patience -= waited
            started = time.monotonic()
            disturbed = _disturbed(folder, index, call)
            if disturbed is None:
                return
            seconds = time.monotonic() - started
            again = disturbed > DISTURBED and patience > 0
            say(
                f"{what}, {seconds:.0f} s{f' after {waited:.0f} s of waiting' if waited else ''}"
                f"{f', others took {disturbed:.0%}: again' if again else ''}"
            )
            if not again:
                break
            patience -= seconds
        say(f"{_PATIENCE} {patience}")


def _disturbed(folder: Path, index: int, call: Call) -> float | None:
    """Make a call; the share of the cores that others took, or ``None`` where a rank failed."""
    started, busy, own = time.monotonic(), _busy_seconds(), _ranks_seconds()
    if not _forked(folder, index, call):
        return None
    others = _busy_seconds() - busy - (_ranks_seconds() - own)
    return others / (NUM_RANKS * (time.monotonic() - started))


def _ranks_seconds() -> float:
    """Processor time of all ranks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_quiet(most: float) -> float:
    """Wait until nothing else keeps a core busy, for so many seconds at most; how long it was."""
    waited, busy = 0.0, 1.0
    while waited < most and busy > _QUIET:
        before = _busy_seconds()
        time.sleep(1.0)
        waited, busy = waited + 1.0, _busy_seconds() - before
    return waited


def _forked(folder: Path, index: int, call: Call) -> bool:
    """Both ranks of a call, forked and ended; whether both came to its end."""
    (folder / f"store{index}").unlink(missing_ok=True)
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(NUM_RANKS)
    ranks = [
        fork.Process(target=_rank, args=(folder, index, call, rank, together.wait))
        for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    while not any(process.exitcode for process in ranks):
        running = [process.sentinel for process in ranks if process.exitcode is None]
        if not running:
            break
        wait(running)
    for process in ranks:
        if process.exitcode is None:  # it waits for one that failed
            process.kill()
        process.join()
    return not any(process.exitcode for process in ranks)


def _rank(folder: Path, index: int, call: Call, rank: int, meet: Callable[[], Any]) -> None:
    end_with_parent()
    faulthandler.dump_traceback_later(CALL_SECONDS, exit=True)
    place = _Place(folder=folder, index=index, rank=rank, meet=meet)
    found = _FUNCTIONS[call.name](place, *call.arguments)
    (folder / f"{index}.{rank}{_ENDING}").write_bytes(pickle.dumps(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Which rank of which call this process is.

    Args:
        meet: returns when every rank has called it; works where there is no process group.
    """

    folder: Path
    index: int
    rank: int
    meet: Callable[[], Any]

    def join(self) -> Any:
        """The process group of all ranks, made over gloo."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(self.folder / f"store{self.index}"), NUM_RANKS),
            rank=self.rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=CALL_SECONDS),
        )
        return dist.group.WORLD


def _blocks(place: _Place, trial: Trial, tasks: Sequence[Task]) -> tuple[Machine, list[Timing]]:
    """Some blocks, each timed by both ranks at the same time."""
    from nest_megatron.megatron_core.stage import Where
    from nest_megatron.model.execution import Implementation
    from nest_megatron.profile.layer_timer import Measuring, time_block
    from nest_megatron.profile.session import this_machine
    from tests.training.job import CHANGES

    measuring = Measuring(
        where=Where.CPU,
        implementation=Implementation.LOCAL,
        repetitions=trial.passes,
        least=min(5, trial.passes),
        steady=0.0,  # both ranks make as many passes, so that neither is ever alone
        max_seconds=float(CALL_SECONDS),
        changes=CHANGES,
    )
    timings = []
    for task in tasks:
        place.meet()
        timings.append(time_block(trial.spec, task.block, task.shard, measuring))
    return this_machine(Where.CPU, Implementation.LOCAL), timings


def _network(place: _Place, trial: Trial) -> NetworkProfile | None:
    """Gloo's collectives between the two processes."""
    import socket

    from nest_megatron.profile.collectives import DEFAULT_SIZES, measure

    sizes = [size for size in DEFAULT_SIZES if size <= trial.largest_bytes]
    hosts = [socket.gethostname()] * NUM_RANKS
    return measure(place.join(), hosts, trial.network_s, sizes)


def _figures(place: _Place) -> Figures:
    """What a core reaches while the other does the same."""
    import torch
    import torch.distributed as dist

    world = place.join()
    square = torch.randn(1024, 1024)
    source = torch.zeros(1 << 26)
    target, one, message = source.clone(), torch.ones(1), torch.zeros(1 << 23)

    def usual(call: Callable[[], object], calls: int = 1) -> float:
        return statistics.median(_together(dist.barrier, call, calls) for _ in range(11))

    def product() -> None:
        square @ square

    def sum_alone() -> None:
        dist.all_reduce(message, group=world)

    def sum_beside() -> None:
        work = dist.all_reduce(message, group=world, async_op=True)
        product()
        work.wait()

    work, alone, beside = usual(product, 4), usual(sum_alone), usual(sum_beside)
    hidden = (work + alone - beside) / min(work, alone)
    return Figures(
        flops_per_s=2 * 1024**3 / work,
        copy_bytes_per_s=2 * source.nbytes / usual(lambda: target.copy_(source)),
        call_s=usual(lambda: one.add_(1.0), 1000),
        hidden_share=min(1.0, max(0.0, hidden)),
    )


def _together(meet: Callable[[], object], call: Callable[[], object], calls: int) -> float:
    meet()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _train(place: _Place, plan: ParallelPlan, warm_up: int, steps: int) -> Ran:
    """Some optimizer steps of a planned layout."""
    import torch.distributed as dist

    from tests.training import cpu_megatron
    from tests.training.job import config_of, initialize_model_parallel, job_of, models_of, step

    place.join()
    cpu_megatron.install()
    initialize_model_parallel(plan)
    held = _peak_memory()
    config = config_of(plan)
    job = job_of(plan, config, models_of(plan, config))
    for number in range(warm_up):
        step(job, number)
    dist.barrier()
    busy, own = _busy_seconds(), time.process_time()
    seconds, loss = [], None
    for number in range(warm_up, warm_up + steps):
        dist.barrier()
        start = time.perf_counter()
        loss, _ = step(job, number)
        seconds.append(time.perf_counter() - start)
    return Ran(
        seconds=tuple(seconds),
        memory_bytes=_peak_memory() - held,
        loss=loss,
        busy_s=_busy_seconds() - busy,
        own_s=time.process_time() - own,
    )


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _busy_seconds() -> float:
    """Processor time that the machine has spent so far on anything; 0 where it does not say."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:
        return 0.0
    ticks = dict(zip(_STATES, map(int, first[1:]), strict=False))
    busy = sum(ticks[name] for name in _STATES if name not in ("idle", "iowait"))
    return busy / os.sysconf("SC_CLK_TCK")


def _peak_memory() -> int:
    """Largest memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


#: Columns of /proc/stat; time of guests is part of the first two.
_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "blocks": _blocks,
    "network": _network,
    "figures": _figures,
    "train": _train,
}
