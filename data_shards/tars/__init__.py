"""Where samples are in tars: the walk through the headers, and indexes in text (.idx) and binary (.npz). No torch."""
