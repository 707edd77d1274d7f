"""A fleet in a few seconds: the real scheduler and store, a cost model in place of the model."""
