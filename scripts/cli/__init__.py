"""Code that several command-line scripts share: options, errors, exit statuses and output files."""
