"""Other projects' kernels under the same benchmark."""
