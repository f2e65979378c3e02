"""All checks, one subject after the other; what goes wrong in looking is a finding too.

Costs a second for what can be read and asked, and some 20 to 30 seconds on 2 idle cores for what has to be tried: the
imports, a backward pass, the attention kernels, two processes that talk. Those run in children with time-outs, so
nothing that a library does ends the doctor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from launch.doctor.cluster import cluster_checks, read_cluster
from launch.doctor.gpus import (
    LIBRARIES,
    PARTS,
    check_arithmetic,
    check_attention,
    check_cuda,
    check_decoding,
    check_gpus,
    check_imports,
    gpu_checks,
    read_smi,
)
from launch.doctor.libraries import library_checks, read_asked, read_installed
from launch.doctor.machine import machine_checks, read_machine
from launch.doctor.network import check_all_reduce, check_tracking
from launch.doctor.probing import Tried, try_parts
from launch.doctor.report import Report
from launch.doctor.result import Check, Section
from launch.env import num_gpus, tracking_uri, without_place

Say = Callable[[str], None]
_LEFT_OUT = ("imports", "arithmetic", "attention", "decoding", "all-reduce")


def examine(*, runs: Path, cache: Path, depth: Literal["all", "quick"], say: Say) -> Report:
    """Look at everything.

    Args:
        runs: folder of all runs.
        cache: folder for shards that are fetched.
        depth: "quick" leaves out what has to be tried in processes of its own.
        say: takes a line before each thing that takes seconds.
    """
    begin = time.monotonic()
    environment = without_place()
    devices, visible = num_gpus({}), num_gpus()
    tried: Mapping[str, Tried] = {}
    if depth == "all":
        say("trying the libraries and the device ...")
        parts = [*PARTS, *(f"import:{name}" for name in LIBRARIES)]
        tried = try_parts(parts, environment=environment)
    sections = [
        Section("machine", _guarded("machine", lambda: _machine(runs, cache, gpus=visible))),
        Section("libraries", _guarded("libraries", lambda: _libraries(tried))),
        Section("GPUs and arithmetic", _guarded("GPUs", lambda: _gpus(tried, devices=devices, visible=visible))),
        Section("network", _guarded("network", lambda: _network(environment, depth=depth, gpus=visible, say=say))),
        Section("cluster", _guarded("cluster", lambda: cluster_checks(read_cluster()))),
    ]
    left_out = _LEFT_OUT if depth == "quick" else ()
    return Report(tuple(sections), left_out=left_out, seconds=time.monotonic() - begin)


def _machine(runs: Path, cache: Path, *, gpus: int) -> Sequence[Check]:
    return machine_checks(read_machine(runs=runs, cache=cache, gpus=gpus), pythons=read_asked().pythons)


def _libraries(tried: Mapping[str, Tried]) -> Sequence[Check]:
    asked = read_asked()
    installed = read_installed([each.name for each in asked.requirements])
    checks = library_checks(asked, installed)
    if tried:
        checks += check_imports(tried)
        checks.append(check_decoding(tried["decoders"], has_gpu=num_gpus() > 0))
    return checks


def _gpus(tried: Mapping[str, Tried], *, devices: int, visible: int) -> Sequence[Check]:
    checks = [check_gpus(read_smi(), devices=devices, visible=visible)]
    if tried:
        checks.append(check_cuda(tried["torch"], devices=devices, visible=visible))
        checks += gpu_checks(tried["gpus"])
        checks += [check_arithmetic(tried["arithmetic"]), check_attention(tried["attention"])]
    return checks


def _network(environment: Mapping[str, str], *, depth: Literal["all", "quick"], gpus: int, say: Say) -> Sequence[Check]:
    checks = []
    if depth == "all":
        say("trying two processes ...")
        checks.append(check_all_reduce("gloo", environment=environment))
        if gpus > 1:
            checks.append(check_all_reduce("nccl", environment=environment))
    return [*checks, check_tracking(tracking_uri())]


def _guarded(name: str, look: Callable[[], Sequence[Check]]) -> tuple[Check, ...]:
    """The findings, or that they could not be had."""
    try:
        return tuple(look())
    except Exception as error:  # noqa: BLE001 - the doctor outlives whatever a machine does to it
        said = f"{type(error).__name__}: {error}"
        return (
            Check(name, "problem", f"the doctor could not look: {said}", "please report it, with what is special here"),
        )
