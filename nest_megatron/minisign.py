"""Detached signatures in minisign's format: Ed25519 over the BLAKE2b hash of a file.

What is signed here ``minisign -V`` verifies, and what ``minisign -S`` signs is verified here. The
curve and the key derivation are those of the package ``cryptography`` and of ``hashlib``.

Source: https://jedisct1.github.io/minisign, which describes the files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nest_megatron.errors import UserInputError
from nest_megatron.names import Name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: What follows a file's name in the name of its signature.
SUFFIX = ".minisig"
_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "
#: Algorithms: of a key, of a signature of the file itself (which minisign wrote before 0.8) and of
#: its hash; of a key's encryption, and of its checksum.
_KEY, _WHOLE, _HASHED, _SCRYPT, _CHECKSUM = b"Ed", b"Ed", b"ED", b"Sc", b"B2"
_NO_PASSWORD = b"\0\0"
#: Work and memory of a key's encryption, as libsodium counts them (``..._SENSITIVE``).
_WORK, _MEMORY_BYTES = 2**25, 2**30
_BLOCK = 8
#: The field of Curve25519, and the second coordinates of its points of order 1, 2, 4 and 8: with
#: such a public key anybody makes signatures that verify. Source: ``ge25519_has_small_order`` and
#: ``ge25519_is_canonical`` of libsodium.
_FIELD = 2**255 - 19
_EIGHT = 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = (0, 1, _FIELD - 1, _EIGHT, _FIELD - _EIGHT)


class Reason(Name):
    """Why a signature does not hold."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    UNKNOWN_KEY = "unknown_key"
    WRONG = "wrong"


class _Kind(Name):
    PUBLIC_KEY = "public key"
    SECRET_KEY = "secret key"
    SIGNATURE = "signature"


_EXIT_CODES = {
    Reason.MISSING: 12,
    Reason.UNREADABLE: 13,
    Reason.UNKNOWN_KEY: 14,
    Reason.WRONG: 15,
}


