"""Python imports this at the start of every process that has this folder on its PYTHONPATH: the tests' faults go in.

Nothing of it is in the product. Without SHARDVIT_FAULT it does nothing at all.
"""

import importlib
import os

if os.environ.get("SHARDVIT_FAULT"):
    importlib.import_module("injected_faults").install()
