"""Where raw images come from: class folders, lists of labels, IDX files, scikit-learn's digits; see `open_source`.

Imported by: launch, packing.
Imports: files of data_shards, tars.
"""

from data_shards.sources.archive import Unpacking
from data_shards.sources.base import ImageSet, Source
from data_shards.sources.choose import open_source
from data_shards.sources.label_list import LabelList
from data_shards.sources.published.recognise import Published

__all__ = ["ImageSet", "LabelList", "Published", "Source", "Unpacking", "open_source"]
