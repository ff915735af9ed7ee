"""The page is whole, safe and self-contained."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import re
import shlex
import subprocess
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser

import pytest
from rich.console import Console

from nest_megatron.cost_model.settings import OF_EXPERTS, CostSettings, stored_settings
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan
from nest_megatron.model.encoder import Adapters
from nest_megatron.report.charts import IDLE, INK
from nest_megatron.report.html import (
    _model_words,
    groups,
    html_report,
    search_steps,
    setting_meanings,
)
from nest_megatron.report.schedule_view import schedule_view
from nest_megatron.report.terminal import plan_report, summary_rows
from nest_megatron.report.words import degrees, stage_legend
from nest_megatron.units import GIB, format_seconds, to_ticks
from tests.report.plans import SHAPES, hand_plan, searched_plan

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;"
#: Settings that a plan for no framework lists.
NUM_ASSUMPTIONS = len(stored_settings(CostSettings()))
LOADING = {"src", "srcset", "data", "action", "poster", "xlink:href", "background"}
LOADERS = {"link", "img", "iframe", "object", "embed", "base", "form", "image", "use"}


@cache
def page_of(shape: str) -> str:
    """The page of a plan, written once."""
    return html_report(SHAPES[shape]())


class Page(HTMLParser):
    """Tables, tags and attributes of a page; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.caption = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)
        if tag == "tr" and self.caption:
            self.tables[self.caption].append([])
        if tag in ("td", "th") and self.caption:
            self.tables[self.caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.caption = ""

    def handle_data(self, data: str) -> None:
        if "caption" in self.open:
            self.caption += data
            self.tables[self.caption] = []
        elif self.caption and self.tables[self.caption] and {"td", "th"} & set(self.open):
            self.tables[self.caption][-1][-1] += data.replace("\N{NO-BREAK SPACE}", " ")

    def table(self, start: str) -> list[list[str]]:
        """Body rows of the table whose caption starts so."""
        found = [rows for caption, rows in self.tables.items() if caption.startswith(start)]
        assert len(found) == 1, sorted(self.tables)
        return found[0][1:]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_stage_is_there(shape: str) -> None:
    plan = SHAPES[shape]()
    rows = Page(page_of(shape)).table("Pipeline ranks")
    assert [row[0] for row in rows] == [str(rank) for rank in range(len(plan.predicted.stages))]
    letters = "".join(row[2] for row in rows)
    layers = sum(int(n or 1) for n in re.findall(r"[tM*-](?:×(\d+))?", letters))
    assert layers == plan.model.num_stacked_layers
    assert letters.count("E") == letters.count("L") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_loaded_and_one_script_may_run(shape: str) -> None:
    """The one that copies a command, by its hash: none that a name of the plan could smuggle in."""
    text = page_of(shape)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & LOADERS
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert [tag for tag, _ in page.tags].count("script") == len(scripts) == 1
    allowed = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'\"" in text
    for _, attributes in page.tags:
        assert not LOADING & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_names_are_escaped() -> None:
    plan = searched_plan()
    evil = dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, name=EVIL, source=EVIL),
        cluster=dataclasses.replace(plan.cluster, name=EVIL),
        launch={EVIL: LaunchCommand(script=EVIL, argv=(EVIL,), environment={EVIL: EVIL})},
    )
    text = html_report(evil)
    tags = [tag for tag, _ in Page(text).tags]
    assert not LOADERS & {*tags}
    assert tags.count("script") == 1
    assert "&lt;script&gt;alert(" in text


def test_tables_are_accessible() -> None:
    page = Page(page_of("searched"))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") == len(page.tables)
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")
    pictures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(pictures) == 3
    assert all(attributes.get("aria-label") for attributes in pictures)
    assert ("html", {"lang": "en"}) in page.tags


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cell_of_a_card_bears_the_name_of_its_column(shape: str) -> None:
    """On a narrow screen, where a row is a card and the head of the table is hidden."""
    cards = re.findall(r'<div class="scroll[^"]* cards".*?</div>', page_of(shape), re.DOTALL)
    assert len(cards) > 5
    for card in cards:
        cells = re.findall(r"<t[hd][ >][^>]*>", card.partition("<tbody>")[2])
        assert cells
        assert [each for each in cells if "data-label" not in each] == []


