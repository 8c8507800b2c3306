"""Faults in what is decided: promises, loads, saves, snapshots, deadlines, reports."""

from __future__ import annotations

from mutant import Mutant

_DELIVERY = "lifecycle/delivery.py"
_LOADING = "lifecycle/loading.py"
_PLANNER = "lifecycle/planner.py"
_REQUESTS = "lifecycle/requests.py"
_SAVING = "lifecycle/saving.py"
_SILENCE = "lifecycle/silence.py"
_SNAPSHOTS = "lifecycle/snapshots.py"

LOADS = (
    Mutant(
        "load below the floor",
        "Never below the engine's floor: blocks that other requests share would be written under them.",
        _LOADING,
        "            skip = rule.blocks_below(index, floor)",
        "            skip = 0",
    ),
    Mutant(
        "skip one block too many",
        "All that was promised is loaded: a block would be left as it was, and believed.",
        "layout/resume.py",
        "        return max(0, (floor - first_token) // self.block_tokens)",
        "        return max(0, (floor - first_token) // self.block_tokens + 1)",
    ),
    Mutant(
        "blocks that are not there are loaded into",
        "Only into the request's blocks: what the engine keeps no block for would be sent to block -1.",
        _LOADING,
        "            if len(frame) < rule.frame_blocks or NO_BLOCK in frame[skip:]:",
        "            if len(frame) < rule.frame_blocks:",
    ),
    Mutant(
        "promise before the load decision",
        "Never promise what will not be issued: the engine would wait for loads beyond the bound.",
        _LOADING,
        "        if len(self._runs) >= limits.pending_loads_max or self._dead:",
        "        if self._dead:",
    ),
    Mutant(
        "a promise that cannot be kept is dropped",
        "Every promise ends: the request would wait for ever for a load that nobody was told to do.",
        _LOADING,
        "        self._orders.append(LoadJob(job, request.request_id, items))",
        "        if items:\n            self._orders.append(LoadJob(job, request.request_id, items))",
    ),
    Mutant(
        "more is loaded than the engine allocated for",
        "Exactly the tokens from the floor on: an engine that took up less would have its blocks overrun.",
        _LOADING,
        "            stop = boundary // self._limits.chunk_tokens\n            pinned",
        "            stop = request.boundary // self._limits.chunk_tokens\n            pinned",
    ),
    Mutant(
        "a load's sources are not pinned",
        "A pin keeps from eviction: a slot would get other bytes while a load reads it.",
        _LOADING,
        "            pinned = self._directory.pin(request.chunks, stop)",
        "            pinned = []",
    ),
    Mutant(
        "pins go when the first rank is done",
        "A pin lasts until every rank is done: a slower rank would read a slot that was given away.",
        _LOADING,
        "        run.refused = run.refused or load.refused\n",
        "        run.refused = run.refused or load.refused\n"
        "        self._directory.unpin(run.pinned)\n        run.pinned = []\n",
    ),
    Mutant(
        "a load ends when all ranks but one are done",
        "On every rank: the engine would compute on blocks that one rank has not got yet.",
        _REQUESTS,
        "        self.pinned = pinned\n        self.waiting = {Rank(rank) for rank in range(ranks)}\n"
        "        self.faults",
        "        self.pinned = pinned\n"
        "        self.waiting = {Rank(rank) for rank in range(max(1, ranks - 1))}\n"
        "        self.faults",
    ),
    Mutant(
        "a promoted frame of a failed load is kept",
        "READY on every rank: a slot that some rank never filled would be promised.",
        _LOADING,
        "                if failed:\n                    directory.arena_failed",
        "                if run.busy:\n                    directory.arena_failed",
    ),
    Mutant(
        "a corrupt frame is kept",
        "Bad entries are dropped: every later request with that prefix would fail its load again.",
        _LOADING,
        "            if fault in (Fault.ABSENT, Fault.CORRUPT):",
        "            if fault is Fault.ABSENT:",
    ),
    Mutant(
        "what failed is promised again",
        "Never the same keys to the same request: it could load, fail and wait for ever.",
        _REQUESTS,
        "        self.denied.setdefault(group, set()).add(chunk)",
        "        self.denied.setdefault(group, set())",
    ),
    Mutant(
        "a disk that times out is not left alone",
        "The tier is marked degraded: every request would wait for one more time-out.",
        _LOADING,
        "                self._degrade_disk()",
        "                self.refresh_disk()",
    ),
)

