"""Measurements of the whole product on one machine; no part of the package.

Knows the command line of kvreuse. Knows nothing of its modules' insides.
"""
