"""``pin``."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from pathlib import Path

from nest_megatron.errors import OK, PlanFileError, UserInputError
from nest_megatron.files import read_text
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.parser import VERSIONS, load_arguments
from nest_megatron.integrations.megatron_lm.rules import require_launchable
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.planner.pins import Pin, PinnedPlan, is_pinned, pinned_for, write_pinned
from nest_megatron.report.console import say, show_json
from nest_megatron.version import __version__


def run_pin(
    path: Path,
    *,
    out: Path | None,
    by: str | None,
    note: str,
    release: str | None,
    as_json: bool,
) -> int:
    """Freeze a plan file."""
    text = read_text(path, "plan")
    if is_pinned(text):
        raise PlanFileError(
            "plan",
            value=str(path),
            limit="it is pinned already",
            fix="Plan again for a new one; `nest-megatron explain` shows who pinned it.",
        )
    plan = plan_file.load(text, str(path))
    release = _release(plan, release)
    _require_launchable(plan, release)
    pinned = PinnedPlan(
        pin=Pin(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            by=by or _user(),
            note=note,
            nest_megatron_version=__version__,
            megatron_lm=release,
        ),
        plan=plan,
    )
    target = out or path
    write_pinned(pinned, target)
    if as_json:
        show_json({"pinned": str(target), **to_plain(pinned.pin)})
        return OK
    say(
        f"Pinned to {target}: {plan.model.name} on {plan.cluster.describe()}, global batch "
        f"{plan.train.global_batch_size}, {plan.train.precision}, {pinned_for(plan, release)}, "
        f"nest-megatron {__version__}."
    )
    say(f"Launch that job with +nest=pinned nest.plan={target}; any other is refused.")
    return OK


def _release(plan: ParallelPlan, given: str | None) -> str | None:
    """The release of Megatron-LM that a plan is pinned for: the one given, or its own."""
    made = plan.provenance
    if given is None:
        return made.framework_version if made.framework == MEGATRON_LM else None
    load_arguments(given)  # refuses a release that is not recorded
    return given


def _require_launchable(plan: ParallelPlan, version: str | None) -> None:
    """Refuse a plan that is not predicted to fit or that Megatron does not launch."""
    if not plan.predicted.fits:
        raise UserInputError(
            "plan",
            value=plan.predicted.binding_constraint,
            limit="it is not predicted to fit in memory",
            fix="Pin a plan that fits.",
        )
    request = launch_request(plan, version=version or VERSIONS[0])
    require_launchable(request, but=("activation_flag",))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return "unknown"
