"""Mixture-of-experts layers: router, dispatch of tokens to experts, expert GEMMs, and exchange between devices."""
