"""Out of memory: recognised however it is said, and answered with numbers that the plan has for what is advised."""

import re
import subprocess
import sys

import pytest
import torch

from shardvit.pipeline.budget.out_of_memory import is_out_of_memory, what_to_change
from tests.pipeline.budget.planning import recipe

GB = 10**9


def test_memory_that_ran_out_is_recognised_and_other_errors_are_not():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    for other in (RuntimeError("Connection closed by peer"), OSError(12, "x"), ValueError("DefaultCPUAllocator")):
        assert not is_out_of_memory(other)


def test_a_real_limit_of_a_process_is_recognised():
    """A process whose address space is limited, which asks torch for more."""
    code = (
        "import resource, torch; from shardvit.pipeline.budget.out_of_memory import is_out_of_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\n"
        "try: torch.zeros(1 << 33, dtype=torch.uint8)\n"
        "except Exception as error: print(is_out_of_memory(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_what_is_advised_needs_less_and_says_how_much():
    made = recipe("L/16", batch=256, engine={"max_micro_batch_size": 256})
    text = what_to_change(made, stage="pretrain", processes=1, memory_bytes=40 * GB, of="GPU", sharing=1)
    assert "\n" not in text and "a micro-batch of 256" in text and "40" in text
    micro = re.search(r"engine.max_micro_batch_size to (\d+) \(([0-9.]+) GB\)", text)
    assert micro and int(micro[1]) < 256 and float(micro[2]) < 40
    assert "engine.activation_checkpointing to true" in text and "zero_stage" not in text
    whole = recipe("L/16", batch=8, engine={"zero_stage": 0})
    several = what_to_change(whole, stage="pretrain", processes=8, memory_bytes=4 * GB, of="GPU", sharing=1)
    assert "engine.zero_stage to 3" in several
    least = recipe("L/16", batch=1, engine={"activation_checkpointing": True})
    text = what_to_change(least, stage="pretrain", processes=1, memory_bytes=GB, of="GPU", sharing=1)
    assert "max_micro_batch_size" not in text and "smaller model" in text
