"""Google's npz files, of vision_transformer and of big_vision."""
