"""What goes to standard output and standard error."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.errors import UserInputError, shortened
from nest_megatron.files import is_standard_output
from nest_megatron.printing import cleaned, one_line, print_cleaned, print_to_stderr
from nest_megatron.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement

    from nest_megatron.planner import Progress

LINE = 78
#: Whether standard output holds the document of ``--json``, or takes none.
_is_over = ContextVar("is_over", default=False)
_PATIENCE_S, _REFRESH_S = 1.0, 0.25
#: The font of the terminal's tables, in a notebook.
_PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)


def show(*parts: RenderableType) -> None:
    """Print tables, and texts as they stand; plain where standard output is no terminal."""
    console = _console()
    if console.is_terminal:
        with _writing():
            _print(console, parts)
        return
    with _writing(), console.capture() as captured:
        _print(console, parts)
    if text := captured.get():
        say(_stripped(text))


class Shown:
    """What ``print`` and a notebook show as a terminal does."""

    __slots__ = ()

    def report(self) -> Iterable[RenderableType]:
        """The parts, a text as it is to stand."""
        raise NotImplementedError

    def __str__(self) -> str:
        console = _console(file=io.StringIO(), width=80)
        with console.capture() as captured:
            _print(console, self.report())
        return _stripped(captured.get())

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*self.report())

    def _repr_html_(self) -> str:
        console = _console(file=io.StringIO(), width=100, record=True)
        _print(console, self.report())
        return console.export_html(inline_styles=True, code_format=_PRE)


def _console(**options: Any) -> Console:
    from rich.console import Console

    if os.environ.get("COLUMNS") == "0":  # not known; Rich would print nothing
        options = {"width": 80, **options}
    return Console(markup=False, highlight=False, emoji=False, **options)


def _print(console: Console, parts: Iterable[RenderableType]) -> None:
    for part in parts:
        console.print(_Cleaned(part), soft_wrap=isinstance(part, str), crop=False)


class _Cleaned:
    """What Rich prints of a table or a text, without what a terminal would act on in its names."""

    def __init__(self, part: RenderableType) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        part = self._part
        if isinstance(part, str):
            part = console.render_str(part)
        for segment in console.render(part, options):
            yield Segment(cleaned(segment.text), segment.style, segment.control)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._part)


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def show_json(document: object) -> None:
    """Print one JSON document."""
    say(json.dumps(_finite(document), indent=2, allow_nan=False))
    _is_over.set(True)


def show_or_json(
    document: Callable[[], object], report: Callable[[], Iterable[RenderableType]], *, as_json: bool
) -> None:
    """Print a report for people, or the document that says the same to a program."""
    show_json(document()) if as_json else show(*report())


def say(text: str = "") -> None:
    """Print a text; a reader that went away (``| head``) wants no more, and that is no error."""
    with _writing():
        print_cleaned(text)


def say_written(*paths: Path | None) -> None:
    """Name the files that were written; standard output is none."""
    for path in filter(None, paths):
        if not is_standard_output(path):
            say(f"Wrote {path}.")


def print_notes(notes: Iterable[str]) -> None:
    """Print sentences on standard error, one a line."""
    for note in notes:
        print_to_stderr(note)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Write to standard output, and never again once that has failed."""
    try:
        yield
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        _is_over.set(True)
        if not isinstance(error, BrokenPipeError):
            raise UserInputError(
                "standard output",
                None,
                f"it cannot be written to: {error.strerror or error}",
                "Free some space, or send it elsewhere.",
            ) from error