def test_a_dense_model_s_page_has_no_assumptions_about_experts() -> None:
    settings = {row[0] for row in Page(page_of("one stage")).table("What the cost model takes")}
    assert not settings & OF_EXPERTS
    assert "straggler_delay_s" in settings
    assert "cost.ep_overlap" not in page_of("one stage")
    with_experts = Page(page_of("searched")).table("What the cost model takes")
    assert {row[0] for row in with_experts} >= OF_EXPERTS


def test_figures_of_the_plan_are_shown() -> None:
    plan = searched_plan()
    page = Page(html_report(plan))
    assert len(page.table("Other layouts")) == 1 + len(plan.alternatives)
    terms = page.table("Terms of a step")
    assert len(terms) == sum(to_ticks(value) > 0 for value in plan.predicted.terms.values())
    sets = {row[0]: row[1] for row in page.table("Megatron's fields")}
    assert sets["global_batch_size"] == "128"
    assert sets["pipeline_model_parallel_size"] == str(
        plan.layout.dims.pipeline_model_parallel_size
    )
    assert len(page.table("What the cost model")) == NUM_ASSUMPTIONS


def test_launch_command_is_shell() -> None:
    command = LaunchCommand(
        script="pretrain_gpt.py",
        argv=("--pipeline-model-parallel-layout", "Et|tL", "--bf16"),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_X": None},
        notes=("read me",),
    )
    text = html_report(dataclasses.replace(hand_plan(4), launch={"megatron_lm": command}))
    shown = re.search(r'id="command1">(.*?)</pre>', unescape(text), re.DOTALL)
    assert shown is not None
    unset, start = shown[1].replace("\\\n", "").splitlines()
    assert unset == "unset NCCL_X"
    assert shlex.split(start) == [
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        *("torchrun", "--nproc-per-node", "8", "--nnodes", "4", "pretrain_gpt.py"),
        *command.argv,
    ]
    assert "read me" in text


def test_flags_of_a_plan_for_nemo_are_not_said_to_start_it() -> None:
    plan = hand_plan(1, model="bert_large")
    assert "for the Megatron-LM command that starts the job:" in html_report(plan)
    settings = {**plan.provenance.settings, "target": "nemo_2.7"}
    provenance = dataclasses.replace(plan.provenance, settings=settings)
    text = html_report(dataclasses.replace(plan, provenance=provenance))
    assert "the plan is for nemo_2.7" in text
    assert "that starts the job:" not in text


def test_frozen_weights_are_told() -> None:
    plan = hand_plan(1, model="bert_large")
    spec = dataclasses.replace(plan.model, adapters=Adapters(dim=16))
    assert "all weights frozen but those of adapters (lora of rank 16" in _model_words(spec)
    assert "frozen" not in _model_words(plan.model)


def test_a_layout_that_does_not_fit_says_so() -> None:
    plan = hand_plan(4)
    assert not plan.predicted.fits
    assert "In memory this layout does not fit" in html_report(plan)


def test_every_setting_has_a_meaning() -> None:
    meanings = setting_meanings()
    assert set(meanings) == {field.name for field in dataclasses.fields(CostSettings)}
    assert all(len(words) > 20 for words in meanings.values())
    named = [each for each in meanings.values() if re.search(r"\.(py|csv|yaml)|None", each)]
    assert named == []


@pytest.mark.parametrize("shape", SHAPES)
def test_bars_of_memory_say_what_they_are(shape: str) -> None:
    """A tooltip of memory names memory, not the term of the step with the same key."""
    plan = SHAPES[shape]()
    page = Page(page_of(shape))
    tips = [attributes.get("title") or "" for tag, attributes in page.tags if tag == "span"]
    for rank, stage in enumerate(plan.predicted.stages):
        held = stage.memory_bytes["optimizer"] / GIB
        assert f"rank {rank}, optimizer states: {held:.2f} GiB" in tips
    assert not [tip for tip in tips if tip.startswith("rank") and "optimizer step" in tip]


