"""Compute static scales of a quantised KV cache: `python scripts/calibrate.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
