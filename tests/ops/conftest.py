"""Fixtures and hooks of contract tests (tests/contract/fixtures.py), for the suites in this folder."""

from tests.contract.fixtures import backend, pytest_collection_modifyitems, pytest_pyfunc_call, variant

__all__ = ["backend", "pytest_collection_modifyitems", "pytest_pyfunc_call", "variant"]
