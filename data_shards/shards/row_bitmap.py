"""Which samples of a tar count, as a text in the manifest: `1000:` and base64 of a bit per sample of the tar.

The first sample is the highest bit of the first byte, as `numpy.packbits` has it. 170 characters for 1,000 samples.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def pack_rows(counts: NDArray[np.bool_]) -> str:
    """Write which of a tar's samples count; [samples of the tar]."""
    import numpy as np

    return f"{len(counts)}:{base64.b64encode(np.packbits(counts).tobytes()).decode()}"


def unpack_rows(text: str) -> NDArray[np.bool_]:
    """Read `pack_rows`' text."""
    import numpy as np

    bits = np.frombuffer(base64.b64decode(text.partition(":")[2]), np.uint8)
    return np.unpackbits(bits, count=stored_rows(text)).astype(np.bool_)


def stored_rows(text: str) -> int:
    """Count the tar's samples, those left out included."""
    return int(text.partition(":")[0])


def counted_rows(text: str) -> int | None:
    """Count the samples that count; None if the text is malformed."""
    stored, _, bits = text.partition(":")
    try:
        content = base64.b64decode(bits, validate=True)
    except ValueError:
        return None
    if not (stored.isascii() and stored.isdecimal() and len(stored) < 16) or len(content) != -(-int(stored) // 8):
        return None
    number = int.from_bytes(content, "big")
    return None if number & ((1 << -int(stored) % 8) - 1) else number.bit_count()  # None: beyond the last sample
