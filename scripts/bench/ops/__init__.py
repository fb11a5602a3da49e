"""One module for each operation, named as the operation, with a `BENCH` that `harness.session.load` finds."""
