"""Record a run's environment as files for MLflow: packages, GPUs, driver, and uncommitted changes.

Takes tenths of a CPU second per attempt. Records no environment variables, which may hold secrets.
"""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.text import show_bytes
from shardvit.pipeline.runs import written_by
from shardvit.pipeline.runs.written_by import git_tags, source_tags
from shardvit.pipeline.tracking.facts import without_credentials

ENVIRONMENT_FILE = "environment.txt"
DIFF_FILE = "git.diff"
TRACKED_FILES = (ENVIRONMENT_FILE, DIFF_FILE)
_MOST_DIFF_BYTES = 1_000_000
_GIT_SECONDS = 20.0
_DRIVER = Path("/proc/driver/nvidia/version")  # nvidia-smi hangs where the driver does
_SECRET = re.compile(r"(?i)((?:password|passwd|secret|token|api_?key|credential)s?['\"]?\s*[:=]\s*)(\S+)")


def write_environment(folder: Path, *, gpus: str = "") -> None:
    """Write environment.txt and, in a changed checkout, git.diff; `gpus` is from `gpu_tag`. Raises OSError."""
    folder.mkdir(exist_ok=True)
    write_if_changed(folder / ENVIRONMENT_FILE, environment(gpus))
    if diff := git_diff(Path(written_by.__file__)):
        write_if_changed(folder / DIFF_FILE, diff)


def environment(gpus: str = "") -> str:
    """Describe the system, then the installed packages, one line each."""
    lines = [
        f"python {platform.python_version()}",
        f"platform {platform.platform()}",
        f"cores {len(os.sched_getaffinity(0))}",
        *_driver(),
        *([f"gpus {gpus}"] if gpus else []),
        *(f"{name} {value}" for name, value in source_tags().items() if ".git." in name),
        "",
    ]
    named = ((each.metadata["Name"], each.version) for each in metadata.distributions())
    packages = {str(name): version for name, version in named if name is not None}
    lines += [f"{name}=={packages[name]}" for name in sorted(packages, key=str.casefold)]
    return "\n".join(lines) + "\n"


def git_diff(source_file: Path) -> str:
    """Diff the checkout that tracks `source_file` against HEAD, likely secrets masked, cut at 1 MB; "" if clean."""
    if git_tags(source_file).get("shardvit.git.dirty") != "true":
        return ""
    command = ["git", "-C", str(source_file.parent), "diff", "--no-color", "--no-ext-diff", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    text = done.stdout[:_MOST_DIFF_BYTES].decode(errors="replace")
    if len(done.stdout) > _MOST_DIFF_BYTES:
        text += f"\n... cut: the whole is {show_bytes(len(done.stdout))}\n"
    return without_secrets(text)


def without_secrets(text: str) -> str:
    """Mask passwords in URLs and values after words such as `token =`."""
    return _SECRET.sub(r"\1***", without_credentials(text))


def write_if_changed(path: Path, text: str) -> None:
    """Replace a file unless equal, so that its mtime stays and it is not sent again."""
    with suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return
    replace_text(path, text, sync="none")


def gpu_tag() -> dict[str, str]:
    """Return a tag with this rank's visible GPUs and torch's CUDA version, if any."""
    torch = sys.modules.get("torch")  # not imported: no GPU in use
    if torch is None or not torch.cuda.is_available():
        return {}
    every = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{each.name}, {show_bytes(each.total_memory)}" for each in every]
    return {"shardvit.gpus": "; ".join([*names, f"CUDA {torch.version.cuda}"])}


def _driver() -> list[str]:
    with suppress(OSError):
        return [f"driver {_DRIVER.read_text(encoding='utf-8').splitlines()[0]}"]
    return []
