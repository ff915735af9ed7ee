"""Reviewed plans, frozen: a file that only launches the job that it was made for.

The first line of a pinned file is a checksum of every byte below it, so that any later change is
noticed; below lie who pinned it, what it demands of the software, and the plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.errors import PlanFileError
from nest_megatron.files import read_bytes, write_text
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.planner import plan_table
from nest_megatron.planner.plan_table import PlanTable, TableText

#: Who pins the plan of a short run of ``tune``, which nobody has reviewed.
TUNE = "nest-megatron tune"
_HEAD = "# nest-megatron pinned plan, sha256 of all below: "


class UnpinnedError(PlanFileError):
    """A plan file that nobody has pinned."""

    exit_code = 10
    rule = "nest.plan"


class ChangedPinError(PlanFileError):
    """A pinned file of which a byte was changed since."""

    exit_code = 11
    rule = "nest.plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Who froze a plan, and for which software.

    Args:
        megatron_lm: the release that it may launch, as ``RELEASES`` has it; ``None`` where the
            plan was made for none: whichever launches it holds it to its own rules.
    """

    created: str
    by: str
    note: str
    nest_megatron_version: str
    megatron_lm: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPlan:
    """A pinned plan, alone in its file or the entry of a table that was asked for.

    Args:
        sizes: numbers of GPUs that the table has plans for; none without a table.
        told: what the table says of the number of GPUs that was asked for.
        signer: id of the trusted key that signed it, where a policy asked for one.
    """

    pin: Pin
    plan: ParallelPlan
    sizes: tuple[int, ...] = ()
    told: str = ""
    signer: str | None = None


def pinned_for(plan: ParallelPlan, release: str | None) -> str:
    """The framework that a plan is pinned for, in words."""
    if release is not None:
        return f"{MEGATRON_LM} {release}"
    return plan.provenance.framework or "any release of Megatron-LM (pin --release names one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTable:
    """The contents of a pinned file of plans for several numbers of nodes."""

    pin: Pin
    table: PlanTable


def pinned_text(pinned: PinnedPlan | PinnedTable) -> str:
    """The text of a pinned file."""
    pin = {"pin": to_plain(pinned.pin)}
    if isinstance(pinned, PinnedTable):
        body = plan_table.dump(pinned.table, pin)
    else:
        fields = {**pin, **plan_file.fields_of(pinned.plan)}
        body = plan_file.written(fields)
    return f"{_HEAD}{_sum(body)}\n{body}"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_pinned(pinned: PinnedPlan | PinnedTable, path: Path) -> None:
    """Write a pinned file, whole or not at all."""
    write_text(path, pinned_text(pinned))


def is_pinned(text: str) -> bool:
    """Whether a plan file's text is pinned."""
    return text.startswith(_HEAD)


def read_pinned(path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """Read a pinned file.

    Args:
        num_gpus: picks the plan of a table: the one for so many, else for the most below, else for
            the fewest; ``None`` picks the last.

    Raises:
        UnpinnedError: if it is not pinned.
        ChangedPinError: if a byte of it changed since.
    """
    return parse_pinned(read_bytes(path, "nest.plan"), path, num_gpus)


def parse_pinned(content: bytes, path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """The plan of a pinned file from its bytes, as ``read_pinned``."""
    body = _pinned_body(plan_text(content, path), path)
    if plan_table.is_table(body):
        table = TableText.of(body, str(path))
        size = table.sizes()[-1] if num_gpus is None else num_gpus
        return PinnedPlan(
            pin=from_plain(Pin, table.head.get("pin"), "pin"),
            plan=table.plan_for(size),
            sizes=table.sizes(),
            told=table.told_of(size),
        )
    fields = plan_file.parse(body, str(path))
    pin = from_plain(Pin, fields.pop("pin", None), "pin")
    return PinnedPlan(pin=pin, plan=plan_file.from_fields(fields, str(path)))


def plan_text(content: bytes, path: Path) -> str:
    """The text of a plan file, pinned or not.

    Raises:
        ChangedPinError: if it is a pinned file behind a byte-order mark, which no pinned file has.
        PlanFileError: if it is no UTF-8 text.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        limit, fix = f"it is not UTF-8 text: {error}", "Take the file again, or plan anew."
        raise PlanFileError("plan", str(path), limit, fix) from error
    unmarked = text.removeprefix("\ufeff")
    if unmarked != text and is_pinned(unmarked):
        raise _changed(path)
    return unmarked


def _changed(path: Path) -> ChangedPinError:
    return ChangedPinError(
        "nest.plan",
        value=str(path),
        limit="its contents do not match its first line: it was changed after it was pinned",
        fix="Take the reviewed file again, or plan and pin anew.",
    )


def _pinned_body(text: str, path: Path) -> str:
    """What the first line of a pinned file is the checksum of."""
    if not is_pinned(text):
        raise UnpinnedError(
            "nest.plan",
            value=str(path),
            limit="it is not pinned",
            fix=f"Review it, then: nest-megatron pin {path}",
        )
    head, _, body = text.partition("\n")
    if head != _HEAD + _sum(body):
        raise _changed(path)
    return body


def read_table(path: Path) -> tuple[PlanTable, Pin | None] | None:
    """Read a plan table, pinned or not; ``None`` for a file of one plan.

    Raises:
        UserInputError: if it cannot be read, or was changed.
    """
    text = plan_text(read_bytes(path, "plan"), path)
    body = _pinned_body(text, path) if is_pinned(text) else text
    if not plan_table.is_table(body):
        return None
    found = TableText.of(body, str(path))
    pin = from_plain(Pin, found.head["pin"], "pin") if "pin" in found.head else None
    return found.table(), pin


def read_plan(path: Path) -> tuple[ParallelPlan, Pin | None]:
    """Read a plan file, pinned or not.

    Raises:
        UserInputError: if it cannot be read, or was changed.
    """
    text = plan_text(read_bytes(path, "plan"), path)
    if not is_pinned(text) and not plan_table.is_table(text):
        return plan_file.load(text, str(path)), None
    if read_table(path) is not None:
        limit = "it is a table of plans, one for each number of nodes"
        fix = "`nest-megatron explain` shows it; plan for one number of nodes for one plan."
        raise PlanFileError("plan", str(path), limit, fix)
    pinned = read_pinned(path)
    return pinned.plan, pinned.pin
