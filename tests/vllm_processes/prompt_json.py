"""Prompts with images and sounds as JSON, for an engine in a process of its own.

Pixels and samples travel as bytes in base64, so what the engine gets is what the test made, bit for bit.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image


def to_json(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt as vLLM takes it: token ids, RGB images, and sounds with their sampling rates.

    Raises:
        ValueError: it has something else in it.
    """
    media: Mapping[str, Any] = prompt.get("multi_modal_data", {})
    strangers = {*prompt, *media} - {"prompt_token_ids", "multi_modal_data", "image", "audio"}
    if strangers:
        raise ValueError(f"no JSON form for {sorted(strangers)}")
    return {
        "tokens": list(prompt["prompt_token_ids"]),
        "images": [{"size": image.size, "rgb": _text(image.tobytes())} for image in media.get("image", [])],
        "sounds": [
            {"rate": rate, "float32": _text(samples.astype("<f4").tobytes())}
            for samples, rate in media.get("audio", [])
        ],
    }


def from_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that `to_json` was given."""
    images = [
        Image.frombytes("RGB", tuple(image["size"]), b64decode(image["rgb"])) for image in message["images"]
    ]
    sounds = [
        (np.frombuffer(b64decode(sound["float32"]), "<f4").copy(), sound["rate"])
        for sound in message["sounds"]
    ]
    media = {name: items for name, items in (("image", images), ("audio", sounds)) if items}
    prompt: dict[str, Any] = {"prompt_token_ids": message["tokens"]}
    return prompt | ({"multi_modal_data": media} if media else {})


def _text(content: bytes) -> str:
    return b64encode(content).decode()
