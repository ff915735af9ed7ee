"""``[ ... ]``, ``test`` and ``[[ ... ]]``: files are looked at, nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.integrations.shell_script.edits import matches
from nest_megatron.integrations.shell_script.expansion import fill, home_relative, pattern_of
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.values import ScriptError, known

_WHY = "a decision"
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
_OF_FILES: dict[str, Callable[[Path], bool]] = {
    "-e": Path.exists,
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-L": Path.is_symlink,
    "-h": Path.is_symlink,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
    "-r": lambda path: os.access(path, os.R_OK),
    "-w": lambda path: os.access(path, os.W_OK),
    "-x": lambda path: os.access(path, os.X_OK),
}
_ABOUT_TEXT = ("-z", "-n", "-v", "-t")
_BINARY = frozenset((*_COMPARED, "=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef"))


@dataclass(slots=True)
class Decision:
    """A condition, word by word.

    Args:
        words: after expansion for ``test``, as they are written for ``[[``.
        is_keyword: it is ``[[``, whose words are filled in here and whose right sides are patterns.
    """

    words: Sequence[str]
    shell: Shell
    is_keyword: bool
    at: int = 0

    def holds(self) -> bool:
        """Whether it is true.

        Raises:
            ScriptError: if it cannot be read, or depends on what is not known.
        """
        if not self.words:
            return False
        value = self._either()
        if self.at < len(self.words):
            raise ScriptError(f"the condition {' '.join(self.words)!r} cannot be read")
        return value

    def _peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.words[place] if place < len(self.words) else ""

    def _either(self) -> bool:
        value = self._both()
        while self._peek() in ("||", "-o"):
            self.at += 1
            other = self._both()
            value = value or other
        return value

    def _both(self) -> bool:
        value = self._negated()
        while self._peek() in ("&&", "-a"):
            self.at += 1
            if value or not self.is_keyword:
                value = self._negated() and value
            else:
                self._skip()
        return value

    def _skip(self) -> None:
        """Step over what ``&&`` does not look at."""
        depth = 0
        while self.at < len(self.words):
            word = self._peek()
            if depth == 0 and word in ("&&", "||", ")"):
                return
            depth += (word == "(") - (word == ")")
            self.at += 1

    def _negated(self) -> bool:
        if self._peek() == "!" and len(self.words) - self.at > 1:
            self.at += 1
            return not self._negated()
        if self._peek() == "(" and self._peek(1) not in _BINARY:
            self.at += 1
            value = self._either()
            if self._peek() != ")":
                raise ScriptError(f"a ) is missing in {' '.join(self.words)!r}")
            self.at += 1
            return value
        return self._single()

    def _single(self) -> bool:
        if self._peek(1) in _BINARY:
            left, operator, right = self._peek(), self._peek(1), self._peek(2)
            self.at += 3
            return self._compare(self._text(left), operator, right)
        operator = self._peek()
        if operator in (*_OF_FILES, *_ABOUT_TEXT) and self.at + 1 < len(self.words):
            operand = self._text(self._peek(1))
            self.at += 2
            return self._about(operator, operand)
        self.at += 1
        return bool(known(self._text(operator), _WHY))

    def _text(self, word: str) -> str:
        return fill(word, self.shell) if self.is_keyword else word

    def _about(self, operator: str, operand: str) -> bool:
        if operator == "-v":
            return self.shell.lookup(known(operand, _WHY)) is not None
        if operator == "-t":
            return False
        text = known(operand, _WHY)
        if operator in ("-z", "-n"):
            return (not text) == (operator == "-z")
        path = home_relative(text, self.shell.folder) if text else ""
        return bool(text) and "\0" not in text and _OF_FILES[operator](Path(path))

    def _compare(self, left: str, operator: str, right: str) -> bool:
        left = known(left, _WHY)
        if operator in _COMPARED:
            return _COMPARED[operator](self._number(left), self._number(self._text(right)))
        if operator == "=~":
            return self._fits(left, known(self._text(right), _WHY))
        if operator in ("<", ">"):
            other = known(self._text(right), _WHY)
            return left < other if operator == "<" else left > other
        if operator not in ("=", "==", "!="):
            raise ScriptError(f"{operator} compares files by age, which is not done here")
        if self.is_keyword:
            same = matches(left, pattern_of(right, self.shell))
        else:
            same = left == known(right, _WHY)
        return same == (operator != "!=")

    def _number(self, text: str) -> int:
        text = known(text, _WHY).strip()
        if self.is_keyword:
            return self.shell.sum(text)
        if not re.fullmatch(r"[-+]?\d+", text):
            raise ScriptError(f"a condition compares {text!r} as a number")
        return int(text)

    def _fits(self, text: str, expression: str) -> bool:
        try:
            found = re.search(expression, text)
        except re.error as error:
            raise ScriptError(f"the expression {expression!r} cannot be read ({error})") from None
        if found is not None:
            groups = [found[0], *(group or "" for group in found.groups())]
            self.shell.assign("BASH_REMATCH", {str(n): each for n, each in enumerate(groups)})
        return found is not None
