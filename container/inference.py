"""The handler of this container, and the drop-in for one that runs the inference toolkit on its own.

`model_fn(model_dir)` loads the model; `transform_fn(model, data, content_type, accept, context)` answers a body.
Both are called by the toolkit, in kvreuse's server (many requests at once, streamed) and under the stock model server
(one request at a time per worker, streams joined). To change a step, copy this file to code/inference.py beside the
model and wrap what you need.
"""

from kvreuse.server.handler import model_fn, transform_fn

__all__ = ["model_fn", "transform_fn"]
