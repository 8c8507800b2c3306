"""Chunk ids and frame keys: against an oracle of the written format, and against tricks."""

from __future__ import annotations

import hashlib
import struct
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.keys.chain import EngineChain, Extras, Media, TokenChain, chunk_ids_from_tokens, frame_key
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, NamespaceDigest
from kvstow.layout.geometry import GroupId

# The oracle: docs/design/001-identity.md, word for word, and nothing imported from the code.


def f(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def item(*fields: bytes) -> bytes:
    return f(b"".join(f(field) for field in fields))


def oracle_ids(tokens: list[int], size: int, extras: Extras) -> list[bytes]:
    ids: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        extra = b""
        if extras.lora_name:
            extra += item(b"lora", extras.lora_name.encode(), extras.lora_digest)
        if extras.cache_salt:
            extra += item(b"salt", extras.cache_salt.encode())
        if extras.embeds_digest:
            extra += item(b"embeds", extras.embeds_digest)
        for media in sorted(extras.media, key=lambda m: (m.offset, m.tokens, m.identifier)):
            if media.offset < start + size and media.offset + media.tokens > start:
                extra += item(b"media", media.identifier.encode(), u64(media.offset), u64(media.tokens))
        words = struct.pack(f"<{size}I", *tokens[start : start + size])
        parent = ids[-1] if ids else bytes(32)
        ids.append(hashlib.sha256(f(b"kvstow.chunk.tokens.v1") + f(parent) + f(words) + f(extra)).digest())
    return ids


token = st.integers(0, 2**32 - 1)
short_text = st.text("ab", max_size=3)
media_items = st.builds(
    Media,
    offset=st.integers(0, 30),
    tokens=st.integers(1, 12),
    identifier=st.text("ab", min_size=1, max_size=3),
)


@st.composite
def all_extras(draw: st.DrawFn) -> Extras:
    lora_name = draw(short_text)
    return Extras(
        lora_name=lora_name,
        lora_digest=draw(st.binary(min_size=1, max_size=3)) if lora_name else b"",
        cache_salt=draw(short_text),
        embeds_digest=draw(st.binary(max_size=3)),
        media=tuple(draw(st.lists(media_items, max_size=3))),
    )


@given(st.lists(token, max_size=40), st.integers(1, 9), all_extras())
def test_ids_are_what_the_format_says(tokens: list[int], size: int, extras: Extras) -> None:
    assert chunk_ids_from_tokens(tokens, size, extras) == oracle_ids(tokens, size, extras)


@given(st.lists(token, max_size=40), st.integers(1, 9), all_extras(), st.data())
def test_any_way_of_feeding_a_chain_gives_the_same_ids(
    tokens: list[int], size: int, extras: Extras, data: st.DataObject
) -> None:
    chain = TokenChain(size, extras)
    at = 0
    while at < len(tokens):
        step = data.draw(st.integers(1, 13))
        before = list(chain.ids)
        chain.extend(tokens[at : at + step])
        at = min(len(tokens), at + step)
        assert chain.ids[: len(before)] == before
        assert chain.num_tokens == at
    assert chain.ids == chunk_ids_from_tokens(tokens, size, extras)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 3), all_extras()), max_size=6)
)
def test_ids_are_equal_only_for_equal_prefixes_and_extras(
    prompts: list[tuple[list[int], int, Extras]],
) -> None:
    seen: dict[bytes, object] = {}
    for tokens, size, extras in prompts:
        for index, chunk in enumerate(chunk_ids_from_tokens(tokens, size, extras)):
            end = (index + 1) * size
            everywhere = (extras.lora_name, extras.lora_digest, extras.cache_salt, extras.embeds_digest)
            media = sorted(item for item in extras.media if item.offset < end)
            meaning = (size, tokens[:end], everywhere, media)
            assert seen.setdefault(chunk, meaning) == meaning


def test_bytes_cannot_move_between_parts() -> None:
    tokens = [7] * 8
    tricks = [
        Extras(),
        Extras(cache_salt="ab"),
        Extras(cache_salt="a", embeds_digest=b"b"),
        Extras(embeds_digest=b"ab"),
        Extras(lora_name="a", lora_digest=b"bc"),
        Extras(lora_name="ab", lora_digest=b"c"),
        Extras(lora_name="a", lora_digest=b"b", cache_salt="c"),
        Extras(media=(Media(0, 4, "ab"),)),
        Extras(media=(Media(0, 4, "a"), Media(0, 4, "b"))),
        Extras(media=(Media(1, 4, "ab"),)),
        Extras(media=(Media(0, 5, "ab"),)),
        Extras(cache_salt="media" + "\0" * 8),
    ]
    ids = [chunk_ids_from_tokens(tokens, 8, extras)[0] for extras in tricks]
    # The same tokens in other chunks, and an id as a token run, are other things too.
    ids += chunk_ids_from_tokens(tokens, 4) + chunk_ids_from_tokens(tokens, 2)
    ids += EngineChain(1).follow([ids[0]]) + EngineChain(1, b"x").follow([ids[0]])
    ids += EngineChain(2).follow([ids[0], ids[0]])
    ids.append(ChunkId(frame_key(NamespaceDigest(ids[0]), GroupId(0), ids[0])))
    assert len(set(ids)) == len(ids)


