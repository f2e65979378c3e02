"""Encoded images -> squares of pixels: decode, crop, resize, augment, and mix on the device."""
