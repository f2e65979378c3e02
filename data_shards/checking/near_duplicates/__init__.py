"""Images that two sets share: equal bytes, equal pixels, near-duplicates (resized, encoded again, cropped, mirrored)."""
