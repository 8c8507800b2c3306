from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import ConfigError
from kvstow.layout.geometry import NO_BLOCK, BlockId, Group, GroupId, GroupKind, Layout, RegionId, Segment
from kvstow.layout.resume import ResumeRule

PAGED = ResumeRule(GroupKind.PAGED, 4, 16)
STATE = ResumeRule(GroupKind.STATE, 4, 16)


def window(tokens: int) -> ResumeRule:
    return ResumeRule(GroupKind.WINDOW, 4, 16, tokens)


def test_what_a_boundary_needs() -> None:
    assert PAGED.needed(3) == range(3)
    assert STATE.needed(3) == range(2, 3)
    assert window(16).needed(3) == range(2, 3)
    assert window(17).needed(3) == range(1, 3)
    assert window(1000).needed(3) == range(3)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (12, 3), (13, 4), (16, 4), (40, 4)])
def test_a_window_frame_holds_the_blocks_that_a_boundary_can_reach(tokens: int, blocks: int) -> None:
    assert window(tokens).frame_blocks == blocks


@given(st.integers(1, 100), st.integers(1, 8))
def test_what_a_window_needs_is_all_of_it_and_nothing_else(tokens: int, boundary: int) -> None:
    """Token by token, from the definition: [B - W, B)."""
    rule = window(tokens)
    wanted = range(max(0, boundary * 16 - tokens), boundary * 16)
    table = [BlockId(block) for block in range(boundary * 4)]
    brought = {block for index in rule.needed(boundary) for block in rule.frame_table(table, index)}
    assert {token // 4 for token in wanted} <= brought
    assert {token // 16 for token in wanted} == set(rule.needed(boundary))


def test_frame_tables() -> None:
    table = [BlockId(10 + block) for block in range(8)]
    assert PAGED.frame_table(table, 1) == (14, 15, 16, 17)
    assert window(6).frame_table(table, 1) == (16, 17)
    assert window(99).frame_table(table, 0) == (10, 11, 12, 13)
    assert STATE.frame_table(table, 1) == (17,)
    table[2] = NO_BLOCK
    assert PAGED.frame_table(table, 0) == (10, 11, NO_BLOCK, 13)


@pytest.mark.parametrize("rule", [PAGED, STATE, window(6), window(99)])
def test_a_table_that_ends_too_early_gives_fewer_blocks(rule: ResumeRule) -> None:
    table = [BlockId(block) for block in range(7)]
    assert len(rule.frame_table(table, 0)) == rule.frame_blocks
    assert len(rule.frame_table(table, 1)) < rule.frame_blocks
    assert rule.frame_table([], 0) == ()


def test_blocks_below_a_floor() -> None:
    assert [PAGED.blocks_below(1, floor) for floor in (0, 16, 20, 23, 24, 32)] == [0, 0, 1, 1, 2, 4]
    assert [window(6).blocks_below(1, floor) for floor in (0, 20, 27, 28, 32)] == [0, 0, 0, 1, 2]
    assert [STATE.blocks_below(1, floor) for floor in (0, 28, 31, 32)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((GroupKind.PAGED, 0, 16), "block_tokens=0 .* use 1 or more"),
        ((GroupKind.PAGED, 4, 0), "chunk_tokens=0 .* use 4"),
        ((GroupKind.PAGED, 32, 100), "chunk_tokens=100 .*block_tokens=32; use 96 or 128"),
        ((GroupKind.WINDOW, 4, 16), "window_tokens=0 of a window group; use 1 or more"),
        ((GroupKind.STATE, 4, 16, 8), "window_tokens=8 of a state group; use 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_named(values: tuple, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ResumeRule(*values)


def test_a_layout_has_the_rules_of_its_groups_and_the_bytes_of_their_frames() -> None:
    segments = (Segment("a", RegionId(0), 0, 10, 10), Segment("b", RegionId(0), 0, 5, 5))
    kinds = ((GroupKind.PAGED, 0), (GroupKind.WINDOW, 6), (GroupKind.STATE, 0))
    groups = tuple(
        Group(GroupId(index), kind, 4, 8, "uint8", segments, tokens)
        for index, (kind, tokens) in enumerate(kinds)
    )
    layout = Layout(groups, 16)
    assert layout.rules == (PAGED, window(6), STATE)
    assert [layout.payload_bytes(group.group) for group in groups] == [60, 30, 15]
