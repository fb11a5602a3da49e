"""Functions with the signatures of operations of other libraries, implemented with the operations of this package."""