def test_the_field_s_words_are_used() -> None:
    text = unescape(page_of("searched"))
    for words in ("peak memory per GPU", "Where each group's traffic runs", "Cost source"):
        assert words in text
    for words in ("waiting (bubble)", "host work", "Where groups lie", "Sharing"):
        assert words not in text


def test_the_page_follows_the_reader_s_colours() -> None:
    """The background of the schedule is the page's, light or dark."""
    text = html_report(hand_plan(4))
    picture = text[text.index("<svg") : text.rindex("</svg>")]
    assert 'fill="var(--idle)"' in picture
    assert INK not in picture
    assert IDLE not in text.partition("</style>")[2]


def test_the_search_only_narrows_and_is_a_table() -> None:
    steps = search_steps(searched_plan().search)
    counts = [count for _, count in steps]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    shown = Page(page_of("searched")).table("How many were left")
    assert shown == [[name, f"{count:,}"] for name, count in steps]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_contents_lead_to_every_section(shape: str) -> None:
    text = page_of(shape)
    page = Page(text)
    linked = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(linked) == text.count("<h2>") >= 12
    for target in linked:
        assert text.count(f'id="{(target or "").removeprefix("#")}"') == 1
    (nav,) = re.findall(r"<nav.*?</nav>", text, re.DOTALL)
    assert re.findall(r"<a [^>]*>(.*?)</a>", nav) == re.findall(r"<h2>(.*?)</h2>", text)


def test_long_sections_are_folded_and_the_launch_command_is_not() -> None:
    text = page_of("searched")
    folded = re.findall(
        r'<details class="section" aria-label="[^"]*">\n<summary><h2>(.*?)</h2>', text
    )
    assert {"Runners-up", "Sensitivity", "Assumptions", "Provenance"} <= {*folded}
    launch = text.index('<section id="launch">')
    assert "<details" not in text[:launch]
    assert "max-height" not in text
    assert launch < text.index('<section id="plan">')


@pytest.mark.parametrize("shape", SHAPES)
def test_one_figure_is_the_pipeline_bubble(shape: str) -> None:
    """The term of the step; the schedule says how much of the idle time it is."""
    plan, text = SHAPES[shape](), unescape(page_of(shape))
    bubble = plan.predicted.terms.get("pipeline_bubble", 0.0)
    terms = {row[0]: row[2] for row in Page(page_of(shape)).table("Terms of a step")}
    said = re.findall(r"([\d.]+ \w+) are the pipeline bubble", text)
    said += re.findall(r"The ([\d.]+ \w+) that pipeline rank \d+ is idle are", text)
    if to_ticks(bubble) > 0:
        assert said == [terms["pipeline bubble"]] == [format_seconds(bubble)]
    else:
        assert "pipeline bubble" not in terms
        assert said == []
    assert "(pipeline bubble)" not in text


def test_the_letters_of_a_layout_are_explained_wherever_one_stands() -> None:
    plan = searched_plan()
    assert plan.arguments["pipeline_model_parallel_layout"]
    command = LaunchCommand(
        script="pretrain_gpt.py", argv=("--pipeline-model-parallel-layout", "Et|tL"), environment={}
    )
    text = unescape(html_report(dataclasses.replace(plan, launch={"megatron_lm": command})))
    legend = "E embedding, t layer, L output, | next stage"
    sections = dict(re.findall(r'id="(\w+)">(.*?)(?=<section|<details|\Z)', text, re.DOTALL))
    for name in ("launch", "plan", "runners_up", "choices"):
        assert sections[name].count(legend) == 1, name
    assert text.count(legend) == 4
    assert legend not in unescape(page_of("one stage"))


def test_a_hybrid_s_letters_are_its_own() -> None:
    assert stage_legend(SHAPES["hybrid"]().model).startswith("M Mamba, ")
    with_mtp = dataclasses.replace(searched_plan().model, mtp_num_layers=1)
    assert "m MTP layer" in stage_legend(with_mtp)


