"""The page as a browser shows it: wide and narrow, light and dark, by keyboard, printed.

Skipped where playwright (``pip install playwright``) or a Chromium on the path is missing.
"""

from __future__ import annotations

import dataclasses
import html
import shutil
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nest_megatron.layout.recompute import selective_recompute
from nest_megatron.report.html import html_report
from nest_megatron.report.whatif import Variants
from tests.cli.test_whatif import combinations
from tests.report.plans import SHAPES, hand_plan, searched_plan
from tests.report.test_html_sections import command_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path"),
]
#: Least ratio of the contrasts of text, WCAG 2.2 AA.
CONTRAST = """() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(c => {
    c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = node => { for (let at = node; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!colour.startsWith("rgba(") || colour.endsWith(", 1)")) return colour; }
    return getComputedStyle(document.body).backgroundColor; };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  while (words.nextNode()) { const node = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || node.closest("script, .bar, .number")) continue;
    const look = getComputedStyle(node), ink = node.closest("svg") ? look.fill : look.color;
    const pair = [light(ink), light(behind(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push([words.currentNode.data.trim(), ratio.toFixed(2)]); }
  return low; }"""
#: Texts that nobody can bring onto the screen: right of the page and of everything that scrolls.
CUT = """() => {
  const shown = document.querySelectorAll("main :is(p, dd, dt, h1, h2, th, td, li, pre)");
  return [...shown].filter(each => each.getBoundingClientRect().right > innerWidth + 1
    && !each.closest(".scroll:not(.cards), .picture")).map(each => each.textContent.trim()); }"""


class Node(NamedTuple):
    """A part of the page: its name, and the level of a heading."""

    name: str
    level: int | None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def page_of(name: str) -> str:
    """The page of a shape of plans, or of a command beside what it runs today."""
    if name in SHAPES:
        return html_report(SHAPES[name]())
    return html_report(command_page()[0])


@pytest.fixture(
    scope="module", params=["searched", "interleaved", "one stage", "hybrid", "command"]
)
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the page of a plan."""
    path: Path = tmp_path_factory.mktemp("pages") / "plan.html"
    path.write_text(page_of(request.param), encoding="utf-8")
    return path.as_uri()


def opened(browser: Any, address: str, **look: Any) -> tuple[Any, list[str]]:
    """The page in a window, all unfolded, and what the browser complains of, which grows."""
    page, said = browser.new_page(**look), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    return page, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_can_be_read(browser: Any, address: str, width: int, scheme: Any) -> None:
    look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    page, said = opened(browser, address, **look)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(CONTRAST) == []
    assert said == []


def test_kinds_of_layers_differ_in_colour(browser: Any, address: str) -> None:
    page, _ = opened(browser, address)
    letters = """() => [...document.querySelectorAll("#stages .legend .chunk span")].map(each => {
      const look = getComputedStyle(each); return look.backgroundColor + look.boxShadow; })"""
    colours = page.evaluate(letters)
    assert len(colours) > 2
    assert len({*colours}) == len(colours)


def test_the_command_is_copied(browser: Any, address: str) -> None:
    page, said = opened(browser, address)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").first.press("Enter")
    page.get_by_role("status").filter(has_text="Copied.").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator("#command1").text_content()
    assert said == []


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the page of a job on changed clusters."""
    path: Path = tmp_path_factory.mktemp("pages") / "whatif.html"
    plan = hand_plan(4)
    path.write_text(
        Variants(present=plan, variants=combinations(plan, 2)).to_html(), encoding="utf-8"
    )
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_changes_can_be_read(browser: Any, changes: str, width: int, scheme: Any) -> None:
    test_everything_can_be_read(browser, changes, width, scheme)


def test_sliders_pick_a_row_by_keyboard(browser: Any, changes: str) -> None:
    page, said = opened(browser, changes)
    first, second = (page.get_by_role("slider", name=name, exact=True) for name in "xy")
    picked, answer = page.locator("tr.picked"), page.locator(".choices dd")
    assert picked.locator("th").text_content() == "x=1, y=1"
    second.press("ArrowRight")
    assert second.get_attribute("aria-valuetext") == "2"
    assert answer.first.text_content() == "does not fit: 5.0 GiB missing"
    first.press("End")
    assert picked.locator("th").text_content() == "x=2, y=2"
    assert answer.all_text_contents() == picked.locator("td").all_text_contents()
    assert said == []


def test_without_scripts_the_table_has_every_answer(browser: Any, changes: str) -> None:
    page, _ = opened(browser, changes, java_script_enabled=False)
    assert not page.locator(".choices").is_visible()
    assert page.locator("th[data-place]").count() == 5
    assert page.get_by_text("does not fit: 5.0 GiB missing").is_visible()


def test_the_contents_open_what_is_folded_by_keyboard(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    inside = page.locator("#assumptions table").first
    assert not inside.is_visible()
    page.get_by_role("link", name="Assumptions").press("Enter")
    assert inside.is_visible()
    focused = page.locator(":focus")
    assert focused.text_content().strip() == "Assumptions"
    assert 0 <= focused.bounding_box()["y"] <= 60
    page.keyboard.press("Enter")
    assert not inside.is_visible()
    page.get_by_role("link", name="Launch").press("Enter")
    assert page.locator("#launch :focus").count() == 1


def test_contents_work_in_a_frame_as_the_app_has_one(browser: Any, address: str) -> None:
    page = browser.new_page()
    text = html.escape(Path(address.removeprefix("file://")).read_text(encoding="utf-8"))
    page.set_content(f'<iframe sandbox="allow-scripts" srcdoc="{text}"></iframe>')
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name="Provenance").click()
    frame.locator("#provenance table").wait_for()


