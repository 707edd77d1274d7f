"""kvreuse: a SageMaker inference container that reuses the KV of shared prompt prefixes."""

__version__ = "0.1.0"
