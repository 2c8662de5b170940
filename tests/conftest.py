"""Makes the test helpers importable: `from engine import asking`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
