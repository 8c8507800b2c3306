"""Recorder, its Prometheus view, and the logger that says a failure once."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvstow.clock import ManualClock
from kvstow.metrics import GAUGES, SPECS, Metric, MetricKind, OnceLogger, Recorder, prometheus_collector

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_every_metric_has_a_meaning_and_a_line_in_the_docs() -> None:
    assert list(SPECS) == list(Metric)
    text = DOCS.read_text()
    for metric, spec in SPECS.items():
        assert f"| `{metric.value}` | {spec.kind.value} | {spec.help} |" in text


def test_a_snapshot_has_every_name_and_starts_at_zero() -> None:
    assert Recorder().snapshot() == {metric.value: 0 for metric in Metric}


def test_counts_from_many_threads_all_arrive() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(2000):
            recorder.count(Metric.SAVES)
            recorder.count(Metric.SAVED_BYTES, 10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.snapshot()["saves"] == 8000
    assert recorder.snapshot()["saved_bytes"] == 80000


def test_a_gauge_is_set_and_a_snapshot_is_the_callers() -> None:
    recorder = Recorder()
    recorder.gauge(Metric.DISK_DEGRADED, 1)
    taken = recorder.snapshot()
    recorder.gauge(Metric.DISK_DEGRADED, 0)
    taken["saves"] = 99
    assert taken["disk_degraded"] == 1
    assert recorder.snapshot()["disk_degraded"] == 0
    assert recorder.snapshot()["saves"] == 0


def test_wrong_use_is_refused_and_opens_no_new_name() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="disk_degraded"):
        recorder.count(Metric.DISK_DEGRADED)
    with pytest.raises(ValueError, match="saves"):
        recorder.gauge(Metric.SAVES, 1)
    with pytest.raises(ValueError, match="by=-1"):
        recorder.count(Metric.SAVES, -1)
    with pytest.raises(ValueError, match="request-17"):
        recorder.count("request-17")  # type: ignore[arg-type]
    assert set(recorder.snapshot()) == {metric.value for metric in Metric}


def test_the_prometheus_view_has_tiers_as_labels() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    recorder = Recorder()
    recorder.count(Metric.LOADED_TOKENS_DISK, 512)
    recorder.gauge(Metric.ARENA_USED_BYTES, 4096)
    registry = prometheus_client.CollectorRegistry()
    registry.register(prometheus_collector(recorder, {"rank": "1"}))
    text = prometheus_client.generate_latest(registry).decode()
    assert 'kvstow_loaded_tokens_total{rank="1",tier="disk"} 512.0' in text
    assert 'kvstow_loaded_tokens_total{rank="1",tier="arena"} 0.0' in text
    assert 'kvstow_arena_used_bytes{rank="1"} 4096.0' in text
    counters = [metric for metric, spec in SPECS.items() if spec.kind is MetricKind.COUNTER]
    assert len(counters) + len(GAUGES) == len(Metric)


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("kvstow.test_metrics")


def test_the_first_of_a_kind_is_logged_in_full_then_one_line_per_interval(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    once = OnceLogger(logger, clock, interval_s=60)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        for number in range(5):
            once.warn("load_timeout", f"load {number} of 8192 tokens; recomputed")
        once.error("disk_write", "ENOSPC at 3 GiB of 32; free space")
        clock.advance(59)
        once.warn("load_timeout", "again")
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", "load_timeout: load 0 of 8192 tokens; recomputed"),
            ("ERROR", "disk_write: ENOSPC at 3 GiB of 32; free space"),
        ]
        caplog.clear()
        clock.advance(1)
        once.error("disk_write", "again")
        once.error("disk_write", "again")
        assert len(caplog.records) == 1
        assert "disk_write x1, load_timeout x5" in caplog.text
        caplog.clear()
        once.flush()
        assert "disk_write x1" in caplog.text
        assert "load_timeout" not in caplog.text
        caplog.clear()
        once.flush()
        assert not caplog.records


def test_kinds_are_bounded(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    once = OnceLogger(logger, ManualClock())
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        for number in range(1000):
            once.warn(f"kind-{number}", "a careless kind")
        once.flush()
    assert len(caplog.records) <= OnceLogger.KINDS_MAX + 2
    assert f"other x{1000 - OnceLogger.KINDS_MAX - 1}" in caplog.text