def test_the_schedule_is_zoomed_by_keyboard(browser: Any, address: str) -> None:
    page, _ = opened(browser, address)
    picture = page.locator(".picture > svg")
    before = picture.bounding_box()["width"]
    page.get_by_label("whole width").press("ArrowRight")
    assert picture.bounding_box()["width"] == pytest.approx(4 * before, rel=0.01)
    page.keyboard.press("ArrowRight")
    assert picture.bounding_box()["width"] == pytest.approx(16 * before, rel=0.01)


def test_no_script_of_a_name_runs(browser: Any, address: str, tmp_path: Path) -> None:
    """The policy refuses any script but the page's own, should one ever get in."""
    text = Path(address.removeprefix("file://")).read_text(encoding="utf-8")
    path = tmp_path / "evil.html"
    path.write_text(text.replace("<main>", "<main><script>document.title='x'</script>"))
    page, said = opened(browser, path.as_uri())
    assert page.title() != "x"
    assert any("Content Security Policy" in each for each in said)


def test_every_picture_has_a_name_and_what_scrolls_takes_the_focus(
    browser: Any, address: str
) -> None:
    page, _ = opened(browser, address)
    unnamed = '[role="img"]:not([aria-label]), svg:not(svg svg):not([aria-label])'
    assert page.locator(unnamed).count() == 0
    scrolls = """[...document.querySelectorAll("main *")].filter(each =>
      ["auto", "scroll"].includes(getComputedStyle(each).overflowX) && each.tabIndex < 0).length"""
    assert page.evaluate(scrolls) == 0


def test_a_print_cuts_nothing(browser: Any, address: str) -> None:
    """On A4 at 96 points an inch with the page's margins."""
    page = browser.new_page(viewport={"width": 703, "height": 1000})
    page.goto(address)
    page.emulate_media(media="print")
    folded = page.locator("details:not([open]) table")
    assert folded.count() > 5
    assert all(each.bounding_box()["height"] > 20 for each in folded.all())
    assert page.evaluate("document.documentElement.scrollWidth") <= 703
    assert page.evaluate(CUT.replace(".scroll:not(.cards), .picture", ".none")) == []


def test_a_print_cuts_no_long_label(browser: Any, tmp_path: Path) -> None:
    plan = searched_plan()
    long = selective_recompute(["moe_act", "layernorm", "mla_up_proj", "shared_experts"])
    others = tuple(
        dataclasses.replace(each, layout=dataclasses.replace(each.layout, recompute=long))
        for each in plan.alternatives
    )
    path = tmp_path / "plan.html"
    path.write_text(html_report(dataclasses.replace(plan, alternatives=others)), encoding="utf-8")
    test_a_print_cuts_nothing(browser, path.as_uri())


def tree(page: Any) -> dict[str, list[Node]]:
    """What Chromium tells assistive technology, in reading order, by role."""
    found = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    nodes, by_role = {each["nodeId"]: each for each in found}, defaultdict(list)
    left = [found[0]["nodeId"]]
    while left:
        each = nodes[left.pop()]
        left += reversed(each.get("childIds", ()))
        if not each["ignored"]:
            said = {name: each.get(name, {}).get("value", "") for name in ("role", "name")}
            properties = {p["name"]: p["value"].get("value") for p in each.get("properties", ())}
            by_role[said["role"]].append(Node(said["name"], properties.get("level")))
    return by_role


@pytest.mark.parametrize("width", [1280, 390])
def test_a_screen_reader_is_told_what_each_part_is(browser: Any, address: str, width: int) -> None:
    page, _ = opened(browser, address, viewport={"width": width, "height": 900})
    told = tree(page)
    assert [each.level for each in told["heading"]].count(1) == 1
    levels = [0, *(each.level for each in told["heading"])]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    captions = page.locator("caption").all_text_contents()
    assert [each.name for each in told["table"]] == captions
    assert len({*captions}) == len(captions)
    assert len(told["rowheader"]) == page.locator("tbody tr").count()
    if width > 600:  # cards bear the name of the column in each cell
        assert len(told["columnheader"]) == page.locator("thead th").count()
    assert len(told["main"]) == 1
    for role in ("button", "link", "navigation", "radio", "group", "image"):
        assert told[role], role
        assert all(each.name for each in told[role]), (role, told[role])


def test_tab_goes_through_the_page_in_its_order_and_shows_where(browser: Any, address: str) -> None:
    page, _ = opened(browser, address)
    stops = page.evaluate("""() => [
        ...document.querySelectorAll("a, summary, button, input, [tabindex]")]
      .filter(each => each.tabIndex >= 0 && each.checkVisibility()
        && (each.type !== "radio" || each.checked))
      .map((each, place) => each.dataset.stop = place).length""")
    for place in range(stops):
        page.keyboard.press("Tab")
        focused = page.evaluate("""() => { const at = document.activeElement;
          return [at.dataset.stop, getComputedStyle(at).outlineStyle]; }""")
        assert focused == [str(place), "solid"]
