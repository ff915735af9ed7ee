"""The state of a shell that is read: variables, parameters, folder, standard input and output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from nest_megatron.integrations.shell_script import nodes
from nest_megatron.integrations.shell_script.arithmetic import evaluate
from nest_megatron.integrations.shell_script.record import Record
from nest_megatron.integrations.shell_script.values import Leave, ScriptError, Value, unknown

_ONLY_IN_A_RUN = frozenset(("$", "!", "RANDOM", "SECONDS", "HOSTNAME"))


@dataclass(slots=True)
class Shell(ABC):
    """The state of one shell, and what its commands ask of it.

    Args:
        original: variables that it began with.
        keyed: names of associative arrays.
        hidden: of each function that runs, what its own variables stand in the place of.
        status: ``None`` is that of a command that is not run.
        deciding: how many conditions it is in.
        printed: its standard output; ``given`` is its standard input, ``piped`` if that is known.
    """

    record: Record
    variables: dict[str, Value]
    exported: set[str]
    args: list[str]
    script: str
    folder: str
    functions: dict[str, nodes.Command] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)
    keyed: set[str] = field(default_factory=set)
    stack: list[str] = field(default_factory=list)
    hidden: list[dict[str, Value | None]] = field(default_factory=list)
    status: int | None = 0
    line: int = 0
    depth: int = 0
    deciding: int = 0
    printed: list[str] = field(default_factory=list)
    given: str = ""
    piped: bool = False
    original: Mapping[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> Value | None:
        """A variable or parameter; ``None`` if it is not set."""
        if name in self.variables:
            return self.variables[name]
        if name.isdigit() and name != "0":
            return self.args[int(name) - 1] if int(name) <= len(self.args) else None
        return self._special(name)

    def _special(self, name: str) -> Value | None:
        known_here: dict[str, Value] = {
            "#": str(len(self.args)),
            "?": unknown("$?") if self.status is None else str(self.status),
            "-": "".join(sorted(self.options)),
            "0": self.script,
            "PWD": self.folder,
            "BASH_SOURCE": {"0": self.script},
            "LINENO": str(self.line),
        }
        return unknown(f"${name}") if name in _ONLY_IN_A_RUN else known_here.get(name)

    def assign(self, name: str, value: Value) -> None:
        """Set a variable."""
        self.variables[name] = value

    def positional(self) -> list[str]:
        """``$@``."""
        return self.args

    def unset(self, name: str) -> None:
        """Note that a variable is empty because nothing sets it."""
        if "u" in self.options:
            fix = f"Set it: {name}=... before nest-megatron"
            raise ScriptError(f"{name} is not set, and the script has set -u", fix)
        if not name.isdigit():
            self.record.not_set.setdefault(name, self.line)

    def sum(self, text: str) -> int:
        """An arithmetic expression."""
        return evaluate(text, self._number, self.assign)

    def _number(self, name: str) -> str:
        found = self.lookup(name)
        if isinstance(found, dict):
            found = found.get("0")
        return found or ""

    @contextmanager
    def called(self, args: list[str]) -> Iterator[None]:
        """A function or a file that runs with parameters of its own, until it returns."""
        before, self.args = self.args, args
        self.depth += 1
        try:
            yield
        except Leave as left:
            if left.kind != "return":
                raise
            self.status = left.status
        finally:
            self.args, self.depth = before, self.depth - 1

    @abstractmethod
    def output(self, source: str) -> str:
        """What a command substitution gives; unknown text where something would have to run."""

    @abstractmethod
    def child(self) -> Shell:
        """A subshell."""

    @abstractmethod
    def run(self, body: nodes.Body) -> None:
        """Walk through commands."""

    @abstractmethod
    def command(self, command: nodes.Command) -> None:
        """Walk through one command."""

    @abstractmethod
    def walk(self, text: str, script: str) -> None:
        """Walk through a file that is read into this shell."""
