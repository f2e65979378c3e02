"""Forward, backward, step and sharded state: the only room that imports deepspeed and accelerate."""
