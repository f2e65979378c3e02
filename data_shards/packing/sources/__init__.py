"""Where raw images come from: class folders, lists of labels, IDX files, scikit-learn's digits; see `open_source`."""

from data_shards.packing.sources.archive import Unpacking
from data_shards.packing.sources.base import ImageSet, Source
from data_shards.packing.sources.choose import open_source
from data_shards.packing.sources.label_list import LabelList
from data_shards.packing.sources.published.recognise import Published

__all__ = ["ImageSet", "LabelList", "Published", "Source", "Unpacking", "open_source"]