class SignatureError(UserInputError):
    """A signature that does not hold.

    Attributes:
        exit_code: one for each reason, as prologs of a scheduler tell them apart.
    """

    rule = "launch.signers"

    def __init__(self, reason: Reason, *, value: object, limit: str, fix: str) -> None:
        self.reason, self.exit_code = reason, _EXIT_CODES[reason]
        super().__init__("signature", value=value, limit=limit, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A public key: eight bytes that name it, and 32 of Ed25519."""

    number: bytes
    key: bytes

    @property
    def name(self) -> str:
        """The key's number as minisign prints it."""
        return _number(self.number)

    @property
    def line(self) -> str:
        """The key in one line, as ``minisign -P`` takes it."""
        return _encoded(_KEY, self.number, self.key)

    @property
    def text(self) -> str:
        """The text of its file."""
        return f"{_UNTRUSTED}minisign public key {self.name}\n{self.line}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    """A secret key: its number, and the 32 bytes from which Ed25519 derives the rest."""

    number: bytes
    seed: bytes

    @property
    def public(self) -> PublicKey:
        """What verifies its signatures."""
        return PublicKey(
            number=self.number, key=_private(self.seed).public_key().public_bytes_raw()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A signature of a file, and one of itself with the comment that is to be trusted.

    Args:
        hashed: the file's BLAKE2b hash is signed, not the file.
    """

    number: bytes
    hashed: bool
    signature: bytes
    comment: str
    of_comment: bytes

    @property
    def text(self) -> str:
        """The text of its file."""
        first = _encoded(_HASHED if self.hashed else _WHOLE, self.number, self.signature)
        comment = f"{_UNTRUSTED}signature of key {_number(self.number)}"
        return f"{comment}\n{first}\n{_TRUSTED}{self.comment}\n{_encoded(self.of_comment)}\n"


def new_key() -> SecretKey:
    """A key that nobody has."""
    return SecretKey(number=os.urandom(8), seed=os.urandom(32))


def sign(content: bytes, key: SecretKey, comment: str) -> Signature:
    """Sign a file's content, and a comment of one line with it."""
    assert len(comment.splitlines()) < 2, "a signed comment is one line"
    private = _private(key.seed)
    signature = private.sign(_hash(content))
    return Signature(
        number=key.number,
        hashed=True,
        signature=signature,
        comment=comment,
        of_comment=private.sign(signature + comment.encode()),
    )


def verify(content: bytes, signature: Signature, keys: Iterable[PublicKey]) -> PublicKey:
    """The key, of those given, that signed a content and the signature's comment.

    Raises:
        SignatureError: if none of them did.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    keys = list(keys)
    known = [key for key in keys if key.number == signature.number]
    if not known:
        names = ", ".join(key.name for key in keys) or "none"
        raise SignatureError(
            Reason.UNKNOWN_KEY,
            value=f"of key {_number(signature.number)}",
            limit=f"the trusted keys are {names}",
            fix="Have the file signed with one of them, or trust this key.",
        )
    signed = _hash(content) if signature.hashed else content
    commented = signature.signature + signature.comment.encode()
    for key in known:
        public = ed25519.Ed25519PublicKey.from_public_bytes(key.key)
        try:
            public.verify(signature.signature, signed)
            public.verify(signature.of_comment, commented)
        except InvalidSignature:
            continue
        return key
    raise SignatureError(
        Reason.WRONG,
        value=f"of key {_number(signature.number)}",
        limit="it does not match: the file, or the signature's comment, was changed",
        fix="Take the signed file and its signature again.",
    )


def read_public(text: str, name: str) -> PublicKey:
    """A public key from its file, or from its one line; ``name`` is where it was found."""
    algorithm, number, key = _decoded(_last_line(text), _Kind.PUBLIC_KEY, name, 2, 8, 32)
    if algorithm != _KEY:
        raise _unreadable(_Kind.PUBLIC_KEY, name)
    point = int.from_bytes(key, "little") % 2**255
    if point >= _FIELD or point in _SMALL_ORDER:
        limit = (
            "it is a point of small order, or not in its shortest form: others could sign for it"
        )
        fix = "Trust another key (nest-megatron keygen makes one)."
        raise UserInputError(_Kind.PUBLIC_KEY, name, limit, fix)
    return PublicKey(number=number, key=key)


def is_public_line(text: str) -> bool:
    """Whether a text is a public key in one line, not the name of a file.

    >>> is_public_line("reviewer.pub")
    False
    """
    return re.fullmatch(r"RW[A-Za-z0-9+/]{54}", text) is not None


def read_signature(text: str, name: str) -> Signature:
    """A signature from its file; a ``SignatureError`` if it is none."""
    lines = text.splitlines()
    if len(lines) != 4 or not lines[2].startswith(_TRUSTED):
        raise _unreadable(_Kind.SIGNATURE, name)
    algorithm, number, signature = _decoded(lines[1], _Kind.SIGNATURE, name, 2, 8, 64)
    (of_comment,) = _decoded(lines[3], _Kind.SIGNATURE, name, 64)
    if algorithm not in (_WHOLE, _HASHED):
        raise _unreadable(_Kind.SIGNATURE, name)
    return Signature(
        number=number,
        hashed=algorithm == _HASHED,
        signature=signature,
        comment=lines[2].removeprefix(_TRUSTED),
        of_comment=of_comment,
    )


_SECRET_SIZES = (2, 2, 2, 32, 8, 8, 104)


def read_secret(text: str, ask_password: Callable[[], str], name: str) -> SecretKey:
    """A secret key from its file.

    Args:
        ask_password: called where the key is encrypted.

    Raises:
        UserInputError: if it is none, or the password is not its own.
    """
    fields = _decoded(_last_line(text), _Kind.SECRET_KEY, name, *_SECRET_SIZES)
    algorithm, derivation, checksum, salt, operations, memory, inner = fields
    if algorithm != _KEY or checksum != _CHECKSUM or derivation not in (_SCRYPT, _NO_PASSWORD):
        raise _unreadable(_Kind.SECRET_KEY, name)
    if encrypted := derivation == _SCRYPT:
        work, memory_bytes = (int.from_bytes(each, "little") for each in (operations, memory))
        inner = _mixed(inner, ask_password(), salt, work, memory_bytes)
    number, seed, public, found = inner[:8], inner[8:40], inner[40:72], inner[72:]
    key = SecretKey(number=number, seed=seed)
    if key.public.key != public or (encrypted and found != _checksum(number, seed + public)):
        limit = "the password is not this key's" if encrypted else "it is damaged"
        fix = "Give the password that it was made with, or another key."
        raise UserInputError(_Kind.SECRET_KEY, name, limit, fix)
    return key


def secret_text(key: SecretKey, password: str) -> str:
    """The text of a secret key's file, encrypted but with an empty password."""
    salt, work, memory_bytes, derivation = bytes(32), 0, 0, _NO_PASSWORD
    both = key.seed + key.public.key
    inner = key.number + both + bytes(32)
    if password:
        salt, work, memory_bytes, derivation = os.urandom(32), _WORK, _MEMORY_BYTES, _SCRYPT
        inner = key.number + both + _checksum(key.number, both)
        inner = _mixed(inner, password, salt, work, memory_bytes)
    limits = (each.to_bytes(8, "little") for each in (work, memory_bytes))
    line = _encoded(_KEY, derivation, _CHECKSUM, salt, *limits, inner)
    return f"{_UNTRUSTED}minisign encrypted secret key\n{line}\n"


def _mixed(inner: bytes, password: str, salt: bytes, work: int, memory_bytes: int) -> bytes:
    """Encrypt, or decrypt, what a secret key's file holds.

    Raises:
        UserInputError: if the file asks for more memory than keys of minisign do.
    """
    if memory_bytes > _MEMORY_BYTES or work > _WORK:
        limit = f"its encryption may take {_MEMORY_BYTES} bytes of memory, as minisign's does"
        fix = "Make the key anew: nest-megatron keygen."
        raise UserInputError(_Kind.SECRET_KEY, memory_bytes, limit, fix)
    n, p = _scrypt_cost(work, memory_bytes)
    most = 128 * _BLOCK * (n + p + 2)
    stream = hashlib.scrypt(
        password.encode(), salt=salt, n=n, r=_BLOCK, p=p, maxmem=most, dklen=len(inner)
    )
    return bytes(a ^ b for a, b in zip(inner, stream, strict=True))


def _scrypt_cost(work: int, memory_bytes: int) -> tuple[int, int]:
    """N and p of scrypt for libsodium's limits (``pickparams`` of its scrypt).

    >>> _scrypt_cost(2**25, 2**30)
    (1048576, 1)
    """
    work = max(work, 2**15)
    scarce_work = work < memory_bytes // 32
    most = work // (_BLOCK * 4) if scarce_work else memory_bytes // (_BLOCK * 128)
    n = 2 ** max(1, (most // 2).bit_length())
    return n, 1 if scarce_work else max(1, min(work // 4 // n, 2**30 - 1) // _BLOCK)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()


def _checksum(number: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(_KEY + number + key, digest_size=32).digest()


def _number(number: bytes) -> str:
    return number[::-1].hex().upper()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _encoded(*fields: bytes) -> str:
    return base64.b64encode(b"".join(fields)).decode()


def _decoded(line: str, kind: _Kind, name: str, *sizes: int) -> Iterator[bytes]:
    """Fields of fixed sizes from a line in base64."""
    try:
        content = base64.b64decode(line.strip(), validate=True)
    except ValueError:  # binascii's error is one
        content = b""
    if len(content) != sum(sizes):
        raise _unreadable(kind, name)
    stream = io.BytesIO(content)
    return map(stream.read, sizes)


def _unreadable(kind: _Kind, name: str) -> UserInputError:
    limit = f"it is no {kind} in minisign's format"
    fix = "Name a file that minisign or nest-megatron wrote."
    if kind is _Kind.SIGNATURE:
        return SignatureError(Reason.UNREADABLE, value=name, limit=limit, fix=fix)
    return UserInputError(kind, name, limit, fix)


def _private(seed: bytes) -> Ed25519PrivateKey:
    key: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
    return key


def _ed25519() -> Any:
    """The module of ``cryptography``, which an installation may lack."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        limit = "they need the package cryptography, which is not installed"
        fix = "pip install 'nest-megatron[sign]'"
        raise UserInputError("signatures", "Ed25519", limit, fix) from error
    return ed25519
