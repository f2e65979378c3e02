"""Keep the scores of all images for mean average precision, neither on the GPU nor all in memory.

One process holds at most 256 MiB of them, beyond that a file without a name in TMPDIR: 4 bytes an image and class, 4.4
GB for 50,000 images of 21,843 classes, divided by the number of processes. A batch is kept class by class, so that few
classes of all images are few long reads.
"""

import tempfile
import weakref

import torch

from shardvit.data_shards.errors import UserError

_IN_MEMORY_BYTES = 256 << 20


class ScoreFile:
    """float32 scores [images, classes] on the host, added by batch and read by class."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - lives as long as we do
        weakref.finalize(self, self._file.close)
        self._batches: list[tuple[int, int]] = []  # where each begins in bytes, and its rows

    def add(self, by_class: torch.Tensor) -> None:
        """Add a batch, float32 [classes, rows], contiguous. UserError if the disk is full."""
        self._batches.append((self._file.tell(), by_class.shape[1]))
        try:
            self._file.write(by_class.numpy().data)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"mean_average_precision keeps the scores of all images in {tempfile.gettempdir()}: {error.strerror}: "
                "set TMPDIR to a folder with more room, or leave this metric out"
            ) from error

    def read(self, first: int, *, count: int) -> torch.Tensor:
        """Return the scores of `count` classes, float32 [images, count]."""
        parts: list[torch.Tensor] = []
        for begin, rows in self._batches:
            self._file.seek(begin + 4 * first * rows)
            content = bytearray(self._file.read(4 * count * rows))
            parts.append(torch.frombuffer(content, dtype=torch.float32).view(count, rows).t())
        return torch.cat(parts)
