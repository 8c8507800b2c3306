"""A tiny random model that listens, and prompts with sounds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from families import COMMON, Family, saved
from inprocess import prompt
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from words import word_tokenizer

SPECIAL = {"<|audio_bos|>": 3, "<|audio_eos|>": 4, "<|AUDIO|>": 5}
START, END, AUDIO = 3, 4, 5
RATE = 16_000
TOKENS_PER_S = 25
OPTIONS: dict[str, Any] = {
    # The processor replaces a sound's one token by as many as it has.
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"audio": 2},
}
_MEL_BINS = 16

Sound = tuple[np.ndarray, int]


def sound(seed: int, length_s: float = 1.0) -> Sound:
    """Noise, and its sampling rate."""
    noise = np.random.default_rng(seed).standard_normal(int(length_s * RATE))
    return noise.astype(np.float32), RATE


def asked(tokens: list[int], sounds: list[Sound]) -> dict[str, Any]:
    """A prompt in which each `AUDIO` stands for the next sound."""
    return {"prompt_token_ids": tokens, "multi_modal_data": {"audio": sounds}}


def make_qwen2_audio(folder: Path) -> Path:
    """A dense model behind an encoder of sounds."""
    size = 128
    config = Qwen2AudioConfig(
        text_config=COMMON
        | {"model_type": "qwen2", "hidden_size": size, "intermediate_size": 128, "num_hidden_layers": 2},
        audio_config={
            "num_mel_bins": _MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 64,
        },
        audio_token_index=AUDIO,
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=_MEL_BINS), tokenizer=word_tokenizer(SPECIAL)
    )
    processor.save_pretrained(folder)
    saved(Qwen2AudioForConditionalGeneration, config, folder)
    weights = folder / "model.safetensors"
    # vLLM knows the names of the published checkpoints, transformers writes others now.
    renamed = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(renamed, weights, metadata={"format": "pt"})
    return folder


def about_a_sound(length: int) -> dict[str, Any]:
    """How a `Family` asks: ``length`` tokens of text with a second of noise in their middle."""

    def asking(seed: int, noise: int) -> dict[str, Any]:
        before, after = prompt(length // 2, seed), prompt(length - length // 2, seed + 1000)
        return asked([*before, START, AUDIO, END, *after], [sound(noise)])

    return {
        "prompt": lambda seed: asking(seed, noise=seed),
        "look_alike": lambda seed: asking(seed, noise=seed + 1000),
        "before_media": length // 2 + 1,
    }


QWEN2_AUDIO = Family(
    "Qwen2-Audio",
    make_qwen2_audio,
    **about_a_sound(443),
    options=OPTIONS,
    remark=f"a sound of {TOKENS_PER_S} tokens in the middle",
)
