"""Find a trained model and use it: any run, stage, checkpoint or file of weights."""
