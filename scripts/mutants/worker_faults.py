"""Faults in what is done on a rank: copies, writes, reads, their deadlines and their reports."""

from __future__ import annotations

from mutant import Edit, Mutant

_LEDGER = "lifecycle/ledger.py"
_SAVER = "lifecycle/saver.py"
_TRANSFERS = "lifecycle/transfers.py"
_WORKER = "lifecycle/worker.py"

COPIES = (
    Mutant(
        "snapshots are copied later",
        "A snapshot is taken within its step: the window would have moved on, the state been overwritten.",
        _WORKER,
        "            self._saver.snapshot(snapshot)",
        "            self._saver.save(snapshot)",
    ),
    Mutant(
        "blocks are held for the first save only",
        "Blocks stay until every save of them has ended: the next request's tokens would be saved.",
        _WORKER,
        "if not any(map(self._saver.is_saving, hold.jobs))]",
        "if not all(map(self._saver.is_saving, hold.jobs))]",
    ),
    Mutant(
        "a fence stops nothing",
        "No copy runs after a fence: another request's tokens would be saved under this one's name.",
        _TRANSFERS,
        "            self._cancelled = True",
        "            self._cancelled = False",
    ),
    Mutant(
        "a copy runs while its save is cancelled",
        "A fence waits for the copy that runs: the engine would overwrite what is being read.",
        _TRANSFERS,
        "                return False\n            copy()\n            return True",
        "                return False\n        copy()\n        return True",
    ),
    Mutant(
        "the worker loads below the floor",
        "Never below the engine's floor: blocks that other requests share would be written under them.",
        _WORKER,
        "codec.scatter(item.blocks, payload, item.skip_blocks)",
        "codec.scatter(item.blocks, payload)",
    ),
    Mutant(
        "a load that was given up goes on",
        "Nothing writes its blocks after that: they belong to another request by then.",
        _TRANSFERS,
        "            if self._over:\n                return\n            self._copying += 1",
        "            self._copying += 1",
    ),
    Mutant(
        "giving up does not wait for copies",
        "Nothing writes its blocks after that: the copy that runs would end in another request's blocks.",
        _TRANSFERS,
        "            while self._copying:\n                self._copied.wait()\n",
        "",
    ),
    Mutant(
        "slots of lost readers are not named",
        "Never reuse a busy slot: a read that comes back late would overwrite another prompt's frame.",
        _TRANSFERS,
        "            return self._report(busy)",
        "            return self._report(())",
    ),
    Mutant(
        "slots of lost readers never come back",
        "Bounded: every slow read would cost the arena a slot until the next restart.",
        _WORKER,
        "            self._freed.append((item.ref.group, item.slot))",
        "            pass",
    ),
    Mutant(
        "what the arena holds is not verified",
        "Checked before a byte reaches a block: memory goes bad too, and nobody would notice.",
        _WORKER,
        "            payload = open_frame(frame, self._parts.names.identity(item.ref))",
        "            payload = frame[4096 : 4096 + self._parts.names.payload_bytes(item.ref)]",
    ),
    Mutant(
        "absent is a hit",
        "An absent frame is a fault: the blocks would be believed as they are.",
        _WORKER,
        "if found else Fault.ABSENT",
        "if found else None",
    ),
    Mutant(
        "a failed load is called loaded",
        "Every failure is a recompute: the engine would compute on what was not loaded.",
        _WORKER,
        "(request, not report.failed and not report.refused)",
        "(request, not report.refused)",
    ),
)

WRITES = (
    Mutant(
        "a failed write counts as stored",
        "READY when it is on disk: after a restart, or an eviction, the chunk would not be there.",
        _SAVER,
        "        stored = False\n        try:",
        "        stored = True\n        try:",
    ),
    Mutant(
        "READY before the write has ended",
        "READY when it is on disk: a reader would be sent to a file that is not there yet.",
        _SAVER,
        "        self._writing.add(write.job)\n",
        "        self._writing.add(write.job)\n"
        "        self._write_reports.append(WriteReport(write.job, stored=True))\n",
        more=(Edit(_SAVER, "            self._write_reports.append(WriteReport(write.job, stored))\n", ""),),
    ),
    Mutant(
        "removals after the writes",
        "Removals come first: a chunk that is written again would be deleted right after.",
        _WORKER,
        "        if order.removes:\n            self._saver.remove(order.removes)\n",
        "",
        more=(
            Edit(
                _WORKER,
                "            self._saver.write(write)\n",
                "            self._saver.write(write)\n"
                "        if order.removes:\n            self._saver.remove(order.removes)\n",
            ),
        ),
    ),
    Mutant(
        "a write that is never asked for is never reported",
        "Every job ends: a place on disk and a pin would be held for ever.",
        _SAVER,
        "            if write != NO_JOB:\n                self._write_reports",
        "            if write == NO_JOB:\n                self._write_reports",
    ),
    Mutant(
        "a failing disk raises in its reader",
        "No failure of a store raises: the reader's thread would end with a traceback instead of a count.",
        _WORKER,
        '        except StoreError as error:\n            self._parts.failures.error("disk read"',
        '        except KeyError as error:\n            self._parts.failures.error("disk read"',
    ),
    Mutant(
        "a failing disk raises in its writer",
        "No failure of a store raises: the writer's thread would end with a traceback instead of a warning.",
        _SAVER,
        '        except StoreError as error:\n            parts.failures.warn("disk write"',
        '        except KeyError as error:\n            parts.failures.warn("disk write"',
    ),
    Mutant(
        "a staging frame is not given back",
        "Bounded: after a few loads from a disk that has no slots to fill, every load would fail.",
        "stores/arena.py",
        "            self._free_staging.append(index)\n",
        "",
    ),
)

