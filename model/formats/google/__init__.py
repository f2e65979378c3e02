"""Google's npz files, of vision_transformer and of big_vision: `npz` reads and writes them."""
