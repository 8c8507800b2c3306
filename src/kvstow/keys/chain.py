"""From a prompt to its chunk ids, and from a chunk id to the key of a frame.

Two chains make chunk ids. `TokenChain` hashes tokens itself, for an engine that has no hashes
of its own. `EngineChain` takes an engine's per-block hashes, each of which covers its parent,
tokens and extras, and adds what they leave out. Both are incremental. Formats and reasons:
docs/design/001-identity.md.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

import msgspec

from kvstow.keys.digest import DIGEST_BYTES, frame
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, Key, NamespaceDigest
from kvstow.layout.geometry import GroupId

_sha256 = hashlib.sha256

_TOKEN_BYTES = 4
_DIGEST_LENGTH = DIGEST_BYTES.to_bytes(8, "little")
# Each ends in the length of the digest that follows it: parts of fixed size are framed ahead.
_TOKEN_HEAD = frame(b"kvstow.chunk.tokens.v1") + _DIGEST_LENGTH
_FRAME_HEAD = frame(b"kvstow.frame.v1") + _DIGEST_LENGTH
_ENGINE_DOMAIN = frame(b"kvstow.chunk.engine.v1")
_GROUP_LENGTH = (4).to_bytes(8, "little")


class Media(msgspec.Struct, frozen=True, order=True):
    """One image, video or sound in a prompt.

    Attributes:
        offset: index of its first placeholder token, from the start of the prompt.
        tokens: how many placeholder tokens it takes, >= 1.
        identifier: names its content, such as the engine's hash of the pixels.
    """

    offset: int
    tokens: int
    identifier: str

    def __post_init__(self) -> None:
        if self.offset < 0 or self.tokens < 1 or not self.identifier:
            raise ValueError(f"{self}: want offset >= 0, tokens >= 1 and an identifier")

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.offset + self.tokens


class Extras(msgspec.Struct, frozen=True):
    """What, besides the tokens, decides the bytes of a prompt.

    Attributes:
        lora_name: name of the adapter, or "".
        lora_digest: digest of its content (`kvstow.keys.weights.adapter_digest`); goes with
            ``lora_name``: a name can be pointed at other weights.
        cache_salt: keeps tenants apart, or "".
        embeds_digest: digest of prompt embeddings that stand in for tokens, or b"".
        media: media of the prompt, in any order.
        era: told apart from what was saved before caches were reset, or b"".
    """

    lora_name: str = ""
    lora_digest: bytes = b""
    cache_salt: str = ""
    embeds_digest: bytes = b""
    media: tuple[Media, ...] = ()
    era: bytes = b""

    def __post_init__(self) -> None:
        if bool(self.lora_name) != bool(self.lora_digest):
            raise ValueError(
                f"lora_name={self.lora_name!r} with a digest of {len(self.lora_digest)} bytes: give both, "
                "or none"
            )


NO_EXTRAS = Extras()


class TokenChain:
    """Chunk ids of a growing run of tokens; nothing is hashed twice.

    ``ids[i]`` covers all tokens up to and including chunk ``i`` and what the extras say about
    them. Tokens of a chunk that is not full yet are kept until it is. Not thread safe.

    Attributes:
        ids: one id per full chunk; grows in place. Read only.
    """

    def __init__(self, chunk_tokens: int, extras: Extras = NO_EXTRAS) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens}: want at least 1")
        self.ids: list[ChunkId] = []
        self._chunk_tokens = chunk_tokens
        self._tokens_length = (chunk_tokens * _TOKEN_BYTES).to_bytes(8, "little")
        self._everywhere = _encode_request_extras(extras)
        self._media = sorted(extras.media)
        self._rest = _new_array()

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, those of the chunk that is not full included."""
        return len(self.ids) * self._chunk_tokens + len(self._rest)

    def extend(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Append tokens, and media that lie in them or after them.

        Args:
            tokens: ids in [0, 2**32), in order; fastest as a list.
            media: further media, offsets from the start of the prompt.

        Raises:
            ValueError: a token out of range, or media that begin in a chunk already named.
        """
        named = len(self.ids) * self._chunk_tokens
        early = [item for item in media if item.offset < named]
        if early:
            raise ValueError(
                f"{early[0]} begins before token {named}, up to which chunks are named; start anew"
            )
        packed = self._rest + _pack(tokens)
        if media:
            self._media = sorted([*self._media, *media])
        self._rest = packed[self._name_chunks(packed) :]

    def _name_chunks(self, packed: array[int]) -> int:
        """Name every full chunk of ``packed``; return how many tokens that took."""
        size = self._chunk_tokens
        head, length, everywhere, ids = _TOKEN_HEAD, self._tokens_length, self._everywhere, self.ids
        parent = ids[-1] if ids else ROOT_CHUNK
        base = len(ids) * size
        full = len(packed) // size * size
        view = memoryview(packed).cast("B")
        for start in range(0, full, size):
            extras = everywhere
            if self._media:
                extras += self._encode_media(base + start, base + start + size)
            words = view[start * _TOKEN_BYTES : (start + size) * _TOKEN_BYTES]
            parent = ChunkId(_sha256(b"".join((head, parent, length, words, frame(extras)))).digest())
            ids.append(parent)
        return full

    def _encode_media(self, start: int, end: int) -> bytes:
        """Media that overlap tokens [start, end); forgets those that end there."""
        inside = [item for item in self._media if item.offset < end]
        self._media = [item for item in self._media if item.end > end]
        return b"".join(
            _item(b"media", _text(item.identifier), _number(item.offset), _number(item.tokens))
            for item in inside
            if item.end > start
        )


def chunk_ids_from_tokens(
    tokens: Sequence[int], chunk_tokens: int, extras: Extras = NO_EXTRAS
) -> list[ChunkId]:
    """The ids of all full chunks of a prompt, as `TokenChain` gives them."""
    chain = TokenChain(chunk_tokens, extras)
    chain.extend(tokens)
    return chain.ids


class EngineChain:
    """Chunk ids from an engine's own block hashes.

    Each engine hash must be stable across processes and cover its parent, tokens, and extras;
    the hash at a chunk's end then names the whole prefix. What engines leave out is added: the
    content of the LoRA adapter, whose name and path alone they hash. Not thread safe.

    Attributes:
        ids: one id per full chunk; changes in place. Read only.
    """

    def __init__(self, hashes_per_chunk: int, lora_digest: bytes | None = None, era: bytes = b"") -> None:
        """Start empty.

        Args:
            hashes_per_chunk: chunk tokens / tokens per engine hash. The hash unit may be smaller
                or larger than a block; a chunk is a whole number of units.
            lora_digest: content digest of the request's adapter; None without one.
            era: as `Extras.era`.
        """
        if hashes_per_chunk < 1:
            raise ValueError(f"hashes_per_chunk={hashes_per_chunk}: a chunk is at least one hash unit")
        if lora_digest is not None and not lora_digest:
            raise ValueError("lora_digest is empty; give the adapter's digest, or None without an adapter")
        self.ids: list[ChunkId] = []
        self._ends: list[bytes] = []
        self._hashes_per_chunk = hashes_per_chunk
        self._head = _ENGINE_DOMAIN + frame(_number(hashes_per_chunk)) + frame(lora_digest or b"")
        if era:
            self._head += frame(era)

    def follow(self, hashes: Sequence[bytes]) -> list[ChunkId]:
        """Bring ``ids`` up to date with all of a request's hashes.

        Costs as much as what is new. If an engine took hashes back or replaced them, the ids
        that rested on them are replaced too.

        Args:
            hashes: every hash of the request from its start, not only the new ones.

        Returns:
            ``ids``.
        """
        step = self._hashes_per_chunk
        full = len(hashes) // step
        ids, ends = self.ids, self._ends
        kept = min(len(ids), full)
        # Each hash covers its parent: where one is unchanged, so are all before it.
        while kept and ends[kept - 1] != hashes[kept * step - 1]:
            kept -= 1
        del ids[kept:], ends[kept:]
        head = self._head
        for end in hashes[(kept + 1) * step - 1 : full * step : step]:
            ends.append(end)
            ids.append(ChunkId(_sha256(head + frame(end)).digest()))
        return ids


def frame_key(namespace_of_rank: NamespaceDigest, group: GroupId, chunk: ChunkId) -> Key:
    """The key of one frame: this chunk of this group on this rank, in this namespace.

    Args:
        namespace_of_rank: from `kvstow.keys.namespace.rank_namespace`.
        group: 0 .. 2**32 - 1.
        chunk: from a chain.

    Raises:
        ValueError: a digest that is not 32 bytes.
    """
    if len(namespace_of_rank) != DIGEST_BYTES or len(chunk) != DIGEST_BYTES:
        raise ValueError(
            f"namespace of {len(namespace_of_rank)} bytes, chunk id of {len(chunk)}: want {DIGEST_BYTES} each"
        )
    parts = (
        _FRAME_HEAD,
        namespace_of_rank,
        _GROUP_LENGTH,
        group.to_bytes(4, "little"),
        _DIGEST_LENGTH,
        chunk,
    )
    return Key(_sha256(b"".join(parts)).digest())


def _new_array() -> array[int]:
    words = array("I")
    if words.itemsize != _TOKEN_BYTES:  # pragma: no cover - no platform of ours
        raise ValueError(f"array('I') has {words.itemsize} bytes here; want {_TOKEN_BYTES}")
    return words


def _pack(tokens: Sequence[int]) -> array[int]:
    """Tokens as little-endian u32."""
    if isinstance(tokens, bytes | bytearray | memoryview | str):
        raise ValueError(f"tokens is {type(tokens).__name__}: want a sequence of integers")
    try:
        words = array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"a token id does not fit in 32 bits: {error}; want ids in [0, 2**32)") from error
    if sys.byteorder == "big":  # pragma: no cover - no platform of ours
        words.byteswap()
    return words


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _text(value: str) -> bytes:
    # A salt comes from a client and may hold a lone surrogate: every text has one encoding here.
    return value.encode("utf-8", "surrogatepass")


def _item(kind: bytes, *fields: bytes) -> bytes:
    """One extra: its kind and its fields, each framed, framed as a whole."""
    return frame(b"".join(map(frame, (kind, *fields))))


def _encode_request_extras(extras: Extras) -> bytes:
    """The extras that hold for every chunk of a request."""
    items = b""
    if extras.lora_name:
        items += _item(b"lora", _text(extras.lora_name), extras.lora_digest)
    if extras.cache_salt:
        items += _item(b"salt", _text(extras.cache_salt))
    if extras.embeds_digest:
        items += _item(b"embeds", extras.embeds_digest)
    if extras.era:
        items += _item(b"era", extras.era)
    return items
