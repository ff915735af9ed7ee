"""A walk through a script: assignments and decisions are made, programs are only noted down."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nest_megatron.files import read_text
from nest_megatron.integrations.shell_script import nodes
from nest_megatron.integrations.shell_script.assignment import (
    ASSIGNMENT,
    DECLARATIONS,
    assign,
    declare,
)
from nest_megatron.integrations.shell_script.conditions import Decision
from nest_megatron.integrations.shell_script.edits import matches
from nest_megatron.integrations.shell_script.expansion import (
    expand,
    fill,
    fill_document,
    home_relative,
    pattern_of,
)
from nest_megatron.integrations.shell_script.programs import call
from nest_megatron.integrations.shell_script.record import is_launch
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.syntax import parse
from nest_megatron.integrations.shell_script.values import (
    MAX_DEPTH,
    MAX_STEPS,
    Leave,
    ScriptError,
    is_wholly_unknown,
    known,
    plain,
    unknown,
)

_ENDS = {"exit", "return", "true", ":", "echo", "printf", "continue", "break"}
_UNDECIDED = (
    "whether a command that is not run succeeds decides what follows",
    "Decide it by hand in a copy of the script",
)


class Interpreter(Shell):
    """One shell that walks through commands."""

    __slots__ = ()

    def output(self, source: str) -> str:
        """What a command substitution gives; unknown text where something would have to run."""
        found = source.strip()
        if re.fullmatch(r"<\s*\S+", found):
            source = f"cat {found[1:]}"
        inner = self.child()
        self._run_in(inner, partial(inner.run, parse(source)))
        found = "".join(inner.printed).rstrip("\n")
        return unknown(f"$({plain(source)})") if is_wholly_unknown(found) else found

    def child(self) -> Interpreter:
        """A subshell."""
        return Interpreter(
            record=self.record,
            variables=dict(self.variables),
            exported=set(self.exported),
            args=list(self.args),
            script=self.script,
            folder=self.folder,
            functions=dict(self.functions),
            options=set(self.options),
            keyed=set(self.keyed),
            line=self.line,
            depth=self.depth + 1,
            given=self.given,
            piped=self.piped,
            original=self.original,
        )

    def walk(self, text: str, script: str) -> None:
        """Walk through a file that is read into this shell."""
        before, self.script = self.script, script
        try:
            self.run(parse(text))
        finally:
            self.script = before

    # Lists, pipelines and compound commands.

    def run(self, body: nodes.Body) -> None:
        """Walk through commands."""
        for each in body:
            self._and_or(each)

    def _and_or(self, command: nodes.AndOr) -> None:
        for place, (operator, pipeline) in enumerate(command.parts):
            if operator and self.status is None and not _only_ends(pipeline, operator):
                raise ScriptError(*_UNDECIDED)
            if operator and (self.status in (0, None)) == (operator == "||"):
                continue
            is_last = place == len(command.parts) - 1
            self.deciding += not is_last
            try:
                self._pipeline(pipeline)
            finally:
                self.deciding -= not is_last
            if is_last and self.status and not pipeline.negated:
                self._end_on_failure()

    def _end_on_failure(self) -> None:
        if "e" in self.options and not self.deciding:
            raise Leave("exit", self.status)

    def _pipeline(self, pipeline: nodes.Pipeline) -> None:
        self.line = pipeline.line
        commands = pipeline.commands
        given = self.given
        for place, command in enumerate(commands):
            if len(commands) == 1:
                self.command(command)
            else:
                inner = self.child()
                inner.given, inner.piped = given, self.piped or place > 0
                self._run_in(inner, partial(inner.command, command))
                given = "".join(inner.printed)
                if place == len(commands) - 1:
                    self.printed.append(given)
        if pipeline.negated and self.status is not None:
            self.status = int(not self.status)

    def _run_in(self, inner: Interpreter, walk: Callable[[], None]) -> None:
        """Walk in a subshell, whose end does not end this shell."""
        try:
            walk()
        except Leave as left:
            inner.status = left.status
        self.status = inner.status

    def command(self, command: nodes.Command) -> None:
        """Walk through one command; what goes on too long is refused."""
        self.record.steps += 1
        self.line = command.line
        if self.record.steps > MAX_STEPS or time.monotonic() > self.record.until_s:
            fix = "Leave out its endless loop in a copy of the script"
            raise ScriptError(f"it does not end within {self.record.steps:,} commands", fix)
        if self.depth > MAX_DEPTH:
            raise ScriptError(f"it calls itself more than {MAX_DEPTH} deep")
        getattr(self, f"_{type(command).__name__.lower()}")(command)

    def decide(self, condition: nodes.Body) -> bool:
        """Whether a condition holds.

        Raises:
            ScriptError: if that depends on a command that is not run.
        """
        self.deciding += 1
        try:
            self.run(condition)
        finally:
            self.deciding -= 1
        if self.status is None:
            raise ScriptError(*_UNDECIDED)
        return self.status == 0

    def _if(self, command: nodes.If) -> None:
        for condition, body in command.branches:
            if self.decide(condition):
                self.status = 0
                self.run(body)
                return
        self.status = 0
        self.run(command.otherwise)

    def _for(self, command: nodes.For) -> None:
        words = self.args if command.words is None else expand(command.words, self)
        for word in words:
            self.assign(command.name, known(word, f"the loop over {command.name}"))
            if not self._turn(command.body):
                return

    def _forsum(self, command: nodes.ForSum) -> None:
        first, condition, step = command.parts
        self.sum(fill_document(first, self))
        while not condition.strip() or self.sum(fill_document(condition, self)):
            self._step()
            if not self._turn(command.body):
                return
            self.sum(fill_document(step, self))

    def _while(self, command: nodes.While) -> None:
        while self.decide(command.condition) != command.until:
            self._step()
            if not self._turn(command.body):
                return
        self.status = 0

    def _step(self) -> None:
        """Count a turn of a loop, however little it does."""
        self.command(nodes.Sum(self.line, "1"))

    def _turn(self, body: nodes.Body) -> bool:
        """One turn of a loop; whether there is another."""
        try:
            self.run(body)
        except Leave as left:
            if left.kind not in ("break", "continue"):
                raise
            if left.count > 1:
                raise Leave(left.kind, 0, left.count - 1) from None
            return left.kind == "continue"
        return True

    def _case(self, command: nodes.Case) -> None:
        word = known(fill(command.word, self), "a case")
        self.status = 0
        for patterns, body in command.branches:
            if any(matches(word, pattern_of(pattern, self)) for pattern in patterns):
                self.run(body)
                return

    def _group(self, command: nodes.Group) -> None:
        if not command.subshell:
            self.run(command.body)
            return
        inner = self.child()
        self._run_in(inner, partial(inner.run, command.body))
        self.printed += inner.printed

    def _function(self, command: nodes.Function) -> None:
        self.functions[command.name] = command.body
        self.status = 0

    def _condition(self, command: nodes.Condition) -> None:
        self.status = int(not Decision(command.words, self, is_keyword=True).holds())

    def _sum(self, command: nodes.Sum) -> None:
        self.status = int(not self.sum(fill_document(command.text, self)))

    # Simple commands.

    def _simple(self, command: nodes.Simple) -> None:
        if command.given is not None or command.files:
            given = self.given, self.piped
            self.given, self.piped = self._input(command), True
            try:
                self._simple(dataclasses.replace(command, given=None, files=()))
            finally:
                self.given, self.piped = given
            return
        words = list(command.words)
        assignments = []
        while words and ASSIGNMENT.match(words[0]):
            assignments.append(words.pop(0))
        self.status = 0
        if not words:
            for each in assignments:
                assign(self, each)
            return
        if words[0] in DECLARATIONS:
            declare(self, words)
            return
        filled = expand(words, self)
        before = dict(self.variables), set(self.exported)
        for each in assignments:
            self.exported.add(assign(self, each))
        call(self, filled)
        if assignments:
            self.variables, self.exported = before

    def _input(self, command: nodes.Simple) -> str:
        """What is on the standard input of a command."""
        if command.given is not None:
            return self._document(command)
        name = plain(fill(command.files[-1], self))
        path = Path(home_relative(name, self.folder))
        if path.is_file() or name == "/dev/null":
            return read_text(path, "standard input") if path.is_file() else ""
        self.record.not_found.setdefault(name, self.line)
        if is_launch(expand([w for w in command.words if not ASSIGNMENT.match(w)], self)):
            limit = f"its launch reads the file {name}, which is not there"
            raise ScriptError(limit, "Fill in what the script leaves open in < >")
        return unknown(f"$(cat {name})")

    def _document(self, command: nodes.Simple) -> str:
        text = command.given or ""
        if command.quoted:
            return text
        return fill_document(text, self) if "\n" in text else fill(text, self) + "\n"


def _only_ends(pipeline: nodes.Pipeline, operator: str) -> bool:
    """Whether what follows ``||`` only ends the script or says something."""
    commands = [each for each in pipeline.commands if isinstance(each, nodes.Simple | nodes.Group)]
    if operator != "||" or len(commands) < len(pipeline.commands):
        return False
    inner = [
        _only_ends(part, "||")
        for each in commands
        if isinstance(each, nodes.Group)
        for listed in each.body
        for _, part in listed.parts
    ]
    words = {each.words[0] for each in commands if isinstance(each, nodes.Simple) and each.words}
    return all(inner) and words <= _ENDS
