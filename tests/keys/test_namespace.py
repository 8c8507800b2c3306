"""Namespaces: every part counts, and nothing ambiguous gets in."""

from __future__ import annotations

import hashlib
import json
import struct
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstow.errors import ConfigError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.keys.namespace import NamespaceParts, canonical_json, explain, namespace_digest, rank_namespace

CONFIG = {
    "model_type": "llama",
    "_name_or_path": "/models/a",
    "transformers_version": "5.0",
    "rope_parameters": {"rope_theta": 10000.0, "_name_or_path": "x"},
    "id2label": {0: "A", 1: "B"},
    "layers": [{"kind": "full", "_commit_hash": "x"}, None, True],
}

PARTS = NamespaceParts(
    format_version=1,
    layout_digest=b"l" * 32,
    model_id="org/model",
    revision="main",
    weights_digest=b"w" * 32,
    weights_dtype="bfloat16",
    kv_dtype="fp8_e4m3",
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
    model_config=CONFIG,
    speculative=None,
    quantization=None,
    tag="",
)


def changed(**parts: object) -> NamespaceParts:
    return msgspec.structs.replace(PARTS, **parts)


def test_the_digest_is_what_the_format_says() -> None:
    fields = msgspec.structs.asdict(PARTS)
    fields |= {"layout_digest": (b"l" * 32).hex(), "weights_digest": (b"w" * 32).hex()}
    fields["model_config"] = {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 10000.0},
        "id2label": {"0": "A", "1": "B"},
        "layers": [{"kind": "full"}, None, True],
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    domain = b"kvstow.namespace.v1"
    framed = struct.pack("<Q", len(domain)) + domain + struct.pack("<Q", len(text)) + text
    assert namespace_digest(PARTS) == hashlib.sha256(framed).digest()


def test_every_part_counts() -> None:
    others: dict[str, object] = {
        "format_version": 2,
        "layout_digest": b"m" * 32,
        "model_id": "org/model2",
        "revision": None,
        "weights_digest": b"x" * 32,
        "weights_dtype": "float16",
        "kv_dtype": "bfloat16",
        "block_tokens": (16,),
        "chunk_tokens": 128,
        "tp_size": 1,
        "pp_size": 2,
        "dcp_size": 2,
        "pcp_size": 2,
        "engine": "native",
        "engine_version": "0.32.1",
        "attention_backend": "FLASH",
        "device": "cpu avx2",
        "model_config": {**CONFIG, "rope_parameters": {"rope_theta": 5e5}},
        "speculative": {"method": "ngram"},
        "quantization": {"bits": 4},
        "tag": "mine",
    }
    assert set(others) == {field.name for field in msgspec.structs.fields(NamespaceParts)}
    digests = [namespace_digest(changed(**{name: value})) for name, value in others.items()]
    assert len({*digests, namespace_digest(PARTS)}) == len(others) + 1


def test_where_a_config_came_from_and_the_order_of_names_do_not_count() -> None:
    moved = {"transformers_version": "4.0", **{k: v for k, v in reversed(CONFIG.items()) if k[0] != "_"}}
    moved["rope_parameters"] = {"rope_theta": 10000.0}
    assert namespace_digest(changed(model_config=moved)) == namespace_digest(PARTS)
    # A config read from its JSON file has text for the names that were numbers.
    stored = json.loads(json.dumps(CONFIG))
    assert namespace_digest(changed(model_config=stored)) == namespace_digest(PARTS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"namespace.model_config.a.b\[1\]=nan"),
        ({"a": float("inf")}, "namespace.model_config.a=inf"),
        ({"dtype": np.dtype("float32")}, "namespace.model_config.dtype is a numpy"),
        ({"a": b"x"}, "namespace.model_config.a is a builtins.bytes"),
        ({"a": {1, 2}}, "namespace.model_config.a is a builtins.set"),
        ({"a": np.int64(3)}, "namespace.model_config.a is a numpy.int64"),
        ({"a": {(1, 2): 3}}, r"namespace.model_config.a has the name \(1, 2\)"),
        ({"a": {1: 2, "1": 3}}, "namespace.model_config.a has the name 1 twice"),
        ({"a": {True: 2}}, "namespace.model_config.a has the name True"),
        ({}, "namespace.model_config is empty"),
        ({"_name_or_path": "x"}, "namespace.model_config is empty"),
    ],
)
def test_what_has_no_canonical_form_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        namespace_digest(changed(model_config=config))


@pytest.mark.parametrize(
    "part", ["layout_digest", "weights_digest", "model_id", "weights_dtype", "device", "revision", "engine"]
)
def test_a_part_that_was_not_read_is_refused_by_name(part: str) -> None:
    empty: object = b"" if part.endswith("digest") else ""
    with pytest.raises(ConfigError, match=f"namespace.{part} is empty"):
        namespace_digest(changed(**{part: empty}))


def test_a_config_that_holds_itself_is_refused() -> None:
    config: dict[str, object] = {"a": 1}
    config["self"] = config
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        namespace_digest(changed(model_config=config))


def test_canonical_json_writes_enumerations_as_their_values() -> None:
    class Color(StrEnum):
        RED = "red"

    assert canonical_json({"b": Color.RED, "a": (1, 2.0, np.float64(0.1), None)}, "x") == (
        b'{"a":[1,2.0,0.1,null],"b":"red"}'
    )
    assert canonical_json("é\ud800", "x") == b'"\\u00e9\\ud800"'


def test_ranks_and_their_layouts_have_namespaces_of_their_own() -> None:
    namespace = namespace_digest(PARTS)
    ranks = [rank_namespace(namespace, Rank(rank)) for rank in range(4)]
    ranks.append(rank_namespace(namespace, Rank(0), b"stage"))
    assert len({namespace, *ranks}) == 6
    text = b""
    for part in (b"kvstow.namespace.rank.v1", namespace, struct.pack("<I", 3), b""):
        text += struct.pack("<Q", len(part)) + part
    assert ranks[3] == hashlib.sha256(text).digest()
    with pytest.raises(ValueError, match="want 32"):
        rank_namespace(NamespaceDigest(b"short"), Rank(0))


def test_explain_is_one_line_that_names_what_people_change(tmp_path: Path) -> None:
    line = explain(changed(quantization={"bits": 4}))
    assert "\n" not in line
    assert len(line) < 500
    for word in ("org/model@main", "kv=fp8_e4m3", "chunk=256", "tp=2", "vllm-0.32.0", "device='cpu amx'"):
        assert word in line
    assert "quantization=none" not in line