DEADLINES = (
    Mutant(
        "what a silent rank reads is evicted",
        "No slot is refilled while a copy reads it: a silent rank may have found the frame good just now.",
        _LOADING,
        "        if not run.waiting:\n            directory.unpin(run.pinned)  #",
        "        directory.unpin(run.pinned)\n        run.pinned = []  #",
    ),
    Mutant(
        "planner gives up by time alone",
        "Deadlines bound work, not queues: one slow step would fail loads that were doing well.",
        _SILENCE,
        "SILENT_STEPS = 16",
        "SILENT_STEPS = 0",
    ),
    Mutant(
        "planner gives up by steps alone",
        "Deadlines bound work: an engine with short steps would fail every load that takes a moment.",
        _SILENCE,
        "        return now_s - heard_s > self._bound_s and step - heard_step >= SILENT_STEPS",
        "        return step - heard_step >= SILENT_STEPS",
    ),
    Mutant(
        "planner never gives up",
        "In bounded time: a request on a dead rank would wait for ever.",
        _SILENCE,
        "        return now_s - heard_s > self._bound_s and step - heard_step >= SILENT_STEPS",
        "        return now_s - heard_s > 1e9 and step - heard_step >= SILENT_STEPS",
    ),
    Mutant(
        "reports are no sign of life",
        "A rank that lives ends its loads itself: a long queue on a busy rank would be given up under it.",
        _LOADING,
        "        self._watch.heard(rank)\n",
        "",
    ),
    Mutant(
        "a rank that was dead stays dead",
        "A recompute, not the end: one lost report would switch the cache off until the next restart.",
        _LOADING,
        "        self._dead.discard(rank)\n",
        "",
    ),
    Mutant(
        "what a dead rank was told to load is free",
        "Never reuse a busy slot: a rank that was only slow would write into another prompt's frame.",
        _LOADING,
        "            run.busy[place] = run.busy.get(place, 0) + len(run.waiting)",
        "            run.busy[place] = 0",
    ),
)

REPORTS = (
    Mutant(
        "reports are never sent again",
        "What was lost comes again: one lost message would hold blocks and pins for ever.",
        _DELIVERY,
        "            overdue = tuple(self._unacknowledged)",
        "            overdue = ()",
    ),
    Mutant(
        "a report that comes twice is taken in twice",
        "A late report changes nothing: its number would go back, and new reports be thrown away.",
        _DELIVERY,
        "report.number != self._taken[report.rank] + 1:",
        "report.number > self._taken[report.rank] + 1:",
    ),
    Mutant(
        "reports are taken in out of order",
        "In order: what was overtaken would be thrown away as old, with the ends it tells of.",
        _DELIVERY,
        "report.number != self._taken[report.rank] + 1:",
        "report.number <= self._taken[report.rank]:",
    ),
    Mutant(
        "a report is acknowledged before it is there",
        "What was lost comes again: the rank would forget a report that nobody has seen.",
        _DELIVERY,
        "        return tuple(self._taken)",
        "        return tuple(number + 1 for number in self._taken)",
    ),
    Mutant(
        "job ids come round again",
        "One id per job: a late report would end somebody else's load.",
        _PLANNER,
        "        jobs = itertools.count(1)",
        "        jobs = itertools.cycle(range(1, 9))",
    ),
    Mutant(
        "ignore the generation",
        "One generation per use of a request id: a new request would inherit another's failures and saves.",
        _PLANNER,
        "        request = self._requests.pop(request_id, None)",
        "        request = self._requests.get(request_id)",
    ),
)

