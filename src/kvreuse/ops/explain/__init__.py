"""Why reuse is as good or as bad as it is, told from the request log."""
