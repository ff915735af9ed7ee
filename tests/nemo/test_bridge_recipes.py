"""Every recipe of the installed Megatron-Bridge for language and hybrid models.

Each is built without a network, planned, and the plan written into it is what Megatron-Bridge's
own ``ConfigContainer.validate`` accepts. The first recipe of each module and kind is in the fast
tests, the others are slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_bridge import auto_recipe, plan_changes
from tests.nemo import substitutes

if not substitutes.bridge_is_here():
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo import bridge

pytestmark = pytest.mark.nemo
KIND = re.compile(r"_(pretrain|sft|peft)\b|_(pretrain|sft|peft)_")
#: Of models that see images, hear, or make images.
OTHERS = re.compile(r"vl\b|_vl|45v|ministral3|omni|audio|flux|wan|step37|kimi_k25|exaone45|mock")
#: What is said where another number of GPUs may do.
_OF_A_SIZE = "no plan (is predicted to fit|fits)( in|, but)|no combination of degrees is legal"
#: Recipes that Megatron-Bridge itself ends -> why, as our refusal says it with the field's name.
ENDS = {
    r"gemma2.*(sft|peft)": r"packed_sequence_size = 2048: the attention of Gemma2ModelProvider",
    r"exaone4.*(sft|peft)": r"packed_sequence_size = 2048: the attention of GPTModelProvider",
    r"moonlight_16b_(sft|peft)_config": "shared experts have no bias",  # 0.3.1 sets it
    r"vanilla_gpt": r"model\.num_layers = None",
    # of a branch of Megatron-LM; no released megatron-core has such layers
    r"deepseek_v4": r"model\.enable_hyper_connections = 'True'",
}
#: Other recipes that are refused -> why.
REFUSED = {
    r"glm52_sft.*_(128|200)k": _OF_A_SIZE,  # sparse attention is not planned with CP
}
#: Recipes that ask for files or for parts of a model's configuration that are not public.
NOT_BUILT = re.compile(r"gemma4|minimax_m3|step35|exaone_moe_2|qwen3_next.*peft")
#: GPUs and clusters; the first where a plan fits is taken, that of the recipe's name last.
SIZES = (64, 1024, 8)
BLACKWELL = re.compile(r"gb200|gb300|fp8mx|nvfp4|mxfp8")
#: Of all recipes that can run at least this share is planned.
SHARE = 0.95


def all_recipes() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Recipes that can be built here: module, name, function."""
    for module, name, make in bridge.recipes(r"_(pretrain|sft|peft)(_\w+)?_config$"):
        is_ours = not name.startswith(("_", "default")) and not OTHERS.search(f"{module} {name}")
        if is_ours and not NOT_BUILT.search(name):
            yield module, name, make


def cases() -> Iterator[Any]:
    """The recipes as parameters of a test."""
    seen = set()
    for module, name, make in all_recipes():
        kind = module, KIND.search(name.removesuffix("_config"))[0].strip("_")  # type: ignore[index]
        yield pytest.param(name, make, id=name, marks=[pytest.mark.slow] if kind in seen else [])
        seen.add(kind)


def sizes(name: str) -> Iterator[int]:
    """Numbers of GPUs to try."""
    yield from SIZES
    if stated := re.search(r"_(\d+)gpu", name):
        yield -(-int(stated[1]) // 8) * 8


def refusal(name: str) -> str | None:
    """What the refusal of a recipe says; ``None`` for one that is planned."""
    known = {**ENDS, **REFUSED}.items()
    return next((why for pattern, why in known if re.search(pattern, name)), None)


def test_most_recipes_are_planned() -> None:
    ends, names = re.compile("|".join(ENDS)), [name for _, name, _ in all_recipes()]
    run = [name for name in names if not ends.search(name)]
    planned = [name for name in run if refusal(name) is None]
    print(f"{len(planned)} recipes are planned, of {len(run)} that can run and {len(names)} in all")
    assert len(planned) >= SHARE * len(run) > 0


@pytest.mark.parametrize("name", ["deepseek_v4_flash_pretrain_32gpu_h100_bf16_config"])
def test_released_megatron_core_has_no_layers_of(name: str) -> None:
    made = [make for _, found, make in bridge.recipes(f"^{name}$")]
    if not made:
        pytest.skip(f"this Megatron-Bridge has no {name}")
    model = bridge.built(made[0]).model
    with pytest.raises(ValueError, match="Invalid experimental attention variant: dsv4_hybrid"):
        model.transformer_layer_spec(model, vp_stage=0)


@pytest.mark.parametrize(("name", "make"), cases())
def test_bridge_accepts_the_plan_of(name: str, make: Callable[..., Any]) -> None:
    asked = {"mixed_precision_recipe": "bf16_with_fp8_current_scaling_mixed"}
    cfg = bridge.built(make, **(asked if "low_precision" in name else {}))
    may_say = "|".join(filter(None, (_OF_A_SIZE, refusal(name))))
    for num_gpus in sizes(name):
        try:
            plan, _ = _plan(cfg, name, num_gpus)
        except NestError as error:
            if not re.search(may_say, str(error)):
                raise
            continue
        bridge.validate(cfg, num_gpus)
        assert plan_changes(cfg, plan, environment={}) == ()
        return
    assert refusal(name) is not None, "no plan fits on any number of GPUs"


def _plan(cfg: Any, name: str, num_gpus: int) -> Any:
    return auto_recipe(
        cfg,
        cluster="gb200_nvl72" if BLACKWELL.search(name) else "dgx_h100",
        overrides=[f"cluster.num_gpus={num_gpus}", "search.num_alternatives=0"],
        vocab_size=152_000,
        environment={},
    )
