"""Every error kvstow raises, grouped by what the one who catches it does.

::

    KvstowError
    ├── ConfigError          fix the configuration; raised at start only
    │   └── LayoutError      the engine's tensors cannot be carried as they are
    ├── StoreError           count it, recompute, go on; never reaches an engine's step
    │   ├── NoSpaceError     a budget or a file system is full: evict, or skip the save
    │   ├── CorruptFrameError  delete the frame, then treat it as a miss
    │   └── StoreUnavailableError  the device or the peer does not answer: back off, retry later
    └── InvariantError       a bug in kvstow or in its caller: report it

Messages name the thing, the sizes on both sides, and the next step.
"""

from __future__ import annotations


class KvstowError(Exception):
    """Base of all errors that kvstow raises on purpose."""


class ConfigError(KvstowError):
    """A setting, a model or an environment that kvstow cannot run with; raised at start."""


class LayoutError(ConfigError):
    """A KV tensor whose blocks cannot be described as runs of bytes; names the tensor."""


class StoreError(KvstowError):
    """A store could not do what was asked. The caller counts it and recomputes."""


class NoSpaceError(StoreError):
    """A budget or the file system under a store is full."""


class CorruptFrameError(StoreError):
    """A frame's header or payload is not what was saved. The caller removes the frame."""


class StoreUnavailableError(StoreError):
    """The device or peer behind a store failed or did not answer in time."""


class InvariantError(KvstowError):
    """A state that the code promises never to reach; a bug."""