def test_a_prediction_of_another_version_is_pointed_out() -> None:
    plan: ParallelPlan = hand_plan(4)
    assert "another result" not in html_report(plan)
    stale = dataclasses.replace(plan.predicted, iteration_time_s=1.0)
    assert "another result" in html_report(dataclasses.replace(plan, predicted=stale))


def test_no_library_is_loaded_before_a_page_is_written() -> None:
    code = (
        "import sys, nest_megatron.report.html, nest_megatron.report.timeline;"
        "names = ('jinja2', 'matplotlib', 'numpy', 'torch', 'hydra');"
        "print(*[name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("certificate", "told"), [("optimal", False), ("gap", True)])
def test_runners_up_of_a_search_that_time_ended_may_be_incomplete(
    certificate: str, told: bool
) -> None:
    found = searched_plan()
    record = dataclasses.replace(found.search, certificate=certificate, gap_percent=3.0)
    plan = dataclasses.replace(found, search=record)
    sentence = "layouts faster than some of these may be missing"
    assert (sentence in html_report(plan)) == told
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(plan_report(plan))
    assert (sentence in console.export_text()) == told


def test_a_term_below_the_clocks_tick_is_not_listed() -> None:
    plan = hand_plan(4)
    terms = {**plan.predicted.terms, "embedding_sync": 3.96e-13}
    noisy = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, terms=terms))
    assert "embedding sync" not in html_report(noisy)


def test_the_page_begins_with_what_the_terminal_says() -> None:
    """The layout, the batch and what binds the plan stand under its figures."""
    plan = searched_plan()
    text = unescape(html_report(plan))
    for name, words in summary_rows(plan)[2:]:
        assert f"<dt>{name}</dt><dd>{words}</dd>" in text
    assert "<dt>Layout</dt><dd>TP " in text


@pytest.mark.parametrize("shape", SHAPES)
def test_what_each_rank_does_adds_up_to_the_step(shape: str) -> None:
    plan = SHAPES[shape]()
    view = schedule_view(plan)
    for rank, row in enumerate(Page(page_of(shape)).table("What the step of each")):
        spans = view.ranks[rank]
        exposed = sum(sum(view.communication(span).values()) for span in spans)
        busy = sum(span.end - span.start for span in spans)
        assert row[3] == format_seconds(exposed)
        assert row[4] == format_seconds(max(0.0, view.iteration_time_s - busy))


def test_waiting_below_the_clock_s_tick_is_none() -> None:
    times = [cell for row in Page(page_of("hybrid")).table("What the step") for cell in row]
    assert "0 us" in times
    assert not any("e-" in cell for cell in times)


def test_a_model_of_two_stacks_is_told_with_both() -> None:
    text = unescape(page_of("two stacks"))
    assert "12 layers of an encoder and 12 of a decoder, hidden size 768" in text
    assert "sequences of 512 tokens and, in the decoder, of 128;" in text


def test_the_page_says_how_many_micro_batches_it_draws() -> None:
    short = html_report(hand_plan(4, microbatches=8))
    assert "All 8 micro batches are drawn." in short
    drawn = re.search(r"passes of (\d+) of its 512 micro batches", page_of("long"))
    assert drawn is not None
    assert 0 < int(drawn[1]) < 512


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_micro_batches_are_told_where_they_are_drawn(shape: str) -> None:
    text = page_of(shape)
    assert ("A number in a pass" in text) == bool(re.search(r'class="z\d+ number"', text))


def test_each_group_stands_at_the_levels_that_its_traffic_crosses() -> None:
    plan = searched_plan()
    drawn = {level["name"]: level["groups"] for level in groups(plan)["drawn"]}
    levels = [level.name for level in plan.cluster.levels]
    for name, words in (("tp", "tensor"), ("ep", "expert"), ("dp", "data"), ("pp", "pipeline")):
        at = [level for level in levels if any(re.match(rf"{words} \d", g) for g in drawn[level])]
        if degrees(plan.layout)[name.upper()] > 1:
            assert at[-1] == plan.placement.group_levels[name]
        else:
            assert not at
