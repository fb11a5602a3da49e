"""Fixtures and hooks of the contract suites of writes, which are in this folder."""

from tests.contract.fixtures import backend, pytest_collection_modifyitems, pytest_pyfunc_call, variant

__all__ = ["backend", "pytest_collection_modifyitems", "pytest_pyfunc_call", "variant"]
