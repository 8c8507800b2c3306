"""What every engine adapter must do: inherit `EngineContract`, give it an engine, and run pytest.

::

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self, tmp_path: Path) -> Iterator[EngineUnderTest]:
            engine = MyEngine(disk=tmp_path)
            yield engine
            engine.stop()

`kvstow.testing.engine_under_test` says what the engine is asked for. It may serve one test or a whole
module: every test draws prompts that no other has, and must leave every block free. Tests that need
an ability which the engine's type has not are skipped. Two things are for a subclass to say:

- an engine without a prefix cache of its own sets ``caches_prefixes`` to False;
- an engine that never takes blocks from a request that runs sets ``preempts`` to False.

An answer is right if it is what the model says when nothing is reused. So the model must depend on
all that it has read, and the first test sees that it does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstow.testing.engine_client import OUTPUTS, Client
from kvstow.testing.engine_under_test import (
    BreaksItsDisk,
    CanBeKilled,
    CountsPreemptions,
    DamagesFrames,
    EngineUnderTest,
    HoldsCopies,
)


class EngineContract:
    """The tests. A subclass gives the ``engine`` fixture, and may set what follows.

    Attributes:
        caches_prefixes: whether the engine has a prefix cache of its own.
        preempts: whether it takes blocks from requests that run, once it has too few.
    """

    caches_prefixes = True
    preempts = True

    @pytest.fixture
    def client(self, engine: EngineUnderTest, request: pytest.FixtureRequest) -> Iterator[Client]:
        """Asks the engine; blocks that a test does not give back are found when it ends."""
        client = Client(engine, request.node.name)
        yield client
        client.expect_baseline()

    # ---- one request at a time ---------------------------------------------------------

    def test_the_model_tells_prompts_apart(self, client: Client) -> None:
        """The premise of all others: equal answers prove nothing of a model that hardly looks."""
        prompt = client.prompt(3)
        others = [client.with_another_chunk(prompt, index) for index in range(3)]
        said = client.engine.recompute(prompt, 2 * OUTPUTS)
        assert said not in [client.engine.recompute(tokens, 2 * OUTPUTS) for tokens in others]
        assert said == client.engine.recompute(prompt, 2 * OUTPUTS)

    def test_a_reload_says_what_the_cold_run_and_the_own_hit_say(self, client: Client) -> None:
        prompt = client.prompt(3)
        cold = client.ask(prompt)
        assert (cold.own_hit, cold.loaded) == (0, 0)
        client.expect_models_answers([prompt], [cold])
        if self.caches_prefixes:
            own = client.ask(prompt)
            assert own.own_hit > 0
            assert own.tokens == cold.tokens
        client.engine.forget_own_cache()
        client.expect_loaded(prompt, cold)
        # What was loaded is the engine's own now, as if it had computed it.
        assert client.ask(prompt).tokens == cold.tokens

    def test_what_was_saved_outlives_a_restart(self, client: Client) -> None:
        prompts = [client.prompt(3), client.prompt(2)]
        cold = [client.ask_cold(prompt) for prompt in prompts]
        client.engine.restart()
        for prompt, answer in zip(prompts, cold, strict=True):
            client.expect_loaded(prompt, answer)
        # What came from disk is in DRAM now, and is as good there.
        client.engine.forget_own_cache()
        for prompt, answer in zip(prompts, cold, strict=True):
            client.expect_loaded(prompt, answer)

    @pytest.mark.parametrize("resumes", [1, 3])
    def test_a_prompt_that_ends_on_a_boundary_leaves_a_token(self, client: Client, resumes: int) -> None:
        """An engine that is promised all of a prompt has nothing to compute the next token with."""
        prompt = client.prompt(resumes, more=0)
        cold = client.ask_cold(prompt)
        client.expect_loaded(prompt, cold)
        again = client.ask(prompt)  # over the engine's own hit, if it has a cache
        assert again.tokens == cold.tokens
        # One token more, and the last chunk is worth its place.
        longer = (*prompt, prompt[0])
        client.engine.forget_own_cache()
        answer = client.ask(longer)
        client.expect_models_answers([longer], [answer])
        assert client.least_of(prompt) <= answer.loaded <= len(prompt)
        client.engine.forget_own_cache()
        client.expect_loaded(longer, answer)

    def test_less_than_a_chunk_is_never_loaded(self, client: Client) -> None:
        prompt = client.prompt(0, more=client.engine.chunk_tokens - 1)
        cold = client.ask_cold(prompt)
        again = client.ask(prompt)
        assert (again.loaded, again.tokens) == (0, cold.tokens)

    def test_salts_never_meet_and_identical_requests_do(self, client: Client) -> None:
        """What one tenant sent must not show, not even in the time of another's first token."""
        prompt = client.prompt(3)
        salts = ["one", "two", ""]
        # Each is cold although the others' are kept.
        cold = {salt: client.ask_cold(prompt, salt) for salt in salts}
        for salt in salts:
            client.expect_loaded(prompt, cold[salt], salt)
            client.engine.forget_own_cache()
        assert client.ask_cold(prompt, "three").tokens == client.engine.recompute(prompt, OUTPUTS, "three")

    def test_a_common_beginning_is_shared_to_the_chunk(self, client: Client) -> None:
        common = client.prompt(2)
        one, two = common + client.prompt(1), common + client.prompt(1)
        first = client.ask_cold(one)
        second = client.ask(two)
        client.expect_models_answers([two], [second])
        assert second.loaded == client.least_of(common)
        client.engine.forget_own_cache()
        client.expect_loaded(one, first)
        client.engine.forget_own_cache()
        client.expect_loaded(two, second)

    def test_a_chunk_is_known_by_all_that_comes_before_it(self, client: Client) -> None:
        """The same tokens after others are other bytes, even where both beginnings are kept."""
        one, two = client.prompt(3), client.prompt(3)
        for prompt in (one, two):
            client.ask_cold(prompt)
        begun = client.engine.resume_tokens
        mixed = one[:begun] + two[begun:]
        answer = client.ask(mixed)
        client.expect_models_answers([mixed], [answer])
        assert answer.loaded == begun

    def test_a_load_begins_at_the_engines_own_hit(self, client: Client) -> None:
        """Blocks below it may be other requests' too: they are neither loaded nor written."""
        self._need_own_cache()
        prompt = client.prompt(4)
        cold = client.ask_cold(prompt)
        beginning = prompt[: 2 * client.engine.resume_tokens + client.engine.chunk_tokens // 2 + 1]
        client.ask(beginning, outputs=1)
        answer = client.ask(prompt)
        assert answer.tokens == cold.tokens
        assert 0 < answer.own_hit <= len(beginning)
        assert answer.loaded > 0
        assert client.least_of(prompt) <= answer.own_hit + answer.loaded <= client.most_of(prompt)
        # The blocks of the hit are as they were.
        client.expect_models_answers([beginning], [client.ask(beginning)])

    def test_a_longer_own_hit_needs_no_load(self, client: Client) -> None:
        self._need_own_cache()
        prompt = client.prompt(3)
        cold = client.ask(prompt)
        client.engine.settle()
        again = client.ask(prompt)
        assert again.own_hit >= client.least_of(prompt)
        assert (again.loaded, again.tokens) == (0, cold.tokens)

    def test_a_conversation_goes_on_from_what_was_said(self, client: Client) -> None:
        """The last token was said and never read: the chunk that it would complete is not whole."""
        chunk_tokens = client.engine.chunk_tokens
        prompt = client.prompt(2)
        said = client.ask(prompt, outputs=2 * chunk_tokens - len(prompt) % chunk_tokens).tokens
        assert len(prompt + said) % chunk_tokens == 0
        client.engine.forget_own_cache()
        longer = prompt + said + client.prompt(1)
        answer = client.ask(longer)
        assert client.least_of(prompt) <= answer.loaded < len(prompt + said)
        client.expect_models_answers([longer], [answer])

    # ---- several at once ---------------------------------------------------------------

    def test_different_prefixes_at_once_say_what_they_say_alone(self, client: Client) -> None:
        prompts = [client.prompt(3, more=1 + index) for index in range(4)]
        cold = client.ask_at_once(prompts)
        assert not any(answer.own_hit or answer.loaded for answer in cold)
        client.expect_models_answers(prompts, cold)
        for _ in range(2):  # saved at once, then saved alone
            client.engine.forget_own_cache()
            for prompt, answer in zip(prompts, cold, strict=True):
                assert client.ask(prompt).tokens == answer.tokens
        client.engine.forget_own_cache()
        loaded = client.ask_at_once(prompts)
        assert [answer.tokens for answer in loaded] == [answer.tokens for answer in cold]
        for prompt, answer in zip(prompts, loaded, strict=True):
            assert client.least_of(prompt) <= answer.loaded <= client.most_of(prompt)

    @pytest.mark.parametrize("source", ["computed", "DRAM", "disk"])
    def test_the_same_prefix_at_once_says_what_it_says_alone(self, client: Client, source: str) -> None:
        """Twins that wait for each other's copies, and cousins that share a beginning."""
        prompt = client.prompt(3)
        prompts = [prompt, prompt, prompt, prompt[: 2 * client.engine.resume_tokens] + client.prompt(1)]
        if source != "computed":
            client.ask_cold(prompt)
        if source == "disk":
            client.engine.restart()
        answers = client.ask_at_once(prompts)
        client.expect_models_answers(prompts, answers)
        if source != "computed":
            assert any(answer.loaded for answer in answers)
        client.engine.forget_own_cache()
        again = client.ask_at_once(prompts)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]

    def test_more_requests_than_blocks(self, client: Client) -> None:
        """Requests that lose their blocks, with saves and loads under way, say what they say alone."""
        engine = client.engine
        length = 4 * engine.resume_tokens
        outputs = engine.resume_tokens * 3 // 2
        count = max(4, 2 * engine.room_tokens // (length + outputs))
        # Every other one is kept: loads meet preemptions too.
        prompts = [client.prompt(4, more=index % engine.chunk_tokens) for index in range(count)]
        for prompt in prompts[::2]:
            client.ask_cold(prompt)
        before = engine.num_preemptions if isinstance(engine, CountsPreemptions) else 0
        answers = client.ask_at_once(prompts, outputs)
        if self.preempts and isinstance(engine, CountsPreemptions):
            assert engine.num_preemptions > before
        client.expect_models_answers(prompts, answers)
        client.expect_baseline()
        # And what was saved meanwhile is right.
        engine.forget_own_cache()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert client.ask(prompt).tokens == answer.tokens[:OUTPUTS]

    # ---- requests that go away, and copies that take their time ------------------------

    def test_an_abort_in_the_queue(self, client: Client) -> None:
        prompts = [client.prompt(3), client.prompt(3)]
        cold = client.ask_cold(prompts[0])
        names = [client.name() for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            client.engine.submit(name, prompt, OUTPUTS)
        client.engine.abort(names[0])
        (other,) = client.engine.finish(names[1:])
        client.expect_models_answers(prompts[1:], [other])
        client.expect_baseline()
        client.expect_loaded(prompts[0], cold)

    def test_an_abort_during_a_load(self, client: Client) -> None:
        """The load may still write the blocks: nobody else has them before it has ended."""
        engine = self._holding(client)
        prompt, other = client.prompt(3), client.prompt(3)
        cold = client.ask_cold(prompt)
        name = client.name()
        with engine.hold_loads():
            engine.submit(name, prompt, OUTPUTS)
            engine.wait_loading(name)
            engine.abort(name)
            meanwhile = client.ask(other)
        client.expect_baseline()
        client.expect_models_answers([other], [meanwhile])
        # In the blocks that it computed, and from what was saved of them.
        assert client.ask(other).tokens == meanwhile.tokens
        engine.forget_own_cache()
        client.expect_loaded(prompt, cold)
        client.expect_loaded(other, meanwhile)

    def test_others_go_on_during_a_load(self, client: Client) -> None:
        engine = self._holding(client)
        prompt, other = client.prompt(3), client.prompt(3)
        cold = client.ask_cold(prompt)
        name = client.name()
        with engine.hold_loads():
            engine.submit(name, prompt, OUTPUTS)
            engine.wait_loading(name)
            client.expect_models_answers([other], [client.ask(other)])
        (answer,) = engine.finish([name])
        client.check(prompt, answer)
        assert answer.tokens == cold.tokens
        assert client.least_of(prompt) <= answer.loaded <= client.most_of(prompt)

    @pytest.mark.parametrize("ending", ["said", "aborted", "aborted during a load"])
    def test_an_id_used_again_is_a_new_request(self, client: Client, ending: str) -> None:
        engine = client.engine
        prompts = [client.prompt(3), client.prompt(2)]
        cold = [client.ask_cold(prompt) for prompt in prompts]
        name = client.name()
        if ending == "aborted during a load":
            engine = self._holding(client)
            with engine.hold_loads():
                engine.submit(name, prompts[0], OUTPUTS)
                engine.wait_loading(name)
                engine.abort(name)
        else:
            engine.submit(name, prompts[0], OUTPUTS)
            if ending == "aborted":
                engine.abort(name)
            else:
                engine.finish([name])
        engine.forget_own_cache()
        engine.submit(name, prompts[1], OUTPUTS)
        (answer,) = engine.finish([name])
        client.check(prompts[1], answer)
        assert answer.tokens == cold[1].tokens
        assert client.least_of(prompts[1]) <= answer.loaded <= client.most_of(prompts[1])

    def test_blocks_are_kept_for_a_save_that_waits(self, client: Client) -> None:
        """What is copied late is what was computed, whoever wants blocks meanwhile."""
        engine = self._holding(client)
        prompt = client.prompt(3)
        with engine.hold_saves():
            cold = client.ask(prompt)
            # Too short to be saved, and enough of them to pass through every block that is free.
            more = engine.chunk_tokens - OUTPUTS - 1
            for _ in range(2 * engine.room_tokens // engine.chunk_tokens):
                client.ask(client.prompt(0, more=max(1, more)), outputs=2)
        client.expect_models_answers([prompt], [cold])
        engine.forget_own_cache()
        client.expect_loaded(prompt, cold)

    def test_blocks_that_were_taken_away_are_not_saved(self, client: Client) -> None:
        """The saves of a request that loses its blocks wait, and then other tokens lie in these blocks."""
        engine = self._holding(client)
        prompts = [client.prompt(4) for _ in range(engine.room_tokens // len(client.prompt(4)))]
        # So long that none of the others has room for its own by the time that the first is done.
        outputs = 3 * engine.resume_tokens
        names = [client.name() for _ in prompts]
        before = engine.num_preemptions if isinstance(engine, CountsPreemptions) else 0
        with engine.hold_saves():
            for name, prompt in zip(names, prompts, strict=True):
                engine.submit(name, prompt, outputs)
            engine.finish(names[:1])
            if self.preempts and isinstance(engine, CountsPreemptions):
                assert engine.num_preemptions > before
        answers = engine.finish(names)
        client.expect_models_answers(prompts, answers)
        engine.forget_own_cache()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert client.ask(prompt).tokens == answer.tokens[:OUTPUTS]

    # ---- what goes wrong ---------------------------------------------------------------

    def test_a_broken_disk_is_recomputed_and_a_mended_one_is_used_again(self, client: Client) -> None:
        engine = client.engine
        if not isinstance(engine, BreaksItsDisk):
            pytest.skip("this engine's disk cannot be broken")
        prompts = [client.prompt(3) for _ in range(3)]
        cold = [client.ask_cold(prompt) for prompt in prompts]
        new = client.prompt(3)
        engine.restart()
        engine.break_disk()
        try:
            for prompt, answer in zip(prompts[:2], cold[:2], strict=True):
                again = client.ask(prompt)
                assert (again.loaded, again.tokens) == (0, answer.tokens)
            # DRAM is used all the same.
            computed = client.ask_cold(new)
            client.expect_loaded(new, computed)
        finally:
            engine.mend_disk()
        client.expect_baseline()
        client.expect_loaded(prompts[2], cold[2])

    def test_a_mended_disk_keeps_what_is_saved_then(self, client: Client) -> None:
        engine = client.engine
        if not isinstance(engine, BreaksItsDisk):
            pytest.skip("this engine's disk cannot be broken")
        lost, kept = client.prompt(3), client.prompt(3)
        engine.break_disk()
        try:
            lost_cold = client.ask_cold(lost)
        finally:
            engine.mend_disk()
        kept_cold = client.ask_cold(kept)
        engine.restart()
        assert client.ask(lost).tokens == lost_cold.tokens
        client.expect_loaded(kept, kept_cold)

    def test_damaged_frames_are_recomputed_and_replaced(self, client: Client) -> None:
        engine = client.engine
        if not isinstance(engine, DamagesFrames):
            pytest.skip("this engine's frames cannot be damaged")
        prompt = client.prompt(3)
        cold = client.ask_cold(prompt)
        engine.restart()
        damaged = engine.damage_frames()
        assert damaged > 0
        again = client.ask(prompt)
        assert (again.loaded, again.tokens) == (0, cold.tokens)
        # A load ends at the first frame that is bad; the others are found by later ones.
        for _ in range(damaged):
            engine.forget_own_cache()
            again = client.ask(prompt)
            assert again.tokens == cold.tokens
            if again.loaded >= client.least_of(prompt):
                break
        engine.restart()
        client.expect_loaded(prompt, cold)

    def test_a_kill_loses_what_was_under_way_and_nothing_else(self, client: Client) -> None:
        engine = client.engine
        if not isinstance(engine, CanBeKilled):
            pytest.skip("this engine cannot be killed")
        settled, fresh = client.prompt(3), client.prompt(3)
        settled_cold = client.ask_cold(settled)
        fresh_cold = client.ask(fresh)
        name = client.name()
        engine.submit(name, client.prompt(3), OUTPUTS)
        engine.kill()
        client.expect_baseline()
        client.expect_loaded(settled, settled_cold)
        assert client.ask(fresh).tokens == fresh_cold.tokens

    def test_a_kill_during_a_load(self, client: Client) -> None:
        engine = client.engine
        if not isinstance(engine, CanBeKilled) or not isinstance(engine, HoldsCopies):
            pytest.skip("this engine cannot be killed during a load")
        prompt = client.prompt(3)
        cold = client.ask_cold(prompt)
        name = client.name()
        with engine.hold_loads():
            engine.submit(name, prompt, OUTPUTS)
            engine.wait_loading(name)
            engine.kill()
        client.expect_loaded(prompt, cold)

    # ---- inside ------------------------------------------------------------------------

    def _need_own_cache(self) -> None:
        if not self.caches_prefixes:
            pytest.skip("this engine has no prefix cache of its own")

    def _holding(self, client: Client) -> HoldsCopies:
        if not isinstance(client.engine, HoldsCopies):
            pytest.skip("this engine's copies cannot be held")
        return client.engine
