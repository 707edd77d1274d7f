"""From the hit rate that is wanted to the endpoint that gives it."""
