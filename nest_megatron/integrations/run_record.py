"""The record of a run: what is predicted of it, what it did unlike that, and where its figures go.

A rank's own forward and backward passes hold no waiting for other pipeline ranks, but they do hold
waiting for the ranks of its tensor-, context- and expert-parallel groups: all of these seem as slow
as the slowest, so they are compared and named together. Under FSDP a pass waits for all replicas,
and ranks cannot be compared. The audit of a site has what was launched and what became of
it, in files that policies name, each line appended in one write, without a lock that a user could
keep.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.policy import read_policy
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import allocatable
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.uncertainty import predictive
from nest_megatron.errors import NestError
from nest_megatron.files import append_line, now, write_text
from nest_megatron.history.records import (
    FlagChange,
    Launch,
    Outcome,
    Predicted,
    RankMeasured,
    RefusedLaunch,
    RunRecord,
    cluster_key,
    job_key,
)
from nest_megatron.history.store import line_of
from nest_megatron.integrations.megatron_lm.rendezvous import rank_words, within
from nest_megatron.integrations.plan_output import change_rows, user_name
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import AuditRules, PolicyFile
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from nest_megatron.printing import print_cleaned
from nest_megatron.profile.choose import times_of
from nest_megatron.profile.installed import installed_versions, nccl_version
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.units import Seconds, format_gib, format_seconds
from nest_megatron.version import __version__

#: Variables in which schedulers tell a job its number: Slurm, Flux and LSF, PBS.
_BATCH_JOB = ("SLURM_JOB_ID", "FLUX_JOB_ID", "LSB_JOBID", "PBS_JOBID")


def new_run(
    plan: ParallelPlan,
    hosts: Sequence[str],
    launch: Launch | None,
) -> RunRecord:
    """The record of a run that begins.

    Args:
        hosts: of each global rank.
        launch: how it was launched.
    """
    gpus = local_gpus()
    return RunRecord(
        id=secrets.token_hex(4),
        outcome=Outcome.STARTED,
        start=now(),
        user=user_name(),
        batch_job=batch_job(),
        hosts=tuple(hosts),
        device=None if gpus is None else gpus.device_name,
        plan=plan_file.checksum(plan),
        job=job_key(plan),
        cluster=cluster_key(plan),
        versions={**installed_versions(), **nccl_version(), "nest_megatron": __version__},
        grid=plan.layout.without_stages(),
        pipeline_model_parallel_layout=plan.arguments["pipeline_model_parallel_layout"],
        predicted=predicted(plan),
        launch=launch,
    )


def batch_job() -> str | None:
    """The scheduler's number of the job of this process, where there is one."""
    return next(filter(None, map(os.environ.get, _BATCH_JOB)), None)


def predicted(plan: ParallelPlan) -> Predicted:
    """What a plan predicts.

    Shares of the step are computed again, since plan files do not hold them: with the layer times
    that the plan was made with, or not at all.
    """
    times = times_of(plan.provenance.profile, plan.model)
    settings = restored_settings(plan.provenance.settings)
    model = CostModel(plan.model, plan.cluster, settings, times)
    layout = plan.layout
    step_s = plan.predicted.iteration_time_s
    known = predictive(model, layout, step_s)
    is_whole = times is not None or plan.provenance.profile == ANALYTIC_NAME
    stages = plan.predicted.stages
    highest = max(stages, key=lambda stage: stage.peak_memory_bytes)
    return Predicted(
        step_s=step_s,
        low_s=plan.uncertainty.low_s,
        high_s=plan.uncertainty.high_s,
        shares={name.value: share for name, share in known.shares.items()} if is_whole else {},
        features=tuple(sorted(feature.value for feature in known.features)),
        busy_s=tuple(layout.num_microbatches * (s.forward_s + s.backward_s) for s in stages),
        peak_memory_bytes=tuple(stage.peak_memory_bytes for stage in stages),
        peak_terms=highest.memory_bytes,
        allocatable_bytes=allocatable(model, layout),
        expert_imbalance=settings.expert_imbalance if plan.model.is_moe else None,
        own_runs=plan.provenance.own_runs,
    )


