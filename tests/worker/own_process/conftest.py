"""Tests that need a process in which nothing else was imported.

vLLM looks through every module of its process for kernels to replace, and stumbles over
what other tests import. `tests/worker/test_own_process.py` starts that process.
"""

import os

collect_ignore_glob = [] if os.environ.get("OWN_PROCESS") == "1" else ["test_*.py"]
