"""Reports arrive once and in order over a way that loses, repeats and reorders them."""

from __future__ import annotations

import random

import pytest

from kvstow.keys.ids import Rank
from kvstow.lifecycle.delivery import RESEND_ORDERS, Inbox, Outbox
from kvstow.lifecycle.messages import JobId, Report, SaveReport


def post(outbox: Outbox, *jobs: int) -> tuple[Report, ...]:
    return outbox.post([], [SaveReport(JobId(job)) for job in jobs], [], [])


def test_what_is_acknowledged_is_not_sent_again() -> None:
    outbox = Outbox(Rank(1))
    (report,) = post(outbox, 7)
    assert (report.rank, report.number) == (1, 1)
    for _ in range(2 * RESEND_ORDERS):
        outbox.ordered((0, 1))
        assert post(outbox) == ()


def test_what_is_not_acknowledged_is_sent_again_after_some_orders_with_all_that_follows() -> None:
    outbox = Outbox(Rank(0))
    first = post(outbox, 7)
    outbox.ordered((0,))
    second = post(outbox, 8)
    for _ in range(RESEND_ORDERS - 2):
        outbox.ordered((0,))
        assert post(outbox) == ()
    outbox.ordered((0,))
    assert post(outbox) == first + second
    outbox.ordered((0,))
    assert post(outbox) == ()


def test_an_order_without_acknowledgements_takes_nothing_for_taken() -> None:
    outbox = Outbox(Rank(0))
    first = post(outbox, 7)
    for _ in range(RESEND_ORDERS):
        outbox.ordered(())
    assert post(outbox) == first


@pytest.mark.parametrize("seed", range(50))
def test_everything_arrives_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    inbox, outboxes = Inbox(), [Outbox(Rank(rank)) for rank in range(2)]
    inbox.open(2)
    sent: list[list[int]] = [[], []]
    got: list[list[int]] = [[], []]
    under_way: list[Report] = []
    for step in range(300):
        acknowledged = inbox.acknowledgements()
        for rank, outbox in enumerate(outboxes):
            outbox.ordered(acknowledged)
            jobs = [1000 * rank + step] if step < 100 and rng.random() < 0.5 else []
            sent[rank] += jobs
            for report in post(outbox, *jobs):
                under_way += [report] * (1 if step > 150 else rng.choice([0, 1, 1, 2]))
        if step <= 150:
            rng.shuffle(under_way)
        kept = rng.randrange(3) if step <= 150 else 0
        arrived, under_way = under_way[kept:], under_way[:kept]
        for report in arrived:
            if inbox.take(report):
                got[report.rank] += [save.job for save in report.saves]
    assert got == sent
