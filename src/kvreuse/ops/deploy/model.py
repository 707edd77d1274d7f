"""The Python face of `kvreuse deploy`, in the manner of the SageMaker SDK.

Knows what users write. The work is done by the plan and the cloud.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvreuse.ops.deploy.cloud import Cloud
from kvreuse.ops.deploy.plan import plan_deploy, plan_destroy
from kvreuse.ops.deploy.resources import Call
from kvreuse.ops.deploy.settings import Hosting, Source

__all__ = ["KVReuseModel", "Predictor"]


class KVReuseModel:
    """A model and its options, to be hosted under one or more names."""

    def __init__(
        self,
        *,
        model_data: str,
        role: str,
        image_uri: str,
        env: Mapping[str, str] | None = None,
        vpc_config: Mapping[str, Any] | None = None,
        session: Any = None,
        **options: object,
    ) -> None:
        """options: kv_cache_batch_size=8, enable_kv_sharing=True, kv_cache_memory_ratio=0.6 ... Raises ConfigError."""
        named = {"model_data": model_data, "role": role, "image_uri": image_uri}
        self.source = Source(**named, options=options, env=env or {}, vpc_config=vpc_config)
        self._cloud = Cloud(session)

    def plan(self, **hosting: Any) -> tuple[Call, ...]:
        """What `deploy` would send now. Takes what Hosting takes; raises as `deploy` does."""
        wanted = Hosting.of(hosting)
        return plan_deploy(self.source, wanted, self._cloud.observe(wanted.endpoint_name))

    def deploy(self, **hosting: Any) -> Predictor:
        """Create the endpoint or update it, and wait until it serves. Takes what Hosting takes.

        Raises ConfigError before anything is sent, DeployError when AWS refuses or rolls back.
        """
        self._cloud.send(self.plan(**hosting))
        return Predictor(Hosting.of(hosting).endpoint_name, cloud=self._cloud)


class Predictor:
    """An endpoint by its name."""

    def __init__(self, endpoint_name: str, *, cloud: Cloud | None = None) -> None:
        self.endpoint_name = endpoint_name
        self._cloud = cloud or Cloud()

    def predict(self, body: Mapping[str, Any]) -> Any:
        """The parsed answer to one JSON body. botocore's ClientError carries what the container said."""
        answer = self._cloud.client("sagemaker-runtime").invoke_endpoint(
            EndpointName=self.endpoint_name, ContentType="application/json", Body=json.dumps(body).encode()
        )
        return json.load(answer["Body"])

    def destroy(self) -> None:
        """Remove the endpoint and all that `deploy` made for it, and nothing else."""
        self._cloud.send(plan_destroy(self.endpoint_name, self._cloud.observe(self.endpoint_name)))
