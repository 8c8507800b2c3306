"""What is asked of every model family on two ranks: a reload is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from families import STATE, Family
from vllm_children import Engine, Launcher, stow

Note = Callable[[str, str], None]
"""Takes a column of the table and what was seen."""


def check_on_two_ranks(family: Family, launcher: Launcher, folder: Path, note: Note) -> None:
    """Cold, the engine's own hit, from the arena, and from disk after a restart; ``note`` what was seen.

    Where the prompt has an image or a sound, another one in the same text must not meet it.

    Args:
        folder: an empty one, for the model and for the disk tier.
    """
    note("family", family.name)
    model = family.make(folder / "model")
    transfer = stow(chunk_tokens=family.chunk_tokens, disk_path=str(folder / "disk"))
    content = family.prompt(1)

    def start() -> Engine:
        environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        return launcher.spawn(model, transfer, environ, tensor_parallel_size=2, **family.options)

    engine = start()
    cold = engine.ask_about(content)
    hit = (cold.length - 1) // family.chunk_tokens * family.chunk_tokens
    assert cold.cached == 0
    if family.has_own_cache:
        own = engine.ask_about(content)
        assert own.cached == hit
    engine.forget()
    arena = engine.ask_about(content)
    assert arena.cached == engine.numbers()["loaded_tokens_arena"] == hit
    if family.look_alike is not None:
        _expect_apart(engine, family, hit)
    engine.stop()
    engine = start()
    disk = engine.ask_about(content)
    assert disk.cached == engine.numbers()["loaded_tokens_disk"] == hit
    engine.stop()

    assert disk.text == arena.text
    seen = "disk and arena: tokens, log-probabilities"
    if family.has_own_cache:
        assert arena.text == own.text
        seen = "own hit: tokens, log-probabilities"
    note("TP=2", seen + ("; other media kept apart" if family.look_alike else ""))


def _expect_apart(engine: Engine, family: Family, hit: int) -> None:
    """The same text about something else hits no further than to where that begins; both are kept."""
    assert family.look_alike is not None
    contents = [family.prompt(1), family.look_alike(1)]
    engine.forget()
    other = engine.ask_about(contents[1])
    # A state is kept where a prompt ends only, and that is past what they share.
    shared = 0 if STATE in family.kinds else family.before_media // family.chunk_tokens * family.chunk_tokens
    assert other.cached == shared
    own = [engine.ask_about(content) for content in contents]
    # What they look at says something, so sharing would have been wrong.
    assert own[0].text != own[1].text
    engine.forget()
    for content, computed in zip(contents, own, strict=True):
        again = engine.ask_about(content)
        assert (again.cached, again.text) == (hit, computed.text)
