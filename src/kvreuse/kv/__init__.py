"""Where keys and values live: the slabs of one model, their layout and identity.

Knows tensors and slots. Knows nothing of requests, text or HTTP.
"""
