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
    "LGAI-EXAONE/EXAONE-4.0-1.2B": ("Exaone4", 30, 2048, 32, 8, 4096, 102_400, True),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": ("ExaoneMoe", 48, 6144, 64, 8, 18_432, 153_600, False),
    "moonshotai/Kimi-K2-Instruct": ("KimiK2", 61, 7168, 64, 64, 18_432, 163_840, False),
    "zai-org/GLM-5.2": ("GlmMoeDsa", 78, 6144, 64, 64, 12_288, 154_880, False),
    "deepseek-ai/DeepSeek-V4-Flash": ("DeepseekV4", 43, 4096, 64, 1, 2048, 129_280, False),
    "deepseek-ai/DeepSeek-V4-Pro": ("DeepseekV4", 61, 7168, 128, 1, 3072, 129_280, False),
    "Qwen/Qwen3.5-9B-Base": ("Qwen3_5", 32, 4096, 16, 4, 12_288, 248_320, False),
    "Qwen/Qwen3.5-35B-A3B-Base": ("Qwen3_5Moe", 40, 2048, 16, 2, 5632, 248_320, False),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        *("NemotronH", 52, 2688, 32, 2, 1856, 131_072, False),
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        *("NemotronH", 88, 4096, 32, 2, 2688, 131_072, False),
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (
        *("NemotronH", 108, 8192, 64, 2, 5120, 131_072, False),
    ),
}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
#: What DeepSeek's files state beside the defaults of their classes, which are those of V2 and V3.
_DEEPSEEK = {"aux_loss_alpha": 0.001, "moe_layer_freq": 1, "topk_method": "greedy"}
_DEEPSEEK_V3 = {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_DEEPSEEK_V4 = {
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65_536,
    },
}
_GLM = {"n_shared_experts": 1, "num_experts_per_tok": 8, "attention_bias": True, "head_dim": 128}
_NEMOTRON_3 = {
    "head_dim": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "mlp_hidden_act": "relu2",
}
_LATENT_EXPERTS = {
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
_MORE: dict[str, dict[str, Any]] = {
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        **_NEMOTRON_3,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": {
        **_NEMOTRON_3,
        **_LATENT_EXPERTS,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 128,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
    },
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": {
        **_NEMOTRON_3,
        **_LATENT_EXPERTS,
        "hybrid_override_pattern": "MEMEMEMEM*E" * 9 + "MEMEMEMEM",
        "mamba_num_heads": 256,
        "moe_intermediate_size": 5120,
        "moe_shared_expert_intermediate_size": 10_240,
        "moe_latent_size": 2048,
    },
    "LGAI-EXAONE/EXAONE-4.0-1.2B": {
        "head_dim": 64,
        "layer_types": ["full_attention"] * 30,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 1_000_000.0,
        },
    },
    "LGAI-EXAONE/K-EXAONE-236B-A23B": {
        "head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "sliding_window": 128,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
    },
    "moonshotai/Kimi-K2-Instruct": {
        **_DEEPSEEK_V3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50_000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "routed_scaling_factor": 2.827,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "zai-org/GLM-5.2": {
        "first_k_dense_replace": 3,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    "deepseek-ai/DeepSeek-V4-Flash": {**_DEEPSEEK_V4},
    "deepseek-ai/DeepSeek-V4-Pro": {**_DEEPSEEK_V4, "n_routed_experts": 384, "q_lora_rank": 1536},
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
_CLASSES = {"Gemma3": "Gemma3TextConfig", "KimiK2": "DeepseekV3Config"}


def configuration(name: str) -> Any:
    """The configuration of a model on the Hugging Face Hub."""
    import transformers

    kind, layers, hidden, heads, groups, inner, vocabulary, tied = _SIZES[name]
    fields = {"head_dim": 128} if kind == "Qwen3" else {}
    of_text = kind.startswith("Qwen3_5")
    made = getattr(transformers, _CLASSES.get(kind, f"{kind}{'Text' * of_text}Config"))(
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
    return SimpleNamespace(text_config=made) if of_text else made


def go_offline(patch: pytest.MonkeyPatch) -> None:
    """Let recipes ask no Hub for a model, until ``patch`` is undone.

    The bridge of a model is made of its configuration alone, without its weights.
    """
    import transformers
    from megatron.bridge import AutoBridge

    def bridge_of(name: str, *_: object, **__: object) -> Any:
        found = AutoBridge.from_hf_config(configuration(name))
        if name.startswith("google/gemma-3"):  # its precision is asked for by name
            found._config_only_pretrained._model_name_or_path = name
        return found

    def rows(*_: object, **__: object) -> range:
        return range(262_144)  # of Gemma 3, the one tokenizer that is asked for

    patch.setattr(AutoBridge, "from_hf_pretrained", staticmethod(bridge_of))
    patch.setattr(transformers.AutoTokenizer, "from_pretrained", rows)
    patch.setattr(transformers.AutoConfig, "from_pretrained", configuration)
