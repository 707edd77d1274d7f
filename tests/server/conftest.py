"""The server over a fake engine: in this process through ASGI, or on a real port where sockets matter."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fakes import FakeEngine

from kvreuse.api.call import Template
from kvreuse.config import Config
from kvreuse.server import handler
from kvreuse.server.app import create_app
from kvreuse.server.connections import Connections
from kvreuse.server.service import Service
from kvreuse.server.toolkit import Toolkit
from kvreuse.telemetry.request_log import RequestLog


class Process(handler.Process):
    """Loads a service that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Service | None = None

    def load(self, model_dir: str) -> Service:
        assert self.found is not None
        self.service = self.found
        return self.found


class Site:
    """Everything of one server under test. `options` are those of its configuration."""

    def __init__(
        self,
        *,
        engine: FakeEngine | None = None,
        templates: dict[str, Template] | None = None,
        connections: Connections | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.process = Process()
        self.stats = self.process.stats
        self.log = io.StringIO()
        config = Config(**{"max_concurrency": 8, **options})
        self.connections = connections
        self.service = Service(
            self.engine,  # type: ignore[arg-type]
            config,
            stats=self.stats,
            log=RequestLog(self.log),
            templates=templates or {},
        )
        self.process.found = self.service
        self.app = create_app(self.process, config)
        self.url = ""
        self.server: uvicorn.Server | None = None

    def load(self, *, entry_point: str = "no_such_handler", model_dir: str = "/nonexistent") -> None:
        toolkit = Toolkit(entry_point=entry_point, model_dir=model_dir)
        toolkit.load()
        self.process.ready(toolkit)

    def num_open(self) -> int:
        """Requests that the server is answering."""
        return len(self.server.server_state.tasks) if self.server else 0

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    """A loaded Site on a real port. `model_fn` gives its service, as it would after a load."""
    ends: list[Callable[[], None]] = []

    def make(*, is_loaded: bool = True, **settings: Any) -> Site:
        site = Site(**settings)
        monkeypatch.setattr(handler, "process", site.process)
        if is_loaded:
            site.load()
        server = uvicorn.Server(
            uvicorn.Config(
                site.app,
                port=0,
                http=site.connections or "auto",  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
            )
        )
        site.server = server
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.005)
        site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

        def end() -> None:
            site.engine.gate.set()
            server.should_exit = True
            server.force_exit = True
            thread.join(10)
            site.engine.stop(drain_s=0)

        ends.append(end)
        return site

    yield make
    for end in ends:
        end()


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site()


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=20) as client:
        yield client
