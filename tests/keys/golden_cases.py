"""The inputs of the golden ids, and a program that prints what the code makes of them.

``python tests/keys/golden_cases.py`` prints the JSON of golden/identity-v1.json. That file is
never rewritten: a changed id is a changed format, which takes a new domain and a new file.
"""

from __future__ import annotations

import json

from kvstow.keys.chain import EngineChain, Extras, Media, chunk_ids_from_tokens, frame_key
from kvstow.keys.ids import ChunkId, Rank
from kvstow.keys.namespace import NamespaceParts, namespace_digest, rank_namespace
from kvstow.keys.weights import given_weights_digest
from kvstow.layout.geometry import GroupId

TOKENS = list(range(0, 4000, 7))

EXTRAS = {
    "plain": Extras(),
    "salt": Extras(cache_salt="tenant-é"),
    "lora": Extras(lora_name="sql", lora_digest=b"\x01" * 32),
    "embeds": Extras(embeds_digest=b"\x02" * 32),
    "media": Extras(media=(Media(250, 20, "image-a"), Media(300, 5, "image-b"))),
    "all": Extras("sql", b"\x01" * 32, "tenant", b"\x02" * 32, (Media(0, 1, "image-a"),)),
}

PARTS = NamespaceParts(
    format_version=1,
    layout_digest=b"\x03" * 32,
    model_id="org/model",
    revision=None,
    weights_digest=given_weights_digest("release-1"),
    weights_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=(16, 32),
    chunk_tokens=256,
    tp_size=2,
    pp_size=1,
    dcp_size=1,
    pcp_size=1,
    engine="vllm",
    engine_version="0.32.0",
    attention_backend="CPU_ATTN",
    device="cpu amx",
    model_config={"rope_theta": 10000.0, "id2label": {0: "é"}, "layers": [1, None, True]},
    speculative=None,
    quantization={"bits": 4},
    tag="blue",
)


def golden() -> dict[str, object]:
    """Every kind of id, in hexadecimal, by case."""
    namespace = namespace_digest(PARTS)
    hashes = [bytes([number]) * 32 for number in range(9)]
    chunk = ChunkId(b"\x04" * 32)
    return {
        "token_chunks": {
            name: [chunk.hex() for chunk in chunk_ids_from_tokens(TOKENS, 256, extras)]
            for name, extras in EXTRAS.items()
        },
        "engine_chunks": {
            "plain": [chunk.hex() for chunk in EngineChain(4).follow(hashes)],
            "lora": [chunk.hex() for chunk in EngineChain(4, b"\x01" * 32).follow(hashes)],
        },
        "namespace": namespace.hex(),
        "ranks": [rank_namespace(namespace, Rank(rank)).hex() for rank in range(2)],
        "rank_with_layout": rank_namespace(namespace, Rank(1), b"\x05" * 32).hex(),
        "keys": [frame_key(rank_namespace(namespace, Rank(1)), GroupId(g), chunk).hex() for g in (0, 1)],
    }


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
