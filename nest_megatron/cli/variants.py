"""The work of ``whatif``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nest_megatron.api.sweep import SweepOptions
from nest_megatron.api.variants import WhatIf, command_variants, parse_changes, plan_variants
from nest_megatron.cli.command_kinds import forced
from nest_megatron.cli.planning import FreeingOptions
from nest_megatron.cli.sweep import say_written
from nest_megatron.config.overrides import split_launcher
from nest_megatron.errors import UserInputError
from nest_megatron.files import is_standard_output
from nest_megatron.report.console import say, show, show_json


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions(FreeingOptions):
    """What ``whatif`` was told; each field is an option.

    Args:
        overrides: the changes, behind the plan file where there is one.
        html: the page that is written.
        out: the folder that keeps the plans.
    """

    html: Path | None
    out: Path | None


def run_whatif(options: WhatIfOptions) -> int:
    """Plan each change of a job, and print one row a change."""
    options.require_command()
    found = _found(options)
    if not found.variants:
        return found.swept.exit_code()
    html = options.html
    if html is not None:
        found.write_html(html, force=True)  # checked before the search
    if options.as_json:
        show_json(found.to_dict())
    else:
        show(*found.report())
        say_written(found.swept)
        if html is not None and not is_standard_output(html):
            say(f"Written to {html}.")
    return found.swept.exit_code()


def _found(options: WhatIfOptions) -> WhatIf:
    words, command = list(options.overrides), options.swept_command()
    plan = Path(words.pop(0)) if words and command is None else None
    if command is None and (plan is None or ("=" in plan.name and not plan.exists())):
        limit, fix = "no job is named", "Put a plan file before the changes, or add --from COMMAND."
        raise UserInputError("whatif", str(plan or ""), limit, fix)
    texts, launcher = split_launcher(words)
    changes = parse_changes(texts)
    out = None if options.out is None else str(options.out)
    where = SweepOptions(launcher=launcher, out=out, force=forced())
    if command is not None:
        return command_variants(command, changes, where)
    assert plan is not None
    return plan_variants(plan, changes, where)
