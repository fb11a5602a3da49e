"""Decoder models, checkpoints and the inference engine. They use only public names of `pallas_attn`."""
