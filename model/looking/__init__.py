"""What a trained model attends to and has learnt, as tensors: attention, rollout, distances, filters, positions."""
