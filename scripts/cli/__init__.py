"""Shared parts of the command lines: errors, exit status, model and prompt options."""
