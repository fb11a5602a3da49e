"""What config.json says, by family."""
