"""``nest-megatron explain``, ``pin``, ``keygen`` and ``verify``: what is done with a plan file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from nest_megatron.cli.command_kinds import OUTPUT, PATH, command, flag, forced, json_option, option
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, is_standard_output, read_bytes, write_text
from nest_megatron.plain import to_plain
from nest_megatron.planner.pins import (
    PUBLIC_SUFFIX,
    PinnedPlan,
    PinnedTable,
    is_pinned,
    parse_pinned,
    pin_signature,
    pinned_for,
    pinned_text,
    plan_text,
    read_pinned,
    read_signers,
    read_table,
    signature_path,
    verify_pinned,
)
from nest_megatron.printing import one_line
from nest_megatron.report.console import say, show_json, show_or_json


@command("nest-megatron keygen --out robot.key --no-password")
@option("--out", "Write the secret key here.", OUTPUT, required=True)
@flag("--no-password", "Do not encrypt the key, for automated use.")
@json_option
def keygen(out: Path, *, no_password: bool, as_json: bool) -> None:
    """Make a key that signs pinned plans, in minisign's format.

    The public key is written to NAME.pub: give it to those who verify plans.
    """
    from nest_megatron import minisign

    public = out.with_suffix(PUBLIC_SUFFIX)
    if public == out or is_standard_output(out):
        raise UserInputError(
            "--out",
            str(out),
            "a secret key has a file of its own, and the public key takes NAME.pub",
            f"Name it {out.parent / 'reviewer.key'}.",
        )
    check_output("--out", public, force=forced())
    password = "" if no_password else ask_password("Password of the new key", confirm=True)
    if not (password or no_password):
        raise UserInputError(
            "password",
            "",
            "an empty password would leave the key unencrypted",
            "Type one, or add --no-password.",
        )
    secret = minisign.new_key()
    verifying = minisign.public_key(secret)
    name = minisign.key_name(verifying)
    write_text(out, minisign.secret_text(secret, password), mode=0o600)
    write_text(public, minisign.file_text(verifying))
    if as_json:
        show_json({"key": name, "secret": str(out), "public": str(public)})
        return
    say(f"Key {name}: {out} signs (keep it secret), {public} verifies.")
    say(f"Sign a reviewed plan: nest-megatron pin plan.yaml --sign {shlex.quote(str(out))}")


@command(
    "nest-megatron verify pinned.yaml",
    "nest-megatron verify pinned.yaml --key reviewer.pub",
)
@click.argument("path", type=PATH, metavar="PINNED.YAML")
@option(
    "--key keys",
    "A trusted key: its file, a folder of *.pub files, or the key itself. Repeatable; one "
    "match is enough.",
    multiple=True,
    metavar="KEY",
)
@option(
    "--signature", "The signature file; by default PINNED.YAML.minisig.", PATH, needs="--key KEY"
)
@json_option
def verify(path: Path, *, keys: tuple[str, ...], signature: Path | None, as_json: bool) -> None:
    """Check that a pinned plan is unchanged, and with --key who signed it.

    It needs no network. Exit codes: 0 unchanged, 2 bad input, 10 not pinned, 11 changed after it
    was pinned, 12 no signature, 13 unreadable signature, 14 signed with a key that is not trusted,
    15 signature of another file.
    """
    signed = verify_pinned(path, read_signers(keys), signature) if keys else None
    pin = signed.pinned.pin if signed else read_pinned(path).pin
    if as_json:
        signer = signed and {"key": signed.signer.key_name, "source": signed.signer.source}
        show_json({"pinned": to_plain(pin), "signer": signer, "comment": signed and signed.comment})
        return
    say(one_line(f"{path} is as {pin.by} pinned it at {pin.created}."))
    if signed is None:
        say("Who signed it was not asked: --key names trusted keys.")
    else:
        say(one_line(f"Signed by {signed.signer.describe()}."))


def ask_password(prompt: str = "Password of the key", *, confirm: bool = False) -> str:
    """A password from the terminal, or the first line of standard input where it is none."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    return str(click.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True))


