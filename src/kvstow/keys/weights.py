"""Digests of weight files: sampled for a model, complete for an adapter.

A model's weights are too large to hash at every start, so `weights_digest` reads a bounded
part of them at fixed places. docs/design/001-identity.md says what that can miss.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from kvstow.errors import ConfigError
from kvstow.keys.digest import digest, frame

_WEIGHTS_DOMAIN = b"kvstow.weights.v1"
_GIVEN_DOMAIN = b"kvstow.weights.given.v1"
_ADAPTER_DOMAIN = b"kvstow.adapter.v1"

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SIDE_SUFFIXES = frozenset({".json", ".py"})
"""Shard indexes, pre-processing, quantization and scales, and a model's own code: small files, read
in full, that decide what the weights compute."""
_HARMLESS_NAMES = frozenset(
    {
        # The configuration is a part of the namespace in its own right, as the engine read it.
        "config.json",
        # Tokens are keyed, so how text becomes tokens, or is chosen, decides no bytes.
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "merges.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_GGUF_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

FULL_BYTES_MAX = 64 << 20
"""Weights of at most so many bytes are read in full."""
SAMPLES_MAX = 4096
"""Samples over all files of larger weights, shared out by size, at least `FILE_SAMPLES_MIN` a file."""
FILE_SAMPLES_MIN = 16
SAMPLE_BYTES = 4096
EDGE_BYTES = 64 << 10
"""Read at the start and at the end of every file."""
GGUF_HEAD_BYTES = 16 << 20
"""Read at the start of a GGUF file, whose header holds the tokenizer."""
SAFETENSORS_HEADER_MAX = 100_000_000
"""The bound of the safetensors format on its header."""
FILES_MAX = 10_000

_STEP_BYTES = 1 << 20


def weights_digest(path: Path) -> bytes:
    """Digest of a model's weights: names, sizes, headers, and samples of the content.

    Reads about `SAMPLES_MAX` samples, the headers, and the edges of each file, whatever the
    size, and in full the small files that decide what the weights compute; blocks on that I/O.
    Sub-folders count; hidden and linked ones do not.

    Args:
        path: the model's folder, or one weight file (GGUF; its other shards are found).

    Returns:
        32 bytes. The same files give the same bytes on every host.

    Raises:
        ConfigError: no weight file there, one that cannot be read, or one with a bad header.
    """
    files = _find_weights(path)
    sizes = [_size_bytes(file) for _, file in files]
    total_bytes = sum(sizes)
    parts: list[bytes] = []
    for (name, file), size_bytes in zip(files, sizes, strict=True):
        if total_bytes <= FULL_BYTES_MAX or file.suffix in _SIDE_SUFFIXES:
            ranges: Sequence[tuple[int, int]] = [(0, size_bytes)]
        else:
            samples = max(FILE_SAMPLES_MIN, SAMPLES_MAX * size_bytes // total_bytes)
            ranges = _choose_ranges(file, size_bytes, samples)
        parts += [name.encode(), size_bytes.to_bytes(8, "little"), _digest_ranges(file, ranges)]
    return digest(_WEIGHTS_DOMAIN, *parts)


def given_weights_digest(text: str) -> bytes:
    """The digest that the setting ``weights_digest`` stands for; meets no digest of files."""
    return digest(_GIVEN_DOMAIN, text.encode())


def adapter_digest(folder: Path) -> bytes:
    """Digest of a LoRA adapter: its configuration and weights, every byte.

    Blocks on reading the files; about 2 GB/s when they are cached. Call it once per adapter.

    Raises:
        ConfigError: ``folder`` is not an adapter, or cannot be read.
    """
    files = sorted([*folder.glob("adapter_config.json"), *folder.glob("adapter_model.*")])
    if not any(file.name == "adapter_config.json" for file in files) or len(files) < 2:
        raise ConfigError(
            f"{folder} holds {[file.name for file in files]}: want an adapter_config.json and an "
            "adapter_model.safetensors or .bin; name the adapter's folder"
        )
    files += sorted(folder.glob("new_embeddings.*"))
    parts: list[bytes] = []
    for file in files:
        size_bytes = _size_bytes(file)
        parts += [file.name.encode(), size_bytes.to_bytes(8, "little")]
        parts.append(_digest_ranges(file, [(0, size_bytes)]))
    return digest(_ADAPTER_DOMAIN, *parts)


def _find_weights(path: Path) -> list[tuple[str, Path]]:
    """Weight and side files with their names relative to ``path``, sorted by name."""
    if path.is_file():
        shard = _GGUF_SHARD.search(path.name)
        stem = path.name[: shard.start()] if shard else ""
        names = [
            file.name
            for file in path.parent.iterdir()
            if shard and file.name.startswith(stem) and _GGUF_SHARD.fullmatch(file.name[len(stem) :])
        ]
        return [(name, path.parent / name) for name in sorted(names or [path.name])]
    files = sorted(islice(_walk(path), FILES_MAX + 1))
    if not any(file.suffix in _WEIGHT_SUFFIXES for _, file in files):
        raise ConfigError(
            f"no weight file ({', '.join(sorted(_WEIGHT_SUFFIXES))}) in {path}; where weights cannot be "
            "read, set weights_digest to a text that you change whenever they change"
        )
    if len(files) > FILES_MAX:
        raise ConfigError(f"more than {FILES_MAX} files in {path}: not a model's folder; set weights_digest")
    return files


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    def refuse(error: OSError) -> None:
        if error.filename != str(folder):
            raise ConfigError(
                f"cannot read {error.filename} ({error.strerror}); repair it, or set weights_digest"
            )

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(root, name)
            is_side = file.suffix in _SIDE_SUFFIXES and name not in _HARMLESS_NAMES
            if is_side or file.suffix in _WEIGHT_SUFFIXES:
                yield file.relative_to(folder).as_posix(), file


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror}); repair it, or set weights_digest"
        ) from error


def _choose_ranges(file: Path, size_bytes: int, samples: int) -> list[tuple[int, int]]:
    """Where to read: (offset, bytes), from the size and header alone."""
    head_bytes = GGUF_HEAD_BYTES if file.suffix == ".gguf" else EDGE_BYTES
    tensors: list[tuple[int, int]] = []
    if file.suffix == ".safetensors":
        head_bytes, tensors = _read_safetensors_header(file, size_bytes)
        head_bytes += EDGE_BYTES
    middles = [
        begin + max(0, end - begin - SAMPLE_BYTES) // 2 for begin, end in _spread(tensors, samples // 2)
    ]
    evenly = samples - len(middles)
    grid = [size_bytes * index // evenly for index in range(evenly)]
    wanted = [(0, head_bytes), (size_bytes - EDGE_BYTES, EDGE_BYTES)]
    wanted += [(offset, SAMPLE_BYTES) for offset in sorted({*middles, *grid})]
    clipped = [(max(0, offset), min(size_bytes, offset + length)) for offset, length in wanted]
    return [(begin, end - begin) for begin, end in clipped]


def _spread(tensors: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most ``most`` of them, evenly chosen."""
    if len(tensors) <= most:
        return tensors
    return [tensors[len(tensors) * index // most] for index in range(most)]


def _read_safetensors_header(file: Path, size_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Length of the header with its length word, and where each tensor lies in the file.

    Format: 8 bytes little-endian length, JSON, data (github.com/huggingface/safetensors).
    """
    word = b"".join(_read(file, [(0, min(8, size_bytes))]))
    header_bytes = int.from_bytes(word, "little")
    if size_bytes < 8 or header_bytes > min(size_bytes - 8, SAFETENSORS_HEADER_MAX):
        raise ConfigError(
            f"{file} ({size_bytes} bytes) claims a header of {header_bytes}: not a whole safetensors file; "
            "fetch it again"
        )
    try:
        entries = msgspec.json.decode(
            b"".join(_read(file, [(8, header_bytes)])), type=dict[str, dict[str, object]]
        )
        entries.pop("__metadata__", None)
        spans = msgspec.convert([entry["data_offsets"] for entry in entries.values()], list[tuple[int, int]])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(f"{file}: its safetensors header is broken ({error}); fetch it again") from error
    data = 8 + header_bytes
    if any(not 0 <= begin <= end <= size_bytes - data for begin, end in spans):
        raise ConfigError(f"{file} ({size_bytes} bytes) is shorter than its header says; fetch it again")
    return data, sorted((data + begin, data + end) for begin, end in spans)


def _digest_ranges(file: Path, ranges: Sequence[tuple[int, int]]) -> bytes:
    hasher = hashlib.sha256()
    for offset, length in ranges:
        hasher.update(frame(offset.to_bytes(8, "little") + length.to_bytes(8, "little")))
    for piece in _read(file, ranges):
        hasher.update(piece)
    return hasher.digest()


def _read(file: Path, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of all ranges, in steps of at most a MiB."""
    try:
        with file.open("rb", buffering=0) as source:
            for offset, length in ranges:
                for start in range(offset, offset + length, _STEP_BYTES):
                    step_bytes = min(_STEP_BYTES, offset + length - start)
                    piece = os.pread(source.fileno(), step_bytes, start)
                    if len(piece) != step_bytes:
                        raise ConfigError(
                            f"{file} gave {len(piece)} of {step_bytes} bytes at {start}: it changed while it "
                            "was read; start again when it is complete"
                        )
                    yield piece
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror}); repair it, or set weights_digest"
        ) from error