#: From which share on ranks are slow: against replicas of theirs, and against other pipeline ranks,
#: whose layers are others, so that their prices can be wrong as well.
_SLOWER, _SLOWER_THAN_PRICED = 0.05, 0.15
#: From which share on memory is above the prediction, and passes are off it.
_MEMORY, _PASSES = 0.10, 0.10
#: From which share on tokens are spread less evenly over experts than planned for.
_IMBALANCE = 0.10
#: Steps that have to count before one rank is called slower than another.
_FEWEST_STEPS = 4
_WAITING = (GroupKind.TP, GroupKind.CP, GroupKind.ETP, GroupKind.EP)


def run_warnings(run: RunRecord, parts: Mapping[int, RankMeasured]) -> tuple[str, ...]:
    """One sentence each."""
    hosts = {rank: part.host for rank, part in parts.items()}
    missing = [rank for rank in range(run.grid.dims.world_size) if rank not in parts]
    warned = []
    if missing:
        warned = [f"nothing was heard from {rank_words(missing, dict(enumerate(run.hosts)))}"]
    warned += [*_memory(run, hosts), *_experts(run)]
    if not run.grid.zero.is_fsdp:
        groups = _groups(run, parts)
        warned += [*_slow(groups, hosts), *_passes(run, groups)]
    return tuple(warned)


def _memory(run: RunRecord, hosts: Mapping[int, str]) -> Iterator[str]:
    """The rank that is farthest above its prediction, and how many others are above theirs."""
    assert run.measured is not None
    predicted = run.predicted.peak_memory_bytes
    over = [
        (ratio, peak, rank)
        for rank, peak in enumerate(run.measured.peak_memory_bytes)
        if peak and (ratio := peak / predicted[pipeline_rank(run.grid.dims, rank)]) > 1 + _MEMORY
    ]
    if over:
        ratio, peak, worst = max(over, key=itemgetter(0))
        others = f"; so are {len(over)} ranks in all" if len(over) > 1 else ""
        yield (
            f"peak memory of {rank_words([worst], hosts)} is {_percent(ratio)} above the "
            f"prediction ({format_gib(peak)}, predicted {format_gib(peak / ratio)}){others}"
        )


def _experts(run: RunRecord) -> Iterator[str]:
    """Whether tokens are spread less evenly over expert-parallel ranks than was planned for."""
    assert run.measured is not None
    found, planned = run.measured.expert_imbalance, run.predicted.expert_imbalance
    if found is not None and planned is not None and found > (1 + _IMBALANCE) * planned:
        yield (
            f"experts are {found:.2f}x imbalanced (planned for {planned:.2f}x): the busiest "
            "expert-parallel rank has that many times the mean of tokens in the watched steps; "
            f"cost.expert_imbalance={found:.2f} plans for it"
        )


class _Group(NamedTuple):
    """Ranks that wait for each other inside their passes.

    Args:
        least_s, busy_s, most_s: quartiles of the work of a step, over ranks and steps.
        predicted_s: the work of a step on their pipeline rank.
    """

    ranks: tuple[int, ...]
    pipeline_rank: int
    least_s: Seconds
    busy_s: Seconds
    most_s: Seconds
    predicted_s: Seconds

    @property
    def ratio(self) -> float:
        """Measured over predicted work."""
        return self.busy_s / self.predicted_s


def pipeline_rank(dims: ParallelDims, rank: int) -> int:
    """The pipeline rank of a global rank."""
    return group_of_rank(dims, GroupKind.PP, rank).index(rank)


