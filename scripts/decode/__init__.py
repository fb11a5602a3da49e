"""Parts of `run_decode.py` and `calibrate.py`."""
