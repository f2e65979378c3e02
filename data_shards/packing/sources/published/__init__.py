"""Data sets in the layouts that they are published in: ImageNet, CIFAR, Pets, Flowers, VTAB; see `recognise`."""
