"""Bash's grammar as far as launch scripts use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nest_megatron.integrations.shell_script.nodes import (
    AndOr,
    Body,
    Case,
    Command,
    Condition,
    For,
    ForSum,
    Function,
    Group,
    If,
    Pipeline,
    Simple,
    Sum,
    While,
)
from nest_megatron.integrations.shell_script.scanning import BLANK, closing, word_end
from nest_megatron.integrations.shell_script.values import ScriptError

_OPERATORS = (
    *("<<<", "<<-", "&>>", ";;&", "&&", "||", ";;", ";&", "<<", ">>", "<&", ">&", "&>", ">|"),
    *("<>", "|&", ";", "&", "|", "(", ")", "<", ">", "\n"),
)
_REDIRECTIONS = frozenset(("<<<", "<<-", "<<", ">>", "<&", ">&", "&>", "&>>", ">|", "<>", "<", ">"))
_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_END = "end of file"


def parse(text: str) -> Body:
    """A script's commands.

    Raises:
        ScriptError: for a syntax error, or what is not supported.
    """
    parser = _Parser(text)
    body = parser.body(())
    if parser.peek() != _END:
        raise parser.error(f"unexpected {parser.peek()!r}")
    return body


@dataclass(frozen=True, slots=True)
class _Input:
    """What a redirection puts on standard input; nothing where it is for output."""

    text: str | None = None
    quoted: bool = False
    file: str | None = None


@dataclass(slots=True)
class _Parser:
    text: str
    at: int = 0
    start: int = 0
    token: str | None = None
    _documents: list[tuple[str, bool]] = field(default_factory=list)

    def error(self, what: str) -> ScriptError:
        return ScriptError(f"line {self.line()}: {what}", "Correct the script (bash -n names it)")

    def line(self) -> int:
        return 1 + self.text.count("\n", 0, self.start)

    def peek(self) -> str:
        """The next word or operator."""
        if self.token is None:
            found = BLANK.match(self.text, self.at)
            self.start = self.at = found.end() if found else self.at
            self.token = self._read()
        return self.token

    def _read(self) -> str:
        if self.at >= len(self.text):
            return _END
        rest = self.text[self.at : self.at + 3]
        operator = next((o for o in _OPERATORS if rest.startswith(o)), None)
        if operator is not None:
            return operator
        return self.text[self.at : word_end(self.text, self.at)]

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if expected is not None and token != expected:
            raise self.error(f"{expected!r} is expected before {token[:40]!r}")
        if token == _END:
            raise self.error("the script ends too early")
        self.at, self.token = self.at + len(token), None
        if token == "\n":
            self._skip_documents()
        return token

    def _skip_documents(self) -> None:
        """Step over the bodies of here-documents, which ``_document`` has read already."""
        for mark, _ in self._documents:
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self.text, self.at)
            if end is None:
                raise self.error(f"the here-document {mark} does not end")
            self.at = min(end.end() + 1, len(self.text))
        self._documents.clear()

    def newlines(self) -> None:
        while self.peek() in ("\n", ";"):
            self.take()

    def body(self, ends: Sequence[str]) -> Body:
        found = []
        self.newlines()
        while self.peek() not in (*ends, _END, ")", ";;", ";&", ";;&"):
            found.append(self.and_or())
            if self.peek() in (";", "&", "\n"):
                self.take()
            elif self.peek() not in (*ends, _END, ")", ";;", ";&", ";;&"):
                raise self.error(f"unexpected {self.peek()[:40]!r}")
            self.newlines()
        return tuple(found)

    def and_or(self) -> AndOr:
        self.peek()
        line, parts = self.line(), [("", self.pipeline())]
        while self.peek() in ("&&", "||"):
            operator = self.take()
            while self.peek() == "\n":
                self.take()
            parts.append((operator, self.pipeline()))
        return AndOr(line, tuple(parts))

    def pipeline(self) -> Pipeline:
        negated = False
        while self.peek() in ("!", "time"):
            negated ^= self.take() == "!"
        line, commands = self.line(), [self.command()]
        while self.peek() in ("|", "|&"):
            self.take()
            while self.peek() == "\n":
                self.take()
            commands.append(self.command())
        return Pipeline(line, tuple(commands), negated)

    def command(self) -> Command:
        token = self.peek()
        line = self.line()
        if token in _COMPOUND:
            self.take()
            found: Command = _COMPOUND[token](self, line)
            self.redirections()
            return found
        if _NAME.fullmatch(token) and re.match(
            r"[ \t]*\([ \t]*\)", self.text[self.at + len(token) :]
        ):
            return self.function(line)
        return self.simple(line)

    def function(self, line: int) -> Function:
        name = self.take()
        if self.peek() == "(":
            self.take()
            self.take(")")
        self.newlines()
        return Function(line, name, self.command())

    def simple(self, line: int) -> Simple:
        words: list[str] = []
        inputs: list[_Input] = []
        while True:
            token = self.peek()
            if self._redirects():
                inputs.append(self.redirection())
            elif token in _OPERATORS or token == _END:
                break
            else:
                words.append(self.take())
        if not words and not inputs:
            raise self.error(f"unexpected {token!r}")
        texts = [each for each in inputs if each.text is not None]
        last = texts[-1] if texts else _Input()
        files = tuple(each.file for each in inputs if each.file is not None)
        return Simple(line, tuple(words), last.text, last.quoted, files)

    def _redirects(self) -> bool:
        """Whether a redirection comes next, with the number before it or without."""
        token = self.peek()
        follows = self.text[self.at + len(token) :][:1]
        return token in _REDIRECTIONS or (token.isdigit() and follows in ("<", ">"))

    def redirections(self) -> None:
        """Those of a compound command."""
        while self._redirects():
            self.redirection()

    def redirection(self) -> _Input:
        if self.peek().isdigit():
            self.take()
        operator = self.take()
        if operator == "<" and self.text[self.at : self.at + 3].lstrip().startswith("<("):
            start = self.text.index("(", self.at)
            self.at, self.token = closing(self.text, start + 1, ")"), None
            return _Input(text=f'"${self.text[start : self.at]}"')  # what a command prints
        word = self.peek()
        if word in _OPERATORS or word == _END:
            raise self.error(f"a file is expected after {operator} before {word!r}")
        self.take()
        if operator in ("<<", "<<-"):
            return self._document(word)
        if operator == "<<<":
            return _Input(text=word)
        return _Input(file=word if operator == "<" else None)

    def _document(self, word: str) -> _Input:
        mark = re.sub(r"[\"'\\]", "", word)
        at = self.text.find("\n", self.at) + 1
        for earlier, _ in self._documents:
            ends = re.compile(rf"^\t*{re.escape(earlier)}\n", re.MULTILINE).search(self.text, at)
            at = at if ends is None else ends.end()
        end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self.text, at)
        if not at or end is None:
            raise self.error(f"the here-document {mark} does not end")
        self._documents.append((mark, mark != word))
        return _Input(text=self.text[at : end.start()], quoted=mark != word)


def _if(parser: _Parser, line: int) -> If:
    branches: list[tuple[Body, Body]] = []
    otherwise: Body = ()
    while True:
        condition = parser.body(("then",))
        parser.take("then")
        branches.append((condition, parser.body(("elif", "else", "fi"))))
        word = parser.take()
        if word == "else":
            otherwise = parser.body(("fi",))
            word = parser.take("fi")
        if word == "fi":
            return If(line, tuple(branches), otherwise)
        if word != "elif":
            raise parser.error(f"fi is expected before {word!r}")


def _loop_body(parser: _Parser) -> Body:
    parser.newlines()
    parser.take("do")
    body = parser.body(("done",))
    parser.take("done")
    return body


def _for(parser: _Parser, line: int) -> For | ForSum:
    if parser.peek() == "(":
        text = _sum_text(parser, parser.at + 1)
        parts = text.split(";")
        if len(parts) != 3:
            raise parser.error("for ((...)) needs three parts")
        return ForSum(line, (parts[0], parts[1], parts[2]), _loop_body(parser))
    name = parser.take()
    words: tuple[str, ...] | None = None
    while parser.peek() == "\n":
        parser.take()
    if parser.peek() == "in":
        parser.take()
        words = ()
        while parser.peek() not in ("\n", ";"):
            words = (*words, parser.take())
    return For(line, name, words, _loop_body(parser))


def _sum_text(parser: _Parser, at: int) -> str:
    """The inside of ``((...))``, whose first parenthesis lies before ``at``."""
    end = closing(parser.text, at, ")")
    text = parser.text[at:end].strip()
    parser.at, parser.token = end, None
    if not (text.startswith("(") and text.endswith("))")):
        raise parser.error("arithmetic is expected in (( ))")
    return text[1:-2]


def _while(parser: _Parser, line: int, *, until: bool = False) -> While:
    condition = parser.body(("do",))
    return While(line, condition, _loop_body(parser), until)


def _case(parser: _Parser, line: int) -> Case:
    word, branches = parser.take(), []
    parser.newlines()
    parser.take("in")
    parser.newlines()
    while parser.peek() != "esac":
        if parser.peek() == "(":
            parser.take()
        patterns = [parser.take()]
        while parser.peek() == "|":
            parser.take()
            patterns.append(parser.take())
        parser.take(")")
        branches.append((tuple(patterns), parser.body(("esac",))))
        if parser.peek() in (";&", ";;&"):
            raise parser.error(f"{parser.peek()} is not supported")
        if parser.peek() == ";;":
            parser.take()
        parser.newlines()
    parser.take("esac")
    return Case(line, word, tuple(branches))


def _group(parser: _Parser, line: int) -> Group:
    body = parser.body(("}",))
    parser.take("}")
    return Group(line, body, subshell=False)


def _subshell(parser: _Parser, line: int) -> Group | Sum:
    if parser.text[parser.at : parser.at + 1] == "(":
        return Sum(line, _sum_text(parser, parser.at))
    body = parser.body(())
    parser.take(")")
    return Group(line, body, subshell=True)


def _condition(parser: _Parser, line: int) -> Condition:
    words: list[str] = []
    while (token := parser.peek()) != "]]":
        if token == "\n":
            parser.take()
        elif words and words[-1] == "=~":  # parentheses and bars belong to the expression
            end = word_end(parser.text, parser.at, stop=" \t\n")
            words.append(parser.text[parser.at : end])
            parser.at, parser.token = end, None
        else:
            words.append(parser.take())
    parser.take("]]")
    return Condition(line, tuple(words))


_COMPOUND: dict[str, Callable[[_Parser, int], Command]] = {
    "if": _if,
    "for": _for,
    "while": _while,
    "until": lambda parser, line: _while(parser, line, until=True),
    "case": _case,
    "{": _group,
    "(": _subshell,
    "[[": _condition,
    "function": lambda parser, line: parser.function(line),
}
