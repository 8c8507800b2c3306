"""Whole files in and out: O_DIRECT where the file system has it, visible last.

A new file has no name until it is complete (O_TMPFILE, then linkat), so a process that is killed
while it writes leaves nothing. Where the file system cannot do that, the file has a draft's name
until it is renamed; the next owner of the share removes what a dead writer left.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from itertools import count
from types import TracebackType

import numpy as np

from kvstow.errors import CorruptFrameError
from kvstow.stores.disk.names import DRAFT_PREFIX, entries_of

_log = logging.getLogger(__name__)

# O_DIRECT wants address, length and offset in multiples of the device's logical block: 512 or 4096.
_ALIGNMENT = 4096
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class Draft:
    """A file that is written and not visible yet. `publish` it, or leave the context to drop it."""

    def __init__(self, descriptor: int, path: str | None, spare_path: str) -> None:
        """Take over ``descriptor``; ``path`` is the draft's name if it has one."""
        self.descriptor = descriptor
        self._path = path
        self._spare_path = spare_path

    def publish(self, path: str) -> None:
        """Make it visible as ``path``, in one step; replaces what is there."""
        if self._path is None:
            try:
                self._link(path)
            except FileExistsError:
                # linkat cannot replace: go through a name. The file is complete, only unnamed.
                self._link(self._spare_path)
                self._path = self._spare_path
            else:
                return
        os.rename(self._path, path)
        self._path = None

    def _link(self, path: str) -> None:
        # A folder's descriptor makes Python call linkat, and follow the link in /proc.
        os.link(f"/proc/self/fd/{self.descriptor}", path, src_dir_fd=self.descriptor, follow_symlinks=True)

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)
        if self._path is not None:
            os.unlink(self._path)


class Files:
    """How files are written and read under one root. Any thread; every method blocks on the device.

    Raises OSError as the system does, and nothing else unless said.

    Attributes:
        direct: whether O_DIRECT is used.
        unnamed: whether drafts have no name.
    """

    def __init__(self, root: str) -> None:
        """Try out in ``root`` what its file system can do; leaves nothing there.

        Args:
            root: the folder; nobody else may try it out at the same time.
        """
        self._serial = count()
        self._touch_failed = False
        self.direct = True
        self.unnamed = True
        _drop_drafts(root)
        try:
            self._try_out(root)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Full, but what is stored can be read. Named drafts work everywhere.
            self.unnamed = False
        _log.info("disk root %s: direct=%s unnamed=%s", root, self.direct, self.unnamed)

    def draft(self, folder: str, content: memoryview, touched_s: float) -> Draft:
        """Write ``content`` to a new file in ``folder`` that nobody sees yet, with ``touched_s`` as its time.

        Raises:
            OSError: FileNotFoundError when ``folder`` is not there; EIO when the system takes
                only a part and gives no reason; else the system's.
        """
        direct = self.direct and _aligned(content)
        descriptor, path = self._create(folder, os.O_DIRECT if direct else 0)
        draft = Draft(descriptor, path, f"{folder}/{self._draft_name()}")
        try:
            moved = self._move(descriptor, content, os.pwrite)
            if moved != len(content):
                raise OSError(errno.EIO, f"only {moved} of {len(content)} bytes were written")
            os.utime(descriptor, (touched_s, touched_s))
        except BaseException:
            draft.__exit__(None, None, None)
            raise
        return draft

    def read_into(self, path: str, target: memoryview, touched_s: float) -> None:
        """Fill ``target`` with the file at ``path``, and set the file's time to ``touched_s``.

        Raises:
            CorruptFrameError: the file has another length than ``target``.
        """
        direct = self.direct and _aligned(target)
        descriptor = self._open(path, os.O_RDONLY | os.O_NOFOLLOW, os.O_DIRECT if direct else 0)
        try:
            size = os.fstat(descriptor).st_size
            moved = self._move(descriptor, target, _read_at) if size == len(target) else 0
            if moved != len(target):
                raise CorruptFrameError(
                    f"{path}: {size} bytes on disk ({moved} read), {len(target)} wanted; "
                    "remove the frame and recompute"
                )
            self._touch(descriptor, path, touched_s)
        finally:
            os.close(descriptor)

    def _try_out(self, root: str) -> None:
        trial = f"{root}/{self._draft_name()}"
        with self.draft(root, memoryview(mmap.mmap(-1, _ALIGNMENT)), 0.0) as draft:
            if self.unnamed:
                try:
                    draft.publish(trial)
                    os.unlink(trial)
                except OSError as error:
                    _log.info("disk root %s: unnamed files cannot be linked (%s)", root, error)
                    self.unnamed = False

    def _touch(self, descriptor: int, path: str, touched_s: float) -> None:
        try:
            os.utime(descriptor, (touched_s, touched_s))
        except OSError as error:
            # What was read is good: only the order of evictions after a restart suffers.
            if not self._touch_failed:
                _log.warning("%s: its time cannot be set (%s); said once for this root", path, error)
            self._touch_failed = True

    def _create(self, folder: str, direct_flag: int) -> tuple[int, str | None]:
        if self.unnamed:
            try:
                return self._open(folder, os.O_TMPFILE | os.O_RDWR, direct_flag), None
            except OSError as error:
                # EISDIR: kernels that do not know O_TMPFILE see a plain open of a folder.
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
                self.unnamed = False
        path = f"{folder}/{self._draft_name()}"
        return self._open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, direct_flag), path

    def _open(self, path: str, flags: int, direct_flag: int) -> int:
        try:
            return os.open(path, flags | direct_flag, _FILE_MODE)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct_flag:
                raise
        descriptor = os.open(path, flags, _FILE_MODE)
        self.direct = False
        return descriptor

    def _move(self, descriptor: int, content: memoryview, move: Callable[[int, memoryview, int], int]) -> int:
        """Move all of ``content``, in as many calls as the system needs; bytes moved until it gave 0."""
        moved = 0
        while moved < len(content):
            try:
                step = move(descriptor, content[moved:], moved)
            except OSError as error:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # The file system refuses O_DIRECT only now, or the rest of a short transfer is
                # not aligned any more: go on through the page cache.
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.direct = self.direct and moved > 0
                continue
            if step == 0:
                break
            moved += step
        return moved

    def _draft_name(self) -> str:
        # The share's lock leaves one living writer, so pid and serial are unique among the living.
        return f"{DRAFT_PREFIX}{os.getpid()}-{next(self._serial)}"


def _drop_drafts(folder: str) -> None:
    """Remove what a writer that was killed left in ``folder``."""
    for entry in entries_of(folder):
        if entry.name.startswith(DRAFT_PREFIX):
            os.unlink(entry.path)


def make_folders(root: str, folder: str) -> None:
    """Make ``folder`` and what it needs below ``root``, each for the owner only."""
    path = root
    for part in os.path.relpath(folder, root).split(os.sep):
        path = f"{path}/{part}"
        try:
            os.mkdir(path, _FOLDER_MODE)
        except FileExistsError:
            continue


def _read_at(descriptor: int, target: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [target], offset)


def _aligned(content: memoryview) -> bool:
    if len(content) % _ALIGNMENT:
        return False
    return int(np.frombuffer(content, np.uint8).ctypes.data) % _ALIGNMENT == 0
