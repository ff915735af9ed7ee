"""The app in headless Chromium, as somebody uses it who would rather click.

Skipped where nicegui, playwright or a Chromium on the path is missing.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.app.task import CLUSTER_FILE, MODEL_FILE
from nest_megatron.layout import plan_file
from tests.app.served import Served, served
from tests.integrations.commands import LLAMA3_8B
from tests.report.test_browser import CHROMIUM

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path"),
]
#: A plan on two busy cores takes some seconds.
PATIENCE_MS = 120_000


#: Of a text against what is painted behind it (WCAG 2.2, 1.4.3).
CONTRAST = """element => {
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = text => parts(text).slice(0, 3).map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  let behind = element;
  while (behind && parts(getComputedStyle(behind).backgroundColor)[3] === 0)
    behind = behind.parentElement;
  const painted = behind ? getComputedStyle(behind).backgroundColor : "rgb(255, 255, 255)";
  const both = [light(getComputedStyle(element).color), light(painted)].sort((a, b) => b - a);
  return (both[0] + 0.05) / (both[1] + 0.05);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("app")) as started:
        yield started


@pytest.fixture
def page(browser: Any, app: Served) -> Iterator[Any]:
    """A tab, whose requests go to the app alone."""
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        yield opened(context, app)


def opened(context: Any, app: Served) -> Any:
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(app.address)
    page.get_by_role("button", name="Plan", exact=True).wait_for()
    local = (app.origin, "data:", "blob:", "about:")
    assert [url for url in asked if not url.startswith(local)] == []
    return page


