"""Draw the ViT paper's figures: of one model (attention, filters, positions) and across runs (over size and cost)."""
