"""Find images that two sets share: equal bytes, equal pixels, near-duplicates (resized, cropped, mirrored)."""
