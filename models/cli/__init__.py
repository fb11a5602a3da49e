"""The command line of the engine: options, errors, exit statuses and output files."""
