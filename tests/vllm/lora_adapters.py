"""Tiny LoRA adapters in PEFT's format, for the model of `tiny.make_llama`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN = 64
LAYERS = 3
RANK = 8

LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, "max_cpu_loras": 4}
"""Options of an engine that takes them."""


def make_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the attention's query and value; ``seed`` decides what it contains."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    outputs = {"q_proj": 128, "v_proj": 64}
    weights = {}
    for layer in range(LAYERS):
        for name, rows in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
