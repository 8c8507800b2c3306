"""Python imports this by itself at start where this folder is in PYTHONPATH: makes the disk slow."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec


class _BeforeAdapter:
    """Acts when the module that opens the disk is about to be imported.

    Not earlier: this runs in each of vLLM's helper processes too, and most never get there.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != "kvstow.adapters.vllm.worker":
            return None
        sys.meta_path.remove(self)
        from slow_disk import make_slow

        make_slow(float(os.environ["SLOW_DISK_WRITE_S"]))
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _BeforeAdapter())
