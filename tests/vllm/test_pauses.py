"""``sleep`` and ``pause_generation`` wait until the engine has no work, and then reset its caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from gates import Gates
from inprocess import prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_an_idle_engine_can_be_paused_whatever_its_disk_does(
    llama: Path, tmp_path: Path, gates: Gates
) -> None:
    with running(llama, {"disk_path": str(tmp_path / "disk")}) as engine:
        with gates.shut("write"):
            answer = engine.ask(prompt(500, seed=1))
            assert answer.finish == "length"
            # What vLLM's loop does: it steps as long as there is work. The frames are on their way to disk.
            engine.step_until(lambda: not engine.scheduler.has_requests())
            engine.core.pause_scheduler(mode="abort", clear_cache=True)
            engine.core.resume_scheduler()
        engine.clear_own_cache()
        assert engine.ask(prompt(500, seed=1)).cached == 0
        engine.clear_own_cache()
        assert engine.ask(prompt(500, seed=1)).cached == 448
        engine.expect_baseline()
