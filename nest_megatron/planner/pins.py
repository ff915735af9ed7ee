"""Reviewed plans, frozen and signed: a file that only launches the job that it was made for.

The first line of a pinned file is a checksum of every byte below it, so that any later change is
noticed; below lie who pinned it, what it demands of the software, and the plan. A signature of a
reviewer stands in another file next to it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nest_megatron import minisign
from nest_megatron.errors import PlanFileError, UserInputError, typed_setting
from nest_megatron.files import expanded, read_bytes, read_text, require_unwritable, write_text
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.minisign import Reason, SignatureError, key_name
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.planner import plan_table
from nest_megatron.planner.plan_table import PlanTable, TableText

if TYPE_CHECKING:
    from minisign import PublicKey

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


@frozen
class Pin:
    """Who froze a plan, and for which software.

    Args:
        megatron_lm: the release that it may launch, as ``RELEASES`` has it; ``None`` where the
            plan was made for none: whichever launches it holds it to its rules.
    """

    created: str
    by: str
    note: str
    nest_megatron_version: str
    megatron_lm: str | None


@frozen
class PinnedPlan:
    """A pinned plan, alone in its file or an entry of a table.

    Args:
        sizes: numbers of GPUs that the table has plans for; none without a table.
        told: what the table says of the requested number of GPUs.
        signer: id of the trusted key that signed it, where a policy requires one.
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


@frozen
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
        body = plan_file.written({**pin, **plan_file.fields_of(pinned.plan)})
    return f"{_HEAD}{_sum(body)}\n{body}"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_pinned(pinned: PinnedPlan | PinnedTable, path: Path) -> None:
    """Write a pinned file, whole or not at all."""
    write_text(path, pinned_text(pinned))


def is_pinned(text: str) -> bool:
    """Whether a plan file's text is pinned, though its first line be damaged or gone."""
    return any(line.startswith(_HEAD) or line == "pin:" for line in text.splitlines()[:2])


