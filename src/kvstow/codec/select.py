"""Which codec serves a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from kvstow.codec.base import Codec, Region
from kvstow.codec.binding import is_cpu_memory
from kvstow.codec.reference import ReferenceCodec
from kvstow.errors import ConfigError
from kvstow.layout.geometry import Group

PREFERENCES = ("auto", "native", "torch", "reference")


def make_codec(group: Group, regions: Sequence[Region], threads: int = 1, prefer: str = "auto") -> Codec:
    """Bind the fastest codec that can serve ``group``, or the one asked for.

    Args:
        group: what to move.
        regions: the memory behind the group's segments, by region id; the codec keeps them.
        threads: most threads that one transfer uses, at least 1.
        prefer: ``auto`` takes the C kernel for host memory when it is built, else torch, else the
            numpy reference; the other values of `PREFERENCES` take that one.

    Raises:
        ConfigError: an unknown ``prefer``, no thread, or a codec that cannot serve here.
        LayoutError: the regions are not what the group describes.
    """
    if threads < 1:
        raise ConfigError(f"threads={threads} cannot move a block; use 1 or more")
    if prefer not in PREFERENCES:
        raise ConfigError(f"prefer={prefer!r} is no codec; use one of {', '.join(PREFERENCES)}")
    on_host = all(is_cpu_memory(region) for region in regions)
    if prefer in ("native", "reference") and not on_host:
        raise ConfigError(
            f"prefer={prefer!r} serves host memory only, and a region is not; use torch or auto"
        )
    if prefer in ("auto", "native") and on_host:
        native = _optional("kvstow.codec.native", "NativeCodec")
        if native is not None:
            return native(group, regions, threads)
        if prefer == "native":
            raise ConfigError(
                "prefer='native' needs the C kernel, which is not built; run `pip install --no-deps "
                "--no-build-isolation -e .` where gcc and the Python headers are, or use prefer='auto'"
            )
    if prefer in ("auto", "torch"):
        torch_codec = _optional("kvstow.codec.torch_codec", "TorchCodec")
        if torch_codec is not None:
            return torch_codec(group, regions, threads)
        if prefer == "torch" or not on_host:
            raise ConfigError(f"prefer={prefer!r} needs torch here, which is not installed; install it")
    return ReferenceCodec(group, regions)


def _optional(module: str, name: str) -> Callable[[Group, Sequence[Region], int], Codec] | None:
    """A codec class, or None where what it is made of is not installed."""
    try:
        found: Callable[[Group, Sequence[Region], int], Codec] = getattr(import_module(module), name)
    except ImportError:
        return None
    return found
