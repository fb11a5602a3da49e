"""What two cards exchange when contexts are split over them: one exchange of heads, and no cache."""

import json
import subprocess
import sys

import pytest

from tests.aot import environment


def test_compiled_kernels_gather_no_cache(tmp_path):
    if reason := environment.missing("cuda13"):
        pytest.skip(reason)
    kept = {"PALLAS_ATTN_KERNEL_CACHE": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.aot.several_cards"],
        env=environment.variables("cuda13") | kept,
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"heads": ["all-to-all"], "latents": ["all-to-all"]}
    assert len(list(tmp_path.iterdir())) == 4  # a planner and a decode kernel each, for both cards
