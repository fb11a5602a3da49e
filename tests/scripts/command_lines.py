"""Command lines that the tests of run_decode share."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "v3"
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())
VOCAB_SIZE, MAX_POSITIONS = 256, 1280

# These sizes give chunks, mixed steps, and too few pages for two long requests. Nearly all tests use the same shapes,
# which compile once.
SIZES = ["--page-size", "4", "--num-pages", "26", "--max-batched-tokens", "16", "--max-num-seqs", "2"]
SMALL = ["--model", str(GOLDEN), *SIZES, "--max-tokens", "6"]
