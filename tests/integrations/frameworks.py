"""NeMo's and Megatron-Bridge's configurations as far as a plan touches them, without either.

Classes have the frameworks' names, because readers look at them; fields have their defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nest_megatron.model.spec import TransformerSpec


def silu() -> None:
    """Stands for torch's function, which readers know by its name."""


def gelu() -> None:
    """As ``silu``."""


_FUNCTIONS = {"silu": silu, "gelu": gelu}


@dataclass
class TransformerConfig:
    """megatron-core's fields that a plan or a reader looks at."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: Any = 1
    moe_router_topk: int = 2
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str | None = "deepep"
    moe_enable_deepep: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    use_transformer_engine_op_fuser: bool = False
    activation_func: Any = gelu
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    normalization: str = "LayerNorm"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    window_size: Any = None
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: str = "learned_absolute"
    vocab_size: int | None = None
    seq_length: int = 1024
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    tp_comm_overlap: bool = False
    tp_comm_overlap_cfg: Any = None
    defer_embedding_wgrad_compute: bool = False
    gradient_accumulation_fusion: bool = True
    init_model_with_meta_device: bool = False
    cp_comm_type: Any = None
    hierarchical_context_parallel_sizes: Any = None
    cuda_graph_impl: str = "none"
    cuda_graph_scope: Any = "full"
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    fine_grained_activation_offloading: bool = False
    offload_modules: Any = None


@dataclass
class DistributedDataParallelConfig:
    """megatron-core's."""

    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    use_distributed_optimizer: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    average_in_collective: bool = True
    num_distributed_optimizer_instances: int = 1


@dataclass
class MegatronStrategy:
    """NeMo's strategy."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_layout: Any = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    use_tp_pp_dp_mapping: bool = False
    num_distributed_optimizer_instances: int = 1
    pipeline_dtype: Any = "torch.bfloat16"
    fsdp: str | None = None
    save_ckpt_format: str = "torch_dist"
    ckpt_async_save: bool = True
    ddp: Any = field(default_factory=DistributedDataParallelConfig)


@dataclass
class MegatronCommOverlapCallback:
    """NeMo's."""

    tp_comm_overlap: bool | None = None
    tp_comm_overlap_cfg: Any = None
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    bucket_size: int | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None


@dataclass
class CommOverlapConfig(MegatronCommOverlapCallback):
    """Megatron-Bridge's."""

    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None


@dataclass
class DeepEPCallback:
    """NeMo's: sets the dispatcher as training starts."""


@dataclass
class MegatronMixedPrecision:
    """NeMo's precision plugin."""

    precision: str = "bf16-mixed"
    fp8: str | None = None


@dataclass
class MockDataModule:
    """NeMo's mock data."""

    seq_length: int = 8192
    micro_batch_size: int = 1
    global_batch_size: int = 512
    tokenizer: Any = None


@dataclass
class GPTModelProvider(TransformerConfig):
    """Megatron-Bridge's model, which holds its own degrees."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_layout: Any = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    use_te_rng_tracker: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    pipeline_dtype: Any = "torch.bfloat16"
    should_pad_vocab: bool = False


def nemo_recipe(spec: TransformerSpec, *, num_nodes: int = 8, batch: int = 512) -> Any:
    """A recipe of a model, as ``pretrain_recipe`` returns it, in plain objects."""
    return SimpleNamespace(
        model=SimpleNamespace(config=TransformerConfig(**_shape(spec)), tokenizer=None),
        data=MockDataModule(seq_length=spec.seq_length, global_batch_size=batch),
        trainer=SimpleNamespace(
            devices=8,
            num_nodes=num_nodes,
            strategy=MegatronStrategy(),
            plugins=MegatronMixedPrecision(),
            callbacks=[],
        ),
        optim=SimpleNamespace(
            config=SimpleNamespace(use_distributed_optimizer=True, optimizer="adam")
        ),
    )


def bridge_config(spec: TransformerSpec, *, batch: int = 512) -> Any:
    """A ``ConfigContainer`` of a model, in plain objects."""
    return SimpleNamespace(
        model=GPTModelProvider(**_shape(spec)),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=batch),
        optimizer=SimpleNamespace(use_distributed_optimizer=True, optimizer="adam"),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=SimpleNamespace(use_megatron_fsdp=False, use_tp_pp_dp_mapping=False),
        rng=SimpleNamespace(te_rng_tracker=False),
        dataset=SimpleNamespace(seq_length=spec.seq_length),
        checkpoint=SimpleNamespace(ckpt_format="torch_dist", async_save=False),
        tokenizer=SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=None),
        comm_overlap=None,
        mixed_precision=SimpleNamespace(bf16=True, grad_reduce_in_fp32=True),
        peft=None,
    )


def _shape(spec: TransformerSpec) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(TransformerConfig)}
    shared = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name in names}
    return {
        **shared,
        "activation_func": _FUNCTIONS[spec.activation],
        "share_embeddings_and_output_weights": not spec.untie_embeddings_and_output_weights,
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": list(spec.moe_layer_pattern) or 1,
    }
