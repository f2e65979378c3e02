"""Turn a command line into running processes, on one machine or many."""

import os
import sys

import shardvit

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(shardvit.__file__)))
_MODULE = sys.orig_argv[sys.orig_argv.index("-m") + 1] if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv else ""

if _MODULE.startswith(("shardvit.", "launch.")) and not sys.flags.safe_path:
    # `python -m shardvit.launch...` puts the working directory first in sys.path.
    if sys.path[0] != _ROOT:
        del sys.path[0]
    else:  # a clone, perhaps not installed: pass its path on to child processes
        os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

if "OMP_WAIT_POLICY" not in os.environ:
    # Spin count of torch's threads (libgomp's) while they wait for one another: libgomp's own value for more threads
    # than cores, which it cannot detect here. With its usual 300,000, waiting threads hold cores that others need.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
