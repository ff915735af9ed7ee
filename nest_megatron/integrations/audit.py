"""The audit of a site: what was launched and what became of it, in files that policies name.

Lines are those of a history (``history.records.RunRecord``), each appended in one write, without a
lock that a user could keep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from nest_megatron.config.policy import read_policy
from nest_megatron.files import append_line
from nest_megatron.history.records import FlagChange, RunRecord
from nest_megatron.history.store import line_of
from nest_megatron.integrations.fields import shown
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.policy import AuditRules, Policy, PolicyFile
from nest_megatron.units import Seconds

#: A disk that does not answer stops no job for longer.
_WRITE_S: Seconds = 10.0


def audits(policy: Policy | None = None) -> tuple[tuple[PolicyFile, AuditRules], ...]:
    """The files of the policy that name an audit.

    Raises:
        UserInputError: for a policy that is not understood.
    """
    files = read_policy() if policy is None else policy
    return tuple((file, file.audit) for file in files if file.audit is not None)


def begin(run: RunRecord) -> None:
    """Write down a run that is about to begin.

    Raises:
        PolicyError: where it cannot be, and a policy has to have it.
    """
    for file, rules, reason in _unwritten(run):
        if rules.required:
            raise file.broken("audit.required", "audit", rules.file, reason)
        _tell(f"this launch is not in the audit {rules.file}: {reason}")


def refuse(reason: str) -> None:
    """A run of which no record can be made cannot be written down either; raises as ``begin``."""
    for file, rules in audits():
        if rules.required:
            raise file.broken("audit.required", "audit", rules.file, reason)
        _tell(f"this launch is not in the audit {rules.file}: {reason}")


def follow(run: RunRecord) -> None:
    """Write down what became of a run; where that fails, it is told of, and training goes on."""
    for _, rules, reason in _unwritten(run):
        _tell(f"what became of this launch is not in the audit {rules.file}: {reason}")


def changed_flags(changes: Iterable[Change]) -> tuple[FlagChange, ...]:
    """What a plan rewrote, as texts."""
    return tuple(
        FlagChange(
            name=change.field,
            before=None if change.before is None else shown(change.before),
            after=None if change.after is None else shown(change.after),
        )
        for change in changes
    )


def _unwritten(run: RunRecord) -> Iterator[tuple[PolicyFile, AuditRules, str]]:
    """Append a line to each audit; those that it is not in, and why."""
    for file, rules in audits():
        reason = _append(Path(rules.file), rules.mode, line_of(run))
        if reason is not None:
            yield file, rules, reason


def _append(path: Path, mode: int, line: bytes) -> str | None:
    """Why a line could not be appended, if it could not be in time."""
    reasons: list[str | None] = []

    def write() -> None:
        try:
            append_line(path, line, mode=mode)
        except Exception as error:  # noqa: BLE001 - whatever a disk says
            reason = getattr(error, "strerror", None) or str(error)
            reasons.append(f"it cannot be written to: {reason}")
        else:
            reasons.append(None)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITE_S)
    return reasons[0] if reasons else f"its disk has not answered for {_WRITE_S:g} s"


def _tell(text: str) -> None:
    print(f"nest: warning: {text}", flush=True)
