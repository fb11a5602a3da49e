"""Parts that command lines share: errors and exit status, options on a model and its prompts, and their meaning."""
