"""Hugging Face directories: files, weights, tokenizers, and scales measured from them."""

from models.checkpoints.weights import load_model as load_model
