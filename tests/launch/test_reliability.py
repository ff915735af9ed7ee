"""Jobs of several processes, broken in every way that was thought of: each ends, and says why.

``pytest -m reliability tests/launch/test_reliability.py --write-docs`` runs all and writes
docs/reliability.md. With ``MEGATRON_LM_HOME`` the same is done to Megatron-LM's own script.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from nest_megatron.profile import store
from tests.cli.runs import ROOT, environment
from tests.launch.faults.cases import MODEL, Case, words_of
from tests.launch.faults.page import MEGATRON, STAND_IN, Row, Seen, rows_of, runs, write_sections
from tests.launch.faults.ranks import NUM_RANKS, Ended, Job, Launcher
from tests.launch.faults.stub import make_stub
from tests.megatron_lm.training import HOME, ON_CPU
from tests.profile.profiles import whole_profile

pytest.importorskip("torch", reason="torch is not installed")

PAGE = ROOT / "docs" / "reliability.md"
RUNS = [(script, *run) for script in (STAND_IN, MEGATRON) for run in runs(script)]
_MESSAGE = re.compile(
    r"error: .*(?:\n  .*)*|nest: the full plan could not be kept.*|exitcode\s*: -\d+"
)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """What the run saw, for the page."""
    found: Seen = {}
    yield found
    if request.config.getoption("--write-docs", default=False):
        write_sections(PAGE, found)


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as stream:
        while stream.write(b"x" * 4096):
            pass


def job(case: Case, home: Path, *words: str, **variables: str) -> Job:
    """The job of a case."""
    is_real = home == Path(HOME)
    real = [*ON_CPU, "--mock-data", "--eval-iters", "0", "--min-lr", "0.0001"]
    return Job(
        home=home,
        argv=(*MODEL, *(real if is_real else ()), *words_of(case), *words),
        on_shim=is_real,
        fault=case.fault,
        missing=case.missing,
        variables=variables,
    )


def run(case: Case, launcher: Launcher, home: Path, folder: Path) -> list[Ended]:
    """Start the job of a case, or what it has in its place."""
    if launcher is Launcher.COMMAND:
        return [with_one_profile(case, folder)]
    plain = {"XDG_CACHE_HOME": str(folder / "cache")}
    if case.special == "twice":
        both = [job(case, home, **plain).start(launcher) for _ in range(2)]
        return [running.wait() for running in both]
    if case.special == "port":
        with socket.socket() as other:
            other.bind(("localhost", 0))
            other.listen()
            port = f"nest.port={other.getsockname()[1]}"
            return [job(case, home, port, **plain).start(launcher).wait()]
    if case.special in ("full out", "full cache"):
        with tmpfs(folder / "disk", "size=64k") as disk:
            fill(disk)
            if case.special == "full out":
                words, variables = (f"nest.out={disk / 'plan.yaml'}",), plain
            else:
                words, variables = (), {"XDG_CACHE_HOME": str(disk)}
            return [job(case, home, *words, **variables).start(launcher).wait()]
    if case.special == "read-only home":
        with tmpfs(folder / "disk", "ro") as disk:
            home_of_user = {"HOME": str(disk), "XDG_CACHE_HOME": ""}
            return [job(case, home, **home_of_user).start(launcher).wait()]
    return [job(case, home, **plain).start(launcher).wait()]


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("script", "case", "launcher"),
    RUNS,
    ids=[f"{script}-{case.identifier}-{how.name.lower()}" for script, case, how in RUNS],
)
def test_it_ends_and_says_why(
    script: str, case: Case, launcher: Launcher, seen: Seen, tmp_path: Path
) -> None:
    if script == MEGATRON and not HOME:
        pytest.skip("MEGATRON_LM_HOME is not set to a Megatron-LM checkout")
    home = make_stub(tmp_path / "megatron") if script == STAND_IN else Path(HOME)
    for ended in run(case, launcher, home, tmp_path):
        check(case, launcher, ended)
    message = _MESSAGE.search(ended.out)
    row = Row(
        case=case.name,
        what=case.what,
        launcher=launcher.value,
        ends=("works" if launcher is Launcher.COMMAND else "trains")
        if case.trains
        else f"exit codes {codes(ended)}",
        bound=case.bound,
        seconds=ended.seconds,
        message=message[0] if message else "",
    )
    seen.setdefault(script, []).append(row)


def codes(ended: Ended) -> str:
    """The exit codes of the processes, in words."""
    names = {None: "(stopped)", -signal.SIGKILL: "(killed)"}
    return ", ".join(dict.fromkeys(names.get(code, str(code)) for code in ended.codes))


def check(case: Case, launcher: Launcher, ended: Ended) -> None:
    """The processes ended as they must, and those that can speak have said it."""
    if case.trains:
        assert set(ended.codes) == {0}, ended.out[-5000:]
        assert re.search(case.said, ended.out), ended.out[-5000:]
        return
    assert 0 not in ended.codes, ended.out[-5000:]
    if launcher is not Launcher.BY_HAND:
        assert re.search(case.said, ended.out), ended.out[-5000:]
    else:
        ranks = [rank for rank in range(NUM_RANKS) if rank not in case.missing]
        for rank, said in zip(ranks, ended.said, strict=True):
            if rank not in case.silent:
                assert re.search(case.said, said), f"rank {rank} said:\n{said[-5000:]}"
    assert "TRAINS" not in ended.out


STALE = """
import os, signal, sys
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("locked", flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@contextlib.contextmanager
def locked(folder: Path, signal_name: str) -> Iterator[None]:
    """The store's lock as a process left it that was killed or stopped while it held it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = str(folder / store._LOCK)
    owner = subprocess.Popen(
        [sys.executable, "-c", STALE, lock, signal_name], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "locked\n"
    try:
        yield
    finally:
        owner.kill()
        owner.communicate()


def with_one_profile(case: Case, folder: Path) -> Ended:
    """What becomes of commands that want the profile store, or one profile of it."""
    profiles, file = folder / "profiles", folder / "profile.yaml"
    variables = environment(**{store.FOLDER_VARIABLE: str(profiles)})
    store.write(whole_profile(), file)
    bring = ["profiles", "import", str(file)]
    if case.special != "64":
        with locked(profiles, case.special):
            return ended_of([bring], variables)
    assert ended_of([bring], variables).codes == (0,)
    small = ["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8"]
    patient = "search.max_seconds=3600"  # 64 searches share the cores of one host
    plan = ["plan", *small, patient, "--json", f"profile.name={whole_profile().name}"]
    ended = ended_of([bring if index % 8 == 7 else plan for index in range(64)], variables)
    assert ended.out.count(f'"{whole_profile().name}: ') == 56, ended.out[-3000:]
    return ended


def ended_of(commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> Ended:
    """Run commands of ``nest-megatron`` at the same time."""
    started = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "nest_megatron", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(variables),
        )
        for words in commands
    ]
    said = tuple(child.communicate(timeout=1800)[0] for child in children)
    seconds = time.monotonic() - started
    return Ended(codes=tuple(c.returncode for c in children), said=said, seconds=seconds)


@pytest.mark.parametrize("script", [STAND_IN, MEGATRON])
def test_the_page_has_a_row_for_every_case(script: str) -> None:
    """Written by the suite above; a new case needs a new page."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = [(case.name, case.what, how.value) for case, how in runs(script)]
    assert rows_of(text, script) == wanted
    assert os.fspath(Path(__file__).relative_to(ROOT)) in text
