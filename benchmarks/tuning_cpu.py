"""What tuning is worth, on this machine's cores: every layout of some jobs, measured once.

Run from the project's root, on a quiet machine, with a Megatron-LM checkout of 0.16.1::

    MEGATRON_LM_HOME=/path/to/Megatron-LM python benchmarks/tuning_cpu.py --out tuning --minutes 30

Each job is Megatron's own ``pretrain_gpt.py`` over gloo. ``--out`` keeps a row of ``measured.csv``
for each layout, written as soon as it is measured, so that the next call goes on; ``--report``
measures nothing. Over the measured layouts the engine of ``nest-megatron tune`` is then played with
at most ``--budget`` runs: what it takes is compared with the best of all, and with the plan that no
run has corrected. ``--profile`` has ``nest-megatron profile`` time the network and the layers of
each job first, so that the same runs are predicted from them; layouts that are only then among the
best and were not measured are left out. ``--slow-rank`` stops one rank of a job for half of its
time, and prints what the record of the run says of it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.plan_file import digest  # noqa: E402
from nest_megatron.planner.choice import Candidate  # noqa: E402
from nest_megatron.tuning.job import TunedJob, read_tuned  # noqa: E402
from nest_megatron.tuning.launchers import run_locally  # noqa: E402
from nest_megatron.tuning.selection import Known, candidate_words, chosen, next_run  # noqa: E402
from nest_megatron.tuning.session import (  # noqa: E402
    Failure,
    State,
    Trial,
    TuneRequest,
    judged,
    record_of,
)
from nest_megatron.tuning.tuner import outcome_words  # noqa: E402
from tests.megatron_lm.training import HOME, ON_CPU, TRAINING, environment  # noqa: E402
from tools.markdown import table  # noqa: E402

_COLUMNS = ("job", "key", "layout", "predicted_s", "step_s", "seconds", "failure")
_CLUSTER = """\
name: this_machine
num_gpus: 4
accelerator:
  name: CPU core
  memory_bytes: 4.0e+9
  peak_flops_per_s: {{bf16: {flops:.3e}, fp16: {flops:.3e}, fp8: {flops:.3e}, fp32: {flops:.3e}}}
  gemm_efficiency: {{bf16: 1.0, fp16: 1.0, fp8: 1.0, fp32: 1.0}}
  attention_efficiency: 1.0
  memory_bandwidth_bytes_per_s: {copy:.3e}
  memory_efficiency: 1.0
  kernel_floor_s: {call:.3e}
  flash_attention: false
  source: "one core: a product of matrices in bf16, a copy, an operator with nothing to do"
levels:
  - name: node
    num_devices: null
    bandwidth_bytes_per_s: 1.0e+9
    latency_s: 2.0e-4
    source: "by hand: gloo on the loopback"
"""
#: Shapes of jobs: layers, hidden size, heads, sequence, batch, experts; each on one rank per core.
_SHAPES = (
    (8, 64, 8, 64, 8, 0),
    (4, 128, 8, 64, 8, 0),
    (12, 32, 4, 64, 16, 0),
    (4, 64, 4, 256, 8, 0),
    (4, 64, 8, 64, 8, 4),
    (16, 32, 4, 64, 8, 0),
    (2, 256, 8, 64, 8, 0),
    (8, 64, 8, 128, 16, 0),
    (4, 128, 8, 256, 4, 0),
    (8, 32, 4, 64, 16, 4),
    (24, 32, 4, 32, 8, 0),
    (6, 96, 8, 96, 8, 0),
)
_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One layout of a job; ``step_s`` is ``None`` where it failed."""

    step_s: float | None
    out_of_memory: bool


def jobs() -> Mapping[str, str]:
    """The commands of all jobs by name."""
    return {
        f"L{shape[0]} h{shape[1]} s{shape[3]} b{shape[4]} e{shape[5]} on {_RANKS}": _command(*shape)
        for shape in _SHAPES
    }


