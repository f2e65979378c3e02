"""The tracking services that a run can be sent to, a file each: MLflow, TensorBoard, Weights & Biases."""
