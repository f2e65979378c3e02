"""Recipe -> engine -> checkpoint -> MLflow: the training loop, the stages, and a package for each part.

Start at `train_loop`; `stage_training` assembles its parts, `stages` lists the stages.
"""
