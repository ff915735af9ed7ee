"""Signatures of pinned plans: minisign's own, ours, and what does not hold."""

from __future__ import annotations

import base64
import errno
import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron import minisign
from nest_megatron.errors import UserInputError
from nest_megatron.planner.pins import (
    read_signers,
    signature_path,
    verify_pinned,
)
from tests.cli.runs import ROOT, SMALL, Run, run

#: Written by minisign 0.11: `-G -W`, `-S -t`, `-S -l`, of a file that holds "hello".
PUBLIC = """untrusted comment: minisign public key 87C09460C7CF688F
RWSPaM/HYJTAhw8lCWRd8LF/ON7RvD60X/kulv3gB6C3Dre982OxF8jt
"""
SECRET = """untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAj2jPx2CUwIcQ+/FyY3fjVYMostjj\
UcRiOLY0p3oj5z3TKTzdRAz3Qg8lCWRd8LF/ON7RvD60X/kulv3gB6C3Dre982OxF8jtAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\
AAAAAAA=
"""
SIGNATURE = """untrusted comment: signature from minisign secret key
RUSPaM/HYJTAh35bJdeufEG3DKob9Zu7aLzuY8yCXWjsWrfvd+Wcgv4R//J39h0bBVGWag94YhIvKB/BUd5hw0IS/epv77jFfAY=
trusted comment: timestamp:1 file:m.txt
c/zYe0HhBSklUOJWA816h0xhZXOYFPOFoFWiT7Muxoxp0Ymv+CCC4xqUdyrO2WU6s4jDSsP3lr/wcmUFK59VBQ==
"""
WHOLE_SIGNATURE = (
    "untrusted comment: signature from minisign secret key\n"
    "RWSPaM/HYJTAh3IQdQwiW1KUHCabw7po5RUR1gaF8eUP3vzbLrICXayCCgssy7ScTeCiDjACz0swKeWRzc5BKVJAYL5O3lU6hQg=\n"
    "trusted comment: timestamp:1795436671\tfile:m.txt\n"
    "Q6SOgOwrweq5+enPMljS+iOptzkTrY+P63uj+Pf+0ISujvarJEdxdRcXEcF870gX1J0Ncivr0fo4tXZfodaVAA==\n"
)
KEY = minisign.read_public(PUBLIC, "a.pub")


def test_a_folder_of_keys_that_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError):
        read_signers([str(tmp_path)])


@pytest.mark.parametrize("text", [SIGNATURE, WHOLE_SIGNATURE])
def test_signatures_of_minisign_hold(text: str) -> None:
    signature = minisign.read_signature(text, "m.txt.minisig")
    other = minisign.public_key(minisign.new_key())
    assert minisign.verify(b"hello\n", signature, [other, KEY]) == KEY
    assert minisign.file_text(signature).splitlines()[1:] == text.splitlines()[1:]
    with pytest.raises(minisign.SignatureError) as wrong:
        minisign.verify(b"hallo\n", signature, [KEY])
    assert wrong.value.reason is minisign.Reason.WRONG


def test_keys_of_minisign_are_read_and_written() -> None:
    secret = minisign.read_secret(SECRET, pytest.fail, "a.key")
    assert minisign.public_key(secret) == KEY
    assert minisign.file_text(KEY) == minisign.file_text(minisign.public_key(secret)) == PUBLIC
    assert minisign.secret_text(secret, "") == SECRET
    again = minisign.file_text(minisign.sign(b"hello\n", secret, "timestamp:1 file:m.txt"))
    assert again.splitlines()[1:] == SIGNATURE.splitlines()[1:]  # Ed25519 draws nothing


FIELD, EIGHT = 2**255 - 19, 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826


