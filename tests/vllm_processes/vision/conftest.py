"""Models that need torchvision, on two ranks: collected only where it can be imported.

By hand: ``PYTHONPATH=.venv/vision pytest -m models tests/vllm_processes/vision``; see `tests/vllm/vision`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "vllm" / "vision"))

collect_ignore_glob = [] if importlib.util.find_spec("torchvision") else ["test_*.py"]
