"""The small names of the layout: groups, blocks, regions, and what kinds of group there are."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

GroupId = NewType("GroupId", int)
BlockId = NewType("BlockId", int)
RegionId = NewType("RegionId", int)

NO_BLOCK = BlockId(-1)
"""A place in a block table where the engine keeps nothing: outside a window, between images.
Adapters put it for their engine's own null block."""


class GroupKind(StrEnum):
    """What a resume at boundary B needs of a group (docs/design, section 3)."""

    PAGED = "paged"
    WINDOW = "window"
    STATE = "state"
