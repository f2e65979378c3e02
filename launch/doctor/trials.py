"""Try parts in child processes, `python -m shardvit.launch.doctor.trials PART...`; collect results in the parent.

The child announces each part, so that a crash or hang has a name. Some 20 seconds on 2 idle cores, mostly imports.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from shardvit.launch.doctor.child import MARK, Answer, run_children
from shardvit.launch.doctor.findings import Check, judge
from shardvit.launch.doctor.gpus import try_arithmetic, try_torch
from shardvit.launch.doctor.network import ALL_REDUCE_SECONDS, all_reduce
from shardvit.launch.local.env import num_gpus
from shardvit.launch.local.processes import place_here
from shardvit.pipeline.ranks.start_clock import StartClock

Backend = Literal["gloo", "nccl"]
_LIMIT_SECONDS = 120.0  # of a child; imports from a busy network disk have taken a minute
_COMMAND = (sys.executable, "-m", "shardvit.launch.doctor.trials")
_LIBRARIES = ("torchvision", "timm", "accelerate", "deepspeed", "mlflow")
_WORLD = 2


@dataclass(frozen=True)
class Part:
    """Something to try, and the remedy if it fails, crashes or hangs."""

    name: str
    run: Callable[[], Sequence[Check]]
    remedy: str

    def failed(self, found: str) -> list[Check]:
        return [Check(self.name, "problem", found, self.remedy)]


def try_import(library: str) -> Sequence[Check]:
    """Import a library; for torchvision also call a compiled operator, which fails in a wrong build."""
    module = importlib.import_module(library)
    if library == "torchvision":
        import torch

        kept = module.ops.nms(torch.tensor([[0.0, 0.0, 2.0, 2.0]] * 2), torch.tensor([0.9, 0.8]), 0.5)
        assert kept.tolist() == [0]
    return ()


def try_decoders() -> list[Check]:
    """Find the working image decoders."""
    from shardvit.data_shards.errors import UserError
    from shardvit.data_shards.images import decode_nvimgcodec
    from shardvit.data_shards.images.decode import require_decoder

    complaints = {"nvimgcodec": decode_nvimgcodec.complaint("cpu") or "", "simplejpeg": ""}
    try:
        require_decoder("simplejpeg")
    except UserError as error:
        complaints["simplejpeg"] = str(error)
    gpu = decode_nvimgcodec.complaint("gpu") or "" if num_gpus() else None
    return [judge_decoders(complaints, gpu=gpu)]


def judge_decoders(complaints: Mapping[str, str], *, gpu: str | None) -> Check:
    """Judge the decoders; an empty complaint means that one works. `gpu`: the GPU decoder's; None: no GPU."""
    working = [name for name, complaint in {**complaints, "gpu": gpu}.items() if complaint == ""]
    found = f"data.decoder can be {', '.join([*working, 'pillow'])}"
    said = "; ".join(filter(None, complaints.values()))
    remedy = "reading is slower without: pip install -e . adds the decoders"
    return judge("decoding", f"{found}: {said}" if said else found, (bool(said), "note", remedy))


PARTS = {
    "torch": Part("torch and CUDA", try_torch, "reinstall it: pip install --force-reinstall torch -c constraints.txt"),
    "arithmetic": Part("arithmetic", try_arithmetic, "try another GPU, or a torch that is built for this device"),
    "decoders": Part("decoding", try_decoders, "a decoder crashes its process: set data.decoder=simplejpeg or pillow"),
    **{
        f"import:{name}": Part(
            f"import {name}",
            partial(try_import, name),
            f"reinstall it: pip install --force-reinstall --no-deps {name} -c constraints.txt",
        )
        for name in _LIBRARIES
    },
    "gloo": Part(
        f"{_WORLD} processes, gloo",
        partial(all_reduce, "gloo"),
        "gloo looks up the address of this machine's own name: put the name into /etc/hosts, or set "
        "GLOO_SOCKET_IFNAME to an interface (ip -br address lists them)",
    ),
    "nccl": Part(
        f"{_WORLD} processes, nccl",
        partial(all_reduce, "nccl"),
        "set NCCL_DEBUG=INFO and read its log; give a container more /dev/shm",
    ),
}
ALONE = tuple(name for name in PARTS if name not in get_args(Backend))  # need only one process


