"""Pinned plans that a reviewer has signed: the file, and its signature in a file beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nest_megatron import minisign
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, read_bytes, read_text, require_unwritable, write_text
from nest_megatron.minisign import Reason, SignatureError, key_name
from nest_megatron.planner.pins import PinnedPlan, parse_pinned

if TYPE_CHECKING:
    from minisign import PublicKey

#: Ends the name of a public key's file.
PUBLIC_SUFFIX = ".pub"


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedPlan:
    """A pinned plan, who signed it, and the comment that was signed with it."""

    pinned: PinnedPlan
    signer: Signer
    comment: str


def signature_path(path: Path) -> Path:
    """Where the signature of a file lies, unless another is named."""
    return path.with_name(path.name + minisign.SUFFIX)


def sign_pinned(path: Path, key_path: Path, ask_password: Callable[[], str]) -> Path:
    """Sign a pinned file, and write its signature beside it.

    Returns:
        The signature's file.

    Raises:
        UserInputError: if the plan is not pinned, or the key cannot be read.
    """
    content = read_bytes(path, "plan")
    pinned = parse_pinned(content, path)
    key = minisign.read_secret(read_text(key_path, "--sign"), ask_password, str(key_path))
    comment = (
        f"pinned plan of {pinned.plan.model.name}\tby:{pinned.pin.by}\tat:{pinned.pin.created}"
    )
    in_ascii = comment.encode("ascii", "backslashreplace").decode()
    signature = minisign.sign(content, key, re.sub(r"[^\t -~]", " ", in_ascii))
    target = signature_path(path)
    write_text(target, minisign.file_text(signature))
    return target


def verify_pinned(
    path: Path,
    signers: Iterable[Signer],
    signature: Path | None = None,
    num_gpus: int | None = None,
    content: bytes | None = None,
) -> SignedPlan:
    """A pinned file that one of the signers has signed.

    Args:
        signature: its signature's file, if not the one beside it.
        content: of the file, where it was read.
        num_gpus: as of ``parse_pinned``.

    Raises:
        SignatureError: if none of them has, or the file was changed since.
        PlanFileError: if it is not pinned.
    """
    where = signature or signature_path(expanded(path, "plan"))
    if not expanded(where, "--signature").exists():
        limit = "there is no such file, and the plan has to be signed"
        fix = f"Have it signed: nest-megatron pin {path} --sign KEY"
        raise SignatureError(Reason.MISSING, value=str(where), limit=limit, fix=fix)
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
        if owners is not None:
            require_unwritable(path, "launch.signers", owners)
        if path.is_dir():
            files = sorted(path.glob(f"*{PUBLIC_SUFFIX}"))
            if not files:
                limit, fix = f"it holds no key (*{PUBLIC_SUFFIX})", "Copy public keys into it."
                raise UserInputError("--key", name, limit, fix)
            found += [_signer(each, owners) for each in files]
        else:
            found.append(_signer(path, owners))
    return found


def _signer(path: Path, owners: Collection[int] | None) -> Signer:
    if owners is not None:
        require_unwritable(path, "launch.signers", owners)
    key = minisign.read_public(read_text(path, "--key"), str(path))
    return Signer(source=str(path), key=key)
