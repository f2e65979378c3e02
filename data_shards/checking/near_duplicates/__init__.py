"""Find images that two sets share: equal bytes, equal pixels, or near-duplicates (resized, cropped, mirrored)."""
