"""What a stage trains on besides labels, and which task it gets."""
