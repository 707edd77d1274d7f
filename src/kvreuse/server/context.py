"""The request context that hooks see, shaped like the one of the stock model server.

Knows headers. Knows nothing of what the hooks do.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreuse.server.callers import join_headers

__all__ = ["SERVER_NAME", "RequestContext"]

SERVER_NAME = "kvreuse"


class RequestContext:
    """One request. Hooks may call what MMS offers; `index` is always 0 there and here.

    `headers` are looked up in any case. What a hook sets is in `status`, `content_type` and `response_headers`.
    """

    def __init__(self, headers: Mapping[str, str], *, request_id: str, model_dir: str) -> None:
        self._headers = join_headers(headers)
        self.request_id = request_id
        self.status = 200
        self.content_type: str | None = None
        self.response_headers: dict[str, str] = {}
        self.request_processor = [self]
        self.system_properties: dict[str, object] = {
            "model_dir": model_dir,
            "gpu_id": None,
            "batch_size": 1,
            "server_name": SERVER_NAME,
            "server_version": "1",
        }

    @property
    def accept(self) -> str:
        """What the caller accepts. On a stream call SageMaker moves it to a header of its own."""
        return self._headers.get("x-amzn-sagemaker-accept") or self._headers.get("accept", "")

    def get_request_properties(self) -> dict[str, str]:
        """All headers as MMS spells them. The toolkit compares the content type for equality, so without parameters."""
        properties = {name.title(): value for name, value in self._headers.items()}
        properties["Content-Type"] = self._headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if self.accept:
            properties["Accept"] = self.accept
        return properties

    def get_all_request_header(self, index: int = 0) -> dict[str, str]:
        return self.get_request_properties()

    def get_request_header(self, index: int, key: str) -> str | None:
        return self._headers.get(key.lower())

    def get_request_id(self, index: int = 0) -> str:
        return self.request_id

    def set_response_header(self, index: int, key: str, value: str) -> None:
        """A header that HTTP cannot carry is left out."""
        if key.isascii() and key.replace("-", "").isalnum() and value.isascii() and value.isprintable():
            self.response_headers[key] = value

    def set_response_content_type(self, index: int, value: str) -> None:
        self.content_type = value

    def set_response_status(self, code: int = 200, phrase: str = "", index: int = 0) -> None:
        self.status = code
