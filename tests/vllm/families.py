"""One tiny random model of every family that runs on a CPU: how to make it, start it, and ask it.

Those that look at images, and those that do not import without torchvision, are in `vision/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from inprocess import CHUNK, prompt
from tiny import VOCABULARY
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from vllm.inputs import TokensPrompt

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GATED_DELTA: dict[str, Any] = {
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    # Smaller heads have no kernel.
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Three layers of linear attention and one of full attention."""

SEVERAL_GROUPS: dict[str, Any] = {"num_gpu_blocks_override": 300}
"""Several groups share the blocks, and vLLM wants enough for one longest request."""
LATENT: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 120}
RECURRENT: dict[str, Any] = SEVERAL_GROUPS | {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
GATED_DELTA_OPTIONS: dict[str, Any] = RECURRENT | {"dtype": "bfloat16"}
MAMBA2: dict[str, Any] = RECURRENT | {"max_num_batched_tokens": 32}
"""A step of one block: the CPU's kernel gives the state at the end of a step only."""
GATED_DELTA_BLOCK = 288
"""To which vLLM raises the block size, so that a page of attention is as large as a state."""

PAGED, WINDOW, STATE = "paged", "window", "state"


def text(length: int) -> Callable[[int], dict[str, Any]]:
    """Prompts of ``length`` random tokens, by seed."""
    return lambda seed: dict(TokensPrompt(prompt_token_ids=prompt(length, seed)))


@dataclass(frozen=True)
class Family:
    """A model of a family.

    Attributes:
        name: as in the table.
        make: makes it in a folder.
        kinds: of its groups, each once.
        prompt: by seed. Its last block boundary that leaves a token is a chunk boundary too, so that
            the engine's own hit and a reload are the same long.
        look_alike: by seed: the text of ``prompt`` about another image or sound; None if it is about none.
        before_media: tokens of the text before that.
        options: vLLM's.
        chunk_tokens: kvstow's.
        has_own_cache: whether vLLM keeps prefixes of it on a CPU.
        remark: for the table.
    """

    name: str
    make: Callable[[Path], Path]
    kinds: tuple[str, ...] = (PAGED,)
    prompt: Callable[[int], dict[str, Any]] = field(default=text(470))
    look_alike: Callable[[int], dict[str, Any]] | None = None
    before_media: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    chunk_tokens: int = CHUNK
    has_own_cache: bool = True
    remark: str = ""


def saved(
    kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32
) -> Path:
    """A random model of this configuration, the same every time, in ``folder``."""
    torch.manual_seed(0)
    kind(config).to(dtype).save_pretrained(folder)
    return folder


def make_llama4(folder: Path) -> Path:
    """Three of four layers attend within chunks of 128 tokens only."""
    config = Llama4TextConfig(
        **COMMON,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=128,
    )
    return saved(Llama4ForCausalLM, config, folder)


def make_gpt_oss(folder: Path) -> Path:
    """Every other layer sees a window only; attention has sinks."""
    config = GptOssConfig(
        **COMMON,
        intermediate_size=64,
        num_hidden_layers=4,
        head_dim=32,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 2048,
        },
    )
    return saved(GptOssForCausalLM, config, folder)


def make_deepseek_v3(folder: Path) -> Path:
    """Latent attention with compressed queries, and a router with groups of experts."""
    config = DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        # The only sizes that the CPU kernel of this attention is compiled for: 512 + 64.
        kv_lora_rank=512,
        q_lora_rank=32,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=32,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
    )
    return saved(DeepseekV3ForCausalLM, config, folder)


