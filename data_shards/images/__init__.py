"""Encoded images -> squares of pixels: decode, crop, resize, augment."""
