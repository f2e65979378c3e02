"""Cache compiled code in the run folder, so that a resumed run, on any node, does not compile again.

Inductor executes what it finds in its cache, and a run folder may come from somebody else (SECURITY.md). So the cache
folder has a random name stored only in this user's own cache; anything else in RUN/compiled/ is never read.
"""

import os
import secrets
from pathlib import Path

from shardvit.pipeline.recipe.vocabulary import COMPILED_FOLDER

_NAME = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it at each compilation; contains Triton's cache


def keep_compiled_code(run: Path, *, own_cache: Path | None = None) -> Path | None:
    """Cache below the folder `run`; None if already set or the user's own cache is not writable."""
    if os.environ.get(_NAME):
        return None
    try:
        own_cache = own_cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = run / COMPILED_FOLDER / _users_name(own_cache / "shardvit" / "compiled.name")
    except (OSError, RuntimeError):  # no home, or full or read-only: use torch's default, local to this node
        return None
    os.environ[_NAME] = str(folder.absolute())
    return folder


def _users_name(file: Path) -> str:
    """Read the random name in `file`, which the first process creates."""
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
            out.write(secrets.token_hex(16))
        try:
            os.link(draft, file)  # atomic, never overwrites
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    name = file.read_text(encoding="ascii")
    if len(name) != 32 or not name.isalnum():
        raise OSError(f"{file} is damaged")
    return name