def make_qwen3_next(folder: Path) -> Path:
    """Gated delta networks, and full attention in every fourth layer."""
    config = Qwen3NextConfig(
        **COMMON,
        **GATED_DELTA,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return saved(Qwen3NextForCausalLM, config, folder, torch.bfloat16)


def make_lfm2(folder: Path) -> Path:
    """Short convolutions, and full attention in one layer of four."""
    size = 128
    config = Lfm2Config(
        **COMMON | {"hidden_size": size},
        intermediate_size=size,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_multiple_of=32,
        # Names that vLLM reads and transformers no longer writes.
        conv_dim=size,
        block_dim=size,
    )
    return saved(Lfm2ForCausalLM, config, folder)


def make_mamba2(folder: Path) -> Path:
    """Recurrent layers only."""
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return saved(Mamba2ForCausalLM, config, folder)


def make_falcon_h1(folder: Path) -> Path:
    """Full attention and Mamba 2 side by side in every layer."""
    config = FalconH1Config(
        **COMMON,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )
    return saved(FalconH1ForCausalLM, config, folder)


def make_gemma3n(folder: Path) -> Path:
    """The upper five of ten layers have no keys and values: they look at those of the lower ones."""
    config = Gemma3nTextConfig(
        **COMMON,
        intermediate_size=128,
        num_hidden_layers=10,
        head_dim=32,
        sliding_window=64,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
        num_kv_shared_layers=5,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        altup_num_inputs=2,
    )
    return saved(Gemma3nForCausalLM, config, folder)


def make_gemma4(folder: Path) -> Path:
    """Heads of layers with full attention are twice as large as those of layers with a window."""
    config = Gemma4TextConfig(
        **COMMON,
        intermediate_size=128,
        num_hidden_layers=6,
        head_dim=32,
        global_head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
    )
    return saved(Gemma4ForCausalLM, config, folder)


def make_mistral(folder: Path) -> Path:
    """Every layer sees a window only; it is not a whole number of blocks."""
    config = MistralConfig(
        **COMMON, intermediate_size=128, num_hidden_layers=3, head_dim=32, sliding_window=80
    )
    return saved(MistralForCausalLM, config, folder)


def make_pangu(folder: Path) -> Path:
    """Windows of two sizes, and full attention in every third layer."""
    tiny.make_llama(folder, layers=6)
    file = folder / "config.json"
    # transformers does not have this one. Its weights have the names and shapes of Llama's.
    config = json.loads(file.read_text()) | {
        "architectures": ["PanguEmbeddedForCausalLM"],
        "bias": False,
        "interleaved_sliding_window": [64, 160, None],
    }
    file.write_text(json.dumps(config))
    return folder


LLAMA = Family("Llama", tiny.make_llama)
GEMMA = Family("Gemma 3 text", tiny.make_gemma, kinds=(WINDOW, PAGED), options=SEVERAL_GROUPS)
DEEPSEEK_V2 = Family(
    "DeepSeek-V2",
    tiny.make_deepseek,
    options=LATENT,
    has_own_cache=False,
    remark="latent attention; vLLM keeps no prefixes of it on a CPU, so the cold run is the oracle",
)
QWEN3_NEXT = Family(
    "Qwen3-Next",
    make_qwen3_next,
    kinds=(STATE, PAGED),
    prompt=text(900),
    options=GATED_DELTA_OPTIONS,
    chunk_tokens=GATED_DELTA_BLOCK,
    remark="gated delta networks",
)

SHORT = (LLAMA, GEMMA, QWEN3_NEXT, DEEPSEEK_V2)
"""One dense, one with windows, one hybrid, one with latent attention."""
LONG = (
    Family(
        "Llama 4 text",
        make_llama4,
        kinds=(WINDOW, PAGED),
        options=SEVERAL_GROUPS,
        remark="chunked-local attention",
    ),
    Family("GPT-OSS", make_gpt_oss, kinds=(WINDOW, PAGED), options=SEVERAL_GROUPS, remark="attention sinks"),
    Family(
        "DeepSeek-V3",
        make_deepseek_v3,
        options=LATENT,
        has_own_cache=False,
        remark="latent attention, as DeepSeek-V2",
    ),
    Family(
        "LFM2",
        make_lfm2,
        kinds=(STATE, PAGED),
        options=RECURRENT,
        chunk_tokens=32,
        remark="short convolutions",
    ),
    Family(
        "Mamba 2",
        make_mamba2,
        kinds=(STATE,),
        options=MAMBA2,
        chunk_tokens=32,
        remark="no attention; steps of 32 tokens",
    ),
    Family(
        "Falcon-H1",
        make_falcon_h1,
        kinds=(STATE, PAGED),
        options=MAMBA2,
        chunk_tokens=32,
        remark="attention and Mamba 2 in every layer; steps of 32 tokens",
    ),
    Family(
        "Gemma 3n text",
        make_gemma3n,
        kinds=(WINDOW, PAGED),
        options=SEVERAL_GROUPS,
        remark="half of the layers look at another layer's keys and values",
    ),
    Family(
        "Gemma 4 text",
        make_gemma4,
        kinds=(WINDOW, PAGED),
        options=SEVERAL_GROUPS,
        remark="heads of two sizes: blocks of 64 tokens for windows, of 32 for the rest",
    ),
    Family(
        "Gemma 4 text, one group",
        make_gemma4,
        options=SEVERAL_GROUPS | {"disable_hybrid_kv_cache_manager": True},
        remark="the same without vLLM's hybrid cache manager: pages of two sizes in a group",
    ),
    Family("Mistral", make_mistral, kinds=(WINDOW,), remark="windows in every layer"),
    Family(
        "openPangu Embedded",
        make_pangu,
        kinds=(WINDOW, PAGED),
        options=SEVERAL_GROUPS,
        remark="windows of two sizes",
    ),
)


def cases(families: Iterable[Family], others: Iterable[Family] = ()) -> list[Any]:
    """Parameters of a test: families by name, and ``others`` in the long form of the matrix only."""
    return [
        *[pytest.param(family, id=family.name) for family in families],
        *[pytest.param(family, id=family.name, marks=pytest.mark.models) for family in others],
    ]
