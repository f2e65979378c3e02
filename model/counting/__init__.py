"""Parameters, FLOPs and activation bytes of a model, by formula and without torch: `flops.account` is the way in.

For whoever judges a recipe before anything is built (`pipeline.budget`); imports `model.config` and the like."""
