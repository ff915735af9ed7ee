"""Pickles of torch and Megatron-LM, read within limits and without running anything of them.

A few bytes of a pickle may stand for gigabytes: an index of the memo, a length, a text that a zip
archive has compressed, a tuple that holds itself many times. So the opcodes are read first, which
builds nothing (``pickletools`` describes them).
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
            raise _refused(name, "its data.pkl is compressed as torch.save does not")
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
        raise _refused(name, f"what is to be read of it is larger than {most // _MIB} MiB")
    _Scan(content, name, _MEMORY_FACTOR * most).run()
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
        self._stream, self._name, self.most = stream, name, _MAX_DIRECTORY_BYTES
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        """Read as the file does."""
        found = self._stream.read(min(size, self.most + 1) if size >= 0 else self.most + 1)
        if len(found) > self.most:
            raise _refused(self._name, f"a part of the archive is larger than {self.most:,} bytes")
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


@dataclass(frozen=True, slots=True)
class _Opcode:
    """What an opcode takes from the stack and puts there, and how its argument is written.

    Args:
        argument: bytes of it, or a code of ``pickletools`` (negative) for another form.
        pops: values, below those behind the last mark.
        is_plain: it takes nothing and puts one value there, and that is all.
    """

    name: str
    argument: int
    pops: int
    has_slice: bool
    pushes: bool
    is_plain: bool
    cost: int


@cache
def _opcodes() -> Mapping[int, _Opcode]:
    import pickletools

    found = {}
    for each in pickletools.opcodes:
        before = [item.name for item in each.stack_before]
        has_slice, pushes = "mark" in before, bool(each.stack_after)
        is_special = each.name in _SPECIAL
        found[ord(each.code)] = _Opcode(
            each.name,
            each.arg.n if each.arg else 0,
            before.index("mark") if has_slice else len(before),
            has_slice,
            pushes,
            pushes and not before and not is_special,
            _BYTES.get(each.name, _BYTES_EACH),
        )
    return found


#: Bytes that say how long an argument is, and whether they have a sign.
_LENGTHS = {-2: (1, False), -3: (4, True), -4: (4, False), -5: (8, False)}


class _Scan:
    """The opcodes of a pickle, looked at one by one: memory, tuples and the memo are bounded.

    A value is a number here, how many values a tuple of them would have: 1, but for tuples.
    """

    def __init__(self, content: bytes, name: str, most_memory: int) -> None:
        self._content, self._name, self._left = content, name, most_memory
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: list[int] = []

    def run(self) -> None:
        """Refuse a pickle that is beyond a limit, or ends before it stops."""
        content, table, at = self._content, _opcodes(), 0
        while True:
            opcode = table[content[at]]
            at += 1
            argument = b""
            if opcode.argument:  # of a text outside ASCII a character may take four bytes
                start, at = self._argument(opcode, at)
                argument = content[start:at]
                self._left -= len(argument) * (1 if argument.isascii() else 4)
            self._left -= opcode.cost
            if self._left < 0:
                raise _refused(self._name, "what it holds takes too much memory")
            if opcode.name == "STOP":
                return
            if opcode.is_plain:
                self._stack.append(1)
            elif opcode.name in _SPECIAL:
                self._step(opcode.name, argument)
            else:
                self._take(opcode)

    def _argument(self, opcode: _Opcode, at: int) -> tuple[int, int]:
        """Where an argument begins and ends."""
        content, size = self._content, opcode.argument
        if size == -1:  # lines: two of a module's name and a class's
            end = content.index(b"\n", at) + 1
            return at, content.index(b"\n", end) + 1 if opcode.name in ("GLOBAL", "INST") else end
        if size < 0:
            width, signed = _LENGTHS[size]
            size = int.from_bytes(content[at : at + width], "little", signed=signed)
            at += width
        if not 0 <= size <= len(content) - at:
            raise pickle.UnpicklingError("a length is beyond the end")
        return at, at + size

    def _step(self, name: str, argument: bytes) -> None:
        stack = self._stack
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _GETS:
            stack.append(self._memo[_index(name, argument)])
        elif name in _PUTS:
            index = len(self._memo) if name == "MEMOIZE" else _index(name, argument)
            if index > len(self._memo) + 1:  # the reader makes room for all below it
                raise _refused(self._name, f"its memo goes to {index}, with few values in it")
            self._memo += [1] * (index + 1 - len(self._memo))
            self._memo[index] = stack[-1]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP":
            (self._marks if self._marks and self._marks[-1] == len(stack) else stack).pop()
        else:
            raise pickle.UnpicklingError(f"torch.save writes no {name}")

    def _take(self, opcode: _Opcode) -> None:
        """What most opcodes do: values are taken, and one is made of them."""
        stack, values = self._stack, 1
        if opcode.has_slice:
            start = self._marks.pop()
            values += sum(stack[start:])
            del stack[start:]
        for _ in range(opcode.pops):
            values += stack.pop()
        is_tuple = opcode.name in _TUPLES
        if is_tuple and values > _MAX_TUPLE:
            raise _refused(self._name, f"a tuple in it has more than {_MAX_TUPLE:,} values")
        if opcode.pushes:
            stack.append(values if is_tuple else 1)


def _index(name: str, argument: bytes) -> int:
    return int(argument) if name in ("GET", "PUT") else int.from_bytes(argument, "little")


def _refused(name: str, limit: str) -> UserInputError:
    return UserInputError(
        "checkpoint", name, limit, "Check that it is a checkpoint of yours; it may be damaged."
    )
