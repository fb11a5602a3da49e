"""Tools for contributors. Each module describes what it does and how to run it."""
