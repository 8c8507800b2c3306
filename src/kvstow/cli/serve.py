"""vLLM's OpenAI server with kvstow in it: how its command line is made."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstow.adapters.vllm.plugin import MODULE, NAME
from kvstow.config import load_settings
from kvstow.errors import ConfigError

NO_DISK = "none"

_OURS = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend")
"""vLLM's options that say where its keys and values go: only one party can decide that."""


_SHUTDOWN = "--shutdown-timeout"
_SHUTDOWN_MARGIN_S = 5


@dataclass(frozen=True)
class ServeOptions:
    """What ``kvstow serve`` was asked for.

    Attributes:
        model: a model's name or folder, as vLLM takes it.
        arena_gib: DRAM to keep keys and values in; None leaves the default to the connector.
        disk: folder of the disk tier, or None for no disk.
        disk_gib: bytes on disk at most; None leaves the default to the connector.
        vllm_args: every other option, passed on as it is.
    """

    model: str
    arena_gib: float | None
    disk: Path | None
    disk_gib: float | None
    vllm_args: tuple[str, ...]


def choose_disk(choice: str | None, default: Path) -> Path | None:
    """The folder of the disk tier.

    Args:
        choice: what the option said: a folder, ``none``, or None where it was not given.
        default: the folder to use where neither the option nor the environment names one.
    """
    if choice == NO_DISK:
        return None
    if choice is not None:
        return Path(choice).expanduser().absolute()
    named = load_settings({}).disk_path
    return default if named is None else Path(named)


def server_command(options: ServeOptions) -> list[str]:
    """The command that starts the server; it takes the place of the calling process.

    Raises:
        ConfigError: a vLLM option contradicts what kvstow sets, the model is missing, or kvstow
            cannot run with a value; names it and what would be right.
    """
    if options.model.startswith("-"):
        raise ConfigError(
            f"MODEL comes first, got {options.model!r}; use: kvstow serve MODEL {options.model} ..."
        )
    extra = _extra_config(options)
    # Read here too, and not only by the server: a bad value is told before a model is loaded.
    settings = load_settings(extra)
    transfer = json.dumps(
        {
            "kv_connector": NAME,
            # The module besides the class: `VLLM_PLUGINS` may keep plugins out.
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )
    _refuse_conflicts(options.vllm_args, transfer)
    # Not `vllm serve`: the CPU wheel ships no metadata named vllm, without which that command fails.
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    ours = ["--model", options.model, "--kv-transfer-config", transfer]
    if _SHUTDOWN not in map(_option_name, options.vllm_args):
        # vLLM's default of 0 kills the engine at once, and the frames on their way to disk with it.
        ours += [_SHUTDOWN, str(math.ceil(settings.shutdown_s_max) + _SHUTDOWN_MARGIN_S)]
    return [*module, *ours, *options.vllm_args]


def _extra_config(options: ServeOptions) -> dict[str, object]:
    """The connector's own configuration, as far as the options say it."""
    extra: dict[str, object] = {"disk_path": None if options.disk is None else str(options.disk)}
    if options.arena_gib is not None:
        extra["arena_gib"] = options.arena_gib
    if options.disk_gib is not None:
        if options.disk is None:
            raise ConfigError(f"--disk-gib {options.disk_gib:g} with --disk none; leave one of them out")
        extra["disk_gib"] = options.disk_gib
    return extra


def _option_name(arg: str) -> str:
    """The option that ``arg`` gives: vLLM takes ``_`` for ``-``, ``--name=value`` and ``--name.key``."""
    return arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-").rstrip("+")


def _refuse_conflicts(vllm_args: Sequence[str], transfer: str) -> None:
    for arg in vllm_args:
        name = _option_name(arg)
        if name == "--model":
            raise ConfigError(f"{arg} and MODEL both name a model; leave out {arg}")
        if name in _OURS:
            raise ConfigError(
                f"{arg} conflicts with kvstow serve, which sets --kv-transfer-config itself; "
                f"leave it out, or run vLLM on your own with --kv-transfer-config '{transfer}'"
            )
