"""Forward, backward, step and sharded state: the only room that imports deepspeed and accelerate.

Imported by the stage files, `checkpoint` and `budget`. Imports `recipe` and `ranks`.
"""
