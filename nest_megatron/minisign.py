"""Detached signatures in minisign's format: Ed25519 over the BLAKE2b hash of a file.

What is signed here ``minisign -V`` verifies, and what ``minisign -S`` signs is verified here. The
package ``py-minisign`` reads, writes and verifies the files. Here is what a launch needs as well
as that: which of several trusted keys signed a file, why none did, and which keys nobody may trust.

Source: https://jedisct1.github.io/minisign, which describes the files.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nest_megatron.errors import UserInputError
from nest_megatron.packages import require_package
from nest_megatron.plain import Name

if TYPE_CHECKING:
    from minisign import PublicKey, SecretKey, Signature

#: What follows a file's name in the name of its signature.
SUFFIX = ".minisig"
#: Work and memory of a key's encryption, as libsodium counts them (``..._SENSITIVE``).
_WORK, _MEMORY_BYTES = 2**25, 2**30
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


def new_key() -> SecretKey:
    """A key that nobody has."""
    key: SecretKey = _package().KeyPair.generate().secret_key
    return key


def public_key(key: SecretKey) -> PublicKey:
    """What verifies a key's signatures."""
    public: PublicKey = key.get_public_key()
    public.untrusted_comment = f"minisign public key {key_name(public)}"
    return public


def key_name(key: PublicKey) -> str:
    """A key's number as minisign prints it."""
    return _number(key.to_base64())


def file_text(content: PublicKey | SecretKey | Signature) -> str:
    """The text of a file."""
    return f"{bytes(content).decode()}\n"


def secret_text(key: SecretKey, password: str) -> str:
    """The text of a secret key's file; a password encrypts the key, which signs no more then."""
    if password:
        key.encrypt(password, opslimit=_WORK, memlimit=_MEMORY_BYTES)
    return file_text(key)


def sign(content: bytes, key: SecretKey, comment: str) -> Signature:
    """Sign a file's content, and a comment of one line in ASCII with it."""
    signature: Signature = key.sign(
        content,
        untrusted_comment=f"signature of key {key_name(key.get_public_key())}",
        trusted_comment=comment,
    )
    return signature


def verify(content: bytes, signature: Signature, keys: Iterable[PublicKey]) -> PublicKey:
    """The key, of some, that signed a content and the signature's comment.

    Raises:
        SignatureError: if none of them did.
    """
    package, keys = _package(), list(keys)
    number = _number(bytes(signature).splitlines()[1])
    known = [key for key in keys if key_name(key) == number]
    if not known:
        names = ", ".join(map(key_name, keys)) or "none"
        raise SignatureError(
            Reason.UNKNOWN_KEY,
            value=f"of key {number}",
            limit=f"the trusted keys are {names}",
            fix="Have the file signed with one of them, or trust this key.",
        )
    for key in known:
        try:
            key.verify(content, signature)
        except package.VerifyError:
            continue
        return key
    raise SignatureError(
        Reason.WRONG,
        value=f"of key {number}",
        limit="it does not match: the file, or the signature's comment, was changed",
        fix="Take the signed file and its signature again.",
    )


def read_public(text: str, name: str) -> PublicKey:
    """A public key from its file, or from its one line; ``name`` is where it was found."""
    package, content = _package(), text.strip().encode()
    read = package.PublicKey.from_bytes if b"\n" in content else package.PublicKey.from_base64
    try:
        key: PublicKey = read(content)
    except package.ParseError as error:
        raise _unreadable("public key", name) from error
    point = int.from_bytes(base64.b64decode(key.to_base64())[10:], "little") % 2**255
    if point >= _FIELD or point in _SMALL_ORDER:
        limit = (
            "it is a point of small order, or not in its shortest form: others could sign for it"
        )
        fix = "Trust another key (nest-megatron keygen makes one)."
        raise UserInputError("public key", name, limit, fix)
    return key


def is_public_line(text: str) -> bool:
    """Whether a text is a public key in one line, not the name of a file.

    >>> is_public_line("reviewer.pub")
    False
    """
    return re.fullmatch(r"RW[A-Za-z0-9+/]{54}", text) is not None


def read_signature(text: str, name: str) -> Signature:
    """A signature from its file; a ``SignatureError`` if it is none."""
    package = _package()
    try:
        signature: Signature = package.Signature.from_bytes(text.encode())
        if bytes(signature).split() != text.encode().split():  # base64 with other unused bits
            raise package.ParseError("it is not as minisign writes it")
    except package.ParseError as error:
        unreadable = _unreadable("signature", name)
        raise SignatureError(
            Reason.UNREADABLE, value=name, limit=unreadable.limit, fix=unreadable.fix
        ) from error
    return signature


def read_secret(text: str, ask_password: Callable[[], str], name: str) -> SecretKey:
    """A secret key from its file.

    Args:
        ask_password: called where the key is encrypted.

    Raises:
        UserInputError: if it is none, or the password is wrong.
    """
    package = _package()
    try:
        key: SecretKey = package.SecretKey.from_bytes(text.strip().encode())
    except package.ParseError as error:
        raise _unreadable("secret key", name) from error
    try:
        if key.is_encrypted():
            key.decrypt(ask_password())
        key.get_public_key().verify(b"", key.sign(b""))
    except package.Error as error:  # of the second line, where the key is damaged
        raise UserInputError(
            "secret key",
            name,
            f"nothing can be signed with it: {error}",
            "Give the password that it was made with, or another key.",
        ) from error
    return key


def _number(line: bytes) -> str:
    """The number of the key that a line in base64 is, or was made with."""
    return base64.b64decode(line)[2:10][::-1].hex().upper()


def _unreadable(kind: str, name: str) -> UserInputError:
    return UserInputError(
        kind,
        name,
        f"it is no {kind} in minisign's format",
        f"Name a {kind} that minisign or nest-megatron wrote.",
    )


def _package() -> Any:
    """The module of ``py-minisign``, which an installation may lack."""
    require_package(
        "minisign",
        "sign",
        "signatures",
        "they are made and verified by py-minisign, which is not installed",
    )
    import minisign

    return minisign
