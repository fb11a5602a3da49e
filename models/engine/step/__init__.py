"""Steps of the engine: plan, packed metadata and the compiled programs."""
