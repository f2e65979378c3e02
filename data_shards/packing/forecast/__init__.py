"""What a packing would take, before anything is written."""
