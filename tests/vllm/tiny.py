"""Tiny random models, made on the spot, and engines on them in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 512


def make_llama(folder: Path, *, seed: int = 0, layers: int = 3, spread: float = 0.02) -> Path:
    """A dense model with grouped-query attention.

    Args:
        spread: standard deviation of the weights. With the usual one hardly more than the last token
            decides what is said.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def make_deepseek(folder: Path, *, seed: int = 0) -> Path:
    """A model with multi-head latent attention."""
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        # The only sizes that the CPU kernel of this attention is compiled for: 512 + 64.
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=4096,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    DeepseekV2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def make_gemma(folder: Path, *, seed: int = 0) -> Path:
    """A model in which most layers see a window only."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=64,
        query_pre_attn_scalar=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
