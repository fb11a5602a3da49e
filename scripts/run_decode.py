"""Decode prompts with the engine: `python scripts/run_decode.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.decode.command import main

if __name__ == "__main__":
    sys.exit(main())