SAVES = (
    Mutant(
        "drop one rank from the quorum of saves",
        "READY when every rank reported: a chunk would be promised that one rank has not got.",
        _REQUESTS,
        "        self.stop = stop\n        self.waiting = {Rank(rank) for rank in range(ranks)}",
        "        self.stop = stop\n        self.waiting = {Rank(rank) for rank in range(max(1, ranks - 1))}",
    ),
    Mutant(
        "only the last rank's failures count",
        "READY when every rank has it: a chunk would be promised that one rank failed to copy.",
        "lifecycle/savejobs.py",
        "        run.failed.update(failed.item for failed in save.failed)",
        "        run.failed = {failed.item for failed in save.failed}",
    ),
    Mutant(
        "drop one rank from the quorum of writes",
        "READY when every rank reported: a file would be promised that one rank has not written.",
        _REQUESTS,
        "        self.chunks = chunks\n        self.waiting = {Rank(rank) for rank in range(ranks)}",
        "        self.chunks = chunks\n"
        "        self.waiting = {Rank(rank) for rank in range(max(1, ranks - 1))}",
    ),
    Mutant(
        "one rank's failed write is forgotten",
        "READY when every rank has it: a file would be promised that one rank failed to write.",
        "lifecycle/writing.py",
        "        run.stored = run.stored and write.stored",
        "        run.stored = run.stored or write.stored",
    ),
    Mutant(
        "tokens are saved before they are computed",
        "Only final bytes are saved: a chunk would hold whatever lay in its blocks before.",
        _SAVING,
        "        stop = min(len(request.chunks), computed // limits.chunk_tokens)\n        items",
        "        stop = len(request.chunks)\n        items",
    ),
    Mutant(
        "one group of a chunk is saved without the other",
        "Slots for all groups or for none: an arena would fill with halves that serve no boundary.",
        _SAVING,
        "                for item in items:\n                    self._directory.arena_failed(item.ref)\n"
        "                return []",
        "                return items",
    ),
    Mutant(
        "no fence before blocks are taken",
        "Source blocks are not overwritten while a copy reads them: another request's tokens would be saved.",
        _PLANNER,
        "        self._fences.extend(sorted(request.save_jobs))\n",
        "",
    ),
    Mutant(
        "an unsent save survives preemption",
        "Source blocks are not overwritten: the save would be sent after the blocks have a new owner.",
        _PLANNER,
        "        self._saves.drop_orders(request)\n",
        "",
    ),
    Mutant(
        "an unsent snapshot survives the end of its request",
        "Source blocks are not overwritten: an image would be copied from blocks with a new owner.",
        _PLANNER,
        "            return False\n        self._snapshots.drop_orders(request)\n",
        "            return False\n",
    ),
    Mutant(
        "free before the copy",
        "Blocks stay while a save of them is in flight: another request's tokens would be saved.",
        _PLANNER,
        "        self._holds.append(Hold(request_id, tuple(sorted(request.save_jobs))))\n"
        "        self._holding.update(request.save_jobs)\n        return True",
        "        return False",
    ),
)

SNAPSHOTS = (
    Mutant(
        "an image off the chunk grid is kept",
        "Taken exactly at the boundary: the image would be found under the name of an earlier one.",
        _SNAPSHOTS,
        "            image.boundary % limits.chunk_tokens == 0\n            and 0",
        "            0",
    ),
    Mutant(
        "windows that are cut off are kept",
        "Whole frames only: a copy from blocks that the engine no longer has would be tried at every step.",
        _SNAPSHOTS,
        "            is_whole = NO_BLOCK not in frame and not self._directory",
        "            is_whole = not self._directory",
    ),
)

ORDER = (
    Mutant(
        "iterate a set where dispatch order matters",
        "Loads are bounded in dispatch order: the same requests would be served in another order every time.",
        _LOADING,
        "        orders = tuple(self._orders)",
        "        orders = tuple(set(self._orders))",
    ),
    Mutant(
        "removals as a set",
        "A schedule can be run again: what a seed has shown once could not be shown again.",
        "lifecycle/directory.py",
        "        removes = tuple(self._removes)",
        "        removes = tuple(set(self._removes))",
    ),
)