def test_media_change_only_the_chunks_they_reach_and_those_after() -> None:
    tokens = [5] * 40
    plain = chunk_ids_from_tokens(tokens, 8)
    cat = chunk_ids_from_tokens(tokens, 8, Extras(media=(Media(14, 4, "cat"),)))
    dog = chunk_ids_from_tokens(tokens, 8, Extras(media=(Media(14, 4, "dog"),)))
    assert cat[0] == dog[0] == plain[0]
    for index in range(1, 5):
        assert len({plain[index], cat[index], dog[index]}) == 3
    assert cat == chunk_ids_from_tokens(tokens, 8, Extras(media=(Media(14, 4, "cat"),)))


def test_a_conversation_goes_on_with_new_media() -> None:
    chain = TokenChain(8)
    chain.extend([1] * 12)
    chain.extend([2] * 20, media=[Media(14, 4, "cat")])
    both = Extras(media=(Media(14, 4, "cat"),))
    assert chain.ids == chunk_ids_from_tokens([1] * 12 + [2] * 20, 8, both)
    with pytest.raises(ValueError, match="up to which chunks are named"):
        chain.extend([3], media=[Media(31, 4, "dog")])
    assert chain.num_tokens == 32


@pytest.mark.parametrize("kind", [tuple, array, np.array])
def test_tokens_come_in_any_sequence_of_integers(kind: object) -> None:
    tokens = [1, 2, 3, 2**32 - 1]
    given_tokens = array("L", tokens) if kind is array else kind(tokens)  # type: ignore[operator]
    assert chunk_ids_from_tokens(given_tokens, 2) == chunk_ids_from_tokens(tokens, 2)


@pytest.mark.parametrize("tokens", [[-1], [2**32], b"abcd", bytearray(4), "abcd"])
def test_what_is_no_token_is_refused_and_changes_nothing(tokens: list[int]) -> None:
    chain = TokenChain(1)
    with pytest.raises(ValueError, match="token"):
        chain.extend(tokens)
    assert chain.ids == []
    assert chain.num_tokens == 0


def test_a_salt_from_a_client_may_be_any_text() -> None:
    ids = {
        chunk_ids_from_tokens([1], 1, Extras(cache_salt=salt))[0] for salt in ("\ud800", "\udfff", "?", "é")
    }
    assert len(ids) == 4


def test_extras_and_chains_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="give both"):
        Extras(lora_name="x")
    with pytest.raises(ValueError, match="give both"):
        Extras(lora_digest=b"x")
    for offset, tokens, identifier in [(-1, 1, "x"), (0, 0, "x"), (0, 1, "")]:
        with pytest.raises(ValueError, match="want offset"):
            Media(offset, tokens, identifier)
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        TokenChain(0)
    with pytest.raises(ValueError, match="hashes_per_chunk=0"):
        EngineChain(0)
    with pytest.raises(ValueError, match="lora_digest is empty"):
        EngineChain(1, b"")


def oracle_engine_ids(hashes: list[bytes], step: int, lora: bytes) -> list[bytes]:
    ends = hashes[step - 1 :: step]
    head = f(b"kvstow.chunk.engine.v1") + f(u64(step)) + f(lora)
    return [hashlib.sha256(head + f(end)).digest() for end in ends]


def engine_hashes(tokens: list[int]) -> list[bytes]:
    """Like an engine's: each covers its parent."""
    chain = [b"seed"]
    for number in tokens:
        chain.append(hashlib.sha256(chain[-1] + bytes([number])).digest())
    return chain[1:]


runs = st.lists(st.integers(0, 3), max_size=24)


@given(runs, st.integers(1, 5), st.sampled_from([None, b"adapter"]))
def test_engine_ids_are_what_the_format_says(tokens: list[int], step: int, lora: bytes | None) -> None:
    hashes = engine_hashes(tokens)
    assert EngineChain(step, lora).follow(hashes) == oracle_engine_ids(hashes, step, lora or b"")


@given(st.lists(runs, max_size=5), st.integers(1, 5))
def test_an_engine_chain_follows_growth_and_change(versions: list[list[int]], step: int) -> None:
    chain = EngineChain(step)
    grown: list[int] = []
    for version in versions:
        grown = grown + version
        for tokens in (grown, version):
            hashes = engine_hashes(tokens)
            assert chain.follow(hashes) == oracle_engine_ids(hashes, step, b"")
            assert chain.ids == oracle_engine_ids(hashes, step, b"")


def test_frame_keys_are_what_the_format_says_and_all_differ() -> None:
    keys = set()
    for namespace in (bytes(32), b"n" * 32):
        for group in (0, 1, 2**32 - 1):
            for chunk in (ROOT_CHUNK, b"c" * 32):
                key = frame_key(NamespaceDigest(namespace), GroupId(group), ChunkId(chunk))
                text = f(b"kvstow.frame.v1") + f(namespace) + f(struct.pack("<I", group)) + f(chunk)
                assert key == hashlib.sha256(text).digest()
                keys.add(key)
    assert len(keys) == 12
    with pytest.raises(ValueError, match="31 bytes"):
        frame_key(NamespaceDigest(bytes(31)), GroupId(0), ROOT_CHUNK)
    with pytest.raises(ValueError, match="chunk id of 33"):
        frame_key(NamespaceDigest(bytes(32)), GroupId(0), ChunkId(bytes(33)))