def _groups(run: RunRecord, parts: Mapping[int, RankMeasured]) -> list[_Group]:
    dims = run.grid.dims
    found = []
    seen = set[int]()
    for rank in range(dims.world_size):
        if rank in seen:
            continue
        # ranks that it waits for inside its passes, those that they wait for, and itself
        ranks = set[int]()
        ahead = [rank]
        while ahead:
            if (each := ahead.pop()) not in ranks:
                ranks.add(each)
                ahead += [other for kind in _WAITING for other in group_of_rank(dims, kind, each)]
        seen |= ranks
        known = [parts[r].counted_busy_s for r in sorted(ranks) if r in parts]
        busy = [seconds for of_rank in known for seconds in of_rank]
        stage = pipeline_rank(dims, rank)
        predicted_s = run.predicted.busy_s[stage]
        if max(map(len, known), default=0) >= _FEWEST_STEPS and predicted_s > 0:
            least, middle, most = statistics.quantiles(busy, n=4, method="inclusive")
            found.append(_Group(tuple(sorted(ranks)), stage, least, middle, most, predicted_s))
    return found


def _slow(groups: list[_Group], hosts: Mapping[int, str]) -> Iterator[str]:
    for group in groups:
        others = [each for each in groups if each is not group]
        replicas = [each for each in others if each.pipeline_rank == group.pipeline_rank]
        if replicas:
            usual = statistics.median(each.busy_s for each in replicas)
            most = statistics.median(each.most_s for each in replicas)
            if group.least_s > max(most, (1 + _SLOWER) * usual):
                yield (
                    f"{_who(group, hosts)}: forward and backward passes take "
                    f"{_percent(group.busy_s / usual)} longer than those of replicas "
                    f"({format_seconds(group.busy_s)} a step, {format_seconds(usual)}): a slow "
                    "GPU or host, or uneven data"
                )
        elif others:
            usual = statistics.median(each.ratio for each in others)
            if group.least_s / group.predicted_s > (1 + _SLOWER_THAN_PRICED) * usual:
                yield (
                    f"{_who(group, hosts)}: forward and backward passes take "
                    f"{format_seconds(group.busy_s)} a step, {_percent(group.ratio / usual)} more "
                    "than predicted beside the other pipeline ranks: a slow GPU or host, or layers "
                    "that are predicted too fast"
                )


def _passes(run: RunRecord, groups: list[_Group]) -> Iterator[str]:
    """Whether a step is off because of its passes, or of what lies between them."""
    measured = run.measured
    if not groups or measured is None:
        return
    busiest = max(groups, key=lambda group: group.busy_s)
    predicted = max(group.predicted_s for group in groups)
    passes = busiest.busy_s / predicted - 1
    rest_s, predicted_rest_s = measured.step_s - busiest.busy_s, run.predicted.step_s - predicted
    if abs(passes) > _PASSES:
        yield (
            f"forward and backward passes take {format_seconds(busiest.busy_s)} a step on the "
            f"busiest pipeline rank (predicted {format_seconds(predicted)}, {100 * passes:+.0f} %),"
            f" everything else {format_seconds(max(0.0, rest_s))} "
            f"(predicted {format_seconds(max(0.0, predicted_rest_s))})"
        )


def _who(group: _Group, hosts: Mapping[int, str]) -> str:
    return f"{rank_words(group.ranks, hosts)}, pipeline rank {group.pipeline_rank}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"


def figures(run: RunRecord, part: RankMeasured) -> dict[str, float]:
    """Figures of one rank for a dashboard, by name."""
    known = part.peak_memory_bytes
    return {
        "nest/step_s": part.step_s,
        "nest/predicted_step_s": run.predicted.step_s,
        "nest/step_error_percent": 100.0 * (part.step_s / run.predicted.step_s - 1.0),
        **({} if known is None else {"nest/peak_memory_bytes": float(known)}),
    }


