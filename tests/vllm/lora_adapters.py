"""Tiny LoRA adapters in PEFT's format, for the model of `tiny.make_llama` by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8

LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, "max_cpu_loras": 4}
"""Options of an engine that takes them."""

Modules = Mapping[str, tuple[int, int]]
"""Inputs and outputs of linear layers, by their names in the model's checkpoint."""

LLAMA: Modules = {
    f"model.layers.{layer}.self_attn.{name}": (64, outputs)
    for layer in range(3)
    for name, outputs in (("q_proj", 128), ("v_proj", 64))
}
"""The attention's query and value."""


def make_adapter(folder: Path, seed: int, modules: Modules = LLAMA) -> Path:
    """An adapter of ``modules``; ``seed`` decides what it contains."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for module, (inputs, outputs) in modules.items():
        stem = f"base_model.model.{module}"
        weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
        weights[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
