r"""What is printed, whoever wrote it: without characters that a terminal acts on.

A name in a file may hold escape sequences that move the cursor, or marks of another direction of
writing, by which a reviewer reads something else than is there. They are shown as Python writes
them (``\x1b``, ``\u202e``).
"""

from __future__ import annotations

import contextlib
import re
import sys

#: Control characters but tab and line feed, what is invisible or turns the direction of writing
#: (https://www.unicode.org/reports/tr9), separators of lines, and tags.
_ACTED_ON = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def cleaned(text: str) -> str:
    r"""A text of which nothing is acted on.

    >>> cleaned("a\x1b[2Jb\n"), cleaned("a\u202eb")
    ('a\\x1b[2Jb\n', 'a\\u202eb')
    """
    return _ACTED_ON.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""The same in one line, for a name inside a sentence.

    >>> one_line("Ada\nSigned by Bob.")
    'Ada\\nSigned by Bob.'
    """
    return cleaned(text).replace("\n", "\\n")


def print_cleaned(text: str) -> None:
    """Print on standard output."""
    print(cleaned(text), flush=True)


def print_to_stderr(text: str) -> None:
    """Print on standard error, where that takes anything: nothing is to end for a message."""
    with contextlib.suppress(OSError):
        print(cleaned(text), file=sys.stderr, flush=True)
