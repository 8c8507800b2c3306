"""Models that look at images: collected only where torchvision can be imported, so not by itself.

Whether it is there is looked up once per process, by transformers as well, and text models must run
without it. So these tests run in a process of their own: `tests/vllm/test_vision.py` starts it. By hand:
``PYTHONPATH=.venv/vision pytest tests/vllm/vision``.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torchvision") else ["test_*.py"]
