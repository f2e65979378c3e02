"""Images that two sets share: equal bytes, equal pixels, near-duplicates (resized, encoded again, cropped, mirrored).

Imported by: checking, launch, packing.
Imports: files of data_shards, images, store.
"""
