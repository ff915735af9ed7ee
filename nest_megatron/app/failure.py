"""How a job ends that cannot be planned: with a message, at once, and never by training on."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from nest_megatron.app import BAD_INPUT, NOTHING_FITS
from nest_megatron.errors import NestError, OneRankError, UserInputError

if TYPE_CHECKING:
    from nest_megatron.planner import NoPlan

_FAILED = 1


class NothingFitsError(NestError):
    """No plan fits; carries what is missing."""

    def __init__(self, refusal: NoPlan, notes: Sequence[str]) -> None:
        self.refusal = refusal
        self.notes = tuple(notes)
        missing = refusal.missing_bytes / 2**30
        super().__init__(
            f"no plan fits in memory; the nearest ({refusal.nearest}) lacks {missing:.1f} GiB"
        )


@contextlib.contextmanager
def ending_on_errors() -> Iterator[None]:
    """End the process on any error inside, our own ones without a traceback."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not train unplanned
        end(error)


def end(error: Exception) -> NoReturn:
    """Print why on one rank of each host, or on the only one that ends, and exit."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    if local_rank == "0" or isinstance(error, OneRankError):
        _print(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(error, NothingFitsError):
        raise SystemExit(NOTHING_FITS) from error
    raise SystemExit(BAD_INPUT if isinstance(error, UserInputError) else _FAILED) from error


def _print(error: Exception) -> None:
    from nest_megatron.app.output import print_error, show

    rank = os.environ.get("RANK", "0")
    if isinstance(error, NothingFitsError):
        from nest_megatron.report.terminal import no_plan_report, notes_report

        show(no_plan_report(error.refusal), notes_report(error.notes))
    elif isinstance(error, NestError):
        print(f"nest: rank {rank} stops before training.", file=sys.stderr)
        print_error(error, as_json=False)
    else:
        traceback.print_exception(error)
        print(
            f"nest: rank {rank} stops before training: the error above is a fault of "
            "nest-megatron or of a Megatron-LM that it does not know.",
            file=sys.stderr,
        )
