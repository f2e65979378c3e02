"""The ViT paper's figures: of one model (attention, filters, positions), and of several runs (over size and cost)."""
