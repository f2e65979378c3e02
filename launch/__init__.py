"""Turn a command line into running processes, on one machine or many."""

import os
import sys

import shardvit

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(shardvit.__file__)))
_MODULE = sys.orig_argv[sys.orig_argv.index("-m") + 1] if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv else ""

# `python -m` puts the working directory first in sys.path. With a module of somebody else's it stays there: it is his.
if _MODULE.startswith(("shardvit.", "launch.")) and not sys.flags.safe_path:
    if sys.path[0] == _ROOT:  # a clone, perhaps not installed: child processes find it too
        from shardvit.data_shards.working_folder import import_folder

        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), import_folder()])
    elif _MODULE.startswith("shardvit."):
        del sys.path[0]

if "OMP_WAIT_POLICY" not in os.environ:
    # Spin count of torch's threads (libgomp's) while they wait for one another: libgomp's own value for more threads
    # than cores, which it cannot detect here. With its usual 300,000, waiting threads hold cores that others need.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
