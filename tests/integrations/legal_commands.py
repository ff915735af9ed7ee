"""Random commands of Megatron-LM: models, precisions and typed choices of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: A flag with its words; a switch has none. ``None`` leaves the flag out.
Flags = Mapping[str, Sequence[str] | None]
_Draw = Callable[[Sequence[Any]], Any]

_MODEL = {
    "--seq-length": ["1024"],
    "--max-position-embeddings": ["1024"],
    "--train-iters": ["10"],
    "--lr": ["1e-4"],
    "--vocab-size": ["32000"],
    "--tokenizer-type": ["NullTokenizer"],
    "--mock-data": [],
}
_MOE = {
    "--num-experts": ["4"],
    "--moe-ffn-hidden-size": ["512"],
    "--moe-router-topk": ["2"],
    "--disable-bias-linear": [],
    "--moe-grouped-gemm": [],
}
_LATENT = {"--multi-latent-attention": [], "--qk-layernorm": []}
_MODELS: tuple[Flags, ...] = (
    {},
    {"--swiglu": [], "--disable-bias-linear": [], "--position-embedding-type": ["rope"]},
    {"--group-query-attention": [], "--num-query-groups": ["2"]},
    {"--untie-embeddings-and-output-weights": [], "--num-layers": ["6"]},
    {"--hidden-size": ["520"], "--ffn-hidden-size": ["2080"], "--kv-channels": ["64"]},
    {"--mtp-num-layers": ["1"], "--position-embedding-type": ["rope"]},
    {"--position-embedding-type": ["rope"], **_LATENT},
    _MOE,
    {**_MOE, "--moe-shared-expert-intermediate-size": ["512"]},
    {**_MOE, "--moe-layer-freq": ["([0]*2+[1]*6)"], "--swiglu": []},
    {**_MOE, "--position-embedding-type": ["rope"], **_LATENT},
)
_NOTHING: tuple[Flags, ...] = ({},)
_DROPOUT: tuple[Flags, ...] = (
    {},
    {"--hidden-dropout": ["0"], "--attention-dropout": ["0"]},
    {"--attention-dropout": ["0"]},
    {"--hidden-dropout": ["0"]},
)
_PRECISION: tuple[Flags, ...] = (
    {"--bf16": []},
    {"--bf16": []},
    {"--fp16": []},
    {},
    {"--bf16": [], "--fp8-format": ["hybrid"]},
    {"--bf16": [], "--fp8-format": ["hybrid"], "--fp8-recipe": ["tensorwise"]},
    {"--bf16": [], "--fp8-format": ["e4m3"], "--fp8-recipe": ["blockwise"]},
)
_RECOMPUTE: tuple[Flags, ...] = (
    {},
    {"--recompute-activations": []},
    {"--recompute-granularity": ["selective"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["mlp"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["core_attn", "mlp"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["layernorm"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["moe_act"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["moe"]},
    {"--recompute-granularity": ["selective"], "--recompute-modules": ["shared_experts"]},
    {
        "--recompute-granularity": ["full"],
        "--recompute-method": ["uniform"],
        "--recompute-num-layers": ["1"],
    },
    {
        "--recompute-granularity": ["full"],
        "--recompute-method": ["uniform"],
        "--recompute-num-layers": ["2"],
    },
    {
        "--recompute-granularity": ["full"],
        "--recompute-method": ["block"],
        "--recompute-num-layers": ["2"],
    },
)
_GRAPHS: tuple[Flags, ...] = (
    {},
    {},
    {},
    {"--cuda-graph-impl": ["local"]},
    {"--cuda-graph-impl": ["transformer_engine"]},
    {"--cuda-graph-impl": ["transformer_engine"], "--cuda-graph-scope": ["attn"]},
    {"--enable-cuda-graph": []},
)
_OVERLAP: tuple[Flags, ...] = (
    {},
    {},
    {"--tp-comm-overlap": [], "--sequence-parallel": []},
    {"--overlap-moe-expert-parallel-comm": []},
    {"--overlap-moe-expert-parallel-comm": [], "--delay-wgrad-compute": []},
    {"--moe-shared-expert-overlap": []},
    {"--overlap-grad-reduce": [], "--overlap-param-gather": [], "--use-distributed-optimizer": []},
    {"--moe-permute-fusion": []},
    {"--cpu-offloading-num-layers": ["2"]},
)
_DISPATCHER: tuple[Flags, ...] = (
    {},
    {"--moe-token-dispatcher-type": ["alltoall"]},
    {"--moe-token-dispatcher-type": ["allgather"]},
    {"--moe-token-dispatcher-type": ["flex"]},
)
_CONTEXT: tuple[Flags, ...] = (
    {},
    {},
    {"--cp-comm-type": ["a2a"]},
    {"--cp-comm-type": ["all_gather"]},
    {"--context-parallel-size": ["2"]},
    {"--context-parallel-size": ["2"], "--cp-comm-type": ["a2a"]},
)
_DEGREES: tuple[Flags, ...] = (
    {},
    {},
    {"--tensor-model-parallel-size": ["2"], "--sequence-parallel": []},
    {"--pipeline-model-parallel-size": ["2"]},
    {"--pipeline-model-parallel-size": ["4"]},
    {"--pipeline-model-parallel-size": ["2"], "--num-layers-per-virtual-pipeline-stage": ["2"]},
    {"--expert-model-parallel-size": ["2"]},
    {"--expert-model-parallel-size": ["4"], "--expert-tensor-parallel-size": ["1"]},
    {
        "--pipeline-model-parallel-size": ["2"],
        "--num-virtual-stages-per-pipeline-rank": ["2"],
        "--expert-model-parallel-size": ["2"],
    },
)
_ENGINE: tuple[Flags, ...] = (
    {},
    {},
    {},
    {"--transformer-impl": ["local"]},
    {"--attention-backend": ["unfused"]},
)
_STATES: tuple[Flags, ...] = (
    {},
    {},
    {"--use-distributed-optimizer": []},
    {"--optimizer": ["muon"]},
    {"--use-megatron-fsdp": [], "--ckpt-format": ["fsdp_dtensor"]},
)
_ROUND: tuple[Flags, ...] = ({}, {}, {"--microbatch-group-size-per-virtual-pipeline-stage": ["4"]})
_CHOICES = (
    _DROPOUT,
    _PRECISION,
    _RECOMPUTE,
    _GRAPHS,
    _OVERLAP,
    _DISPATCHER,
    _CONTEXT,
    _DEGREES,
    _ENGINE,
    _STATES,
    _ROUND,
)


def random_flags(choose: _Draw) -> dict[str, Sequence[str]]:
    """The flags of a command; of kinds for experts only those that a model with some reads."""
    shape: Flags = {
        "--num-layers": ["8"],
        "--hidden-size": ["512"],
        "--num-attention-heads": ["8"],
        "--micro-batch-size": ["1"],
        "--global-batch-size": ["32"],
    }
    found: dict[str, Sequence[str] | None] = {**shape, **_MODEL, **choose(_MODELS)}
    for kind in _CHOICES:
        chosen = choose(choose((_NOTHING, kind)))
        of_experts = any("moe" in flag or "expert" in flag for flag in chosen)
        if not of_experts or "--num-experts" in found:
            found.update(chosen)
    return {flag: words for flag, words in found.items() if words is not None}


def command_of(flags: Mapping[str, Sequence[str]], num_gpus: int = 8) -> str:
    """The command of some flags."""
    words = " ".join(" ".join([flag, *map(_quoted, values)]) for flag, values in flags.items())
    return f"torchrun --nproc-per-node {num_gpus} pretrain_gpt.py {words}"


def _quoted(word: str) -> str:
    return f"'{word}'" if "(" in word else word
