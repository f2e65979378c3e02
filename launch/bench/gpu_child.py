"""Child process of `launch.bench.gpu`: one contender, or the ceilings; writes JSON.

Started as `python -m launch.bench.gpu_child WHAT SIZE COURSE OUT`. A fresh process each, because compiled code,
allocators and what libraries put in the place of torch's layers outlive a contender.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from launch.bench.gpu_meter import Course, Measured, Meter
from launch.bench.gpu_work import SIZES

CEILINGS = "ceilings"


@dataclass(frozen=True)
class ContenderOutcome:
    """Outcome of one contender at one size; without `measured`, `failure` says why."""

    contender: str
    size: str
    measured: Measured | None
    note: str = ""
    failure: str | None = None
    graphs: int = 0  # that torch.compile made
    graph_breaks: int = 0


def measure(contender: str, *, size: str, course: Course, device: torch.device) -> ContenderOutcome:
    """Run it here."""
    from launch.bench import gpu_contenders

    meter = Meter(course, device=device)
    try:
        note = gpu_contenders.run(contender, SIZES[size], meter=meter, device=device)
    except ModuleNotFoundError as error:
        return ContenderOutcome(contender, size, None, failure=f"not installed: {error.name}")
    except torch.OutOfMemoryError:
        return ContenderOutcome(contender, size, None, failure="out of memory")
    from torch._dynamo.utils import counters

    return ContenderOutcome(
        contender,
        size,
        meter.result(),
        note,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
    )


def main() -> None:
    """One of them."""
    what, size, course, out = sys.argv[1:5]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result: Any
    if what == CEILINGS:
        from launch.bench.gpu_ceilings import ceilings

        result = ceilings(device=device, sizes=size.split("+"))
    else:
        result = measure(what, size=size, course=Course(**json.loads(course)), device=device)
    Path(out).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
