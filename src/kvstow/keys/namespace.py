"""What must agree before two engines share a byte, and its digest.

A namespace is a hash over canonical JSON of `NamespaceParts`. Nothing has a silent default:
what cannot be read, or cannot be written down unambiguously, is an error at start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import msgspec

from kvstow.errors import ConfigError
from kvstow.keys.digest import DIGEST_BYTES, digest
from kvstow.keys.ids import NamespaceDigest, Rank

_NAMESPACE_DOMAIN = b"kvstow.namespace.v1"
_RANK_DOMAIN = b"kvstow.namespace.rank.v1"

_DEPTH_MAX = 32

VOLATILE_CONFIG_NAMES = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Names of a Hugging Face config that say where it came from, not what the model computes.
Dropped at every depth."""


class NamespaceParts(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes of a chunk, besides its prefix, group and rank.

    Attributes:
        format_version: of the stored form.
        layout_digest: of the engine's KV layout, as its ranks agree on it: groups, kinds,
            segments in order, block bytes, strides that matter, index dtype.
        model_id: name or path of the model.
        revision: of the model in its repository; None for a plain folder.
        weights_digest: from `kvstow.keys.weights`.
        weights_dtype: the engine computes in it.
        kv_dtype: the engine keeps keys and values in it.
        block_tokens: tokens per block, by group.
        chunk_tokens: tokens per chunk.
        tp_size, pp_size: tensor and pipeline parallel sizes.
        dcp_size, pcp_size: decode and prefill context parallel sizes.
        engine, engine_version: who wrote the bytes.
        attention_backend: whose layout inside a block they have.
        device: kind of device and what of its abilities changes that layout, such as
            ``cpu amx`` or ``cuda sm_90``: CPU attention lays K out by instruction set, so bytes
            written under AMX must not be read under AVX2.
        model_config: the model's configuration as plain data; `VOLATILE_CONFIG_NAMES` are
            dropped.
        speculative: configuration of speculative decoding; None without.
        quantization: configuration of quantization; None without.
        tag: the setting ``namespace``.
    """

    format_version: int
    layout_digest: bytes
    model_id: str
    revision: str | None
    weights_digest: bytes
    weights_dtype: str
    kv_dtype: str
    block_tokens: tuple[int, ...]
    chunk_tokens: int
    tp_size: int
    pp_size: int
    dcp_size: int
    pcp_size: int
    engine: str
    engine_version: str
    attention_backend: str
    device: str
    model_config: Mapping[str, object]
    speculative: Mapping[str, object] | None
    quantization: Mapping[str, object] | None
    tag: str = ""


def namespace_digest(parts: NamespaceParts) -> NamespaceDigest:
    """Name the set of engines that may share bytes.

    Raises:
        ConfigError: a part is empty, or holds something without a canonical form; names it.
    """
    return NamespaceDigest(digest(_NAMESPACE_DOMAIN, canonical_json(_as_mapping(parts), "namespace")))


def rank_namespace(namespace: NamespaceDigest, rank: Rank, layout_digest: bytes = b"") -> NamespaceDigest:
    """The namespace that the keys of one rank are made in.

    Args:
        namespace: what all ranks agree on.
        rank: whose bytes.
        layout_digest: of this rank's own layout, where ranks differ (pipeline stages).
    """
    if len(namespace) != DIGEST_BYTES:
        raise ValueError(f"namespace of {len(namespace)} bytes: want {DIGEST_BYTES}")
    return NamespaceDigest(digest(_RANK_DOMAIN, namespace, rank.to_bytes(4, "little"), layout_digest))


def explain(parts: NamespaceParts) -> str:
    """One line for logs: the parts that people change, and short digests of the rest."""
    return (
        f"namespace {namespace_digest(parts).hex()[:12]}: model={parts.model_id}@{parts.revision or '-'} "
        f"weights={parts.weights_digest.hex()[:8]}/{parts.weights_dtype} kv={parts.kv_dtype} "
        f"layout={parts.layout_digest.hex()[:8]} blocks={','.join(map(str, parts.block_tokens))} "
        f"chunk={parts.chunk_tokens} tp={parts.tp_size} pp={parts.pp_size} dcp={parts.dcp_size} "
        f"pcp={parts.pcp_size} engine={parts.engine}-{parts.engine_version} "
        f"attention={parts.attention_backend} device={parts.device!r} "
        f"speculative={_short(parts.speculative)} quantization={_short(parts.quantization)} "
        f"tag={parts.tag!r} format={parts.format_version}"
    )


def canonical_json(value: object, where: str) -> bytes:
    """The one JSON text of plain data: sorted names, no spaces, ASCII, no NaN.

    Args:
        value: None, bool, int, float, str, and lists, tuples and mappings of them. Names may be
            whole numbers and stand for their decimal text, as JSON stores them.
        where: what ``value`` is, for messages.

    Raises:
        ConfigError: anything else; names the field.
    """
    plain = _plain(value, where, _DEPTH_MAX)
    text = json.dumps(plain, sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.encode("ascii")


def _as_mapping(parts: NamespaceParts) -> dict[str, object]:
    fields = msgspec.structs.asdict(parts)
    for name, value in fields.items():
        if name != "tag" and (value == "" or value == b"" or value == ()):
            raise ConfigError(f"namespace.{name} is empty: it could not be read; give its value")
        if isinstance(value, bytes):
            fields[name] = value.hex()
    fields["model_config"] = _without_volatile(parts.model_config, _DEPTH_MAX)
    if not fields["model_config"]:
        raise ConfigError("namespace.model_config is empty: it could not be read; give the model's config")
    return fields


def _without_volatile(value: object, depth_left: int) -> object:
    # Past the depth bound nothing is dropped: canonical_json refuses the value.
    if depth_left == 0:
        return value
    if isinstance(value, Mapping):
        return {
            name: _without_volatile(item, depth_left - 1)
            for name, item in value.items()
            if name not in VOLATILE_CONFIG_NAMES
        }
    if isinstance(value, list | tuple):
        return [_without_volatile(item, depth_left - 1) for item in value]
    return value


def _plain(value: object, where: str, depth_left: int) -> object:
    if depth_left < 0:
        raise ConfigError(f"{where} is nested more than {_DEPTH_MAX} deep; give plain data")
    match value:
        case None | bool():
            return value
        # Subclasses (enumerations, numpy's float64) are written as the plain value they are.
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ConfigError(f"{where}={value} has no canonical form; give a finite number")
            return float(value)
        case str():
            return str.__str__(value)
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]", depth_left - 1) for index, item in enumerate(value)]
        case Mapping():
            return _plain_mapping(value, where, depth_left)
        case _:
            raise ConfigError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no canonical "
                "form; give plain data (none, true, numbers, text, lists, mappings)"
            )


def _plain_mapping(value: Mapping[object, object], where: str, depth_left: int) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, item in value.items():
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ConfigError(f"{where} has the name {name!r}; names are text or whole numbers")
        text = str.__str__(name) if isinstance(name, str) else str(int(name))
        if text in plain:
            raise ConfigError(f"{where} has the name {text} twice, as text and as a number; keep one")
        plain[text] = _plain(item, f"{where}.{text}", depth_left - 1)
    return plain


def _short(config: Mapping[str, object] | None) -> str:
    if config is None:
        return "none"
    return digest(b"kvstow.explain.v1", canonical_json(config, "config")).hex()[:8]
