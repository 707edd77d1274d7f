"""From requests to tokens: scheduling, the packed forward, attention over spans, sampling, text.

Knows the model. Knows nothing of HTTP or of the shapes of bodies.
"""
