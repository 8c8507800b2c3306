"""Models that start in vLLM and must not be cached are refused at start, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from families import COMMON, saved
from inprocess import start
from tiny import VOCABULARY
from transformers import (
    HrmTextConfig,
    HrmTextForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from words import word_tokenizer

from kvstow.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START, MEL_BINS = 3, 16


def refusal(model: Path, **options: Any) -> str:
    """Start an engine that must not start; what it says."""
    try:
        with pytest.raises(ConfigError) as refused:
            start(model, skip_tokenizer_init=False, **options).llm_engine.engine_core.shutdown()
    finally:
        ensure_kv_transfer_shutdown()
    return str(refused.value)


def test_cross_attention_looks_at_what_no_key_covers(tmp_path: Path) -> None:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=MEL_BINS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=START,
    )
    WhisperFeatureExtractor(feature_size=MEL_BINS).save_pretrained(tmp_path)
    word_tokenizer({"<|startoftranscript|>": START}).save_pretrained(tmp_path)
    model = saved(WhisperForConditionalGeneration, config, tmp_path)
    # vLLM takes a whole sound, which is 1500 tokens, in one step.
    said = refusal(model, max_model_len=448, max_num_batched_tokens=2048, num_gpu_blocks_override=200)
    assert "KV cache group 1 is a CrossAttentionSpec" in said


def test_a_prompt_that_is_read_in_both_directions_is_not_a_prefix(tmp_path: Path) -> None:
    """Keys of a prompt's first tokens depend on its last ones, and vLLM turns its own cache off."""
    config = HrmTextConfig(
        **COMMON, intermediate_size=128, num_hidden_layers=2, head_dim=32, H_cycles=2, L_cycles=1
    )
    word_tokenizer({}).save_pretrained(tmp_path)
    assert "KV cache group 0" in refusal(saved(HrmTextForCausalLM, config, tmp_path))


def test_pooling_over_every_token_needs_every_token_computed(tmp_path: Path) -> None:
    """vLLM turns its own cache off; a hit from elsewhere would end the engine."""
    word_tokenizer({}).save_pretrained(tmp_path)
    pooler = {"seq_pooling_type": "MEAN"}
    said = refusal(tiny.make_llama(tmp_path), runner="pooling", convert="embed", pooler_config=pooler)
    assert "seq_pooling_type='MEAN'" in said
