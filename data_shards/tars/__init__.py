"""Where samples are in tars: a walk through the headers, and the indexes made of it, in text (.idx) and binary (.npz).

Needs neither torch nor a network. Imported by all of data_shards but the values; imports none of its other rooms.
"""
