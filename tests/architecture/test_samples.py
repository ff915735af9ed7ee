"""``docs/refresh.py`` prints samples anew, and no printed plan in the documents is without it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.imports import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What only a plan that was printed holds.
PRINTED = re.compile(r"^nest: this job runs as|^ *Step +[\d.]+ m?s|parallel_size=\d", re.M)


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_printed_plan_is_a_sample(refresh: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for match in refresh._SAMPLE.finditer(text):
        kind = re.match(r"(?:<!--.*?-->\n+)?```(\w*)", match[0], re.S)
        if kind and kind[1] in ("", "text") and PRINTED.search(match["body"]):
            assert refresh.is_sample(match), match["body"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_plan.md", "users/network_architect.md"])
def test_samples_of_the_first_pages_are_current(refresh: ModuleType, name: str) -> None:
    assert refresh.main(["--check", str(ROOT / "docs" / name)]) == 0, f"refresh docs/{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_samples_have_a_command_and_known_needs(refresh: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    samples = [m for m in refresh._SAMPLE.finditer(text) if refresh.is_sample(m)]
    assert text.count("<!-- sample") <= len(samples), "a mark without a block below it"
    for match in samples:
        refresh.Tools().missing(match["needs"] or "")
        assert match["command"] or match["body"].startswith("$ "), match["body"]


def test_pages_that_are_written_whole_name_their_benchmark(refresh: ModuleType) -> None:
    for name, (_, command) in refresh.WHOLE.items():
        (script,) = re.findall(r"benchmarks/\w+\.py", command)
        assert (ROOT / script).is_file()
        assert script in (ROOT / "docs" / name).read_text(encoding="utf-8")


BLOCK = """\
Words.

<!-- sample: printf 'a 1\\nb 2\\nc 3\\nd 4\\ne 5\\nin 3.1 s\\n' -->
```text
$ shown
a 7
...
c 8
d 9
...
in 9.9 s
```

```text
$ nest-megatron --version
```
"""


def test_a_sample_is_printed_anew_and_keeps_what_it_leaves_out(
    refresh: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(BLOCK)
    assert refresh.main(["--check", str(page)]) == 1
    assert page.read_text() == BLOCK, "a check writes nothing"
    assert refresh.main([str(page)]) == 0
    text = page.read_text()
    assert "$ shown\na 1\n...\nc 3\nd 4\n...\nin 3.1 s\n```" in text
    assert "$ nest-megatron --version\nnest-megatron" in text
    assert refresh.main(["--check", str(page)]) == 0, "times of programs are no difference"


def test_a_sample_that_cannot_be_printed_leaves_the_page(
    refresh: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    for command, why in (("no-such-program", "127"), ("echo z", "no line like 'a 7'")):
        page.write_text(re.sub(r"sample: .* -->", f"sample: {command} -->", BLOCK))
        before = page.read_text()
        assert refresh.main([str(page)]) == 1
        assert page.read_text() == before
        assert why in capsys.readouterr().err


def test_a_sample_that_lacks_its_framework_is_skipped_with_the_reason(
    refresh: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- sample nemo: false -->\n```text\nold\n```\n")
    assert refresh.main([str(page)]) == 0
    assert "page.md:2: skipped, needs --nemo PYTHON" in capsys.readouterr().out


def test_a_page_that_is_written_whole_is_written_where_it_is_named(
    refresh: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(refresh.WHOLE, "page.md", ("", 'printf "new\\n" > $PAGE'))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("old\n")
    assert refresh.main(["--check", "docs/page.md"]) == 1
    assert page.read_text() == "old\n"
    assert refresh.main(["docs/page.md"]) == 0
    assert page.read_text() == "new\n"


def test_the_words_of_a_sample_that_vary(refresh: ModuleType) -> None:
    same = refresh.normalised
    assert same("solved, in 2.07 s with the\n kernel") == same("solved, in 1 s with the kernel")
    assert same("| nemotron | accepted | 0.47 |") == same("| nemotron | accepted | 9.12 |")
    assert same("Step   29.322 s") != same("Step   30.322 s")
