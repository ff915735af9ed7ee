"""``requirements-release.txt``: exact versions with hashes of all that the package asks for."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.cli.runs import ROOT

#: Each pinned version, with the hashes behind it.
PINNED = [
    (Requirement(words[0]), words[1:])
    for entry in re.split(r"\n(?=\S)", (ROOT / "requirements-release.txt").read_text("utf-8"))
    if not entry.startswith("#")
    and (words := [word.strip() for word in entry.replace("\\\n", "\n").splitlines()])
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_each_version_is_exact_and_has_hashes() -> None:
    assert len(PINNED) > len(PROJECT["dependencies"])
    for requirement, hashes in PINNED:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)


@pytest.mark.parametrize(
    "asked", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["sign"]]
)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_what_the_package_asks_for_is_pinned(asked: str, python: str) -> None:
    """What ``bash .ci/pin_release`` writes again after a change of pyproject.toml."""
    wanted = Requirement(asked)
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    (version,) = (
        specifier.version
        for requirement, _ in PINNED
        if canonicalize_name(requirement.name) == canonicalize_name(wanted.name)
        and (requirement.marker is None or requirement.marker.evaluate(here))
        for specifier in requirement.specifier
    )
    assert Version(version) in wanted.specifier
