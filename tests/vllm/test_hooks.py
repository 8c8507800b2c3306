"""The connector fits the vLLM that is installed: names, signatures, kinds."""

from __future__ import annotations

import inspect

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvstow.adapters.vllm.compat import LATER_HOOKS, minor_version, vllm_version
from kvstow.adapters.vllm.connector import StowConnector
from kvstow.adapters.vllm.plugin import register

pytestmark = pytest.mark.vllm


def public(cls: type) -> dict[str, object]:
    return {name: member for name, member in vars(cls).items() if not name.startswith("_")}


def inherited(name: str) -> object:
    for base in (SupportsHMA, KVConnectorBase_V1):
        if name in vars(base):
            return vars(base)[name]
    pytest.fail(f"{name} is a hook of no class of vLLM's: it is never called")


def shape(member: object) -> list[tuple[str, object, object]]:
    """Parameters by name, kind and default; annotations are written in different ways."""
    function = getattr(member, "__func__", member)
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", sorted(public(StowConnector)))
def test_a_hook_is_what_vllm_calls(name: str) -> None:
    since = LATER_HOOKS.get(name, (0, 0))
    if minor_version() < since:
        pytest.skip(f"vLLM {vllm_version()} has no hook {name}: it came with {since[0]}.{since[1]}")
    ours, theirs = vars(StowConnector)[name], inherited(name)
    assert type(ours) is type(theirs)
    if not isinstance(ours, property):
        assert shape(ours) == shape(theirs)


def test_the_constructor_is_what_vllm_calls() -> None:
    theirs = shape(KVConnectorBase_V1.__init__)
    assert [part[:2] for part in shape(StowConnector.__init__)] == [part[:2] for part in theirs]


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(StowConnector)


def test_the_name_is_registered_once_however_often_plugins_are_loaded() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("StowConnector") is StowConnector
