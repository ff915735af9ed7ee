"""Pickles of torch and Megatron-LM, read within limits and without running anything of them.

A few bytes of a pickle may stand for gigabytes: an index of the memo, a length, a text that a zip
archive has compressed, a tuple that holds itself many times. So the opcodes are read first, which
builds nothing (``pickletools`` describes them).
"""

from __future__ import annotations

import io
import pickle
import zipfile
from functools import cache
from pickletools import OpcodeInfo, genops
from typing import IO, Any

from nest_megatron.errors import UserInputError

_MIB = 2**20
#: An archive's ``data.pkl`` holds the arguments and what is not sharded: some 2 MiB, at most.
MAX_STATE_BYTES = 32 * _MIB
#: ``.metadata`` has some 60 opcodes for each shard of each tensor of the whole job.
MAX_METADATA_BYTES = 128 * _MIB
#: Memory of what a pickle makes for each of its bytes, as far as it may go.
_MEMORY_FACTOR = 8
_MAX_DIRECTORY_BYTES = 8 * _MIB
#: Values of a tuple, with those of tuples inside it: they are all looked at to hash it.
_MAX_TUPLE = 10_000
_MAX_DIMENSIONS = 64
#: Bytes of an object in CPython, by the opcode that makes it.
_BYTES_EACH = 48
_BYTES = dict.fromkeys(("EMPTY_DICT", "DICT", "EMPTY_SET", "FROZENSET"), 240)
_BYTES |= dict.fromkeys(("NEWOBJ", "REDUCE", "OBJ", "INST"), 160)
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
#: Sizes of a plain value that is taken from a checkpoint.
_MAX_VALUES, _MAX_TEXT, _MAX_BITS = 10_000, 100_000, 64


class Inert:
    """Stands for an object of any class: keeps its attributes and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):  # shared, for a pickle may set it many times
            self.__dict__ = state


def load_state(stream: IO[bytes], name: str) -> Any:
    """What ``torch.save`` wrote, without the contents of tensors.

    Args:
        name: of the file, for errors.

    Raises:
        UserInputError: if it is beyond the limits.
        Exception: any, if it is damaged.
    """
    bounded = _Bounded(stream, name)
    with zipfile.ZipFile(bounded) as archive:
        bounded.most = MAX_STATE_BYTES + 1
        entry = next(e for e in archive.infolist() if e.filename.endswith("data.pkl"))
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _limit_error(name, "its data.pkl is compressed as torch.save does not")
        with archive.open(entry) as data:
            return load_inert(data.read(MAX_STATE_BYTES + 1), name, most=MAX_STATE_BYTES)


def load_inert(content: bytes, name: str, *, most: int) -> Any:
    """A pickle in which every class and function is ``Inert``.

    Args:
        name: of the file, for errors.
        most: bytes that it may have.

    Raises:
        UserInputError: if it is beyond the limits.
        Exception: any, if it is damaged.
    """
    if len(content) > most:
        raise _limit_error(name, f"what is to be read of it is larger than {most // _MIB} MiB")
    _require_bounded(content, name, _MEMORY_FACTOR * most)
    return _Unpickler(io.BytesIO(content)).load()


def is_plain(value: object) -> bool:
    """Whether a value is a switch, a number, a text or lists of them, none of them large."""
    left, seen = [value], 0
    while left:
        value, seen = left.pop(), seen + 1
        if isinstance(value, list | tuple) and seen + len(left) + len(value) <= _MAX_VALUES:
            left += value
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                return False
        elif isinstance(value, str):
            if len(value) > _MAX_TEXT:
                return False
        elif not (value is None or isinstance(value, float)):
            return False
    return True


class _Bounded:
    """A file of which no large part is read at once; ``zipfile`` reads its list of contents so.

    Args:
        most: bytes of a part.
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._name = name
        self.most = _MAX_DIRECTORY_BYTES
        self.seek = stream.seek
        self.tell = stream.tell
        self.seekable = stream.seekable

    def read(self, size: int = -1) -> bytes:
        """Read as the file does."""
        found = self._stream.read(min(size, self.most + 1) if size >= 0 else self.most + 1)
        if len(found) > self.most:
            raise _limit_error(
                self._name, f"a part of the archive is larger than {self.most:,} bytes"
            )
        return found


class _Unpickler(pickle.Unpickler):
    """Runs nothing of what was pickled."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that does nothing, or what makes a tuple of torch's sizes."""
        return _size if (module, name) == ("torch", "Size") else Inert

    def persistent_load(self, pid: object) -> None:
        """Nothing: the contents of tensors are not read."""


def _size(values: list[object] | tuple[object, ...] = ()) -> tuple[object, ...]:
    """A copy, of a length that many copies may have."""
    if len(values) > _MAX_DIMENSIONS:
        raise pickle.UnpicklingError("a tensor has too many dimensions")
    return tuple(values)


_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
#: Opcodes that do more than take values and make one of them, or that torch does not write.
_SPECIAL = frozenset((*_GETS, *_PUTS, "MARK", "DUP", "POP", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"))


@cache
def _taken(opcode: OpcodeInfo) -> tuple[int, bool]:
    """Values that an opcode takes from the stack, and whether those behind the last mark too."""
    before = [item.name for item in opcode.stack_before]
    has_slice = "mark" in before
    return before.index("mark") if has_slice else len(before), has_slice


def _require_bounded(content: bytes, name: str, left: int) -> None:
    """Refuse a pickle that is beyond a limit: of memory, of tuples, of the memo.

    A value is a number here, how many values a tuple of them would have: 1, but for tuples.

    Args:
        left: bytes of memory that what it holds may take.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    for opcode, argument, _ in genops(content):
        kind = opcode.name
        if isinstance(argument, str | bytes):  # a character outside ASCII may take four bytes
            left -= len(argument) * (1 if argument.isascii() else 4)
        left -= _BYTES.get(kind, _BYTES_EACH)
        if left < 0:
            raise _limit_error(name, "what it holds takes too much memory")
        if kind not in _SPECIAL:
            (pops, has_slice), values = _taken(opcode), 1
            if has_slice:
                start = marks.pop()
                values += sum(stack[start:])
                del stack[start:]
            for _ in range(pops):
                values += stack.pop()
            is_tuple = kind in _TUPLES
            if is_tuple and values > _MAX_TUPLE:
                raise _limit_error(name, f"a tuple in it has more than {_MAX_TUPLE:,} values")
            if opcode.stack_after:
                stack.append(values if is_tuple else 1)
        elif kind == "MARK":
            marks.append(len(stack))
        elif kind in _GETS:
            stack.append(memo[argument or 0])
        elif kind in _PUTS:
            index = len(memo) if argument is None else argument
            if index > len(memo) + 1:  # the reader makes room for all below it
                raise _limit_error(name, f"its memo goes to {index}, with few values in it")
            memo += [1] * (index + 1 - len(memo))
            memo[index] = stack[-1]
        elif kind == "DUP":
            stack.append(stack[-1])
        elif kind == "POP":
            (marks if marks and marks[-1] == len(stack) else stack).pop()
        else:
            raise pickle.UnpicklingError(f"torch.save writes no {kind}")


def _limit_error(name: str, limit: str) -> UserInputError:
    return UserInputError(
        "checkpoint", name, limit, "Check that it is a checkpoint of yours; it may be damaged."
    )
