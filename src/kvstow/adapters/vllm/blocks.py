"""The engine's blocks through its own tensors, for the self-test: nothing here comes from the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import LayoutError
from kvstow.layout.geometry import BlockId, GroupId, RegionId

# Integers, because nothing may take liberties with the bits of one.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorBlocks:
    """Reads and writes blocks as the engine indexes them (a `kvstow.lifecycle.trial.EngineBlocks`).

    Args:
        groups: by group, what the engine keeps of it, by name; tensors that show the same memory
            in the same way count once.
        regions: flat uint8 tensors over the storages, by region id.
        num_blocks: blocks of every group.

    Raises:
        LayoutError: a tensor without an axis that counts blocks.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, torch.Tensor]], regions: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        self._regions = regions
        self._groups = [_distinct(tensors, num_blocks) for tensors in groups]

    def names(self, group: GroupId) -> Sequence[str]:
        """See `kvstow.lifecycle.trial.EngineBlocks.names`."""
        return [name for name, _ in self._groups[group]]

    def read(self, group: GroupId, tensor: int, block: BlockId) -> npt.NDArray[np.uint8]:
        """See `kvstow.lifecycle.trial.EngineBlocks.read`."""
        content = self._block(group, tensor, block).clone(memory_format=torch.contiguous_format)
        found: npt.NDArray[np.uint8] = content.cpu().reshape(-1).view(torch.uint8).numpy()
        return found

    def write(self, group: GroupId, tensor: int, block: BlockId, content: npt.NDArray[np.uint8]) -> None:
        """See `kvstow.lifecycle.trial.EngineBlocks.write`."""
        part = self._block(group, tensor, block)
        part.copy_(torch.from_numpy(content).view(part.dtype).view(part.shape))

    def peek(self, region: RegionId, start: int, stop: int) -> bytes:
        """See `kvstow.lifecycle.trial.EngineBlocks.peek`."""
        found: bytes = self._regions[region][start:stop].cpu().numpy().tobytes()
        return found

    def _block(self, group: GroupId, tensor: int, block: BlockId) -> torch.Tensor:
        return self._groups[group][tensor][1][block]


def _distinct(tensors: Mapping[str, torch.Tensor], num_blocks: int) -> list[tuple[str, torch.Tensor]]:
    """Each memory once, as integers [num_blocks, kernel blocks, ...]."""
    found: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if memory not in found:
            axis = block_axis(name, tensor, num_blocks)
            blocks = tensor.view(_INTEGERS[tensor.element_size()]).movedim(axis, 0)
            found[memory] = name, blocks.unflatten(0, (num_blocks, -1))
    return list(found.values())


def block_axis(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """The axis that counts blocks, or a whole number of kernel blocks in each: the first that can.

    Raises:
        LayoutError: there is none.
    """
    for axis, size in enumerate(tensor.shape):
        if size and size % num_blocks == 0:
            return axis
    raise LayoutError(
        f"{name} (shape {tuple(tensor.shape)}) has no axis of num_blocks={num_blocks} or a multiple of it"
    )
