"""Ids stay what released versions made them, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvstow
from kvstow.keys.weights import adapter_digest, weights_digest

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "identity-v1.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "random", "4242"])
def test_golden_ids_in_a_process_with_its_own_hash_seed(seed: str) -> None:
    source = str(Path(kvstow.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(HERE / "golden_cases.py")],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(run.stdout) == GOLDEN


def test_golden_weights(tmp_path: Path) -> None:
    """A folder with known bytes, small and so read in full, and one so large that it is sampled."""
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    assert (
        weights_digest(tmp_path).hex() == "b1017d98c3e690ccf54645c232fa3d5a5a8f17c3bac845bb5a9030c13b0ac5ca"
    )
    with (tmp_path / "more.bin").open("wb") as handle:
        handle.truncate(80 << 20)
    assert (
        weights_digest(tmp_path).hex() == "b8c7cc0d2a98bca1cb2885641f1e69591d7e088dfa0f6c31e148164e5c08d814"
    )
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"abcd")
    assert (
        adapter_digest(tmp_path).hex() == "fcfb6424a8f7ba0239edfb03ab3bd0242c385081b5cf907bf43453494463cd2c"
    )
