"""The configuration of every family that transformers knows can go into a namespace."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from kvstow.adapters.vllm.identity import _plain
from kvstow.keys.namespace import canonical_json


@pytest.mark.parametrize(
    "family", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "qwen3_next"]
)
def test_a_family_can_be_written_down(family: str) -> None:
    found = canonical_json(_plain(CONFIG_MAPPING[family]().to_dict()), "model_config")
    assert found == canonical_json(_plain(CONFIG_MAPPING[family]().to_dict()), "model_config")


def test_infinity_is_no_other_number() -> None:
    texts = [canonical_json(_plain([value]), "x") for value in (float("inf"), float("-inf"), 0.0)]
    assert len(set(texts)) == 3