def _command(layers: int, hidden: int, heads: int, seq: int, batch: int, e: int) -> str:
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
    shape += f" --seq-length {seq} --max-position-embeddings {seq}"
    shape += f" --micro-batch-size 1 --global-batch-size {batch}"
    experts = f"--num-experts {e} --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    experts += " --disable-bias-linear --swiglu"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS)]
    words += [f"{HOME}/pretrain_gpt.py", *shlex.split(shape), *(shlex.split(experts) if e else [])]
    training = list(TRAINING)
    training[training.index("--train-iters") + 1] = "100000"
    return shlex.join([*words, *training, *ON_CPU])


def cluster_file(folder: Path) -> Path:
    """This machine as a cluster; made once, so that later calls predict alike."""
    path = folder / "cluster.yaml"
    if not path.exists():
        write_text(path, _CLUSTER.format(**_figures()))
    return path


def _figures() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    matrix, long, small = torch.ones(512, 512).bfloat16(), torch.ones(1 << 24), torch.ones(1)
    product_s, copy_s, call_s = (
        min(_timed(call) for _ in range(20))
        for call in (lambda: matrix @ matrix, long.clone, lambda: small + small)
    )
    return {"flops": 2 * 512**3 / product_s, "copy": 2 * 4 * (1 << 24) / copy_s, "call": call_s}


def _timed(call: object) -> float:
    begun = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begun


