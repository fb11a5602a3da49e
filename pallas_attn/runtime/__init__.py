"""Dispatch, device queries, kernel cache, sharded calls and tuning: what every operation's call passes through."""
