"""Where words, quotes and substitutions end in the text of a script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nest_megatron.integrations.shell_script.values import MAX_WORDS, ScriptError

#: Blanks, continued lines and a comment.
BLANK = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")
_ASSIGNED_ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_BRACES = re.compile(r"([^{}'\"`\\]*?)(?<!\$)\{([^{}'\"`]*(?:,|\.\.)[^{}'\"`]*)\}(.*)", re.DOTALL)
_QUOTES = frozenset("'\"`")


def split_words(text: str) -> Iterator[str]:
    """The words between the parentheses of an array."""
    at = 0
    while True:
        while (end := _blank_end(text, at)) > at or text[at : at + 1] == "\n":
            at = max(end, at + (text[at : at + 1] == "\n"))
        if at >= len(text):
            return
        end = word_end(text, at)
        if end == at:
            raise ScriptError(f"an array holds {text[at]!r}")
        yield text[at:end]
        at = end


def word_end(text: str, at: int, stop: str = " \t\r\n;&|()<>") -> int:
    """Where the word that begins at ``at`` ends."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "(" and _ASSIGNED_ARRAY.fullmatch(text, start, at):
            at = closing(text, at + 1, ")")
        elif char in stop:
            break
        else:
            at = _skip(text, at)
    return min(at, len(text))


def _skip(text: str, at: int) -> int:
    """Past one character, a quoted text or a substitution."""
    char, following = text[at], text[at + 1 : at + 2]
    if char == "\\":
        return at + 2
    if char == "$" and following in ("'", "("):
        return _quoted(text, at + 1) if following == "'" else closing(text, at + 2, ")")
    if char == "$" and following == "{":
        return closing(text, at + 2, "}")
    return _quoted(text, at) if char in _QUOTES else at + 1


def _quoted(text: str, at: int) -> int:
    quote, start = text[at], at
    escapes = quote != "'" or text[at - 1 : at] == "$"
    at += 1
    while at < len(text) and text[at] != quote:
        if text[at] == "\\" and escapes:
            at += 2
        elif quote == '"' and text[at] in "$`":
            at = _skip(text, at)
        else:
            at += 1
    if at >= len(text):
        line = 1 + text.count("\n", 0, start)
        raise ScriptError(f"the quote {quote} of line {line} is not closed")
    return at + 1


def closing(text: str, at: int, mark: str) -> int:
    """Past the ``mark`` that closes what is open at ``at``."""
    opening, depth = {")": "(", "}": "{"}[mark], 1
    while at < len(text):
        char = text[at]
        if char == "#" and mark == ")" and text[at - 1 : at].isspace():
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        depth += (char == opening) - (char == mark)
        if depth == 0:
            return at + 1
        at = _skip(text, at)
    raise ScriptError(f"a {mark} is missing")


def _blank_end(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    return at if found is None else found.end()


def braces(word: str) -> Iterator[str]:
    """``a{b,c}`` as ``ab ac``, and ``{1..3}`` as ``1 2 3``."""
    found = _BRACES.fullmatch(word)
    if found is None:
        yield word
        return
    before, inside, after = found.groups()
    count = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", inside)
    if count is None and "," not in inside:
        yield word
        return
    items = inside.split(",")
    if count is not None:
        first, last = int(count[1]), int(count[2])
        if abs(last - first) > MAX_WORDS:
            raise ScriptError(f"{{{inside}}} is too long")
        step = 1 if last >= first else -1
        items = [str(n) for n in range(first, last + step, step)]
    for item in items:
        for rest in braces(after):
            yield f"{before}{item}{rest}"
