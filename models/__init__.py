"""Decoder models, their checkpoints and the serving engine, built on the public names of `pallas_attn`."""
