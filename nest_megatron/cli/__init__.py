"""The command line: ``nest-megatron`` and ``python -m nest_megatron``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nest_megatron.caching import rare_garbage_collection
from nest_megatron.errors import (
    BAD_INPUT,
    INTERRUPTED,
    OK,
    OUR_FAULT,
    PROGRAM,
    interruption_of,
)
from nest_megatron.printing import print_to_stderr

if TYPE_CHECKING:
    from nest_megatron.units import Seconds


def run_process() -> int:
    """Run the command line as the work of the whole process, whose time counts from its start."""
    with rare_garbage_collection():
        return main(begun_s=time.monotonic() - time.process_time())


def main(argv: Sequence[str] | None = None, *, begun_s: Seconds | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; those of the process if not given.
        begun_s: when ``search.max_seconds`` began (``time.monotonic``); now if not given.

    Returns:
        The exit code: 0 done, 1 nothing is predicted to fit, 2 bad input, 3 time ended the
        search before it had a plan, or one within 10 % of the best, 10 to 15 a plan that is not
        as it was pinned or signed, 16 a policy forbids it, 70 a bug of this program, 130
        interrupted.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:  # a KeyboardInterrupt may come while modules are loaded
        from nest_megatron.report.console import prepare_streams

        prepare_streams()
        return _run(arguments, begun_s)
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except Exception as error:  # noqa: BLE001 - no user should see a traceback
        if interruption := interruption_of(error):
            return _interrupted(interruption)
        if isinstance(error, ImportError):  # of a package that is missing, or that is broken
            print_to_stderr(f"error: {error}. `pip install {PROGRAM}` installs all that it needs.")
            return BAD_INPUT
        from nest_megatron.report.failure import report

        with contextlib.suppress(Exception):  # of standard error that cannot be written to
            return report(error, arguments)
        return OUR_FAULT


def _interrupted(error: KeyboardInterrupt) -> int:
    """Say so, with what is left of the work where that is known."""
    # An interruption inside exec(text), by which dataclasses are made, leaves a mark in CPython, by
    # which `python -m` ends by SIGINT although the interruption was caught. Whatever text runs next
    # clears the mark (run_eval_code_obj in Python/pythonrun.c).
    exec("")
    told = f": {error}" if str(error) else ""
    print_to_stderr(f"Interrupted{told}.")
    return INTERRUPTED


def _run(arguments: list[str], begun_s: Seconds) -> int:
    import click

    from nest_megatron.cli.commands import cli
    from nest_megatron.errors import NestError, UserInputError
    from nest_megatron.report.console import print_error

    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in own
    try:
        code = cli.main(args=arguments, prog_name=PROGRAM, standalone_mode=False, obj=begun_s)
    except NestError as error:
        if interruption_of(error):
            raise
        print_error(error, as_json=as_json)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print_to_stderr(error.format_message())
        return BAD_INPUT
    except click.ClickException as error:  # in the form of our own errors
        command = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
        limit = " ".join(error.format_message().split())
        fix = f"`{command} --help` shows the options and examples."
        if close := getattr(error, "possibilities", None):  # of an option that is misspelt
            limit, fix = error.message, f"Did you mean {' or '.join(close)}? {fix}"
        wrong = UserInputError("command line", command, limit.rstrip("."), fix)
        print_error(wrong, as_json=as_json)
        return BAD_INPUT
    except click.Abort as error:
        raise KeyboardInterrupt(*getattr(error.__cause__, "args", ())) from error
    except SystemExit:  # click's answer to a reader that went away (``| head``)
        return OK
    return code if isinstance(code, int) else OK
