"""Count Megatron-LM's example scripts that are planned, for docs/launch_scripts.md.

``python docs/make_launch_scripts.py RELEASE=CHECKOUT...`` estimates each script of ``examples`` in
each checkout, with eight words as arguments, and writes the table of the page; releases are those
of ``--megatron-version``. It takes minutes. What is not priced goes to standard error, with why.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import nest_megatron
from nest_megatron.errors import UserInputError

PAGE = Path(__file__).with_name("launch_scripts.md")
_ARGUMENTS = tuple(f"/given/{n}" for n in range(1, 9))
_BEGIN, _END = "<!-- scripts -->\n", "<!-- end -->\n"


def result_of(script: Path, release: str) -> tuple[str, str]:
    """How far a script comes, and why no farther."""
    words = ["bash", str(script), *_ARGUMENTS]
    try:
        nest_megatron.estimate_command(words, cluster="dgx_h100", megatron_version=release)
    except UserInputError as error:
        why = f"{error.what} = {error.value}: {error.limit}"
        return "none" if error.what == "script" else "launch", why
    return "priced", ""


def main(arguments: list[str]) -> None:
    """Write the table."""
    checkouts = dict(argument.partition("=")[::2] for argument in arguments)
    counts = {release: Counter[tuple[str, str]]() for release in checkouts}
    for release, checkout in checkouts.items():
        examples = Path(checkout, "examples").resolve()
        os.chdir(checkout)  # as the examples expect
        for script in sorted(examples.rglob("*.sh")):
            name = script.relative_to(examples)
            result, why = result_of(script, release)
            counts[release].update((folder, result) for folder in (f"`{name.parts[0]}`", "all"))
            print(release, name, result, why, sep="\t", file=sys.stderr)
    folders = sorted({folder for each in counts.values() for folder, _ in each})
    rows = [f"| folder | {' | '.join(checkouts)} |", f"|---|{'--:|' * len(checkouts)}"]
    for folder in (*(each for each in folders if each != "all"), "all"):
        cells = (_cell(each, folder) for each in counts.values())
        rows.append(f"| {folder} | {' | '.join(cells)} |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    table = "\n".join((*rows, ""))
    PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")


def _cell(counts: Counter[tuple[str, str]], folder: str) -> str:
    priced, launch, none = (counts[folder, result] for result in ("priced", "launch", "none"))
    return f"{priced + launch}, {priced} of {priced + launch + none}"


if __name__ == "__main__":
    main(sys.argv[1:])
