"""Data sets in the layouts that they are published in: ImageNet, CIFAR, Pets, Flowers, VTAB; see `recognise`.

Imported by: files of data_shards.sources.
Imports: files of data_shards, files of data_shards.sources.
"""
