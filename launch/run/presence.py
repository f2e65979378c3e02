"""Is the run folder still there? Somebody may delete or rename it while a run is at work in it.

A folder that was renamed takes the open files with it, and another one may have its name by now: what is compared is
the folder itself, which is held open. Nothing is made in its place: those who write in mid-run make no folder above
their own (`data_shards.durable.make_folders`). Costs one look at a name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_shards.errors import UserError


def gone(folder: Path) -> str:
    """The sentence for a folder that is not there any more."""
    return (
        f"the run folder {folder} is gone: it was deleted or renamed while the run was at work in it, and nothing was "
        "written in its place; bring it back under this name, and the same command goes on"
    )


class Presence:
    """A folder as it was found.

    Args:
        folder: the run folder.

    Raises:
        UserError: it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(gone(folder)) from None

    def is_gone(self) -> bool:
        """Whether the folder has lost its name, for certain: a file server that is away is no proof."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._descriptor))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def demand(self) -> None:
        """Go on only if it is there.

        Raises:
            UserError: it is gone.
        """
        if self.is_gone():
            raise UserError(gone(self.folder))

    @contextmanager
    def demanded(self) -> Iterator[None]:
        """Within it, what fails after the folder was lost has failed because of that.

        Raises:
            UserError: something has failed, and the folder is gone.
        """
        try:
            yield
        except Exception as error:
            if self.is_gone():
                raise UserError(gone(self.folder)) from error
            raise

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._descriptor)