def profile(command: str, cluster: Path, folder: Path, seconds: float) -> None:
    """Time the layers in which a job's plans differ; a job that has been timed is left alone."""
    if _profile_names(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder.with_suffix(".yaml")
    words = [*_NEST, "plan", "--from", command, "--free", "all", "--megatron-version", "0.16"]
    words += [*_settings(cluster), "search.num_alternatives=15", f"out={plan}", "--force"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    _time(plan, folder, seconds, "--no-collectives")


def measure_network(command: str, cluster: Path, folder: Path, seconds: float) -> Path:
    """The cluster with its network as measured between the ranks of a job; measured once."""
    network, found = folder / "network.yaml", folder / "measured.yaml"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "plan.yaml"
        words = [*_NEST, "plan", "--from", command, "--megatron-version", "0.16"]
        words += [*_settings(cluster), f"out={plan}", "--force"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        _time(plan, folder, seconds, "--network-out", str(network), "--force")
        words = [*_NEST, "network", "import", str(network), "--cluster", str(cluster)]
        subprocess.run([*words, "--out", str(found)], check=True)
    return found


def _time(plan: Path, folder: Path, seconds: float, *more: str) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS)]
    words += ["-m", "nest_megatron.profile", "--for", str(plan), "--cpu"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NEST_MEGATRON_PROFILES": str(folder)}
    words += ["--max-seconds", str(seconds), *more]
    subprocess.run(words, check=True, env=variables)


_NEST = (sys.executable, "-m", "nest_megatron")


def _profile_names(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("[!.]*.yaml")]


def _settings(cluster: Path) -> tuple[str, ...]:
    return f"cluster={cluster}", f"cluster.num_gpus={_RANKS}", "checks.plausibility=off"


def read_job(command: str, cluster: Path, num_layouts: int, profiles: Path) -> TunedJob:
    """A job with its layouts that are predicted to be the fastest, from its profile if any."""
    os.environ["NEST_MEGATRON_PROFILES"] = str(profiles)
    names = [f"profile.name={name}" for name in _profile_names(profiles)]
    overrides = (*_settings(cluster), *names)
    asked = TuneRequest(
        command=command,
        overrides=overrides,
        config_dir=None,
        free="all",
        megatron_version="0.16",
        budget=1,
        iterations=1,
        run_timeout_s=600.0,
        launcher="local",
        launcher_options=(),
        folder="",
    )
    found = read_tuned(asked, compose(parse(overrides)))
    few = dataclasses.replace(found.ranked, candidates=found.ranked.candidates[:num_layouts])
    return dataclasses.replace(found, ranked=few)


def key_of(candidate: Candidate) -> str:
    """What a layout is called in the table."""
    return digest([candidate.solved.layout, list(candidate.solved.layout.partition.boundaries)])


def measure(job: TunedJob, candidate: Candidate, iterations: int, *, slowed: int | None) -> Trial:
    """Run a layout; a slowed rank is stopped for half of its time, and what is said is printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        history, output = folder / "record.jsonl", folder / "output.txt"
        plan = job.plan(candidate)
        command = job.command(plan, folder / "pinned.yaml", iterations, history)
        variables = {name: environment()[name] for name in _OURS}
        command = dataclasses.replace(command, environment={**command.environment, **variables})
        done = threading.Event()
        if slowed is not None:
            threading.Thread(target=_slow, args=(slowed, done), daemon=True).start()
        ended = run_locally(command, 600.0, output)
        done.set()
        record = record_of(history)
        if slowed is not None and record is not None:
            print(*record.warnings, sep="\n")
        trial = Trial(
            number=1,
            plan="",
            layout=candidate_words(candidate),
            predicted_s=candidate.step.median_s,
            state=State.STARTED,
        )
        return judged(trial, record, ended, output)


_OURS = ("PYTHONPATH", "PYTHONWARNINGS", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")


def _slow(rank: int, done: threading.Event) -> None:
    """Stop a rank of the run that this process started, for half of the time."""
    while not done.wait(0.05):
        processes = list(_processes_of(rank))
        _signal(processes, signal.SIGSTOP)
        time.sleep(0.05)
        _signal(processes, signal.SIGCONT)


def _signal(processes: Sequence[int], sign: signal.Signals) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def _processes_of(rank: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        own = f"NEST_TUNING_CPU={os.getpid()}".encode() in variables
        if own and f"RANK={rank}".encode() in variables and b"pretrain_gpt.py" in words:
            yield int(folder.name)


def read_table(path: Path) -> dict[tuple[str, str], Measured]:
    """What was measured so far, by job and layout."""
    if not path.exists():
        return {}
    with path.open(newline="") as stream:
        return {
            (row["job"], row["key"]): Measured(
                step_s=float(row["step_s"]) if row["step_s"] else None,
                out_of_memory=row["failure"] == Failure.OUT_OF_MEMORY,
            )
            for row in csv.DictReader(stream)
        }


def add_row(path: Path, name: str, candidate: Candidate, trial: Trial) -> None:
    """Keep a measured layout."""
    is_new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.writer(stream)
        if is_new:
            writer.writerow(_COLUMNS)
        predicted = f"{trial.predicted_s:.6f}"
        step = "" if trial.step_s is None else f"{trial.step_s:.6f}"
        row = (name, key_of(candidate), trial.layout, predicted, step, trial.seconds, trial.failure)
        writer.writerow(row)


def play(job: TunedJob, measured: Mapping[str, Measured], budget: int) -> list[str]:
    """A row of the report: the engine with at most so many runs, against every layout measured."""
    known = Known(ranked=job.ranked, iterations=20, num_steps=job.num_steps)
    steps = {each.solved: measured[key_of(each)] for each in job.ranked.candidates}
    best = min(each.step_s for each in measured.values() if each.step_s is not None)
    before, after, runs = _error(known, steps), math.nan, 0
    while not isinstance(found := next_run(known, budget - runs), str):
        plan, runs = found.candidate.solved, runs + 1
        step_s = steps[plan].step_s
        if step_s is None:
            known = known.without(plan, out_of_memory=steps[plan].out_of_memory)
        else:
            known = known.measured(plan, step_s, None)
        if runs <= 3:
            after = _error(known, steps)
    taken, first = chosen(known), job.ranked.candidates[0]
    assert taken is not None
    losses = [_loss(steps[each.solved].step_s, best) for each in (first, taken)]
    return [str(len(steps)), str(runs), *losses, f"{100 * before:.1f}", f"{100 * after:.1f}"]


def _loss(step_s: float | None, best: float) -> str:
    return "fails" if step_s is None else f"{100 * (step_s / best - 1):.1f}"


def _error(known: Known, steps: Mapping[object, Measured]) -> float:
    """Median error of the predictions of plans that have not run."""
    errors = [
        abs(math.log(step_s / each.step.median_s))
        for each in known.candidates()
        if each.solved not in known.steps_s and (step_s := steps[each.solved].step_s) is not None
    ]
    return statistics.median(errors) if errors else math.nan


def report(options: argparse.Namespace, cluster: Path) -> None:
    """Print the table over all jobs whose layouts were all measured."""
    found, rows = read_table(options.out / "measured.csv"), []
    for name, command in jobs().items():
        if not any(key[0] == name for key in found):
            continue
        job = read_job(command, cluster, options.layouts, _profiles(options, name))
        own = {key: value for (of, key), value in found.items() if of == name}
        kept = tuple(each for each in job.ranked.candidates if key_of(each) in own)
        if len(kept) == len(job.ranked.candidates) or options.profile:
            job = dataclasses.replace(job, ranked=dataclasses.replace(job.ranked, candidates=kept))
            rows.append([name, *play(job, own, options.budget)])
    head = ("job", "layouts", "runs", "without runs, % behind the best", "tuned, % behind")
    head = (*head, "error of other plans before, %", "after 3 runs, %")
    said = table(head, rows, numeric=6) if rows else "No job has all its layouts measured yet."
    print(said)
    for number, what in ((3, "without runs"), (4, "tuned")):
        near = sum(row[number] != "fails" and float(row[number]) <= 2.0 for row in rows)
        print(f"Within 2 % of the best, {what}: {near} of {len(rows)} jobs.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure for some time, then report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the measured layouts")
    parser.add_argument("--minutes", type=float, default=30.0, help="no run begins after this")
    parser.add_argument("--jobs", type=int, default=12, help="how many of the jobs")
    parser.add_argument("--layouts", type=int, default=15, help="of each job")
    parser.add_argument("--iterations", type=int, default=12, help="timed steps of a run")
    parser.add_argument("--budget", type=int, default=4, help="runs of a tuning")
    parser.add_argument("--profile", type=float, help="seconds, of each job's layers first")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--slow-rank", type=int, help="run one job with this rank slowed, and end")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cluster = cluster_file(options.out)
    if options.profile:
        first = next(iter(jobs().values()))
        cluster = measure_network(first, cluster, options.out / "network", options.profile)
    if options.slow_rank is not None:
        name, command = next(iter(jobs().items()))
        job = read_job(command, cluster, 1, _profiles(options, name))
        os.environ["NEST_TUNING_CPU"] = str(os.getpid())
        trial = measure(job, job.ranked.candidates[0], options.iterations, slowed=options.slow_rank)
        print(outcome_words(trial))
        return
    if not options.report:
        _measure_all(options, cluster)
    report(options, cluster)


def _profiles(options: argparse.Namespace, name: str) -> Path:
    """Where the profile of a job's layers is; an empty folder without ``--profile``."""
    return options.out / ("profiles" if options.profile else "none") / digest(name)


def _measure_all(options: argparse.Namespace, cluster: Path) -> None:
    until, path = time.monotonic() + 60 * options.minutes, options.out / "measured.csv"
    for name, command in list(jobs().items())[: options.jobs]:
        if time.monotonic() > until:
            return
        profiles, known = _profiles(options, name), read_table(path)
        if options.profile:
            profile(command, cluster, profiles, options.profile)
        job = read_job(command, cluster, options.layouts, profiles)
        for candidate in job.ranked.candidates:
            if (name, key_of(candidate)) in known:
                continue
            if time.monotonic() > until:
                return
            trial = measure(job, candidate, options.iterations, slowed=None)
            add_row(path, name, candidate, trial)
            print(f"{name}: {trial.layout}: {outcome_words(trial)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
