"""Where the parts of a corpus' work run: this machine's processes, or a Ray cluster."""
