"""Which sample stands at which position of which epoch: pure functions."""
