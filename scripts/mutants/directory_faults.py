"""Faults in what is known: the joint rule, pins, eviction, slots, and what is found at start."""

from __future__ import annotations

from mutant import Edit, Mutant

_BOUNDARY = "lifecycle/boundary.py"
_DIRECTORY = "lifecycle/directory.py"
_INVENTORY = "lifecycle/inventory.py"
_RESUME = "layout/resume.py"
_TABLES = "lifecycle/tables.py"

JOINT_RULE = (
    Mutant(
        "a window is one chunk short",
        "What its kind needs at the boundary: a window's first tokens would be whatever lay in the blocks.",
        _RESUME,
        "return -(-self.window_tokens // self.chunk_tokens) if",
        "return max(1, self.window_tokens // self.chunk_tokens) if",
    ),
    Mutant(
        "a mix of boundaries",
        "Never a mix: a hybrid model would go on with a state of one place and keys up to another.",
        _BOUNDARY,
        "                agreed = agreed and found == boundary\n",
        "",
    ),
    Mutant(
        "only one paged group is asked",
        "Every group has what it needs: models with two kinds of attention would resume with half of one.",
        _BOUNDARY,
        "                index += 1\n            stop = index\n",
        "                index += 1\n            return index\n",
    ),
    Mutant(
        "the search begins a chunk too late",
        "Every chunk beyond the floor: a missing first chunk would be promised.",
        "lifecycle/loading.py",
        "        start = computed // limits.chunk_tokens\n        # One",
        "        start = -(-computed // limits.chunk_tokens)\n        # One",
    ),
    Mutant(
        "no token is left to compute",
        "At least one token is left: the engine would have no logits to sample from.",
        "lifecycle/loading.py",
        "        stop = min(len(request.chunks), (num_tokens - 1) // limits.chunk_tokens)",
        "        stop = min(len(request.chunks), num_tokens // limits.chunk_tokens)",
    ),
    Mutant(
        "a chunk that is being copied counts",
        "READY on every rank: a request would be promised what is still being copied, or never arrives.",
        _BOUNDARY,
        "                if entry.arena is not ready:\n                    if entry.promoting:",
        "                if entry.arena is Copy.NONE:\n                    if entry.promoting:",
    ),
    Mutant(
        "an image that is being copied counts",
        "READY on every rank: a hybrid model would resume from an image that is not there yet.",
        _BOUNDARY,
        "                if entry.arena is ready:\n                    continue",
        "                if entry.arena is not Copy.NONE:\n                    continue",
    ),
    Mutant(
        "the image of another boundary",
        "One image taken exactly there: a state that has read other tokens than the keys beside it.",
        "lifecycle/loading.py",
        "                ref = request.ref(group, index)\n                tier",
        "                earlier = index - 1 if rule.kind is GroupKind.STATE and index else index\n"
        "                ref = request.ref(group, earlier)\n                tier",
    ),
    Mutant(
        "PENDING for ever",
        "Every promise ends: a read from disk that failed once would keep all later requests waiting.",
        _TABLES,
        "        entry.arena = Copy.NONE\n        entry.promoting = False\n",
        "        entry.arena = Copy.NONE\n",
    ),
    Mutant(
        "a lookup pins what it finds",
        "A lookup changes nothing: it is polled, and soon nothing could be evicted any more.",
        "lifecycle/loading.py",
        "            request.boundary = computed + match.tokens\n",
        "            request.boundary = computed + match.tokens\n"
        "            self._directory.pin(request.chunks, request.boundary // self._limits.chunk_tokens)\n",
    ),
    Mutant(
        "a lookup is a use",
        "A lookup changes nothing: a request that waits would push out what others are about to load.",
        _DIRECTORY,
        "        return search.run(stop)",
        "        self.touch(chunks, stop)\n        return search.run(stop)",
    ),
)

