"""What the watch keeps in STAGE/ranks from one attempt to the next."""

import signal
from pathlib import Path

from pipeline.ranks.place import Place
from pipeline.ranks.watch import Watch


def test_files_of_ranks_that_are_no_more_are_removed_and_others_stay(tmp_path: Path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for name in ("rank-1.json", "stack-rank-1.txt", "rank-10.json", "stack-rank-2.txt", "notes.txt"):
        (folder / name).write_text("x")
    before = signal.getsignal(signal.SIGUSR2)
    watch = Watch(folder, place=Place(world_size=2), attempt="two", hang_seconds=0, say=print)
    watch.start()
    watch.close()
    signal.signal(signal.SIGUSR2, before)
    left = {path.name for path in folder.iterdir()}
    assert left - {"stack-rank-0.txt"} == {"rank-0.json", "rank-1.json", "stack-rank-1.txt", "notes.txt"}
