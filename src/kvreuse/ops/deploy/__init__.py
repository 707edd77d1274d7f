"""Puts the container on a SageMaker endpoint, watched and scaled, and takes it away again.

An endpoint's wanted state and what exists give a plan, a list of calls as values; the cloud sends it.
"""

from kvreuse.ops.deploy.cloud import DeployError
from kvreuse.ops.deploy.model import KVReuseModel, Predictor
from kvreuse.ops.deploy.settings import Canary, Hosting

__all__ = ["Canary", "DeployError", "Hosting", "KVReuseModel", "Predictor"]
