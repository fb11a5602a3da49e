"""The contract of writes is here, beside what they share: its fixtures and hooks."""

from tests.contract.fixtures import backend, pytest_collection_modifyitems, pytest_pyfunc_call, variant

__all__ = ["backend", "pytest_collection_modifyitems", "pytest_pyfunc_call", "variant"]