@pytest.mark.parametrize("sign", [0, 2**255])
@pytest.mark.parametrize(
    "point", [0, 1, FIELD - 1, EIGHT, FIELD - EIGHT, FIELD, FIELD + 1, FIELD + 5, 2**255 - 1]
)
def test_a_public_key_for_which_anybody_signs_is_refused(point: int, sign: int) -> None:
    content = b"Ed" + bytes(8) + (point + sign).to_bytes(32, "little")
    line = base64.b64encode(content).decode()
    for text in (f"untrusted comment: weak\n{line}\n", line):
        with pytest.raises(UserInputError, match="small order"):
            minisign.read_public(text, "weak.pub")


@pytest.mark.slow
def test_a_password_encrypts_a_key_and_no_other_opens_it() -> None:
    key = minisign.new_key()
    public = minisign.public_key(key)
    text = minisign.secret_text(key, "correct horse")
    opened = minisign.read_secret(text, lambda: "correct horse", "b.key")
    assert minisign.public_key(opened) == public
    with pytest.raises(UserInputError, match="wrong password"):
        minisign.read_secret(text, lambda: "battery staple", "b.key")


def test_unused_bits_of_base64_are_not_ignored() -> None:
    lines = minisign.file_text(minisign.sign(b"plan", minisign.new_key(), "")).splitlines()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = lines[3][-3]  # 64 bytes: four bits of the last letter are unused, and zero
    lines[3] = lines[3][:-3] + letters[letters.index(last) + 1] + "=="
    with pytest.raises(minisign.SignatureError, match="minisign's format"):
        minisign.read_signature("\n".join(lines) + "\n", "x")


@given(st.binary(max_size=200), st.integers(0, 3), st.data())
def test_a_changed_byte_never_holds(content: bytes, line: int, data: st.DataObject) -> None:
    key = minisign.new_key()
    public = minisign.public_key(key)
    text = minisign.file_text(minisign.sign(content, key, "plan"))
    assert minisign.verify(content, minisign.read_signature(text, "x"), [public])
    lines = text.splitlines()
    first = len("untrusted comment: ") if line == 0 else 0
    place = data.draw(st.integers(first, len(lines[line]) - 1))
    other = data.draw(st.sampled_from("Ab1+=").filter(lambda c: c != lines[line][place]))
    lines[line] = lines[line][:place] + other + lines[line][place + 1 :]
    changed = "\n".join(lines) + "\n"
    if line == 0:  # minisign's own name for it: an untrusted comment
        assert minisign.verify(content, minisign.read_signature(changed, "x"), [public])
        return
    with pytest.raises(minisign.SignatureError):
        minisign.verify(content, minisign.read_signature(changed, "x"), [public])


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed plan, its signer's keys and another's."""
    folder = tmp_path_factory.mktemp("signed")
    assert run("plan", *SMALL, f"out={folder / 'plan.yaml'}").code == 0
    for name in ("reviewer", "other"):
        assert run("keygen", "--out", str(folder / f"{name}.key"), "--no-password").code == 0
    plan, key = folder / "plan.yaml", folder / "reviewer.key"
    assert run("pin", str(plan), "--sign", str(key)).code == 0
    return plan


def verified(plan: Path, *keys: str) -> Run:
    return run("verify", str(plan), *(word for key in keys for word in ("--key", key)))


def test_a_signed_plan_holds(signed: Path) -> None:
    public = signed.parent / "reviewer.pub"
    for key in (str(public), public.read_text().splitlines()[1], str(signed.parent)):
        found = verified(signed, key)
        assert found.code == 0, found.err
        assert "Signed by" in found.out
    assert "was not asked" in verified(signed).out


def test_a_file_of_a_key_s_name_takes_its_place_nowhere(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = (signed.parent / "reviewer.pub").read_text().splitlines()[1]
    Path(line).parent.mkdir(parents=True, exist_ok=True)  # base64 has slashes
    Path(line).write_bytes((signed.parent / "other.pub").read_bytes())
    assert verified(signed, line).code == 0


def test_a_secret_key_is_private_and_never_replaced(signed: Path) -> None:
    key = signed.parent / "reviewer.key"
    assert stat.S_IMODE(key.stat().st_mode) & 0o077 == 0
    assert run("keygen", "--out", str(key), "--no-password").code == 2


def test_each_reason_has_its_exit_code(signed: Path, tmp_path: Path) -> None:
    public, other = (str(signed.parent / f"{name}.pub") for name in ("reviewer", "other"))
    plan, unpinned = tmp_path / "plan.yaml", tmp_path / "unpinned.yaml"
    plan.write_bytes(signed.read_bytes())
    assert verified(plan, public).code == 12
    signature_path(plan).write_text("nothing")
    assert verified(plan, public).code == 13
    signature_path(plan).write_bytes(signature_path(signed).read_bytes())
    assert verified(plan, public).code == 0
    assert verified(plan, other).code == 14
    assert verified(plan, other, public).code == 0  # while one key replaces another
    plan.write_text(plan.read_text() + "\n")
    assert verified(plan, public).code == 15
    assert verified(plan).code == 11
    unpinned.write_text("schema:" + plan.read_text().partition("\nschema:")[2])
    assert verified(unpinned).code == 10
    assert verified(tmp_path / "none.yaml").code == 2
    assert verified(signed, str(signed)).code == 2  # not a key
    assert verified(signed, str(tmp_path)).code == 2  # a folder without keys


def test_an_empty_key_trusts_nobody(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set, and not the keys of the current folder."""
    monkeypatch.chdir(signed.parent)
    assert verified(signed, ".").code == 0
    done = verified(signed, "")
    assert done.code == 2
    assert "error: --key = '': it holds no key" in done.err