BOUNDS = (
    Mutant(
        "start a deadline at enqueue",
        "Bounds run on work: a load that waited its turn would be given up in the middle of its copy.",
        _LEDGER,
        "            entry.running = True\n            entry.since_s = self._clock.monotonic_s()",
        "            entry.running = True",
    ),
    Mutant(
        "a load is judged before what ended is noted",
        "One that ended gives those behind it their time anew: a slow step would make good loads fail.",
        _WORKER,
        "        loads = self._take_load_reports()\n"
        "        # Only now: one that ended gives those behind it their time anew.\n",
        "        loads: list[LoadReport] = []\n",
    ),
    Mutant(
        "those behind get no time anew",
        "Deadlines bound work, not queues: the fortieth of forty loads would fail on a slow disk.",
        _LEDGER,
        "            if behind and not entry.running:",
        "            if behind and entry.running:",
    ),
    Mutant(
        "those in front get time anew too",
        "If nothing ahead moves, it fails: a load that hangs would live as long as anything ends behind it.",
        _LEDGER,
        "            if behind and not entry.running:",
        "            if other != job:",
    ),
    Mutant(
        "loads are never given up",
        "In bounded time: a request behind a disk that hangs would wait for ever.",
        _LEDGER,
        "now_s - entry.since_s > self._bound_s]",
        "now_s - entry.since_s > 1e12]",
    ),
    Mutant(
        "saves wait for ever",
        "Nothing waits without a bound: blocks of finished requests would be held behind a slow copy.",
        _SAVER,
        "waited_s > parts.limits.save_timeout_s and",
        "waited_s > 1e12 and",
    ),
    Mutant(
        "the load queue is not looked at",
        "Every promise ends: a load that no thread has room for would never be reported.",
        _WORKER,
        "        if not queued:\n",
        "        if not queued and self._parts.disk is job:\n",
    ),
)

SHARED = (
    Mutant(
        "no rank fills the slots that all share",
        "The first rank keeps what every rank reads: every hit would be a corrupt frame.",
        "stores/arena.py",
        "        return self._shared is None or self._shared.is_first or group",
        "        return self._shared is None or group",
    ),
    Mutant(
        "every rank fills the slots that all share",
        "One rank writes a slot: the others have it to read, and their saves and loads would fail.",
        "stores/arena.py",
        "        return self._shared is None or self._shared.is_first or group not in self._shared.slots",
        "        return self._shared is not self",
    ),
    Mutant(
        "memory is used before all ranks have it",
        "All or none: a rank would read slots that nobody fills.",
        "stores/handover.py",
        "                if first.recv(len(_USE)) == _USE:",
        "                if first.recv(len(_USE)) is not None:",
    ),
    Mutant(
        "memory that came is not looked at",
        "Bytes of the same engine only: a rank would read whatever memory it was sent.",
        "stores/handover.py",
        "[:_MARK_BYTES] != offer.mark:",
        "[:_MARK_BYTES] is None:",
    ),
    Mutant(
        "a stranger is given the memory",
        "Prompts belong to one engine: a process of another would read them.",
        "stores/handover.py",
        "    is_ours = request.namespace == meeting.namespace and 0",
        "    is_ours = 0",
    ),
    Mutant(
        "another user is given the memory",
        "Prompts belong to one user: another on the same host would read them.",
        "stores/handover.py",
        "    return bool(user == os.geteuid())",
        "    return bool(user >= 0)",
    ),
    Mutant(
        "the budget pays for shared slots on every rank",
        "One stored copy where all ranks hold the same bytes: the arena would hold a fraction of it.",
        "stores/rank_arena.py",
        "            1 if GroupId(group) in shared else self.world_size for",
        "            self.world_size for",
    ),
)
