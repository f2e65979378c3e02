"""What pyproject.toml cannot say: an sdist and a wheel carry the commit that they were made from.

`shardvit --version` and the record of every run and checkpoint name it. Everything else is in pyproject.toml.
"""

import json
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_PACKAGE = Path("src", "shardvit")


def write_commit(package: Path) -> None:
    """Write the tags of this folder's commit into `package`: git's, in an unpacked sdist those that it carries."""
    names = runpy.run_path(str(_PACKAGE / "pipeline" / "runs" / "written_by.py"))
    (package / names["COMMIT_FILE"]).write_text(json.dumps(names["source_revision"]()), encoding="utf-8")


class Wheel(build_py):
    """Copies the package, and adds the commit; an editable install asks git each time."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib, "shardvit"))


class Sdist(sdist):
    """Copies the sources, and adds the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, _PACKAGE))


setup(cmdclass={"build_py": Wheel, "sdist": Sdist})