def main(parts: Sequence[str]) -> int:
    """Run in the child: try the parts. Returns 1 if one raised."""
    code = 0
    for name in parts:
        _tell(name)
        print(f"{MARK}{name}", file=sys.stderr, flush=True)  # later errors belong to this part
        try:
            checks = PARTS[name].run()
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
            lines = str(error).strip().splitlines()
            _tell(name, error=f"{type(error).__name__}: {lines[0] if lines else ''}")
            code = 1
        else:
            _tell(name, checks=[asdict(each) for each in checks])
    return code


def try_parts(
    parts: Sequence[str],
    *,
    environment: Mapping[str, str],
    command: Sequence[str] = _COMMAND,
    limit_seconds: float = _LIMIT_SECONDS,
    clock: StartClock | None = None,
) -> dict[str, list[Check]]:
    """Run in the parent: return each part's checks. After a crash or hang, a new child tries the rest."""
    found: dict[str, list[Check]] = {}

    def show(output: str) -> None:
        if clock and (messages := Answer(None, output, "", 0.0).messages):
            part = messages[-1]["part"]
            clock.set_status(f"trying {PARTS[part].name}", f"{parts.index(part) + 1} of {len(parts)}")

    while left := [name for name in parts if name not in found]:
        [answer] = run_children(
            [[*command, *left]], environments=[environment], limit_seconds=limit_seconds, progress=show
        )
        # If not even one part began, none would.
        found |= _results(answer) or {name: PARTS[name].failed(answer.ending) for name in left}
    return found


def try_all_reduce(
    backend: Backend,
    *,
    environment: Mapping[str, str],
    command: Sequence[str] = _COMMAND,
    limit_seconds: float = ALL_REDUCE_SECONDS + 30,
) -> list[Check]:
    """Run in the parent: start two processes as `shardvit run` does; see `launch.local.env.without_place`."""
    with tempfile.TemporaryDirectory(prefix="shardvit-doctor-") as folder:
        places = [{**environment, **place_here(rank, ranks=_WORLD, rendezvous=Path(folder))} for rank in range(_WORLD)]
        answers = run_children([[*command, backend]] * _WORLD, environments=places, limit_seconds=limit_seconds)
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.code != 0]
    if not failed:
        return _results(answers[0])[backend]
    # Report the one that crashed, not the one that was killed while waiting for it.
    rank, answer = min(failed, key=lambda each: sys.maxsize if each[1].code is None else each[1].code)
    said = next((message["error"] for message in answer.messages if "error" in message), answer.ending)
    return PARTS[backend].failed(f"all-reduce: process {rank}: {said}")


def full_reports(*, environment: Mapping[str, str]) -> dict[str, str]:
    """Run torch's collect_env and DeepSpeed's ds_report in child processes: they may crash or hang."""
    modules = {"torch.utils.collect_env": "torch.utils.collect_env", "ds_report": "deepspeed.env_report"}
    answers = {
        name: run_children([[sys.executable, "-m", each]], environments=[environment], limit_seconds=_LIMIT_SECONDS)[0]
        for name, each in modules.items()
    }
    return {name: each.output if each.code == 0 else each.ending for name, each in answers.items()}


def _tell(part: str, **more: object) -> None:
    print(MARK + json.dumps({"part": part, **more}), flush=True)


def _results(answer: Answer) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for message in answer.messages:
        part, checks = message["part"], message.get("checks")
        failed = PARTS[part].failed(message.get("error", answer.ending))
        found[part] = failed if checks is None else [Check(**each) for each in checks]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
