"""Defaults, the arena's size, and chunks against blocks."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.config import Settings, check_chunk, choose_chunk, resolve_arena_bytes
from kvstow.errors import ConfigError

GIB = 2**30


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().chunk_tokens = 1  # type: ignore[misc]


def test_defaults_are_the_published_ones() -> None:
    assert msgspec.to_builtins(Settings()) == {
        "arena_gib": None,
        "disk_path": None,
        "disk_gib": 32.0,
        "chunk_tokens": 0,
        "image_interval_tokens": 0,
        "image_share": 0.25,
        "save": "all",
        "role": "both",
        "min_load_tokens": 0,
        "load_timeout_s": 30.0,
        "save_timeout_s": 30.0,
        "pending_loads_max": 64,
        "pending_saves_max": 256,
        "pending_writes_max": 1024,
        "load_threads": 2,
        "disk_readers": 4,
        "copy_threads": 1,
        "codec": "auto",
        "disk_cooldown_s": 30.0,
        "shutdown_s_max": 10.0,
        "self_test": True,
        "weights_digest": None,
        "namespace": "",
    }


def test_roles_and_the_least_load() -> None:
    assert Settings(chunk_tokens=64).load_tokens_min == 64
    assert Settings(min_load_tokens=1000).load_tokens_min == 1000
    roles = {role: Settings(role=role) for role in ("both", "save", "load")}  # type: ignore[arg-type]
    assert {role: (s.saves, s.loads) for role, s in roles.items()} == {
        "both": (True, True),
        "save": (True, False),
        "load": (False, True),
    }


@pytest.mark.parametrize(
    ("arena_gib", "available_bytes", "arena_bytes"),
    [
        (None, 64 * GIB, 4 * GIB),
        (None, 8 * GIB, 2 * GIB),
        (1.5, 2 * GIB, 3 * GIB // 2),
        (2.0, 2 * GIB, 2 * GIB),
    ],
)
def test_arena_size(arena_gib: float | None, available_bytes: int, arena_bytes: int) -> None:
    assert resolve_arena_bytes(Settings(arena_gib=arena_gib), available_bytes) == arena_bytes


def test_an_arena_larger_than_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_arena_bytes(Settings(arena_gib=64), 30 * GIB)
    assert str(caught.value) == (
        "arena_gib=64 is more than the 30.00 GiB of memory available; use at most 30, or none for 4.00"
    )


@pytest.mark.parametrize(
    ("chunk", "blocks", "message"),
    [
        (100, [32], "chunk_tokens=100 is not a multiple of block_tokens=32; use 96 or 128"),
        (16, [32], "chunk_tokens=16 is not a multiple of block_tokens=32; use 32"),
        (
            64,
            [16, 96, 32],
            "chunk_tokens=64 is not a multiple of block_tokens=96 (groups have 16, 32, 96); use 96",
        ),
    ],
)
def test_a_chunk_of_part_blocks_is_refused_with_what_would_do(
    chunk: int, blocks: list[int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_chunk(chunk, blocks)
    assert str(caught.value) == message


@given(st.integers(1, 4096), st.lists(st.sampled_from([1, 16, 24, 32, 160, 256]), min_size=1, max_size=4))
def test_check_chunk_agrees_with_arithmetic_and_its_advice_works(chunk: int, blocks: list[int]) -> None:
    fits = all(chunk % size == 0 for size in blocks)
    try:
        check_chunk(chunk, blocks)
    except ConfigError as error:
        assert not fits
        for advice in str(error).rpartition("use ")[2].split(" or "):
            check_chunk(int(advice), blocks)
            assert abs(int(advice) - chunk) < math.lcm(*blocks)
    else:
        assert fits


@pytest.mark.parametrize(
    ("chosen", "block_tokens", "keeps_images", "chunk_tokens"),
    [
        (0, [16], False, 256),
        (0, [32, 16], False, 256),
        (0, [288], False, 288),
        (0, [96], False, 288),
        (0, [160, 32], True, 160),
        (0, [288, 288], True, 288),
        (64, [32], False, 64),
        (100, [32], True, 100),  # what was chosen stays, and is checked later
    ],
)
def test_a_chunk_that_is_left_open_suits_the_engine(
    chosen: int, block_tokens: list[int], keeps_images: bool, chunk_tokens: int
) -> None:
    settings = choose_chunk(Settings(chunk_tokens=chosen), block_tokens, keeps_images=keeps_images)
    assert settings.chunk_tokens == chunk_tokens
