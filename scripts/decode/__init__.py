"""Parts of `run_decode.py`: its options, its progress display, and its report as JSON, table and picture."""
