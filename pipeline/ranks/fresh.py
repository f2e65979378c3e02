"""A process that goes on with the next stage is as a fresh one: same random numbers, memory given back.

So a stage's result does not depend on which stages this process ran before, to the last bit. What is not put back has
no part in results: imported libraries, the process group, MLflow's connection, threads of torch. Costs a collection of
Python's garbage, some tenths of a second with a large model.
"""

from __future__ import annotations

import gc
import random
import sys

import torch


class FreshProcess:
    """The state of the generators as it is now, at the start of the process, to return to before each later stage."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def again(self) -> None:
        """Call where nothing holds the last stage's engine any more."""
        gc.collect()  # DeepSpeed's engine, its optimizer and its hooks refer to each other
        if "torch._dynamo" in sys.modules:  # graphs of the last stage's model, and what they allow for recompilation
            torch._dynamo.reset()
        if self._cuda is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_rng_state(self._cuda)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
