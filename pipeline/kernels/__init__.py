"""Compiled blocks, attention kernels and TF32, chosen at the start of a stage."""
