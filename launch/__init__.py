"""From a command line to running processes, on one machine or on many."""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # Python is about to run a module of this package, and looks for what that imports in the working folder first.
    if sys.path[0] != _ROOT:
        del sys.path[0]
    else:  # a clone that need not be installed: so what is started from it gets told
        os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

if "OMP_WAIT_POLICY" not in os.environ:
    # How long torch's threads (libgomp's) spin while they wait for one another: its own number for more threads than
    # cores, which nobody tells it. With the usual 300,000 they hold cores that the awaited thread could run on.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
