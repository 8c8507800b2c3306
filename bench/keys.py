"""Identity: chunk ids, frame keys, and the digests taken at start.

``python bench/keys.py [--json PATH]``; the targets are of docs/design/001-identity.md.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstow.keys.chain import EngineChain, Extras, Media, TokenChain, chunk_ids_from_tokens, frame_key
from kvstow.keys.ids import NamespaceDigest
from kvstow.keys.namespace import NamespaceParts, namespace_digest
from kvstow.keys.weights import weights_digest
from kvstow.layout.geometry import GroupId
from report import emit

PROMPT_TOKENS = 128 * 1024
CHUNK_TOKENS = 256
HASH_TOKENS = 16
WEIGHTS_BYTES = 16 << 30
SHARDS = 4
LAYERS = 32
REPEATS = 15


def measure(name: str, work: Callable[[], object], target_ms: float | None = None) -> dict[str, Any]:
    """Time ``work``: the best and the median of `REPEATS` runs."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    times.sort()
    return {
        "what": name,
        "best_ms": times[0],
        "median_ms": times[len(times) // 2],
        "target_ms": "-" if target_ms is None else f"{target_ms:g}",
    }


def prompt_rows() -> list[dict[str, Any]]:
    """Chunk ids and frame keys of one long prompt."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    hashes = [rng.randbytes(32) for _ in range(PROMPT_TOKENS // HASH_TOKENS)]
    media = tuple(Media(offset, 800, f"image-{offset}") for offset in range(0, PROMPT_TOKENS, 4096))
    ids = chunk_ids_from_tokens(tokens, CHUNK_TOKENS)
    namespace = NamespaceDigest(bytes(32))
    followed = EngineChain(CHUNK_TOKENS // HASH_TOKENS)
    followed.follow(hashes[:-16])

    def one_turn() -> None:
        chain = TokenChain(CHUNK_TOKENS)
        chain.extend(tokens[:2048])

    def follow_again() -> None:
        followed.follow(hashes)

    per_chunk = CHUNK_TOKENS // HASH_TOKENS
    return [
        measure(
            "token chunk ids, 128k tokens from a list", lambda: chunk_ids_from_tokens(tokens, CHUNK_TOKENS), 3
        ),
        measure(
            "token chunk ids, 128k tokens, 32 images",
            lambda: chunk_ids_from_tokens(
                tokens, CHUNK_TOKENS, Extras("lora", bytes(32), "salt", b"", media)
            ),
        ),
        measure("token chunk ids, a turn of 2k tokens", one_turn),
        measure(f"engine chunk ids, {len(hashes)} hashes", lambda: EngineChain(per_chunk).follow(hashes), 3),
        measure("engine chunk ids, the same list again", follow_again),
        measure(f"frame keys, {len(ids)}", lambda: [frame_key(namespace, GroupId(0), i) for i in ids], 1),
    ]


def start_rows() -> list[dict[str, Any]]:
    """What is digested once, at start."""
    config = {f"key_{number}": [number, float(number), str(number)] for number in range(200)}
    parts = NamespaceParts(
        format_version=1,
        layout_digest=bytes(32),
        model_id="model",
        revision=None,
        weights_digest=bytes(32),
        weights_dtype="bfloat16",
        kv_dtype="bfloat16",
        block_tokens=(16,),
        chunk_tokens=CHUNK_TOKENS,
        tp_size=1,
        pp_size=1,
        dcp_size=1,
        pcp_size=1,
        engine="bench",
        engine_version="1",
        attention_backend="none",
        device="cpu",
        model_config=config,
        speculative=None,
        quantization=None,
    )
    rows = [measure("namespace digest, config of 200 keys", lambda: namespace_digest(parts))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_weights(folder)
        rows.append(measure("weights digest, 16 GiB in 4 sparse files", lambda: weights_digest(folder), 1000))
    return rows


def write_weights(folder: Path) -> None:
    """A folder of the shape of a 16 GiB model; sparse, so it takes no room and no disk answers."""
    for shard in range(SHARDS):
        tensors = [f"model.layers.{shard * LAYERS // SHARDS + n // 9}.part{n % 9}" for n in range(72)]
        each = WEIGHTS_BYTES // SHARDS // len(tensors)
        header = {
            tensor: {"dtype": "U8", "shape": [each], "data_offsets": [index * each, (index + 1) * each]}
            for index, tensor in enumerate(tensors)
        }
        text = json.dumps(header).encode()
        with (folder / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + each * len(tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    emit("keys", [*prompt_rows(), *start_rows()], arguments.json)


if __name__ == "__main__":
    main()
