"""Hugging Face configurations of the models that Megatron-Bridge's recipes name, without a network.

The sizes are those of the models' own ``config.json``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

#: (layers, hidden size, heads, key-value heads, inner size, vocabulary, tied embeddings)
_SIZES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "meta-llama/Llama-2-7b-hf": ("Llama", 32, 4096, 32, 32, 11_008, 32_000, False),
    "meta-llama/Llama-3.2-1B": ("Llama", 16, 2048, 32, 8, 8192, 128_256, True),
    "meta-llama/Llama-3.2-3B": ("Llama", 28, 3072, 24, 8, 8192, 128_256, True),
    "meta-llama/Meta-Llama-3-8B": ("Llama", 32, 4096, 32, 8, 14_336, 128_256, False),
    "meta-llama/Meta-Llama-3.1-8B": ("Llama", 32, 4096, 32, 8, 14_336, 128_256, False),
    "meta-llama/Meta-Llama-3-70B": ("Llama", 80, 8192, 64, 8, 28_672, 128_256, False),
    "meta-llama/Meta-Llama-3.1-70B": ("Llama", 80, 8192, 64, 8, 28_672, 128_256, False),
    "meta-llama/Meta-Llama-3.1-405B": ("Llama", 126, 16_384, 128, 8, 53_248, 128_256, False),
    "Qwen/Qwen2-0.5B": ("Qwen2", 24, 896, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2-1.5B": ("Qwen2", 28, 1536, 12, 2, 8960, 151_936, True),
    "Qwen/Qwen2-7B": ("Qwen2", 28, 3584, 28, 4, 18_944, 152_064, False),
    "Qwen/Qwen2-72B": ("Qwen2", 80, 8192, 64, 8, 29_568, 152_064, False),
    "Qwen/Qwen2.5-0.5B": ("Qwen2", 24, 896, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2.5-1.5B": ("Qwen2", 28, 1536, 12, 2, 8960, 151_936, True),
    "Qwen/Qwen2.5-7B": ("Qwen2", 28, 3584, 28, 4, 18_944, 152_064, False),
    "Qwen/Qwen2.5-14B": ("Qwen2", 48, 5120, 40, 8, 13_824, 152_064, False),
    "Qwen/Qwen2.5-32B": ("Qwen2", 64, 5120, 40, 8, 27_648, 152_064, False),
    "Qwen/Qwen2.5-72B": ("Qwen2", 80, 8192, 64, 8, 29_568, 152_064, False),
    "Qwen/Qwen3-0.6B": ("Qwen3", 28, 1024, 16, 8, 3072, 151_936, True),
    "Qwen/Qwen3-1.7B": ("Qwen3", 28, 2048, 16, 8, 6144, 151_936, True),
    "Qwen/Qwen3-4B": ("Qwen3", 36, 2560, 32, 8, 9728, 151_936, True),
    "Qwen/Qwen3-8B": ("Qwen3", 36, 4096, 32, 8, 12_288, 151_936, False),
    "Qwen/Qwen3-14B": ("Qwen3", 40, 5120, 40, 8, 17_408, 151_936, False),
    "Qwen/Qwen3-32B": ("Qwen3", 64, 5120, 64, 8, 25_600, 151_936, False),
    "Qwen/Qwen3-30B-A3B": ("Qwen3Moe", 48, 2048, 32, 4, 6144, 151_936, False),
    "Qwen/Qwen3-235B-A22B": ("Qwen3Moe", 94, 4096, 64, 4, 12_288, 151_936, False),
    "zai-org/GLM-4.5": ("Glm4Moe", 92, 5120, 96, 8, 12_288, 151_552, False),
    "zai-org/GLM-4.5-Air": ("Glm4Moe", 46, 4096, 96, 8, 10_944, 151_552, False),
    "openai/gpt-oss-20b": ("GptOss", 24, 2880, 64, 8, 2880, 201_088, False),
    "openai/gpt-oss-120b": ("GptOss", 36, 2880, 64, 8, 2880, 201_088, False),
    "allenai/OLMoE-1B-7B-0125": ("Olmoe", 16, 2048, 16, 16, 1024, 50_304, False),
    "google/gemma-2-2b": ("Gemma2", 26, 2304, 8, 4, 9216, 256_000, True),
    "google/gemma-2-9b": ("Gemma2", 42, 3584, 16, 8, 14_336, 256_000, True),
    "google/gemma-2-27b": ("Gemma2", 46, 4608, 32, 16, 36_864, 256_000, True),
    "google/gemma-3-1b-pt": ("Gemma3", 26, 1152, 4, 1, 6912, 262_144, True),
    "deepseek-ai/DeepSeek-V2-Lite": ("DeepseekV2", 27, 2048, 16, 16, 10_944, 102_400, False),
    "deepseek-ai/DeepSeek-V2": ("DeepseekV2", 60, 5120, 128, 128, 12_288, 102_400, False),
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3", 61, 7168, 128, 128, 18_432, 129_280, False),
    "moonshotai/Moonlight-16B-A3B": ("DeepseekV3", 27, 2048, 16, 16, 11_264, 163_840, False),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3Next", 48, 2048, 16, 2, 5120, 151_936, False),
}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
#: What DeepSeek's files state beside the defaults of their classes, which are those of V2 and V3.
_DEEPSEEK = {"aux_loss_alpha": 0.001, "moe_layer_freq": 1, "topk_method": "greedy"}
_DEEPSEEK_V3 = {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_GLM = {"n_shared_experts": 1, "num_experts_per_tok": 8, "attention_bias": True, "head_dim": 128}
_MORE: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B": {**_QWEN3_EXPERTS, "moe_intermediate_size": 768, "head_dim": 128},
    "Qwen/Qwen3-235B-A22B": {**_QWEN3_EXPERTS, "moe_intermediate_size": 1536, "head_dim": 128},
    "zai-org/GLM-4.5": {
        **_GLM,
        "n_routed_experts": 160,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "zai-org/GLM-4.5-Air": {
        **_GLM,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "google/gemma-2-2b": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "google/gemma-2-9b": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "google/gemma-2-27b": {"head_dim": 128, "query_pre_attn_scalar": 144},
    "google/gemma-3-1b-pt": {"head_dim": 256, "sliding_window": 512},
    "deepseek-ai/DeepSeek-V2-Lite": {
        **_DEEPSEEK,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
    },
    "deepseek-ai/DeepSeek-V2": {
        **_DEEPSEEK,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
    },
    "deepseek-ai/DeepSeek-V3": {**_DEEPSEEK_V3, "num_nextn_predict_layers": 1},
    "moonshotai/Moonlight-16B-A3B": {
        **_DEEPSEEK_V3,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"full_attention_interval": 4},
    "openai/gpt-oss-20b": {"num_local_experts": 32, "head_dim": 64},
    "openai/gpt-oss-120b": {"num_local_experts": 128, "head_dim": 64},
}


#: Configurations of a model's text whose class is named otherwise.
_CLASSES = {"Gemma3": "Gemma3TextConfig"}


def configuration(name: str) -> Any:
    """The configuration of a model on the Hugging Face Hub."""
    import transformers

    kind, layers, hidden, heads, groups, inner, vocabulary, tied = _SIZES[name]
    fields = {"head_dim": 128} if kind == "Qwen3" else {}
    return getattr(transformers, _CLASSES.get(kind, f"{kind}Config"))(
        architectures=[f"{kind}ForCausalLM"],
        torch_dtype="bfloat16",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131_072,
        **fields,
        **_MORE.get(name, {}),
    )


def go_offline(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a recipe's module ask no Hub for a model, until ``patch`` is undone.

    The bridge of a model is made of its configuration alone, without its weights.
    """

    def bridge_of(name: str, *_: object, **__: object) -> Any:
        from megatron.bridge import AutoBridge

        found = AutoBridge.from_hf_config(configuration(name))
        if name.startswith("google/gemma-3"):  # its precision and tokenizer are asked for by name
            import transformers
            from megatron.bridge.models.gemma import gemma3_bridge

            patch.setattr(
                transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: range(262_144)
            )
            patch.setattr(
                gemma3_bridge, "AutoConfig", SimpleNamespace(from_pretrained=configuration)
            )
            found._config_only_pretrained._model_name_or_path = name
        return found

    offline = SimpleNamespace(from_hf_pretrained=bridge_of)
    patch.setattr(module, "AutoBridge", offline, raising=False)
