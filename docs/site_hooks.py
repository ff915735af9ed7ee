"""What mkdocs does not do by itself: pages that no entry of the navigation names, links to sources.

Pages are also read on GitHub, where a link to ``../hydra_configs/plan.yaml`` opens the file; the
site takes along a copy of each file that is linked so.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Folder of the site for files that lie outside docs/.
SOURCES = "sources"
_OUTWARDS = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the navigation leaves out: decisions as such, other pages under More."""
    assert config.nav is not None
    named = set(_names(config.nav))
    left = sorted(file.src_uri for file in files.documentation_pages())
    left = [name for name in left if name not in named]
    decisions = [name for name in left if name.startswith("decisions/")]
    more = [name for name in left if name not in decisions]
    config.nav += [{"More": more}] if more else []
    config.nav += [{"Decisions": decisions}]
    return files


def _names(entry: Any) -> list[str]:
    """The pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [name for each in inner for name in _names(each)]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that lead out of docs/ at copies of the files; mkdocs warns of what is none."""
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
