"""Files alone, without a store: what becomes of a write that the system does not finish."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from kvstow.stores.disk.files import Files


def test_a_write_that_stops_without_a_reason_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.pwrite
    files = Files(str(tmp_path))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0 if at else real_write(fd, data[:4096], at))
    with pytest.raises(OSError, match="only 4096 of 8192 bytes") as raised:
        files.draft(str(tmp_path), memoryview(mmap.mmap(-1, 8192)), touched_s=0.0)
    assert raised.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []
