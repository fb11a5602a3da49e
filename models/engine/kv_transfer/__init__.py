"""KV-cache transfer between engines, and saved prefix caches."""
