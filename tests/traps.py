"""A working folder of somebody's own repository, whose modules have the names of ours, of torch and of Python's."""

from collections.abc import Callable
from pathlib import Path

# What our processes import early, late, and in multiprocessing's own first lines.
MODULES = ("model", "launch", "torch", "json", "random", "selectors", "yaml", "deepspeed", "mlflow")
PACKAGES = ("pipeline", "data_shards", "tests", "multiprocessing")


def lay_traps(folder: Path, *, without: tuple[str, ...] = ()) -> Callable[[], list[str]]:
    """Write them; what is returned tells which of them have been executed."""
    sprung = folder / "sprung"
    sprung.mkdir(parents=True)
    for name in {*MODULES, *PACKAGES} - {*without}:
        path = folder / name / "__init__.py" if name in PACKAGES else folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(sprung / name)!r}, 'w').close()\nraise ImportError('a trap: {name}')\n")
    return lambda: sorted(path.name for path in sprung.iterdir())
