"""Commands that use a trained model: evaluate, transfer, predict, convert."""
