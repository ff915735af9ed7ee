"""Bash's arithmetic: whole numbers, variables by name, assignments; 64 bits are not exceeded."""

from __future__ import annotations

import operator as op
import re
from collections.abc import Callable
from dataclasses import dataclass

from nest_megatron.integrations.shell_script.values import ScriptError, known

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|"
    r"\*\*|\+\+|--|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|[-+*/%<>=!~&^|?:(),])"
)
_LIMIT = 1 << 63


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise ScriptError("it divides by 0")
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _power(left: int, right: int) -> int:
    if right < 0 or right > 63:
        raise ScriptError(f"the exponent {right} is out of range")
    return int(left**right)


def _shift(left: int, right: int) -> int:
    return left << right if 0 <= right < 64 else 0


_OPERATORS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "|": (3, op.or_),
    "^": (4, op.xor),
    "&": (5, op.and_),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">": (7, lambda a, b: int(a > b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, _shift),
    ">>": (8, lambda a, b: a >> min(max(b, 0), 63)),
    "+": (9, op.add),
    "-": (9, op.sub),
    "*": (10, op.mul),
    "/": (10, _divide),
    "%": (10, lambda a, b: a - b * _divide(a, b)),
    "**": (11, _power),
}


def evaluate(text: str, get: Callable[[str], str], put: Callable[[str, str], None]) -> int:
    """The value of an expression.

    Args:
        get: the text of a variable, empty if it is not set.
        put: sets a variable.

    Raises:
        ScriptError: for a syntax error, or a value that is not known.

    >>> evaluate("8 * (N + 1) / 3", {"N": "4"}.__getitem__, lambda name, value: None)
    13
    """
    return _Reader(_tokens(known(text, "a sum")), get, put).whole()


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ScriptError(f"the sum {text!r} cannot be read")
        found.append(token[1])
        at = token.end()
    return found


@dataclass(slots=True)
class _Reader:
    tokens: list[str]
    get: Callable[[str], str]
    put: Callable[[str, str], None]
    at: int = 0
    depth: int = 0

    def whole(self) -> int:
        value = 0
        while self.at < len(self.tokens):
            value = self.assignment()
            if self.at < len(self.tokens):
                self.expect(",")
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise ScriptError(f"the sum {' '.join(self.tokens)!r} cannot be read")
        self.at += 1

    def assignment(self) -> int:
        name, then = self.peek(), (self.tokens[self.at + 1 : self.at + 2] or [""])[0]
        is_name = name[:1].isalpha() or name.startswith("_")
        operator = then.removesuffix("=")
        if not is_name or operator == then or then in ("==", "<=", ">=", "!="):
            return self.choice()
        self.at += 2
        value = self.assignment()
        if operator:
            value = _OPERATORS[operator][1](self.number(name), value)
        return self.set(name, value)

    def set(self, name: str, value: int) -> int:
        self.put(name, str(value))
        return value

    def choice(self) -> int:
        value = self.binary(1)
        if self.peek() == "?":
            self.at += 1
            first = self.assignment()
            self.expect(":")
            second = self.assignment()
            return first if value else second
        return value

    def binary(self, least: int) -> int:
        left = self.unary()
        while (found := _OPERATORS.get(self.peek())) is not None and found[0] >= least:
            rank, apply = found
            self.at += 1
            right = self.binary(rank if apply is _power else rank + 1)
            left = apply(left, right)
            if abs(left) >= _LIMIT:
                raise ScriptError("a sum exceeds 64 bits")
        return left

    def unary(self) -> int:
        token = self.peek()
        self.at += 1
        if token in ("+", "-", "!", "~"):
            value = self.unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self.peek()
            self.at += 1
            return self.set(name, self.number(name) + (1 if token == "++" else -1))
        if token == "(":
            value = self.assignment()
            self.expect(")")
            return value
        return self.atom(token)

    def atom(self, token: str) -> int:
        if token[:1].isdigit():
            return _number(token)
        if not (token[:1].isalpha() or token.startswith("_")):
            raise ScriptError(f"the sum {' '.join(self.tokens)!r} cannot be read")
        value = self.number(token)
        if self.peek() in ("++", "--"):
            self.set(token, value + (1 if self.peek() == "++" else -1))
            self.at += 1
        return value

    def number(self, name: str) -> int:
        """A variable's value; one that is not set is 0, and text is a sum of its own."""
        text = known(self.get(name), f"the sum with {name}").strip()
        if not text:
            return 0
        if re.fullmatch(r"-?\d+", text):
            return -_number(text[1:]) if text.startswith("-") else _number(text)
        if self.depth > 20:
            raise ScriptError(f"{name} refers to itself")
        inner = _Reader(_tokens(text), self.get, self.put, depth=self.depth + 1)
        return inner.whole()


def _number(token: str) -> int:
    """Digits as bash reads them: a leading 0 is octal."""
    base, mark, digits = token.partition("#")
    try:
        if mark:
            return int(digits, int(base))
        return (
            int(token, 0) if token[:2].lower() == "0x" else int(token, 8 if token[0] == "0" else 10)
        )
    except ValueError:
        raise ScriptError(f"{token} is no number to bash") from None