SPACE = (
    Mutant(
        "a pinned frame is evicted from the arena",
        "A pin keeps from eviction: a slot would get other bytes while a load reads it.",
        _TABLES,
        "        if entry.pins:\n            return False\n",
        "",
    ),
    Mutant(
        "a parent is evicted before its child",
        "A chunk is worth nothing without those before it: budgets would fill with what no lookup reaches.",
        _TABLES,
        "        return self.is_paged and chunk in self.followers",
        "        return False",
        more=(
            Edit(
                _DIRECTORY,
                "            deepest_first = self._tails.of_use(needed)[::-1]",
                "            deepest_first = self._tails.of_use(needed)",
            ),
        ),
    ),
    Mutant(
        "an image stays when that of another group goes",
        "One image of every group or none: images are few and large, and one alone serves no boundary.",
        _DIRECTORY,
        "            self._drop_idle(chunk, (GroupKind.STATE,))\n",
        "",
    ),
    Mutant(
        "chunks stay when the image that they led to goes",
        "Chunks that lead to no image are worth nothing: they go before those of a prompt that has one.",
        _DIRECTORY,
        "            self._tails.end(chunk)\n",
        "",
    ),
    Mutant(
        "what an ended request had past its last image stays",
        "Chunks that lead to no image are worth nothing: they go before those of a prompt that has one.",
        "lifecycle/planner.py",
        "        self.directory.retire(request.chunks)\n",
        "",
    ),
    Mutant(
        "what a request goes on from makes room for it",
        "Chunks that lead nowhere are of use again when a request comes to save what needs them.",
        _DIRECTORY,
        "            self._tails.go_on(ref)  #",
        "            pass  #",
    ),
    Mutant(
        "one frame more on disk than the budget",
        "Budgets are hard: the directory would count on a file that the store refuses.",
        _DIRECTORY,
        "        if table.disk_frames >= table.disk_frames_max and not",
        "        if table.disk_frames > table.disk_frames_max and not",
    ),
    Mutant(
        "slots as many as the richest rank has",
        "As many as the poorest has: the poorer ranks would be told to use memory that is not theirs.",
        _DIRECTORY,
        "            slots = min(hello.arena_slots[index] for hello in hellos)",
        "            slots = max(hello.arena_slots[index] for hello in hellos)",
    ),
    Mutant(
        "a frame that is being written is not pinned",
        "A frame keeps its slot until it is on disk: another frame's bytes would be written under its name.",
        _DIRECTORY,
        "        entry.disk = Copy.FILLING\n        entry.pins += 1\n",
        "        entry.disk = Copy.FILLING\n",
        more=(
            Edit(
                _DIRECTORY,
                "        self._enter(table.disk_order, ref.chunk)\n        self.unpin((ref,))",
                "        table.disk_order.add(ref.chunk)",
            ),
            Edit(
                _DIRECTORY,
                "        self._removes.append(ref)\n        self.unpin((ref,))",
                "        self._removes.append(ref)\n        table.forget_if_empty(entry)",
            ),
        ),
    ),
    Mutant(
        "a bad frame's slot is free at once",
        "A slot is free when its last reader is gone: a slower rank would read another chunk from it.",
        _DIRECTORY,
        "            if entry.pins:\n                entry.arena = Copy.DOOMED",
        "            if entry.pins > 1000:\n                entry.arena = Copy.DOOMED",
    ),
    Mutant(
        "a slot is free while a lost reader may write it",
        "Never reuse a busy slot: a read that comes back after an hour would overwrite another frame.",
        _TABLES,
        "        if busy_ranks:\n",
        "        if busy_ranks > 1000:\n",
    ),
    Mutant(
        "a slot is freed twice",
        "One frame per slot: two prompts would be copied into the same memory.",
        _TABLES,
        "        elif self.quarantined.pop(slot, None) is not None:\n",
        "        elif self.quarantined.pop(slot, None) is not None or slot not in self.free_slots:\n",
    ),
    Mutant(
        "a slot is free when the first of two lost readers is back",
        "Never reuse a busy slot: the other rank's reader would overwrite a new frame there.",
        _TABLES,
        "        if left > 0:\n            self.quarantined[slot] = left\n        elif",
        "        if",
    ),
    Mutant(
        "files of a failed write stay",
        "Bounded: ranks would keep files that the directory does not know, until the budget is full of them.",
        _DIRECTORY,
        "        table.disk_frames -= 1\n        self._removes.append(ref)\n",
        "        table.disk_frames -= 1\n",
    ),
)

START = (
    Mutant(
        "one rank's file is enough",
        "READY when every rank has it: after a restart, chunks that one rank lost would be promised.",
        _INVENTORY,
        "        return self.holders[ref.chunk] == self.ranks",
        "        return self.holders[ref.chunk] >= 1",
    ),
    Mutant(
        "orphans are adopted",
        "A chunk is worth nothing without those before it: the disk would hold files that nobody can hit.",
        _INVENTORY,
        "        if found.is_complete(ref) and ref.parent in rooted:",
        "        if found.is_complete(ref):",
    ),
    Mutant(
        "ranks may disagree",
        "Disagreement is an error at start: ranks with other settings would share keys.",
        _DIRECTORY,
        "            if mine != theirs:",
        "            if mine is None:",
    ),
)