def read_pinned(path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """Read a pinned file.

    Args:
        num_gpus: picks the plan of a table: the one for so many, else for the most below, else for
            the fewest; ``None`` picks the last.

    Raises:
        UnpinnedError: if it is not pinned.
        ChangedPinError: if a byte of it changed since.
    """
    return parse_pinned(read_bytes(path, typed_setting("plan")), path, num_gpus)


def parse_pinned(content: bytes, path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """The plan of a pinned file from its bytes, as ``read_pinned``."""
    body = _pinned_body(plan_text(content, path), path)
    if plan_table.is_table(body):
        table = TableText(body, str(path))
        size = table.sizes[-1] if num_gpus is None else num_gpus
        return PinnedPlan(
            pin=from_plain(Pin, table.head.get("pin"), "pin"),
            plan=table.plan_for(size),
            sizes=table.sizes,
            told=next((each.told for each in table.entries if each.num_gpus == size), ""),
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
        raise PlanFileError(
            typed_setting("plan"),
            str(path),
            f"it is not UTF-8 text: {error}",
            "Take the file again, or plan again.",
        ) from error
    unmarked = text.removeprefix("\ufeff")
    if unmarked != text and is_pinned(unmarked):
        raise _changed(path)
    return unmarked


def _changed(path: Path) -> ChangedPinError:
    return ChangedPinError(
        typed_setting("plan"),
        str(path),
        "its contents do not match its first line: it was changed after it was pinned",
        "Take the reviewed file again, or plan and pin again.",
    )


def _body(content: bytes, path: Path) -> str:
    """A plan file without the checksum that a pinned one begins with."""
    text = plan_text(content, path)
    return _pinned_body(text, path) if is_pinned(text) else text


def _pinned_body(text: str, path: Path) -> str:
    """What the first line of a pinned file is the checksum of."""
    if not is_pinned(text):
        fix = "It is no plan: name a file that nest-megatron pin has written."
        if text.startswith("schema:"):
            fix = f"Review it, then: nest-megatron pin {shlex.quote(str(path))}"
        raise UnpinnedError(typed_setting("plan"), str(path), "it is not pinned", fix)
    head, _, body = text.partition("\n")
    if head != _HEAD + _sum(body):
        raise _changed(path)
    return body


def read_table(path: Path) -> tuple[PlanTable, Pin | None] | None:
    """Read a plan table, pinned or not; ``None`` for a file of one plan.

    Raises:
        UserInputError: if it cannot be read, or was changed.
    """
    body = _body(read_bytes(path, "plan"), path)
    if not plan_table.is_table(body):
        return None
    found = TableText(body, str(path))
    pin = from_plain(Pin, found.head["pin"], "pin") if "pin" in found.head else None
    return found.table(), pin


def read_plan(path: Path) -> tuple[ParallelPlan, Pin | None]:
    """Read a plan file, pinned or not.

    Raises:
        UserInputError: if it cannot be read, or was changed.
    """
    content = read_bytes(path, "plan")
    body = _body(content, path)
    if plan_table.is_table(body):
        raise PlanFileError(
            "plan",
            str(path),
            "it is a table of plans, one for each number of nodes",
            "`nest-megatron explain` shows it; plan for one number of nodes for one plan.",
        )
    if not is_pinned(plan_text(content, path)):
        return plan_file.load(body, str(path)), None
    pinned = parse_pinned(content, path)
    return pinned.plan, pinned.pin


#: Ends the name of a public key's file.
PUBLIC_SUFFIX = ".pub"


@frozen
class Signer:
    """A trusted key and where it was found: a file's name, or the key itself."""

    source: str
    key: PublicKey

    @property
    def key_name(self) -> str:
        """The key's number."""
        return key_name(self.key)

    def describe(self) -> str:
        """The key, and the name of its file."""
        if minisign.is_public_line(self.source):
            return self.key_name
        return f"{Path(self.source).stem} (key {self.key_name})"


@frozen
class SignedPlan:
    """A pinned plan, who signed it, and the comment that was signed with it."""

    pinned: PinnedPlan
    signer: Signer
    comment: str


def signature_path(path: Path) -> Path:
    """Where the signature of a file lies, unless another is named."""
    return path.with_name(path.name + minisign.SUFFIX)


def pin_signature(
    content: bytes, path: Path, key_path: Path, ask_password: Callable[[], str]
) -> str:
    """The signature of a pinned file's bytes, as the text of the file next to it.

    Raises:
        UserInputError: if the plan is not pinned, or the key cannot be read.
    """
    pinned = parse_pinned(content, path)
    key = minisign.read_secret(read_text(key_path, "--sign"), ask_password, str(key_path))
    comment = (
        f"pinned plan of {pinned.plan.model.name}\tby:{pinned.pin.by}\tat:{pinned.pin.created}"
    )
    in_ascii = comment.encode("ascii", "backslashreplace").decode()
    return minisign.file_text(minisign.sign(content, key, re.sub(r"[^\t -~]", " ", in_ascii)))


def verify_pinned(
    path: Path,
    signers: Iterable[Signer],
    signature: Path | None = None,
    num_gpus: int | None = None,
    content: bytes | None = None,
) -> SignedPlan:
    """A pinned file that one of the signers has signed.

    Args:
        signature: its signature's file, if not the one next to it.
        content: of the file, where it was read.
        num_gpus: as of ``parse_pinned``.

    Raises:
        SignatureError: if none of them has, or the file was changed since.
        PlanFileError: if it is not pinned.
    """
    where = signature or signature_path(expanded(path, "plan"))
    if not expanded(where, "--signature").exists():
        raise SignatureError(
            Reason.MISSING,
            value=str(where),
            limit="there is no such file, and the plan has to be signed",
            fix=f"Have it signed: nest-megatron pin {shlex.quote(str(path))} --sign KEY",
        )
    found = minisign.read_signature(read_text(where, "--signature"), str(where))
    by_key = {signer.key: signer for signer in signers}
    content = read_bytes(path, "plan") if content is None else content
    key = minisign.verify(content, found, by_key)
    # what was verified, whatever the file is by now
    pinned = parse_pinned(content, path, num_gpus)
    return SignedPlan(pinned=pinned, signer=by_key[key], comment=found.trusted_comment)


def read_signers(named: Iterable[str], owners: Collection[int] | None = None) -> list[Signer]:
    """Trusted keys: each a file, a folder of files ``*.pub``, or a key in one line.

    Args:
        owners: ids of the users that the files belong to; nobody else may write to them or to a
            folder above them. ``None`` takes any.

    Raises:
        UserInputError: for a file that is no public key, a folder without one, or one that somebody
            else could change.
    """
    found = []
    for name in named:
        if minisign.is_public_line(name):
            found.append(Signer(source=name, key=minisign.read_public(name, name)))
            continue
        path = expanded(Path(name), "--key")
        files = [path]
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if each.suffix == PUBLIC_SUFFIX)
        if owners is not None:
            for each in dict.fromkeys((path, *files)):
                require_unwritable(each, "launch.signers", owners)
        if not files or name == "":
            raise UserInputError(
                "--key",
                name,
                f"it holds no key (*{PUBLIC_SUFFIX})",
                "Name a public key, or a folder that holds some.",
            )
        found += [
            Signer(source=str(each), key=minisign.read_public(read_text(each, "--key"), str(each)))
            for each in files
        ]
    return found
