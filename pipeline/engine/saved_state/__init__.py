"""A checkpoint of an engine: its files, and how any world size, ZeRO stage and backend reads them."""
