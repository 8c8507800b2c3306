"""The namespace of a vLLM engine: everything that must agree before bytes are shared.

Read in the worker, after the model was loaded. What cannot be read is an error, never a default.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvstow.adapters.vllm.compat import vllm_version
from kvstow.config.settings import Settings
from kvstow.errors import ConfigError
from kvstow.keys.namespace import NamespaceParts
from kvstow.keys.weights import given_weights_digest, weights_digest
from kvstow.stores.framing import VERSION

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def namespace_parts(
    vllm_config: VllmConfig,
    settings: Settings,
    block_tokens: tuple[int, ...],
    agreed_digest: bytes,
    backends: str,
) -> NamespaceParts:
    """Everything that identifies this engine's bytes, apart from the rank.

    Args:
        vllm_config: the engine's configuration.
        settings: what the user chose.
        block_tokens: tokens per block, by group.
        agreed_digest: of what all ranks know of the layout.
        backends: names of the attention backends that lay the blocks out.

    Raises:
        ConfigError: something cannot be read; names it.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return NamespaceParts(
        format_version=VERSION,
        layout_digest=agreed_digest,
        model_id=_model_id(model.model),
        revision=model.revision,
        weights_digest=_weights(vllm_config, settings),
        weights_dtype=str(model.dtype),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        block_tokens=block_tokens,
        chunk_tokens=settings.chunk_tokens,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        engine="vllm",
        engine_version=vllm_version(),
        attention_backend=backends,
        device=_device(),
        # With dtype as a name: JSON knows no torch types.
        model_config=_plain({"hf": model.hf_config.to_dict(), "vllm": _options(model)}),
        speculative=_speculative(vllm_config, settings),
        quantization=_quantization(vllm_config),
        tag=settings.namespace,
    )


def _model_id(model: str) -> str:
    # One folder under two spellings is one model.
    return str(Path(model).resolve()) if Path(model).exists() else model


def _weights(vllm_config: VllmConfig, settings: Settings) -> bytes:
    if settings.weights_digest is not None:
        return given_weights_digest(settings.weights_digest)
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if load_format.endswith("dummy"):
        raise ConfigError(
            f"load_format={load_format!r}: there are no weight files to identify; set weights_digest in "
            "kv_connector_extra_config to a text that changes whenever the weights do"
        )
    return weights_digest(_weights_folder(model.model, model.revision, vllm_config.load_config.download_dir))


def _weights_folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # The model is loaded by now, so its files are here; never fetch anything for a name.
        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(
            f"model={model!r}: its weight files are neither a folder nor in the local hub cache "
            f"(download_dir={download_dir!r}; {error}); "
            "set weights_digest in kv_connector_extra_config to a text that changes whenever they do"
        ) from error


def _device() -> str:
    """Kind of device, and what of its abilities changes the inside of a block."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda sm_{major}{minor}"
    # CPU attention kernels choose how K is laid out by instruction set.
    abilities = [str(torch.backends.cpu.get_cpu_capability())]
    if torch.cpu._is_amx_tile_supported():
        abilities.append("amx")
    return "cpu " + " ".join(abilities)


def _speculative(vllm_config: VllmConfig, settings: Settings) -> Mapping[str, object] | None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    named = draft.model if draft is not None else None
    weights = ""
    if draft is not None and settings.weights_digest is None:
        load = speculative.draft_load_config or vllm_config.load_config
        weights = weights_digest(_weights_folder(draft.model, draft.revision, load.download_dir)).hex()
    return {
        "method": str(speculative.method),
        "model": str(named),
        "num_speculative_tokens": speculative.num_speculative_tokens,
        # A draft model that shares the block table writes KV of its own into it.
        "weights": weights,
    }


def _quantization(vllm_config: VllmConfig) -> Mapping[str, object] | None:
    model = vllm_config.model_config
    if model.quantization is None:
        return None
    # For methods that quantise while they load, this says how.
    return {"method": str(model.quantization), "config": repr(getattr(model, "quantization_config", None))}


def _options(model: ModelConfig) -> Mapping[str, object]:
    """What vLLM is told of a model beside its configuration, and what changes the bytes."""
    media = model.multimodal_config
    return {
        # LongRoPE turns keys by one set of factors or another, as this is long. Of what was asked for: what
        # is made of it follows from the configuration, or from the memory after the model was made.
        "max_model_len": model.original_max_model_len,
        # Hashes of images cover what a request says of this, and not what the engine was started with.
        "mm_processor_kwargs": media and media.mm_processor_kwargs,
    }


def _plain(value: Any) -> Any:
    """A configuration with the types that JSON lacks written as text."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    # Mamba 2 and its kin bound a time step by infinity, for which JSON has no number.
    if isinstance(value, torch.dtype) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return value
