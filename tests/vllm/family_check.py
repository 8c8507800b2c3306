"""What is asked of every model family: a reload is the engine's own hit, alone and in company.

What is compared, and how:

- KV bytes of every block that a resume at the boundary reads, by group, when the first token is out;
- tokens and the log-probabilities of the whole vocabulary, for a request that runs alone;
- tokens only, for two that run at once: a batch of two is another sum in another order, so its
  log-probabilities differ in their last bits from those of a request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from families import STATE, Family
from inprocess import Answer, Engine, prompt, running

from kvstow.adapters.vllm.setup import rules_of

Note = Callable[[str, str], None]
"""Takes a column of the table and what was seen."""


@dataclass
class Seen:
    """What one request said, and the blocks that it went on from.

    Attributes:
        answer: its answer.
        length: tokens of its prompt.
        held: bytes by group and index of the block in the request's table, where it has one, of those
            below the last chunk boundary of the prompt; as they were when the first token was out.
    """

    answer: Answer
    length: int = 0
    held: dict[tuple[int, int], bytes] = field(default_factory=dict)


def together(
    engine: Engine, prompts: Sequence[dict[str, Any]], chunk_tokens: int, **options: Any
) -> list[Seen]:
    """Ask ``prompts`` at once and look at each as its first token comes out."""
    names = [engine.submit([], content=content, logprobs=True, **options) for content in prompts]
    seen = {name: Seen(engine.answers[name]) for name in names}

    def step() -> None:
        engine.step()
        for name, one in seen.items():
            if one.answer.tokens and not one.length:
                one.length = engine.request(name).num_prompt_tokens
                one.held = _held(engine, name, (one.length - 1) // chunk_tokens * chunk_tokens)

    engine.step_until(lambda: all(one.answer.finish is not None for one in seen.values()), step)
    return list(seen.values())


def _held(engine: Engine, name: str, boundary: int) -> dict[tuple[int, int], bytes]:
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return {
        (group, index): engine.group_bytes(group, block)
        for group, table in enumerate(engine.tables(name))
        for index, block in enumerate(table[: boundary // groups[group].kv_cache_spec.block_size])
        if block
    }


def check_family(family: Family, folder: Path, note: Note) -> None:
    """Run all of it on one family; ``note`` what was seen.

    Args:
        folder: an empty one, for the model and for the disk tier.
    """
    model = family.make(folder / "model")
    stow = {"chunk_tokens": family.chunk_tokens, "disk_path": str(folder / "disk")}
    options = {"max_num_seqs": 2, **family.options}
    check = _Check(family, note)
    note("family", family.name)
    note("remarks", family.remark)
    with running(model, stow, **options) as engine:
        check.groups(engine)
        check.cold_and_own_hit(engine)
        check.reload(engine, "arena")
        check.two_at_once(engine)
        check.another_ending(engine)
        engine.expect_baseline()
    with running(model, stow, **options) as engine:
        check.reload(engine, "disk")
        engine.expect_baseline()
    check.done()


class _Check:
    def __init__(self, family: Family, note: Note) -> None:
        self._family = family
        self._note = note
        self._groups: set[int] = set()
        self._restored: list[str] = []
        self._oracles: dict[int, Seen] = {}  # by the prompt's seed: what a reload must equal
        # Whether the oracles' tails were computed from the boundary where a reload begins. A cold run's
        # was not, and latent attention sums in another order then; after one reload there is a better one.
        self._is_same_tail = family.has_own_cache
        # Whether an answer after a hit has the log-probabilities of one that was computed from the start.
        self._is_cold_exact = False

    def groups(self, engine: Engine) -> None:
        """The kinds are the ones that the family is here for."""
        config = engine.scheduler.kv_cache_config
        rules = rules_of(config, self._family.chunk_tokens)
        assert {rule.kind.value for rule in rules} == set(self._family.kinds)
        self._groups = set(range(len(rules)))
        said: dict[str, int] = {}
        for rule, group in zip(rules, config.kv_cache_groups, strict=True):
            window = f"({rule.window_tokens})" if rule.window_tokens else ""
            layers = len(group.layer_names)
            said_layers = f"{layers} layer{'s' if layers > 1 else ''}"
            kind = f"{rule.kind.value}{window}, {said_layers}"
            said[kind] = said.get(kind, 0) + 1
        self._note("groups", str(len(rules)))
        self._note("kinds", "; ".join(f"{count} × {kind}" for kind, count in said.items()))
        self._note("dtype", str(engine.core.vllm_config.model_config.dtype).removeprefix("torch."))

    def cold_and_own_hit(self, engine: Engine) -> None:
        """Two prompts, each alone, cold and again."""
        says_the_same = True
        for seed in (1, 2):
            cold = self._alone(engine, seed)
            assert cold.answer.cached == 0
            self._oracles[seed] = cold
            if self._family.has_own_cache:
                own = self._alone(engine, seed)
                assert own.answer.cached == self._hit(cold)
                self._expect_answer(own, cold.answer, "tokens")
                says_the_same &= own.answer.logprobs == cold.answer.logprobs
                self._oracles[seed] = own
        self._is_cold_exact = self._family.has_own_cache and says_the_same
        if not self._family.has_own_cache:
            equal = "no own hit"
        else:
            equal = "tokens, log-probabilities" if says_the_same else "tokens"
        self._note("own hit equals cold", equal)

    def reload(self, engine: Engine, tier: str) -> None:
        """From kvstow alone, one request at a time."""
        for seed, oracle in self._oracles.items():
            engine.clear_own_cache()
            before = engine.counters()
            seen = self._alone(engine, seed)
            hit = self._hit(oracle)
            assert engine.counted_since(before)[f"loaded_tokens_{tier}"] == hit == seen.answer.cached
            self._expect_blocks(seen, oracle)
            self._expect_answer(seen, oracle.answer, "all" if self._is_same_tail else "tokens")
            self._oracles[seed] = Seen(seen.answer, seen.length, oracle.held)
        self._is_same_tail = True
        self._restored.append(f"{hit} of {oracle.length} from {tier}")

    def two_at_once(self, engine: Engine) -> None:
        """Different prompts and the same one; then two that are computed and saved at once."""
        for seeds in ((1, 2), (1, 1)):
            engine.clear_own_cache()
            for seed, seen in zip(seeds, self._together(engine, seeds), strict=True):
                assert seen.answer.cached == self._hit(seen)
                self._expect_blocks(seen, self._oracles[seed])
                self._expect_answer(seen, self._oracles[seed].answer, "tokens")
        engine.clear_own_cache()
        for seen in self._together(engine, (3, 4)):
            assert seen.answer.cached == 0
        for seed in (3, 4):
            engine.clear_own_cache()
            seen = self._alone(engine, seed)
            assert seen.answer.cached == self._hit(seen)
            # What it loaded was computed in company, so its bits may be others.
            cold = self._alone(engine, seed, uses_caches=False)
            assert cold.answer.cached == 0
            self._expect_answer(seen, cold.answer, "tokens")
        self._note("two at once", "KV bytes, tokens")

    def another_ending(self, engine: Engine) -> None:
        """A stored prompt whose last quarter is another: what both begin with does not depend on it."""
        content = self._family.prompt(1)
        tokens = content["prompt_token_ids"]
        kept = 3 * len(tokens) // 4
        content |= {"prompt_token_ids": [*tokens[:kept], *prompt(len(tokens) - kept, seed=5)]}
        engine.clear_own_cache()
        [seen] = together(engine, [content], self._family.chunk_tokens)
        [cold] = together(engine, [content], self._family.chunk_tokens, uses_caches=False)
        assert cold.answer.cached == 0
        # Of recurrent state there is none before the end of the stored prompt.
        begun = kept + seen.length - len(tokens)
        whole = begun // self._family.chunk_tokens * self._family.chunk_tokens
        assert seen.answer.cached == (0 if STATE in self._family.kinds else whole)
        self._expect_answer(seen, cold.answer, "all" if self._is_cold_exact else "tokens")
        equal = "tokens, log-probabilities" if self._is_cold_exact else "tokens"
        self._note("another ending", f"{seen.answer.cached} of {begun} loaded; as cold: {equal}")

    def done(self) -> None:
        """Note what all of it was compared with."""
        against = "own hit" if self._family.has_own_cache else "cold run"
        if self._family.has_own_cache:
            what = "KV bytes, tokens, log-probabilities"
        else:
            what = "KV bytes, tokens; disk and arena also log-probabilities"
        self._note("bit-exact against", f"{against}: {what}")
        self._note("tokens restored", "; ".join(self._restored))

    def _alone(self, engine: Engine, seed: int, **options: Any) -> Seen:
        return self._together(engine, (seed,), **options)[0]

    def _together(self, engine: Engine, seeds: Sequence[int], **options: Any) -> list[Seen]:
        prompts = [self._family.prompt(seed) for seed in seeds]
        return together(engine, prompts, self._family.chunk_tokens, **options)

    def _hit(self, seen: Seen) -> int:
        return (seen.length - 1) // self._family.chunk_tokens * self._family.chunk_tokens

    def _expect_blocks(self, seen: Seen, oracle: Seen) -> None:
        """Every block that the oracle went on from was there, with the same bytes."""
        assert {group for group, _ in oracle.held} == self._groups
        missing = oracle.held.keys() - seen.held.keys()
        assert not missing
        differ = [key for key, content in oracle.held.items() if seen.held[key] != content]
        assert not differ

    def _expect_answer(self, seen: Seen, said: Answer, how: str) -> None:
        assert seen.answer.tokens == said.tokens
        if how == "all":
            assert seen.answer.logprobs == said.logprobs
