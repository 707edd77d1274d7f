"""Finds what keeps prompts from sharing their beginnings, and says what to change."""
