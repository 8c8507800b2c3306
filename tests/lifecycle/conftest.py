from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from one_rank import NAMESPACE

from kvstow.clock import ManualClock
from kvstow.keys.ids import Rank
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    root = DiskRoot.open(
        tmp_path, instance="test", rank=Rank(0), world_size=1, budget_bytes=1 << 20, clock=ManualClock()
    )
    store = DiskStore(root, NAMESPACE)
    yield store
    store.close()
