"""What runs on which device: formats, and choices that a plan leaves alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.write import environment
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.knobs import KnobConditions, Package, always_on, open_values
from nest_megatron.layout.numeric_knobs import NUMERIC_KNOBS
from nest_megatron.layout.rulebook.devices import (
    DEVICES,
    closed_on,
    device_notes,
    device_rules,
    has_multicast,
    require_recipe,
)
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.model.execution import PLAIN, Execution, FlexBackend, TokenDispatcher
from nest_megatron.validation.machine_words import accelerator
from tests import catalogue
from tests.cli.runs import run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cost_model.md"
ACCELERATORS = tuple(accelerator(name) for name in catalogue_names("accelerator"))
FP8 = {"delayed", "tensorwise", "blockwise", "mxfp8"}
#: By the first word of an accelerator's name: scalings that Transformer Engine trains in.
TRAINS = {
    "H100": FP8 - {"mxfp8"},
    "H20": FP8 - {"mxfp8"},
    "GH200": FP8 - {"mxfp8"},
    "B200": {*FP8, "nvfp4"},
    "B300": {*FP8, "nvfp4"},
    "GB300": {*FP8, "nvfp4"},
    "L40S": {"delayed", "tensorwise"},
    "RTX": {"delayed", "tensorwise"},
    "MI300X": {"delayed", "tensorwise"},
    "MI325X": {"delayed", "tensorwise"},
    "MI350X": {"delayed", "tensorwise", "mxfp8"},
    "MI355X": {"delayed", "tensorwise", "mxfp8"},
}


@pytest.mark.parametrize("word", TRAINS)
def test_a_scaling_is_refused_where_the_engine_does_not_train_in_it(word: str) -> None:
    devices = [each.name for each in ACCELERATORS if each.name.split("-")[0] == word]
    assert devices
    for device in devices:
        for recipe in (*FP8, "nvfp4"):
            if recipe in TRAINS[word]:
                require_recipe(device, recipe)
                continue
            with pytest.raises(
                UserInputError, match=rf"_recipe = '{recipe}': .* Use (fp8 by )?delayed,"
            ):
                require_recipe(device, recipe)


@pytest.mark.parametrize("recipe", [None, "custom"])
def test_sixteen_bits_and_recipes_of_ones_own_pass(recipe: str | None) -> None:
    require_recipe("MI300X-192GB", recipe)


def test_a_device_of_one_s_own_is_left_alone() -> None:
    require_recipe("chip", "nvfp4")
    assert closed_on("chip") == frozenset()
    assert not list(device_notes("chip", "mxfp8", Execution(tp_comm_overlap=True)))


def test_rules_and_the_catalogue_agree_on_formats() -> None:
    for device in ACCELERATORS:
        rules = device_rules(device.name)
        recipes = set(rules.recipes) if rules else set()
        assert device.supports(Precision.FP8) == bool(recipes & FP8), device.name
        assert device.supports(Precision.NVFP4) == ("nvfp4" in recipes), device.name
    known = {recipe.value for recipe in Fp8Recipe}
    assert all({*row.recipes, *row.refused} <= known for row in DEVICES)


def test_what_a_plan_would_gain_in_fewer_bits_runs_there() -> None:
    for device in ACCELERATORS:
        for knob in NUMERIC_KNOBS:
            if knob.precision is None:
                continue
            recipe = "nvfp4" if knob.precision is Precision.NVFP4 else knob.values["fp8_recipe"]
            if knob.is_for({}, Precision.BF16, device.name, has_experts=False):
                require_recipe(device.name, recipe)


AMD = KnobConditions(
    spec=catalogue.model("mixtral_8x7b"),
    accelerator="MI300X-192GB",
    packages=frozenset(Package),
)


def test_on_amd_a_plan_adds_no_kernels_of_nvidia() -> None:
    hybrid_ep = Execution(
        moe_token_dispatcher_type=TokenDispatcher.FLEX,
        moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
    )
    chosen = always_on(hybrid_ep, AMD)
    assert chosen.moe_flex_dispatcher_backend is None
    assert chosen.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    assert chosen.moe_permute_fusion
    assert not chosen.tp_comm_overlap
    closed = {"moe_flex_dispatcher_backend", "cuda_graph_impl", "cuda_graph_scope"}
    assert not closed & open_values(AMD).keys()


def test_what_a_job_has_itself_stays_and_is_told() -> None:
    own = Execution(
        tp_comm_overlap=True,
        moe_token_dispatcher_type=TokenDispatcher.FLEX,
        moe_flex_dispatcher_backend=FlexBackend.DEEPEP,
    )
    told = list(device_notes("MI355X-288GB", "mxfp8", own))
    assert [
        word in " ".join(told)
        for word in ("user buffers", "Primus-Turbo", "NVTE_ROCM_ENABLE_MXFP8=1", "graphs in part")
    ] == [True, True, True, False]
    assert not list(device_notes("MI355X-288GB", "tensorwise", PLAIN))
    assert not list(device_notes("H100-SXM-80GB", "tensorwise", own))


def test_a_plan_for_amd_says_so_and_leaves_user_buffers() -> None:
    job = ("model=llama3_8b", "cluster.num_gpus=8")
    fixed = "parallel.tensor_model_parallel_size=8"
    overlaps = [
        "--tp-comm-overlap" in run("plan", *job, fixed, f"cluster={cluster}", "--json").out
        for cluster in ("mi300x", "dgx_h100")
    ]
    assert overlaps == [False, True]
    amd = run("plan", *job, "cluster=mi300x", "train.precision=nvfp4")
    assert amd.code == 2
    assert "fp4_recipe = nvfp4: matrix units of AMD take another" in amd.err


@pytest.mark.parametrize(
    ("cluster", "device", "multicast"),
    [
        ("dgx_h100", "", True),
        ("gb200_nvl36", "", True),
        ("dgx_a100", "", False),
        ("alps_gh200", "", False),
        ("dgx_h100", "H100-PCIe-80GB", False),
        ("dgx_h100", "H200-NVL-141GB", False),
        ("mi300x", "", False),
    ],
)
def test_user_buffers_without_multicast_copy_over_ipc(
    cluster: str, device: str, multicast: bool
) -> None:
    found = catalogue.cluster(cluster, 72 if cluster == "gb200_nvl36" else 8)
    if device:
        named = dataclasses.replace(found.accelerator, name=device)
        found = dataclasses.replace(found, accelerator=named)
    assert has_multicast(found) is multicast
    dims = ParallelDims(tensor_model_parallel_size=2)
    request = LaunchRequest(
        spec=catalogue.model("llama3_8b"),
        dims=dims,
        micro_batch_size=1,
        global_batch_size=8,
        execution=Execution(tp_comm_overlap=True),
    )
    variables = environment(request, multicast=has_multicast(found))
    assert variables.get("UB_SKIPMC") == (None if multicast else "1")
    plain = environment(dataclasses.replace(request, execution=PLAIN), multicast=False)
    alone = dataclasses.replace(request, dims=ParallelDims())
    assert not {"UB_SKIPMC"} & {*plain, *environment(alone, multicast=False)}


@pytest.mark.parametrize(("cluster", "value"), [("dgx_a100", "1"), ("h200", None)])
def test_a_plan_s_command_says_so(cluster: str, value: str | None) -> None:
    job = ("model=llama3_8b", "cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8")
    found = run("plan", *job, f"cluster={cluster}", "--json").json()
    command = found["launch"]["megatron_lm"]
    assert "--tp-comm-overlap" in command["argv"]
    assert command["environment"].get("UB_SKIPMC") == value


def test_the_table_of_devices_is_that_of_the_code() -> None:
    shown = [
        line for line in DOCS.read_text(encoding="utf-8").splitlines() if " | `delayed`" in line
    ]
    rows = [
        f"| {row.words} | {', '.join(f'`{each}`' for each in row.recipes)} | "
        f"{', '.join(f'`{each}`' for each in sorted(row.closed))} | {row.source} |"
        for row in DEVICES
    ]
    assert shown == rows
