"""Chunks that lead to no image, and images that serve no boundary, are the first to go."""

from __future__ import annotations

from collections.abc import Sequence

from lifecycle_bench import CHUNK, PAGED, STATE, Bench, chunk_ids, hello, refs, window

from kvstow.keys.ids import ChunkId
from kvstow.lifecycle.messages import Held, RequestId, Tier


def save(bench: Bench, name: str, ids: Sequence[ChunkId], images: Sequence[int]) -> None:
    """A request that computes all of ``ids`` with images at some boundaries, and ends."""
    request, tokens = RequestId(name), len(ids) * CHUNK
    tables = bench.tables(tokens, len(bench.rules))
    bench.planner.progress(request, ids, tokens, lambda: tables)
    bench.planner.snapshot(request, ids, tokens, lambda: tables, bench.offers(images))
    order = bench.planner.step()
    bench.planner.finished(request)
    bench.answer(order)
    bench.answer(bench.planner.step())


def kept(bench: Bench, ids: Sequence[ChunkId], group: int = 0) -> list[bool]:
    return [bench.directory.tier_of(ref) is not None for ref in refs(ids, group)]


def test_the_images_of_one_boundary_go_together() -> None:
    bench = Bench(hello(rules=(PAGED, STATE, STATE), slots=(16, 2, 8)))
    old, new = chunk_ids("old", 3), chunk_ids("new", 1)
    save(bench, "a", old, [2, 3])
    save(bench, "b", new, [1])
    assert kept(bench, old, 1) == kept(bench, old, 2) == [False, False, True]
    assert kept(bench, new, 1) == kept(bench, new, 2) == [True]


def test_a_bad_image_takes_those_of_the_other_groups_with_it_from_all_tiers() -> None:
    bench = Bench(hello(rules=(PAGED, STATE, STATE), disk_frames=8))
    ids = chunk_ids("p", 2)
    save(bench, "a", ids, [1, 2])
    for tier in Tier:
        bench.directory.drop(refs(ids, 1)[1], tier)
    assert kept(bench, ids, 2) == [True, False]
    assert bench.planner.step().removes == (refs(ids, 1)[1], refs(ids, 2)[1])
    assert kept(bench, ids) == [True, True]


def test_an_image_that_is_read_outlives_that_of_another_group() -> None:
    bench = Bench(hello(rules=(PAGED, STATE, STATE)))
    ids = chunk_ids("p", 1)
    save(bench, "a", ids, [1])
    pinned = bench.directory.pin(ids, 1)
    bench.directory.drop(refs(ids, 1)[0], Tier.ARENA)
    assert kept(bench, ids, 2) == [True]
    bench.directory.unpin(pinned)


def test_chunks_past_the_last_image_of_an_ended_request_go_before_older_ones() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(8, 8)))
    old, new = chunk_ids("old", 3), chunk_ids("new", 5)
    save(bench, "a", old, [3])
    save(bench, "b", new, [3])
    save(bench, "c", chunk_ids("more", 1), [1])
    assert kept(bench, new) == [True, True, True, True, False]
    save(bench, "d", chunk_ids("most", 2), [2])
    assert kept(bench, new) == [True, True, True, False, False]
    assert kept(bench, old) == [True, True, False]


def test_a_tail_that_is_written_after_its_request_ended_goes_first_on_disk_too() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), disk_frames=4))
    old, new = chunk_ids("old", 2), chunk_ids("new", 2)
    save(bench, "a", old, [2])
    save(bench, "b", new, [1])
    save(bench, "c", chunk_ids("more", 1), [1])
    for ref in refs(old) + refs(new):
        bench.directory.drop(ref, Tier.ARENA)
    assert kept(bench, new) == [True, False]
    assert kept(bench, old) == [True, True]


def test_chunks_that_led_to_an_image_that_was_evicted_are_next() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(8, 2)))
    old, new, last = chunk_ids("old", 3), chunk_ids("new", 3), chunk_ids("last", 3)
    save(bench, "a", old, [3])
    save(bench, "b", new, [3])
    bench.directory.touch(old, 2)  # of two prompts the more recent one, but for its image
    save(bench, "c", last, [3])  # which makes room
    assert kept(bench, old) == [True, True, False]
    assert kept(bench, new) == kept(bench, last) == [True, True, True]


