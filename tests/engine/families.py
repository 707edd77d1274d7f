"""A tiny random model of each supported family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_WINDOW = 11  # shorter than most prompts of the tests
_WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96}  # heads of 32: layers can be fused on a CPU
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": _WINDOW},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": {  # keys and values of different head sizes
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "llama_wide": _WIDE | {"attention_bias": True, "mlp_bias": True},
    "mistral_wide": _WIDE | {"sliding_window": _WINDOW},
    "qwen2_wide": _WIDE,
    "llama_mqa": {"num_key_value_heads": 1},
    "llama_mha": {"num_key_value_heads": 4},
}


def tiny_model(family: str, *, attn_implementation: str) -> PreTrainedModel:
    """The family's model with fixed random weights, float32, in eval mode."""
    name = family.removesuffix("_wide").removesuffix("_mqa").removesuffix("_mha")
    config = AutoConfig.for_model(name, **{**_COMMON, **FAMILIES[family]})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
    return model.eval()