#: Characters that a terminal without Unicode cannot show, by what stands for them.
_STAND_INS = {
    "-": "─━═┄┈╌╴╶–—",
    "|": "│┃║┆┊",
    "+": "┌┐└┘├┤┬┴┼╭╮╰╯╞╡╪",
    "#": "█▇▆▅▄▃▂▁▉▊▋▌▍▎▏░▒▓●■",
    "'": "‘’′",
    '"': "“”″",
    "...": "…",
    "x": "×",
    ".": "·",
    "*": "•",
    "->": "→",
    "<-": "←",
    ">=": "≥",
    "<=": "≤",
    "~": "≈",
    "+-": "±",
    "u": "µμ",
    " ": "\u00a0",
}
_PLAIN = {character: plain for plain, those in _STAND_INS.items() for character in those}


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """Characters that an encoding lacks, in those that it has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(x, "?") for x in error.object[error.start : error.end]), error.end


def prepare_streams() -> None:
    """Let nothing fail for a stream that is closed, and nothing printed for its characters."""
    codecs.register_error("nest_megatron", _in_plain)
    _is_over.set(sys.stdout is None)
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            is_utf = stream.encoding.lower().startswith("utf")
            stream.reconfigure(errors="backslashreplace" if is_utf else "nest_megatron")


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print why there is no plan, or a user's mistake: two lines on standard error, or as JSON.

    On standard error too where standard output cannot take the document, or holds the result.
    """
    told: Any = error
    if hasattr(told, "report"):
        show_or_json(told.document, told.report, as_json=as_json)
        return
    if as_json and not _is_over.get():
        with contextlib.suppress(UserInputError):
            show_json({"error": error_fields(error)})
            return
    if not isinstance(error, UserInputError):
        print_to_stderr(f"error: {error}")
        return
    shown = one_line(shortened(str(error.value))) or "''"
    given = "" if error.value is None else f" = {shown}"
    print_to_stderr(f"error: {one_line(error.what)}{given}: {error.limit}.\n       {error.fix}")


def error_fields(error: Exception) -> dict[str, Any]:
    """An error for a program that reads it."""
    if not isinstance(error, UserInputError):
        return {"what": type(error).__name__, "value": None, "limit": str(error), "fix": ""}
    return {name: _finite(getattr(error, name)) for name in ("what", "value", "limit", "fix")}


def _finite(value: Any) -> Any:
    """JSON has no NaN, no infinity and no types of ours."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else str(value)


def command_lines(
    words: Sequence[str],
    environment: Iterable[tuple[str, str | None]] = (),
    indent: str = "  ",
    width: int | None = None,
) -> str:
    """A command to copy: broken before flags, with backslashes.

    Args:
        environment: variables before it; one that is ``None`` is left out.
        width: of its lines; of the terminal, and no more than is read with ease, if not given.

    >>> print(command_lines(["torchrun", "x.py", "--layout", "Et|tL"], [("A", "1")]))
      A=1 torchrun x.py --layout 'Et|tL'
    """
    width = width or min(LINE, shutil.get_terminal_size().columns - len(indent))
    variables = ((name, text) for name, text in environment if text is not None)
    pieces: list[str] = [f"{name}={shlex.quote(text)}" for name, text in variables]
    for before, word in pairwise(["", *words]):
        if before.startswith("--") and not word.startswith("--"):
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    lines = [indent]
    for piece in pieces:
        fits = len(lines[-1]) + len(piece) + 3 <= width
        if not fits and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(f"{indent}  ")
        lines[-1] += f"{piece} "
    return "\n".join(line.rstrip() for line in lines)


def search_words(solved: int, best: float | None, bound: float) -> str:
    """How far a search is, of what ``planner.Progress`` is called with.

    >>> search_words(12, 6.71, 6.5)
    'searching: 12 solved, best 6.710 s, bound 6.500 s'
    """
    told = "no plan yet" if best is None else f"best {format_seconds(best)}"
    return f"searching: {solved} solved, {told}, bound {format_seconds(bound)}"


@contextlib.contextmanager
def status_line(text: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is at work, and a function that changes it."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A callback that writes a line, on a terminal and only if the search takes a while.

    A thread of its own writes it, so that a search that never calls back costs nothing.
    """
    if not sys.stderr.isatty():
        yield None
        return
    latest = "searching"
    finished = threading.Event()

    def report(solved: int, best: float | None, bound: float) -> None:
        nonlocal latest
        latest = search_words(solved, best, bound)

    def write() -> None:
        if finished.wait(_PATIENCE_S):
            return
        with status_line("searching") as update:
            while not finished.wait(_REFRESH_S):
                update(latest)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield report
    finally:
        finished.set()
        writer.join()
