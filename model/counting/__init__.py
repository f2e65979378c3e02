"""Parameters, FLOPs and activation bytes of a model, by formula and without torch; start at `flops.account`."""
