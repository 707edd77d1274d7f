"""Counts what happened and publishes it: metrics and one log line per request."""
