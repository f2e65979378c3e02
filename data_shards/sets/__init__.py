"""Sets that live: what is chosen of them, what is appended to them, and their statistics."""
