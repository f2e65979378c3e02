"""Where raw images come from: class folders, IDX files, scikit-learn's digits. `open_source` finds out
which.
"""

from data_shards.sources.base import ImageSet, Source
from data_shards.sources.choose import open_source

__all__ = ["ImageSet", "Source", "open_source"]
