"""Tiny random models that look at images, with processors and prompts; and those that need torchvision."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from families import (
    COMMON,
    GATED_DELTA,
    GATED_DELTA_BLOCK,
    GATED_DELTA_OPTIONS,
    PAGED,
    STATE,
    Family,
    saved,
    text,
)
from inprocess import prompt
from PIL import Image
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from words import word_tokenizer

SPECIAL = {
    "<|vision_start|>": 3,
    "<|vision_end|>": 4,
    "<|image_pad|>": 5,
    "<|video_pad|>": 6,
}
VISION_START, VISION_END, IMAGE = 3, 4, 5
SPECIAL_IDS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE,
    "video_token_id": 6,
}
TURNED: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
"""Rotary embeddings of positions in three dimensions."""

OPTIONS: dict[str, Any] = {
    # The processor replaces an image's one token by as many as it has.
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}


def picture(seed: int, side: int) -> Image.Image:
    """A square of noise."""
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))


def asked(tokens: list[int], images: list[Image.Image]) -> dict[str, Any]:
    """A prompt in which each `IMAGE` stands for the next image."""
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}


def about_a_picture(length: int, side: int) -> dict[str, Any]:
    """How a `Family` asks: ``length`` tokens of text with a picture in their middle."""

    def asking(seed: int, noise: int) -> dict[str, Any]:
        before, after = prompt(length // 2, seed), prompt(length - length // 2, seed + 1000)
        return asked([*before, VISION_START, IMAGE, VISION_END, *after], [picture(noise, side)])

    return {
        "prompt": lambda seed: asking(seed, noise=seed),
        "look_alike": lambda seed: asking(seed, noise=seed + 1000),
        "before_media": length // 2 + 1,
    }


def make_qwen2_vl(folder: Path) -> Path:
    """A dense model behind a vision encoder with patches of 14 pixels."""
    size = 128
    config = Qwen2VLConfig(
        text_config=COMMON
        | {"hidden_size": size, "intermediate_size": 128, "num_hidden_layers": 2, "rope_parameters": TURNED},
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": size,
            "num_heads": 2,
            "patch_size": 14,
            "mlp_ratio": 2,
        },
        **SPECIAL_IDS,
    )
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=word_tokenizer(SPECIAL),
        video_processor=Qwen2VLVideoProcessor(),
    )
    processor.save_pretrained(folder)
    return saved(Qwen2VLForConditionalGeneration, config, folder)


def make_qwen3_vl(folder: Path) -> Path:
    """The encoder's inner layers go into the language model's, too."""
    config = Qwen3VLConfig(
        text_config=COMMON
        | {
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "rope_parameters": TURNED | {"mrope_interleaved": True},
        },
        vision_config=_encoder(deepstack_visual_indexes=[0]),
        **SPECIAL_IDS,
    )
    _save_qwen3_processor(folder)
    return saved(Qwen3VLForConditionalGeneration, config, folder)


def make_qwen3_5(folder: Path) -> Path:
    """Gated delta networks, text only."""
    return saved(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**COMMON, **GATED_DELTA), folder, torch.bfloat16)


def make_qwen3_5_vl(folder: Path) -> Path:
    """Gated delta networks behind a vision encoder."""
    rope = TURNED | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    config = Qwen3_5Config(
        text_config=COMMON | GATED_DELTA | {"rope_parameters": rope},
        vision_config=_encoder(),
        **SPECIAL_IDS,
    )
    _save_qwen3_processor(folder)
    return saved(Qwen3_5ForConditionalGeneration, config, folder, torch.bfloat16)


def _encoder(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": COMMON["hidden_size"],
        "num_position_embeddings": 256,
        **more,
    }


def _save_qwen3_processor(folder: Path) -> None:
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16),
        tokenizer=word_tokenizer(SPECIAL),
        video_processor=Qwen3VLVideoProcessor(),
    )
    processor.save_pretrained(folder)


QWEN2_VL = Family(
    "Qwen2-VL",
    make_qwen2_vl,
    **about_a_picture(452, side=112),
    options=OPTIONS,
    remark="an image of 16 tokens in the middle",
)
SHORT = (QWEN2_VL,)
LONG = (
    Family(
        "Qwen3-VL",
        make_qwen3_vl,
        **about_a_picture(452, side=128),
        options=OPTIONS,
        remark="an image of 16 tokens in the middle; deepstack",
    ),
    Family(
        "Qwen3.5 text",
        make_qwen3_5,
        kinds=(STATE, PAGED),
        prompt=text(900),
        options=GATED_DELTA_OPTIONS,
        chunk_tokens=GATED_DELTA_BLOCK,
        remark="gated delta networks",
    ),
    Family(
        "Qwen3.5-VL",
        make_qwen3_5_vl,
        kinds=(STATE, PAGED),
        **about_a_picture(880, side=128),
        options=OPTIONS | GATED_DELTA_OPTIONS,
        chunk_tokens=GATED_DELTA_BLOCK,
        remark="gated delta networks; an image of 16 tokens in the middle",
    ),
)
