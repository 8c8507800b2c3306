"""Contenders timed in turns, and what their times say: medians, spread, and an interval of a ratio."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Seconds = list[float]


def interleave(
    contenders: Mapping[str, Callable[[], object]], rounds: int, rng: random.Random
) -> dict[str, Seconds]:
    """Run every contender once per round, in an order drawn anew each time; seconds of each run."""
    seen: dict[str, Seconds] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            start = time.perf_counter()
            contenders[name]()
            seen[name].append(time.perf_counter() - start)
    return seen


def spread(values: Sequence[float]) -> float:
    """Half of the distance from the 10th to the 90th percentile, as a share of the median."""
    if len(values) < 2:
        return 0.0
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / 2 / statistics.median(values)


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Ratio of the medians."""
    return statistics.median(of) / statistics.median(to)


def ratio_interval(
    of: Sequence[float], to: Sequence[float], rng: random.Random, draws: int = 4000
) -> tuple[float, float]:
    """95% bootstrap interval of `ratio`. Rounds are drawn, so that a pair measured together stays one."""
    rounds = range(len(of))
    ratios = []
    for _ in range(draws):
        drawn = rng.choices(rounds, k=len(rounds))
        ratios.append(ratio([of[index] for index in drawn], [to[index] for index in drawn]))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws) - 1]


def at_least(value: float, target: float) -> dict[str, Any]:
    """Columns of a target that is reached from above."""
    return {"target": f">= {target:g}", "reached": "yes" if value >= target else "no"}


def at_most(value: float, target: float) -> dict[str, Any]:
    """Columns of a target that is reached from below."""
    return {"target": f"<= {target:g}", "reached": "yes" if value <= target else "no"}


NO_TARGET: Mapping[str, Any] = {"target": "-", "reached": "-"}
"""The same columns where nothing is asked for."""