def choose(page: Any, label: str, name: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(name)
    page.get_by_role("option", name=name, exact=True).click()


def plan(page: Any, model: str = "llama3_8b", **fields: str) -> None:
    choose(page, "Model", model)
    page.get_by_label("GPUs", exact=True).fill("8")
    page.get_by_label("Global batch size").fill("64")
    page.get_by_role("button", name="Plan", exact=True).click()


def report(page: Any, of: str = "The plan") -> Any:
    return page.frame_locator(f"iframe[title='Report: {of}']")


def test_a_plan_is_shown_copied_and_saved(page: Any, tmp_path: Path) -> None:
    plan(page)
    report(page).get_by_role("heading", name="llama3_8b on 8 x H100").wait_for()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    report(page).get_by_role("button", name="Copy").first.click()
    report(page).get_by_role("status").filter(has_text="Copied.").wait_for()
    assert "torchrun" in page.evaluate("navigator.clipboard.readText()")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the plan").click()
    path = tmp_path / saved.value.suggested_filename
    saved.value.save_as(path)
    assert plan_file.read(path).layout.num_gpus == 8
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the report").click()
    assert saved.value.suggested_filename == "plan.html"


def test_a_plan_is_planned_again_on_changed_clusters(page: Any, tmp_path: Path) -> None:
    plan(page)
    changes = page.get_by_label("What if")
    changes.fill("memory=141GiB")
    changes.press("Enter")
    page.get_by_role("region", name="On changed clusters").filter(has_text="unchanged").wait_for()
    maps = report(page, "On changed clusters")
    maps.get_by_role("heading", name="Tokens/s", exact=True).wait_for()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this comparison").click()
    saved.value.save_as(tmp_path / "whatif.html")
    heading = maps.get_by_role("heading").first.text_content()
    assert heading in (tmp_path / "whatif.html").read_text(encoding="utf-8")
    assert report(page).get_by_role("heading", name="llama3_8b on 8 x H100").is_visible()


def test_numbers_of_gpus_and_planners_are_compared_and_saved(page: Any, tmp_path: Path) -> None:
    choose(page, "Model", "gpt3_126m")
    page.get_by_label("Global batch size").fill("64")
    page.get_by_label("GPUs", exact=True).fill("8..16")
    page.get_by_label("GPUs", exact=True).press("Enter")
    page.get_by_role("region", name="By number of GPUs").filter(has_text="Pareto").wait_for()
    page.get_by_role("button", name="Show", exact=True).click()
    report(page).get_by_role("heading", name="gpt3_126m on 8 x H100").wait_for()
    saves = {"Save the table": "sizes.csv", "Save the plan": "plan.yaml"}
    for button, name in saves.items():
        with page.expect_download() as saved:
            page.get_by_role("button", name=button).click()
        saved.value.save_as(tmp_path / name)
    table = (tmp_path / "sizes.csv").read_text(encoding="utf-8")
    assert table.startswith("number,cluster.num_gpus,")
    assert plan_file.read(tmp_path / "plan.yaml").layout.num_gpus == 8
    page.get_by_label("GPUs", exact=True).fill("8")
    page.get_by_role("button", name="Other planners").click()
    report(page, "Planners").get_by_role("heading", name="gpt3_126m on 8 x H100").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this comparison").click()
    assert saved.value.suggested_filename == "planners.html"


def test_a_command_stands_beside_its_plan(page: Any) -> None:
    page.get_by_role("button", name="My Megatron-LM command").click()
    page.get_by_label("Command, or bash").fill(LLAMA3_8B)
    page.get_by_label("GPUs", exact=True).fill("16")
    page.get_by_role("button", name="Plan", exact=True).click()
    report(page).get_by_role("heading", name="Today and planned").wait_for()


def test_a_mistake_is_named_with_its_fix_and_the_form_stays(page: Any) -> None:
    page.get_by_label("GPUs", exact=True).fill("13x")
    page.get_by_role("button", name="Plan", exact=True).click()
    alert = page.get_by_role("alert").filter(has_text="error: ")
    alert.wait_for()
    assert "Traceback" not in alert.text_content()
    assert page.get_by_label("GPUs", exact=True).input_value() == "13x"
    plan(page)
    report(page).get_by_role("heading", name="llama3_8b on 8 x H100").wait_for()
    assert alert.count() == 0


def test_all_fields_that_are_wrong_are_named_and_marked_at_once(page: Any) -> None:
    page.get_by_label("Model", exact=True).fill("llama3_9b")
    page.get_by_label("GPUs", exact=True).fill("13x")
    page.get_by_label("More settings").fill("parallel.tensor=8")
    page.get_by_role("button", name="Plan", exact=True).click()
    alert = page.get_by_role("alert").filter(has_text="3 entries of the form cannot be used.")
    alert.wait_for()
    for label in ("Model: llama3_9b", "GPUs: 13x", "More settings, one a line: parallel.tensor=8"):
        assert label in alert.text_content()
    marked = page.locator(".q-field--error")
    assert marked.count() == 3
    for label in ("Model", "GPUs", "More settings, one a line"):
        assert marked.filter(has=page.get_by_label(label, exact=True)).count() == 1
    page.get_by_label("GPUs", exact=True).fill("8")
    gpus = marked.filter(has=page.get_by_label("GPUs", exact=True))
    gpus.wait_for(state="detached")
    assert marked.count() == 2


def test_an_empty_page_guides_and_its_example_is_planned(page: Any) -> None:
    guide = page.get_by_role("heading", name="What to fill first")
    assert guide.is_visible()
    page.get_by_role("button", name="Load an example").click()
    page.get_by_role("button", name="Plan", exact=True).click()
    report(page).get_by_role("heading", name="llama3_8b on 64 x H100").wait_for()
    assert not guide.is_visible()


def test_the_example_of_a_command_says_what_it_costs(page: Any) -> None:
    page.get_by_role("button", name="My Megatron-LM command").click()
    page.get_by_role("button", name="Load an example").click()
    page.get_by_role("button", name="What does my command cost?").click()
    report(page).get_by_role("heading", name="on 64 x H100").wait_for()


def test_a_reload_keeps_the_form_and_the_plan(page: Any) -> None:
    plan(page)
    report(page).get_by_role("heading", name="llama3_8b on 8 x H100").wait_for()
    changes = page.get_by_label("What if")
    changes.fill("memory=141GiB")
    changes.press("Enter")
    page.get_by_role("region", name="On changed clusters").filter(has_text="unchanged").wait_for()
    page.get_by_label("More settings").fill("train.seq_length=4096")
    page.get_by_label("Cluster", exact=True).fill("dgx_h1000")
    page.keyboard.press("Tab")
    page.reload()
    report(page).get_by_role("heading", name="llama3_8b on 8 x H100").wait_for()
    page.get_by_role("region", name="On changed clusters").filter(has_text="unchanged").wait_for()
    kept = {"Global batch size": "64", "More settings": "train.seq_length=4096"}
    for label, value in {**kept, "GPUs": "8", "What if": "memory=141GiB"}.items():
        assert page.get_by_label(label).first.input_value() == value
    assert page.get_by_label("Cluster", exact=True).input_value() == "dgx_h1000"
    assert not page.get_by_role("heading", name="What to fill first").is_visible()
    changes = page.get_by_label("What if")
    changes.fill("memory=100GiB")
    changes.press("Enter")
    page.get_by_role("region", name="On changed clusters").filter(has_text="100GiB").wait_for()


def test_a_name_that_is_wrong_is_told_and_no_other_is_planned(page: Any) -> None:
    page.get_by_label("Model", exact=True).fill("llama3_9b")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("alert").filter(has_text="Model: llama3_9b: there is no such").wait_for()
    assert page.get_by_label("Model", exact=True).input_value() == "llama3_9b"
    choose(page, "Model", "gpt3_126m")
    page.get_by_label("GPUs", exact=True).fill("8")
    page.get_by_role("button", name="What does this layout cost?").click()
    report(page).get_by_role("heading", name="gpt3_126m on 8").wait_for()


def test_a_search_says_how_far_it_is_and_is_cancelled(page: Any) -> None:
    choose(page, "Model", "deepseek_v3")
    page.get_by_label("GPUs", exact=True).fill("1024")
    page.get_by_role("button", name="Plan", exact=True).click()
    told = re.compile(r"searching: \d+ solved, .*, bound .* s")
    page.get_by_role("status").filter(has_text=told).wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("alert").filter(has_text="Cancelled.").wait_for()
    assert page.get_by_role("button", name="Plan", exact=True).is_enabled()


def test_the_keyboard_alone_plans_cancels_and_reads_on(page: Any) -> None:
    page.get_by_label("Model", exact=True).focus()
    for label in (MODEL_FILE, "Cluster", CLUSTER_FILE, "GPUs"):
        page.keyboard.press("Tab")
        assert page.locator(":focus").get_attribute("aria-label").startswith(label)
    page.keyboard.type("8")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("alert").filter(has_text="Cancelled.").wait_for()
    assert page.locator(":focus").get_attribute("aria-label") == "GPUs"  # it was left there
    page.get_by_role("button", name="Plan", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator(":focus", has_text="Cancel").wait_for()
    page.locator("[role=heading]:focus", has_text="The plan").wait_for()
    assert page.get_by_role("status").text_content().startswith("Done after")


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_a_page_of_any_width_is_read_without_scrolling_sideways(
    browser: Any, app: Served, width: int, scheme: str
) -> None:
    window = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with browser.new_context(**window) as context:
        page = opened(context, app)
        page.get_by_role("button", name="My Megatron-LM command").click()
        page.get_by_label("Command, or bash").fill(LLAMA3_8B)
        page.get_by_role("button", name="What does my command cost?").click()
        report(page).get_by_role("heading").first.wait_for()
        page.get_by_role("button", name="As the command line prints it").first.click()
        page.get_by_role("region", name="The plan, as printed").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        unnamed = r"(?m)^ *- '?(button|textbox|combobox|region|alert|status)[^\"\n]*$"
        assert set(re.findall(unnamed, page.locator("main").aria_snapshot())) <= {"alert", "status"}
        for role, shown in (("button", "Plan"), ("button", "What does my command cost?")):
            found = page.get_by_role(role, name=shown, exact=True)
            assert found.evaluate(CONTRAST) >= 4.5


def test_two_tabs_do_not_mix(page: Any, app: Served) -> None:
    other = opened(page.context, app)
    plan(page, "llama3_8b")
    plan(other, "gpt3_7b")
    report(other).get_by_role("heading", name="gpt3_7b on 8").wait_for()
    report(page).get_by_role("heading", name="llama3_8b on 8").wait_for()


def test_a_tab_that_is_closed_ends_what_it_runs(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path) as started:
        with browser.new_context() as context:
            planning = planning_process(started, opened(context, started))
        assert ended(planning)
        started.process.send_signal(signal.SIGINT)
        _, err = started.process.communicate()
    assert (started.process.returncode, err) == (0, "")


def test_ctrl_c_ends_what_tabs_run(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path) as started, browser.new_context() as context:
        planning = planning_process(started, opened(context, started))
        started.process.send_signal(signal.SIGINT)
        _, err = started.process.communicate()
        assert ended(planning)
    assert (started.process.returncode, err) == (0, "")


def planning_process(started: Served, page: Any) -> int:
    """A descriptor of the child of the app that plans for a page, for many seconds."""
    choose(page, "Model", "deepseek_v3")
    page.get_by_label("GPUs", exact=True).fill("4096")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("button", name="Cancel").wait_for()
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not (found := spawned_children(started.process.pid)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    (planning,) = found
    return os.pidfd_open(planning)


def spawned_children(pid: int) -> list[int]:
    """Children that `multiprocessing` spawned, from when they are a program of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return [
        int(child)
        for child in children
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8")
    ]


def ended(process: int) -> bool:
    """Whether a process has ended, which is waited for."""
    readable, _, _ = select.select([process], [], [], PATIENCE_MS / 1000)
    os.close(process)
    return bool(readable)


def test_over_the_network_the_form_takes_no_path(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0") as started:
        port = started.origin.rstrip("/").rpartition(":")[2]
        token = started.address.partition("?")[2]
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{port}/?{token}")
            page.get_by_role("button", name="Plan", exact=True).wait_for()
            assert page.get_by_label("path or contents").filter(visible=True).count() == 0
            assert page.get_by_text("My Megatron-LM command").filter(visible=True).count() == 0
