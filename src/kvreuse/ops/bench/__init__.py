"""Measurements of what reuse brings, each over the real server and plain HTTP. `cli` lists them."""
