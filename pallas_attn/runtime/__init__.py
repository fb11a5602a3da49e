"""Dispatch, device queries, kernel cache, sharded calls and tuning. Every operation's call uses these modules."""
