"""The decoder: attention of each family, experts, layers, caches."""
