"""Training backends: forward, backward, step and sharded state. Only this package imports deepspeed and accelerate."""
