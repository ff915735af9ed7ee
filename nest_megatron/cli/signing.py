"""``nest-megatron keygen`` and ``verify``: who signed a pinned plan."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nest_megatron.cli.command_kinds import OUTPUT, PATH, command, forced, json_option


@command("nest-megatron keygen --out robot.key --no-password")
@click.option("--out", type=OUTPUT, required=True, help="Write the secret key here.")
@click.option("--no-password", is_flag=True, help="Do not encrypt the key, for automated use.")
@json_option
def keygen(out: Path, *, no_password: bool, as_json: bool) -> None:
    """Make a key that signs pinned plans, in minisign's format.

    The public key is written to NAME.pub: give it to those who verify plans.
    """
    from nest_megatron import minisign
    from nest_megatron.errors import UserInputError
    from nest_megatron.files import check_output, write_text
    from nest_megatron.planner.signed import PUBLIC_SUFFIX
    from nest_megatron.report.console import say, show_json

    public = out.with_suffix(PUBLIC_SUFFIX)
    if public == out:
        limit, fix = "the public key takes this name", f"Name it {out.with_suffix('.key')}."
        raise UserInputError("--out", str(out), limit, fix)
    check_output("--out", public, force=forced())
    password = "" if no_password else ask_password("Password of the new key", confirm=True)
    if not (password or no_password):
        limit = "an empty password would leave the key unencrypted"
        fix = "Type one, or add --no-password."
        raise UserInputError("password", "", limit, fix)
    secret = minisign.new_key()
    verifying = minisign.public_key(secret)
    name = minisign.key_name(verifying)
    write_text(out, minisign.secret_text(secret, password), mode=0o600)
    write_text(public, minisign.file_text(verifying))
    if as_json:
        show_json({"key": name, "secret": str(out), "public": str(public)})
        return
    say(f"Key {name}: {out} signs (keep it secret), {public} verifies.")
    say(f"Sign a reviewed plan: nest-megatron pin plan.yaml --sign {out}")


@command(
    "nest-megatron verify pinned.yaml",
    "nest-megatron verify pinned.yaml --key reviewer.pub",
)
@click.argument("path", type=PATH, metavar="PINNED.YAML")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="A trusted key: its file, a folder of *.pub files, or the key itself. Repeatable; one "
    "match is enough.",
)
@click.option("--signature", type=PATH, help="The signature file; by default PINNED.YAML.minisig.")
@json_option
def verify(path: Path, *, keys: tuple[str, ...], signature: Path | None, as_json: bool) -> None:
    """Check that a pinned plan is unchanged, and with --key who signed it.

    It needs no network. Exit codes: 0 unchanged, 2 bad input, 10 not pinned, 11 changed after it
    was pinned, 12 no signature, 13 unreadable signature, 14 signed with a key that is not trusted,
    15 signature of another file.
    """
    from nest_megatron.errors import UserInputError
    from nest_megatron.plain import to_plain
    from nest_megatron.planner.pins import read_pinned
    from nest_megatron.planner.signed import read_signers, verify_pinned
    from nest_megatron.printing import one_line
    from nest_megatron.report.console import say, show_json

    if signature is not None and not keys:
        limit, fix = "it is compared with trusted keys", "Add --key."
        raise UserInputError("--signature", str(signature), limit, fix)
    signed = verify_pinned(path, read_signers(keys), signature) if keys else None
    pin = signed.pinned.pin if signed else read_pinned(path).pin
    if as_json:
        signer = signed and {"key": signed.signer.key_name, "source": signed.signer.source}
        comment = signed and signed.comment
        show_json({"pinned": to_plain(pin), "signer": signer, "comment": comment})
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
