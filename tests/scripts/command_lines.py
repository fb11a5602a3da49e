"""Arguments of scripts/run_decode.py that several test modules use."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "v3"
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())
VOCAB_SIZE, MAX_POSITIONS = 256, 1280

# With these sizes, prompts are computed in chunks, steps mix decode rows and chunks, and two long requests do not fit
# the pool. Nearly all tests use these sizes, so that their steps are compiled once.
SIZES = ["--page-size", "4", "--num-pages", "26", "--max-batched-tokens", "16", "--max-num-seqs", "2"]
SMALL = ["--model", str(GOLDEN), *SIZES, "--max-tokens", "6", "--quiet"]