def test_chunks_go_with_an_image_back_to_the_image_before() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(6, 8)))
    other, ids = chunk_ids("other", 3), chunk_ids("p", 3)
    save(bench, "a", other, [3])
    save(bench, "b", ids, [1, 3])
    bench.directory.drop(refs(ids, 1)[2], Tier.ARENA)
    save(bench, "c", chunk_ids("more", 3), [3])
    assert kept(bench, ids) == [True, False, False]
    assert kept(bench, other) == [True, True, False]


def test_a_chunk_that_another_prompt_with_an_image_goes_on_from_is_none_of_a_tail() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(6, 2)))
    shared = chunk_ids("shared", 2)
    one, other = shared + chunk_ids("one", 1), shared + chunk_ids("other", 1)
    save(bench, "a", chunk_ids("apart", 1), [1])
    save(bench, "b", one, [3])
    save(bench, "c", other, [3])  # the image of "apart" makes room
    save(bench, "d", chunk_ids("last", 1), [1])  # and that of "one"
    save(bench, "e", chunk_ids("tail", 2), [])
    assert kept(bench, one) == [True, True, False]
    assert kept(bench, other) == [True, True, True]


def test_a_tail_that_somebody_goes_on_from_is_like_any_other_chunk() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(6, 8)))
    turn = chunk_ids("turn", 2)
    other = chunk_ids("other", 2)
    save(bench, "a", turn, [1])
    save(bench, "b", other, [2])
    save(bench, "c", turn + chunk_ids("next", 1), [3])
    save(bench, "d", chunk_ids("more", 3), [3])
    assert kept(bench, turn) == [True, True]
    assert kept(bench, other) == [False, False]


def test_a_tail_that_gets_its_image_after_all_is_like_any_other_chunk() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(5, 8)))
    ids, other = chunk_ids("p", 2), chunk_ids("other", 2)
    save(bench, "a", ids, [])
    save(bench, "b", other, [2])
    save(bench, "c", ids, [2])  # all kept but the image
    save(bench, "d", chunk_ids("more", 2), [2])
    assert kept(bench, ids) == [True, True]
    assert kept(bench, other) == [True, False]


def test_an_image_that_takes_the_place_of_the_last_that_its_chunks_led_to_keeps_them() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(6, 2)))
    old, shared = chunk_ids("old", 2), chunk_ids("shared", 2)
    save(bench, "a", old, [2])
    save(bench, "b", shared + chunk_ids("one", 1), [3])
    bench.directory.touch(old, 2)
    save(bench, "c", shared, [2])  # where prompts part; the image of "b" makes room
    bench.directory.touch(shared, 2)  # and somebody resumes there
    save(bench, "d", chunk_ids("more", 3), [])
    assert kept(bench, shared) == [True, True]
    assert kept(bench, old) == [True, False]


def test_windows_of_a_tail_go_first_too() -> None:
    bench = Bench(hello(rules=(PAGED, window(CHUNK), STATE), slots=(16, 4, 8)))
    old, new = chunk_ids("old", 2), chunk_ids("new", 2)
    save(bench, "a", old, [2])
    save(bench, "b", new, [1])
    save(bench, "c", chunk_ids("more", 1), [1])
    assert kept(bench, new, 1) == [True, False]
    assert kept(bench, old, 1) == [True, True]


def test_what_leads_to_no_image_is_seen_at_start() -> None:
    old, new = chunk_ids("old", 2), chunk_ids("new", 2)
    found = [*refs(old), refs(old, 1)[1], *refs(new), refs(new, 1)[0]]
    inventory = [Held(ref, float(age)) for age, ref in enumerate(found)]
    bench = Bench(hello(rules=(PAGED, STATE), disk_frames=4, inventory=inventory))
    save(bench, "a", chunk_ids("more", 1), [1])
    assert kept(bench, new) == [True, False]
    assert kept(bench, old) == [True, True]


def test_without_states_an_ended_request_changes_no_order() -> None:
    bench = Bench(hello(rules=(PAGED, window(CHUNK)), slots=4))
    old, new = chunk_ids("old", 2), chunk_ids("new", 2)
    save(bench, "a", old, [])
    save(bench, "b", new, [])
    save(bench, "c", chunk_ids("more", 1), [])
    assert kept(bench, new) == [True, True]
    assert kept(bench, old) == [True, False]
