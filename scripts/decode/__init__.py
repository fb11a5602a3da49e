"""Parts of `run_decode.py`: options, progress display, and the report as JSON, table and picture."""