@command(
    "nest-megatron explain plan.yaml",
    "nest-megatron explain plan.yaml --json",
    "nest-megatron explain plan.yaml --versus parallel.tensor_model_parallel_size=2",
    "nest-megatron explain plan.yaml --why-not tp=8,pp=4",
)
@click.argument("path", type=PATH, metavar="PLAN.YAML")
@option("--html", "Write the report as an HTML page.", OUTPUT)
@option(
    "--timeline",
    "Write the schedule: a .json trace for Perfetto, or a .png or .svg picture.",
    OUTPUT,
)
@option(
    "--versus",
    "Compare the plan with a layout of other sizes (tp=8,pp=4 or Megatron's own flags): time "
    "term by term, memory part by part.",
    metavar="LAYOUT",
)
@option(
    "--why-not",
    "Say why the plan does not have these sizes: a rule, memory, or how much slower they are.",
    metavar="LAYOUT",
)
@json_option
def explain(
    path: Path,
    *,
    html: Path | None,
    timeline: Path | None,
    versus: str | None,
    why_not: str | None,
    as_json: bool,
) -> None:
    """Explain a plan file: where time and memory go, and why other layouts lose."""
    from nest_megatron.api import PlanTable, load_plan
    from nest_megatron.integrations.plan_output import pin_note

    options = {"--html": html, "--timeline": timeline, "--versus": versus, "--why-not": why_not}
    given = {name: value for name, value in options.items() if value is not None}
    if found := read_table(path):
        for name, value in given.items():
            raise UserInputError(
                name, str(value), f"{path} is a table of plans", "Plan for one number of nodes."
            )
        record, pin = found
        table = PlanTable(record=record, notes=(pin_note(pin),) if pin else ())
        show_or_json(table.to_dict, table.report, as_json=as_json)
        return
    explained = load_plan(path).explain()
    if versus is not None or why_not is not None:
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)}: give one of them.")
        other = explained.versus(versus) if versus is not None else explained.why_not(str(why_not))
        show_or_json(other.to_dict, other.report, as_json=as_json)
        return
    if timeline:
        from nest_megatron.report.charts import check_picture

        check_picture(timeline, "--timeline", ".json")
    show_or_json(explained.to_dict, explained.report, as_json=as_json)
    if timeline:
        explained.write_timeline(timeline, force=True)  # checked before
    if html:
        explained.write_html(html, force=True)


@command(
    "nest-megatron pin plan.yaml",
    "nest-megatron pin plan.yaml --out pinned.yaml --by ada --note 'reviewed for run 7'",
    "nest-megatron pin plan.yaml --sign reviewer.key",
)
@click.argument("path", type=PATH, metavar="PLAN.YAML")
@option("--out", "Write the pinned plan here; by default it replaces PLAN.YAML.", OUTPUT)
@option("--by", "The reviewer; by default your user name.", metavar="NAME")
@option("--note", "A remark to keep in the file.", metavar="TEXT", default="")
@option(
    "--release --megatron-version release",
    "Of a plan for Megatron-LM: the release that it may launch on (0.19); by default its own.",
    metavar="RELEASE",
)
@option(
    "--sign key",
    "Sign with this secret key. A plan that is already pinned is only signed.",
    PATH,
    metavar="KEY",
)
@json_option
def pin(
    path: Path,
    *,
    out: Path | None,
    by: str | None,
    note: str,
    release: str | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """Pin a reviewed plan: it launches the job that it was made for, and no other.

    Launch with +nest=pinned nest.plan=FILE. If a byte of the file changes, the launch is refused.
    """
    from nest_megatron.integrations.plan_output import pin_plan

    target = out or path
    is_printed = is_standard_output(target)
    if key is not None and is_printed:
        limit = "the signature lies beside the pinned plan, and --out - makes no file"
        raise UserInputError("--sign", str(key), limit, "Name a file with --out.")
    content = read_bytes(path, "plan")
    made_now = key is None or out is not None or not is_pinned(plan_text(content, path))
    if not made_now:
        pinned: PinnedPlan | PinnedTable = parse_pinned(content, path)
        for name, given in (("--by", by), ("--note", note), ("--release", release)):
            if given:
                raise UserInputError(
                    name,
                    given,
                    f"{path} is pinned already, by {pinned.pin.by}, and is only signed",
                    f"Leave {name} out.",
                )
    else:
        pinned = pin_plan(path, by=by, note=note, release=release)
        content = pinned_text(pinned).encode()
    signed = "" if key is None else pin_signature(content, path, key, ask_password)
    if made_now:
        write_text(target, content.decode())
    signature = signature_path(target) if signed else None
    if signature:
        write_text(signature, signed)
    made = pinned.pin
    if as_json:
        show_json(
            {"pinned": str(target), "signature": signature and str(signature), **to_plain(made)}
        )
        return
    plans = [pinned.plan] if isinstance(pinned, PinnedPlan) else [*pinned.table.plans.values()]
    sizes = " or ".join(plan.cluster.describe() for plan in plans)
    plan = plans[0]
    word = "Pinned to" if made_now else "Signed as it is:"
    where, target = ("standard output", Path("FILE")) if is_printed else (str(target), target)
    say(
        f"{word} {where}: {plan.model.name} on {sizes}, global batch "
        f"{plan.layout.global_batch_size}, {plan.train.precision}, "
        f"{pinned_for(plan, made.megatron_lm)}, nest-megatron {made.nest_megatron_version}."
    )
    if signature is not None:
        say(
            f"Signed: {signature}. `nest-megatron verify {shlex.quote(str(target))} "
            "--key PUBLIC.KEY` says by whom."
        )
    how = "+nest=pinned nest.plan"
    if str(plan.provenance.settings.get("target")).startswith("nemo"):
        how = "run.plugins=nest run.plugins.mode=pinned run.plugins.plan"
    say(f"Launch that job with {how}={shlex.quote(str(target))}; any other is refused.")
