"""A package `shardvit` of a test: found before ours from its folder, with all of ours but the program of a rank."""

from pathlib import Path

from tests.conftest import ROOT


def stand_in_for_launch(folder: Path, *, train: str, begins: str = "") -> None:
    """`train` is what `python -m shardvit.launch.train` runs there; `begins` is run when `launch` is imported."""
    package = folder / "shardvit"
    (package / "launch").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'shardvit')!r})\n")
    (package / "launch" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'launch')!r})\n{begins}")
    (package / "launch" / "train.py").write_text(train)
