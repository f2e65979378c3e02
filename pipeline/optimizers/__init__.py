"""The optimizers and their parameter groups: torch's and timm's, and our own where those differ from Google's."""
