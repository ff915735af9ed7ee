"""The audit of a site: what was launched and what became of it, in files that policies name.

Lines are those of a history (``history.records.RunRecord``), each appended in one write, without a
lock that a user could keep.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from nest_megatron.config.policy import read_policy
from nest_megatron.errors import NestError
from nest_megatron.files import append_line
from nest_megatron.history.records import FlagChange, RefusedLaunch, RunRecord
from nest_megatron.history.store import line_of
from nest_megatron.integrations.fields import shown
from nest_megatron.integrations.plan_output import user_name
from nest_megatron.integrations.run_record import batch_job, now
from nest_megatron.layout.diff import Change
from nest_megatron.layout.policy import AuditRules, PolicyFile
from nest_megatron.printing import print_cleaned
from nest_megatron.units import Seconds

#: A disk that does not answer stops no job for longer.
_WRITE_S: Seconds = 10.0


def audits() -> tuple[tuple[PolicyFile, AuditRules], ...]:
    """The files of the policy that name an audit.

    Raises:
        UserInputError: for a policy that is not understood.
    """
    return tuple((file, file.audit) for file in read_policy() if file.audit is not None)


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


@contextlib.contextmanager
def refusals(mode: str, plan_file: str | None, num_ranks: int) -> Iterator[None]:
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
                batch_job=batch_job(os.environ),
                host=socket.gethostname(),
                num_ranks=num_ranks,
                mode=mode,
                plan_file=plan_file,
                rule=error.rule,
                reason=str(error),
                exit_code=error.exit_code,
            )
            for _, rules, reason in _unwritten(refused):
                _tell(f"this refusal is not in the audit {rules.file}: {reason}")
        raise


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


def _unwritten(run: RunRecord | RefusedLaunch) -> Iterator[tuple[PolicyFile, AuditRules, str]]:
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
    print_cleaned(f"nest: warning: {text}")
