"""Recipe -> engine -> checkpoint -> MLflow: the stages, the training loop, and a room for each thing that they need.

Begin with `train_loop`; `stage_training` puts its parts together, `stages` says what the stages are. Imported by
`launch`; imports `model` and `data_shards`.
"""
