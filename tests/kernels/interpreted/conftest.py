"""Tests of Triton kernels under its interpreter: in a process of their own.

The interpreter must be chosen before Triton is imported; `tests/kernels/
test_interpreted.py` starts that process.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
