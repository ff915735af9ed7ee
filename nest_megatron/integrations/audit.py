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
from nest_megatron.files import append_line, now
from nest_megatron.history.records import FlagChange, RefusedLaunch, RunRecord
from nest_megatron.history.store import line_of
from nest_megatron.integrations.fields import shown
from nest_megatron.integrations.plan_output import user_name
from nest_megatron.integrations.run_record import batch_job
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


def begin(run: RunRecord | str) -> None:
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
            follow(refused, "this refusal")
        raise


def follow(record: RunRecord | RefusedLaunch, what: str = "what became of this launch") -> None:
    """Write down what became of a run; where that fails, it is told of, and training goes on."""
    for _, rules in audits():
        if unwritten := _append(rules, record):
            _tell(what, rules, unwritten)


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


def _append(rules: AuditRules, record: RunRecord | RefusedLaunch) -> str | None:
    """Append a line to an audit; why it could not be, if it could not be in time."""
    reasons = [f"its disk has not answered for {_WRITE_S:g} s"]

    def write() -> None:
        try:
            append_line(Path(rules.file), line_of(record), mode=rules.mode)
            reasons.clear()
        except Exception as error:  # noqa: BLE001 - whatever a disk says
            reason = getattr(error, "strerror", None) or str(error)
            reasons[0] = f"it cannot be written to: {reason}"

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITE_S)
    return next(iter(reasons), None)


def _tell(what: str, rules: AuditRules, reason: str) -> None:
    print_cleaned(f"nest: warning: {what} is not in the audit {rules.file}: {reason}")