def test_a_pinned_plan_is_signed_again_as_it_is(signed: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_bytes(signed.read_bytes())
    assert run("pin", str(plan), "--sign", str(signed.parent / "other.key")).code == 0
    assert plan.read_bytes() == signed.read_bytes()
    assert verified(plan, str(signed.parent / "other.pub")).code == 0
    assert run("pin", str(plan), "--sign", str(signed.parent / "other.pub")).code == 2


def test_a_password_comes_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nest_megatron.cli.explain import ask_password

    monkeypatch.setattr(sys, "stdin", io.StringIO("correct horse\nmore\n"))
    assert ask_password() == "correct horse"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    key = tmp_path / "a.key"
    assert run("keygen", "--out", str(key)).code == 2  # not an unencrypted key by mistake
    assert not key.exists()


def test_a_pinned_file_is_signed_and_not_pinned_anew(signed: Path, tmp_path: Path) -> None:
    key, plan = tmp_path / "b.key", tmp_path / "plan.yaml"
    plan.write_bytes(signed.read_bytes())
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    refused = run("pin", str(plan), "--sign", str(key), "--by", "eve")
    assert refused.code == 2
    assert "is pinned already, by " in refused.err
    done = run("pin", str(plan), "--sign", str(key))
    assert "Signed as it is: " in done.out
    assert "Pinned to" not in done.out


def test_a_key_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = run("keygen", "--out", str(tmp_path / "a.pub"), "--no-password")
    assert named.code == 2
    assert f"Name it {tmp_path / 'reviewer.key'}." in named.err
    monkeypatch.chdir(tmp_path)
    printed = run("keygen", "--out", "-", "--no-password")
    assert (printed.code, printed.out) == (2, "")
    assert "error: --out = -: a secret key has a file of its own" in printed.err
    assert not list(tmp_path.iterdir())  # neither key in the other's place
    key, public = tmp_path / "a.key", tmp_path / "a.pub"
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    kept = key.read_text(), public.read_text()
    assert "has not written" not in run("keygen", "--out", str(key), "--no-password").err
    assert (key.read_text(), public.read_text()) == kept
    key.unlink()
    assert "--force" in run("keygen", "--out", str(key), "--no-password").err  # for the public key
    assert run("keygen", "--out", str(key), "--no-password", "--force").code == 0
    assert public.read_text() != kept[1]


def test_a_prolog_lets_only_signed_plans_through(signed: Path, tmp_path: Path) -> None:
    script = ROOT / "recipes" / "slurm" / "verify_plan.sh"
    program = tmp_path / "nest-megatron"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m nest_megatron "$@"\n')
    program.chmod(0o755)

    def ended(**more: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **more}
        return subprocess.run(
            ["bash", str(script)], env=environment, capture_output=True, text=True, check=False
        )

    keys = {"NEST_TRUSTED_KEYS": str(signed.parent / "reviewer.pub")}
    assert ended().returncode == 0
    assert ended(NEST_PLAN=str(signed), **keys).returncode == 0
    stopped = ended(NEST_PLAN=str(signed), NEST_TRUSTED_KEYS=str(signed.parent / "other.pub"))
    assert stopped.returncode == 14
    assert stopped.stdout.startswith("print nest: ")


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_itself_agrees(signed: Path) -> None:
    public = signed.parent / "reviewer.pub"
    subprocess.run(["minisign", "-V", "-m", signed, "-p", public], check=True, capture_output=True)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisign", None)
    with pytest.raises(UserInputError, match=r"pip install 'nest-megatron\[sign\]'"):
        minisign.new_key()


def test_what_was_verified_is_what_is_launched(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file in the place of the signed one, just after its bytes were read."""
    plan = tmp_path / "plan.yaml"
    plan.write_bytes(signed.read_bytes())
    signature_path(plan).write_bytes(signature_path(signed).read_bytes())
    verify = minisign.verify

    def swapping(*args: Any, **options: Any) -> Any:
        plan.write_text("another\n")
        return verify(*args, **options)

    monkeypatch.setattr(minisign, "verify", swapping)
    found = verify_pinned(plan, read_signers([str(signed.parent / "reviewer.pub")]))
    assert found.pinned.plan.model.name == "llama3_8b"
    assert plan.read_text() == "another\n"


def test_what_was_reviewed_is_what_is_signed(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file in the place of the plan while its reviewer types a password."""
    plan, content = tmp_path / "plan.yaml", signed.read_bytes()
    plan.write_bytes(content)
    read = minisign.read_secret

    def swapping(*args: Any) -> Any:
        plan.write_text("another\n")
        return read(*args)

    monkeypatch.setattr(minisign, "read_secret", swapping)
    assert run("pin", str(plan), "--sign", str(signed.parent / "reviewer.key")).code == 0
    assert verified(plan, str(signed.parent / "reviewer.pub")).code == 15
    plan.write_bytes(content)
    assert verified(plan, str(signed.parent / "reviewer.pub")).code == 0


def test_a_plan_that_cannot_be_signed_is_not_written(signed: Path, tmp_path: Path) -> None:
    plan, wrong = tmp_path / "plan.yaml", signed.parent / "reviewer.pub"
    assert run("plan", *SMALL, f"out={plan}").code == 0
    kept = plan.read_bytes()
    for more in ((), ("--out", str(tmp_path / "pinned.yaml"))):
        assert run("pin", str(plan), "--sign", str(wrong), *more).code == 2
    assert plan.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [plan]


def test_a_damaged_key_signs_nothing() -> None:
    head, line = SECRET.splitlines()
    damaged = bytearray(base64.b64decode(line))
    damaged[62] ^= 1  # of the 32 bytes that the public key comes from
    text = f"{head}\n{base64.b64encode(damaged).decode()}\n"
    with pytest.raises(UserInputError, match="nothing can be signed with it"):
        minisign.read_secret(text, pytest.fail, "a.key")


def test_a_name_outside_of_ascii_is_signed_as_minisign_allows(signed: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={plan}").code == 0
    key = str(signed.parent / "reviewer.key")
    assert run("pin", str(plan), "--sign", key, "--by", "Jürgen").code == 0
    found = verify_pinned(plan, read_signers([str(signed.parent / "reviewer.pub")]))
    assert "\tby:J\\xfcrgen\t" in found.comment
    assert found.pinned.pin.by == "Jürgen"
