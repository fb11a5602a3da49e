"""Mixture-of-experts layers: router, dispatch of rows to experts, expert GEMMs, and exchange between devices."""
