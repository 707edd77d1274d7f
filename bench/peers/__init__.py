"""The comparison with other inference servers: how each is installed, started, loaded and measured.

Knows the peers. Knows nothing of kvreuse's own measurements.
"""
