"""What mkdocs does not do by itself: pages that no entry of the navigation names, links to sources.

Pages are also read on GitHub, where a link to ``../hydra_configs/plan.yaml`` opens the file; the
site takes along a copy of each file that is linked so. Pages of results are left out of the
search, and their long tables are folded.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from generated_pages import RESULTS  # noqa: E402  (beside this file)

#: A table of a page of results with more rows is folded.
MOST_ROWS = 40
#: Folder of the site for files that lie outside docs/.
SOURCES = "sources"
_OUTWARDS = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)\)")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the navigation leaves out, under More."""
    assert config.nav is not None
    named = set(_names(config.nav))
    more = sorted({file.src_uri for file in files.documentation_pages()} - named)
    config.nav += [{"More": more}] if more else []
    return files


def _names(entry: Any) -> list[str]:
    """The pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [name for each in inner for name in _names(each)]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that lead out of docs/ at copies of the files; mkdocs warns of what is none."""
    if page.file.src_uri in RESULTS:
        page.meta["search"] = {"exclude": True}
    folder = posixpath.dirname(page.file.src_uri)

    def pointed(match: re.Match[str]) -> str:
        path = posixpath.relpath(posixpath.join("docs", folder, match["path"]), ".")
        if path.startswith(("docs/", "../")) or not (ROOT / path).is_file():
            return match[0]
        target = f"{SOURCES}/{path}" + (".txt" if path.endswith(".md") else "")
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        return f"]({posixpath.relpath(target, folder or '.')})"

    return _OUTWARDS.sub(pointed, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Folds long tables of results."""
    return _TABLE.sub(_folded, html) if page.file.src_uri in RESULTS else html


def _folded(match: re.Match[str]) -> str:
    """A table, below a line that opens it where it is long."""
    rows = match[0].count("<tr>") - 1
    if rows <= MOST_ROWS:
        return match[0]
    return f"<details><summary>Table of {rows} rows</summary>\n{match[0]}\n</details>"
