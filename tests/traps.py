"""A working folder of somebody's own repository, whose modules have the names of ours, of torch and of Python's; and
what our processes have in sys.path there."""

import ast
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

# What our processes import early, late, and in multiprocessing's own first lines.
MODULES = ("model", "launch", "torch", "json", "random", "selectors", "yaml", "deepspeed", "mlflow")
PACKAGES = ("pipeline", "data_shards", "tests", "multiprocessing")
ROOMS = ("model", "launch", "pipeline", "data_shards")  # those of them that are folders of ours

# Into a sitecustomize: notes sys.path at every import of ours, the last one last. It imports nothing itself.
_WATCH = """
import os, sys
def note(event, arguments):
    if event == "import" and arguments[0].startswith("shardvit.") and arguments[0] != "shardvit.launch":
        with open(f"{FOLDER}/{os.getpid()}", "w") as file:
            file.write(repr((sys.orig_argv, sys.path)))
sys.addaudithook(note)
"""


def lay_traps(folder: Path, *, names: Collection[str] = (*MODULES, *PACKAGES)) -> Callable[[], list[str]]:
    """Write them; what is returned tells which of them have been executed."""
    sprung = folder / "sprung"
    sprung.mkdir(parents=True)
    for name in names:
        path = folder / name / "__init__.py" if name in PACKAGES else folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(sprung / name)!r}, 'w').close()\nraise ImportError('a trap: {name}')\n")
    return lambda: sorted(path.name for path in sprung.iterdir())


@dataclass(frozen=True)
class Seen:
    """A process of ours."""

    command: Sequence[str]
    sys_path: Sequence[str]

    def is_kind(self, kind: str) -> bool:
        return any(kind in word for word in self.command)

    def searches(self, folder: Path) -> bool:
        return any(os.path.realpath(each or os.getcwd()) == os.path.realpath(folder) for each in self.sys_path) or (
            "" in self.sys_path
        )


class Watch:
    """Processes that have `folder` in their PYTHONPATH leave their sys.path in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._seen = folder, folder / "seen"
        self._seen.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(f"FOLDER = {str(self._seen)!r}\n{_WATCH}")

    def seen(self) -> list[Seen]:
        return [Seen(*ast.literal_eval(path.read_text())) for path in self._seen.iterdir()]

    def demand(self, *kinds: str, without: Path) -> None:
        """Such processes have been there, and none searches a folder."""
        seen = self.seen()
        assert [each for each in seen if each.searches(without)] == []
        assert [kind for kind in kinds if not any(each.is_kind(kind) for each in seen)] == []
