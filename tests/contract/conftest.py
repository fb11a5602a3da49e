"""Fixtures and hooks of the contract suites (fixtures.py)."""

from tests.contract.fixtures import backend, pytest_collection_modifyitems, pytest_pyfunc_call, variant

__all__ = ["backend", "pytest_collection_modifyitems", "pytest_pyfunc_call", "variant"]
