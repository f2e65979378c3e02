"""Where samples are in tars: the walk through the headers, and indexes in text (.idx) and binary (.npz). Needs neither
torch nor a network.
"""
