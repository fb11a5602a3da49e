"""Code that `reference.py` and `xla.py` share: plain JAX that runs on any device."""
