"""Mixture-of-experts layer: router, expert GEMMs and the exchange of tokens between devices."""
