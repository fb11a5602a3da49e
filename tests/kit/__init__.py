"""Helpers that tests of several packages use, and pytest plugins of the test suite."""
