"""The command lines that tests of run_decode share."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "v3"
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())
VOCAB_SIZE, MAX_POSITIONS = 256, 1280

# Chunks, mixed steps and too few pages for two long requests; the same shapes, compiled once, in nearly every test.
SIZES = ["--page-size", "4", "--num-pages", "26", "--max-batched-tokens", "16", "--max-num-seqs", "2"]
SMALL = ["--model", str(GOLDEN), *SIZES, "--max-tokens", "6"]
