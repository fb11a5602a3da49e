"""Speculative decoding: draft proposers and the step that verifies drafts."""
