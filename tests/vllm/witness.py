"""Watches an engine under pressure: what a load brought must be what a forward computed.

Batching changes bits, so there is no one right run to compare with. What is right is checked block
by block instead: a block that was loaded must hold bytes that a forward of this engine computed for
exactly that prefix.
"""

from __future__ import annotations

from typing import Any

from inprocess import Engine

Prefix = tuple[int, ...]


class Witness:
    """Notes what each forward computed, and holds what each load brought against it.

    Attributes:
        loaded: blocks that came from kvstow, all found right.
        preemptions: how often the engine took a running request's blocks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block_tokens = [
            group.kv_cache_spec.block_size for group in engine.scheduler.kv_cache_config.kv_cache_groups
        ]
        self._computed: dict[tuple[int, Prefix], set[bytes]] = {}
        # By block: which group's prefix it was last seen to hold, and the bytes.
        self._holds: dict[int, tuple[int, Prefix, bytes]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self.loaded = 0
        self.preemptions = 0

    def step(self) -> None:
        """Let the engine do one step and look at what it changed."""
        floors = {name: request.num_computed_tokens for name, request in self._live().items()}
        self._engine.step()
        for name, request in self._live().items():
            self._look(name, request, floors.get(name, 0))

    def _live(self) -> dict[str, Any]:
        return dict(self._engine.scheduler.requests)

    def _look(self, name: str, request: Any, floor: int) -> None:
        preemptions, seen = self._seen.get(name, (0, 0))
        if request.num_preemptions != preemptions:
            self.preemptions += request.num_preemptions - preemptions
            seen = 0
        if name not in {running.request_id for running in self._engine.scheduler.running}:
            # It waits, or a load writes its blocks: they are looked at once it runs.
            self._seen[name] = (request.num_preemptions, 0)
            return
        computed = request.num_computed_tokens
        tokens = tuple(request.all_token_ids)
        for group, table in enumerate(self._engine.tables(name)):
            size = self._block_tokens[group]
            for index in range(seen // size, computed // size):
                if table[index]:
                    self._look_at(name, group, tokens[: (index + 1) * size], table[index], floor)
        self._seen[name] = (request.num_preemptions, computed)

    def _look_at(self, name: str, group: int, prefix: Prefix, block: int, floor: int) -> None:
        content = self._engine.group_bytes(group, block)
        if self._holds.get(block) == (group, prefix, content):
            return
        self._holds[block] = (group, prefix, content)
        known = self._computed.setdefault((group, prefix), set())
        if len(prefix) <= floor:
            assert content in known, f"{name}: group {group}, {len(prefix)} tokens: was never computed"
            self.loaded += 1
        else:
            known.add(content)
