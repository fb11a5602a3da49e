"""The command `decode`: options, progress display, and reports as JSON, as a table and as a plot."""