def write_prometheus(run: RunRecord, path: Path) -> None:
    """Write a measured run for node_exporter's textfile collector, whole or not at all.

    Source: Prometheus' text exposition format 0.0.4.
    """
    measured, predicted = run.measured, run.predicted
    assert measured is not None
    job = {"run": run.id, "model": run.job.model, "plan": run.plan}
    busy = "Median work of a step in a rank's own forward and backward passes."
    peaks, planned = measured.peak_memory_bytes, predicted.peak_memory_bytes
    rows: tuple[tuple[str, str, str, tuple[float | None, ...]], ...] = (
        ("step_seconds", "Median of the watched steps.", "", (measured.step_s,)),
        ("predicted_step_seconds", "As planned.", "", (predicted.step_s,)),
        ("rank_busy_seconds", busy, "rank", measured.busy_s),
        ("rank_peak_memory_bytes", "Peak memory of a rank's device.", "rank", peaks),
        ("predicted_peak_memory_bytes", "As planned.", "pipeline_rank", planned),
        ("warnings", "Ranks or memory unlike the plan.", "", (len(run.warnings),)),
    )
    lines = []
    for name, about, label, values in rows:
        samples = [(rank, value) for rank, value in enumerate(values) if value is not None]
        if samples:
            lines += [f"# HELP nest_{name} {about}", f"# TYPE nest_{name} gauge"]
        for rank, value in samples:
            labels = {**job, label: str(rank)} if label else job
            inside = ",".join(f'{key}="{text.translate(_ESCAPED)}"' for key, text in labels.items())
            lines.append(f"nest_{name}{{{inside}}} {value!r}")
    write_text(path, "\n".join([*lines, ""]))


#: What Prometheus escapes in the value of a label.
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


#: A disk that does not answer stops no job for longer.
_WRITE_S: Seconds = 10.0


def audits() -> tuple[tuple[PolicyFile, AuditRules], ...]:
    """The files of the policy that name an audit.

    Raises:
        UserInputError: for a policy that is not understood.
    """
    return tuple((file, file.audit) for file in read_policy() if file.audit is not None)


def audit_launch(run: RunRecord | str) -> None:
    """Write down a run that is about to begin.

    Args:
        run: its record; a text says why none can be made.

    Raises:
        PolicyError: where it cannot be, and a policy has to have it.
    """
    for file, rules in audits():
        if unwritten := run if isinstance(run, str) else _append(rules, run):
            if rules.required:
                raise file.broken("audit.required", "audit", rules.file, unwritten)
            _tell("this launch", rules, unwritten)


@contextlib.contextmanager
def auditing_refusals(mode: str, plan_file: str | None, num_ranks: int) -> Iterator[None]:
    """Write down a launch that a rule does not allow, on the rank that plans; its error goes on.

    Args:
        mode: of ``+nest=``.
        plan_file: the pinned file that was asked for, if one was.
    """
    try:
        yield
    except NestError as error:
        if error.rule is not None:
            refused = RefusedLaunch(
                id=secrets.token_hex(4),
                start=now(),
                user=user_name(),
                batch_job=batch_job(),
                host=socket.gethostname(),
                num_ranks=num_ranks,
                mode=mode,
                plan_file=plan_file,
                rule=error.rule,
                reason=str(error),
                exit_code=error.exit_code,
            )
            audit_outcome(refused, "this refusal")
        raise


def audit_outcome(
    record: RunRecord | RefusedLaunch, what: str = "what became of this launch"
) -> None:
    """Write down what became of a run; where that fails, warn, and training goes on."""
    for _, rules in audits():
        if unwritten := _append(rules, record):
            _tell(what, rules, unwritten)


def changed_flags(changes: Iterable[Change]) -> tuple[FlagChange, ...]:
    """What a plan rewrote, as texts."""
    return tuple(
        FlagChange(name=name, before=before, after=after)
        for name, before, after, _ in change_rows(changes)
    )


def _append(rules: AuditRules, record: RunRecord | RefusedLaunch) -> str | None:
    """Append a line to an audit; why it could not be, if it could not be in time."""
    try:
        within(_WRITE_S, lambda: append_line(Path(rules.file), line_of(record), mode=rules.mode))
    except TimeoutError:
        return f"its disk has not answered for {_WRITE_S:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a disk says
        return f"it cannot be written to: {getattr(error, 'strerror', None) or error}"
    return None


def _tell(what: str, rules: AuditRules, reason: str) -> None:
    print_cleaned(f"nest: warning: {what} is not in the audit {rules.file}: {reason}")
