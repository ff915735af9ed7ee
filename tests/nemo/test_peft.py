"""What the frameworks' own adapters train: counted on megatron-core's modules, layout by layout."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import pytest

from nest_megatron.errors import NestError
from nest_megatron.integrations.restore import with_adapters
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.megatron_core.stage import as_rank, transformer_config
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.encoder import Adapters, PeftScheme
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.spec import TransformerSpec
from tests.nemo import substitutes

if not substitutes.bridge_is_here():
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.contract.megatron_model import _build
from tests.contract.megatron_shims import meta_megatron, torch

pytestmark = pytest.mark.nemo
PACKAGES = {"bridge": "megatron.bridge.peft", "nemo": "nemo.collections.llm.peft"}
CLASSES = {
    PeftScheme.LORA: ("lora", "LoRA"),
    PeftScheme.DORA: ("dora", "DoRA"),
    PeftScheme.CANONICAL_LORA: ("canonical_lora", "CanonicalLoRA"),
}
SHAPE: dict[str, Any] = {
    "name": "small",
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": 128,
    "vocab_size": 1024,
}
DENSE = TransformerSpec(**SHAPE)
EXPERTS = TransformerSpec(
    **SHAPE,
    num_experts=4,
    moe_layer_pattern=(0, 1),
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=128,
)
LATENT = TransformerSpec(
    **{**SHAPE, "num_query_groups": None},
    multi_latent_attention=True,
    q_lora_rank=64,
    kv_lora_rank=32,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
)
_UP = ("linear_q_up_proj", "linear_kv_up_proj", "linear_proj")
#: Model, what is adapted.
CASES = {
    "all": (DENSE, {}),
    "queries": (DENSE, {"target_modules": ("linear_qkv",), "dim": 8}),
    "dora": (DENSE, {"scheme": PeftScheme.DORA}),
    "canonical": (DENSE, {"scheme": PeftScheme.CANONICAL_LORA, "dim": 16}),
    "patterns": (DENSE, {"target_modules": ("*.self_attention.linear_*", "*fc2")}),
    "latent attention": (LATENT, {"target_modules": _UP}),
    "output layer": (DENSE, {"target_modules": ("output_layer",)}),
    "attention beside experts": (EXPERTS, {"target_modules": ("linear_qkv", "linear_proj")}),
    "shared experts": (EXPERTS, {"target_modules": ("*.shared_experts.*", "linear_proj")}),
}


def own(framework: str, adapters: Adapters, **fields: Any) -> Any:
    """The framework's object that adapts a model."""
    module, name = CLASSES[adapters.scheme]
    fields |= {"target_modules": list(adapters.target_modules), "dim": adapters.dim}
    return getattr(importlib.import_module(f"{PACKAGES[framework]}.{module}"), name)(**fields)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_as_many_parameters_are_trained(case: str, tp: int, monkeypatch: Any) -> None:
    model, stated = CASES[case]
    adapters = Adapters(**stated)
    spec = dataclasses.replace(model, adapters=adapters)
    ep = 2 if spec.is_moe else 1
    dims = ParallelDims(
        tensor_model_parallel_size=tp,
        data_parallel_size=2,
        expert_model_parallel_size=ep,
    )
    counts = unit_parameters(spec, tp, ep, 1, single_stage=True)
    expected = sum(counts, ParameterCount()).trained.total
    utils = importlib.import_module(f"{PACKAGES['bridge']}.utils")
    monkeypatch.setattr(utils, "HAVE_TE", False)  # the substitutes are no types
    monkeypatch.setattr(torch.linalg, "norm", lambda weight, dim: weight.sum(dim))
    with meta_megatron(), as_rank(spec, dims, 0):
        config = transformer_config(spec, dims, sequence_parallel=tp > 1)
        built = _build(spec, dims, config, None)
        peft = own("bridge", adapters)
        peft(built, training=True)
        trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert trained == expected > 0


@pytest.mark.parametrize("framework", PACKAGES)
@pytest.mark.parametrize("scheme", CLASSES)
def test_a_framework_s_object_is_read(framework: str, scheme: PeftScheme) -> None:
    adapters = Adapters(scheme=scheme, dim=16)
    if importlib.util.find_spec(PACKAGES[framework].partition(".")[0]) is None:
        pytest.skip(f"{framework} is not installed")
    spec, notes = with_adapters(DENSE, own(framework, adapters, alpha=7), "peft", None)
    assert (spec, notes) == (dataclasses.replace(DENSE, adapters=adapters), ())


@pytest.mark.parametrize(
    "fields",
    [{"target_modules": [], "exclude_modules": ["linear_qkv"]}, {"lora_dtype": "float32"}],
)
def test_what_is_not_priced_is_refused_by_name(fields: dict[str, Any]) -> None:
    peft = own("bridge", Adapters())
    for name, value in fields.items():
        setattr(peft, name, value)
    with pytest.raises(NestError, match=next(reversed(fields))):
        with_adapters(DENSE, peft, "cfg.peft", None)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 2), (2, 2)])
def test_experts_of_a_rank_share_adapters(
    tp: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the grouped product, which Transformer Engine alone builds, the adapter is built."""
    spec = dataclasses.replace(
        EXPERTS, adapters=Adapters(dim=16, target_modules=("*.mlp.experts.*",))
    )
    dims = ParallelDims(
        tensor_model_parallel_size=tp, data_parallel_size=2, expert_model_parallel_size=ep
    )
    from megatron.bridge.peft.utils import ParallelLinearAdapter

    monkeypatch.setattr(  # 0.6 gives all ranks the first one's values
        ParallelLinearAdapter,
        "_synchronize_shared_expert_parameters",
        lambda _: None,
        raising=False,
    )
    hidden, ffn, total = spec.hidden_size, spec.expert_ffn_hidden_size, 0
    with meta_megatron(), as_rank(spec, dims, 0):
        config = transformer_config(spec, dims, sequence_parallel=tp > 1)
        for sizes, is_row in (((hidden, 2 * ffn), False), ((ffn, hidden), True)):
            built = ParallelLinearAdapter(
                *sizes, 16, "mlp.experts.linear_fc1", input_is_parallel=is_row,
                model_parallel_config=config, is_expert=True,
            )  # fmt: skip
            total += sum(p.numel() for p in built.parameters())
    counts = unit_parameters(spec, tp, ep, 1, single_stage=True)
    trained = sum(counts, ParameterCount()).trained
    assert (trained.dense, trained.expert) == (0, total)
