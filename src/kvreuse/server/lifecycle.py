"""Start and end of the one process: bind the port, load behind it, drain on SIGTERM.

Knows the configuration, uvicorn and signals. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from kvreuse.config import DEFAULT_MODEL_DIR, Config
from kvreuse.errors import ConfigError, KVReuseError
from kvreuse.server import handler
from kvreuse.server.app import create_app
from kvreuse.server.connections import Connections
from kvreuse.server.replies import log_fault
from kvreuse.server.requirements import install_requirements
from kvreuse.server.toolkit import Toolkit
from kvreuse.telemetry.observing import make_publisher

__all__ = ["DRAIN_S", "main"]

# SIGKILL comes 30 s after SIGTERM: finish for DRAIN_S, then abort, with some seconds left to say so.
DRAIN_S = 20.0
_ANSWER_S, _FLUSH_S = 4, 4
# Longer than a caller keeps an idle connection: it must not be closed under a request that is on its way.
_KEEP_ALIVE_S = 90
_MAX_CONNECTIONS = 4096
_OTHER_FILES = 256
# Connections that may wait to be accepted; and how many are accepted before the loop turns to others again.
_BACKLOG, _ACCEPTED_AT_ONCE = 2048, 32
_LOG = logging.getLogger(__name__)


def main(config: Config) -> int:
    """Serve until SIGTERM or SIGINT. 0 after an orderly end, 1 when the port or the model cannot be had."""
    process = handler.process
    process.config = config
    try:
        listener = _bind(config)
    except OSError as error:
        return _refuse(f"cannot listen on {config.host}:{config.port}: {error.strerror}")
    connections = Connections(max_open=_allowed_connections(), idle_s=_KEEP_ALIVE_S)
    publisher = make_publisher(config, process.stats, process.gauges)
    server = _Server(process, config, connections)
    loader = threading.Thread(target=server.load, args=(publisher.start,), name="kvreuse-load", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises a signal again after its orderly end; this handler takes it, so that the exit code is ours.
        signal.signal(number, server.handle_exit)
    _LOG.info("listening on %s:%d, loading the model", *listener.getsockname()[:2])
    loader.start()
    server.run(sockets=[listener])
    publisher.stop(timeout_s=_FLUSH_S)
    return server.exit_code


def _bind(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sends without delay (TCP_NODELAY) only on sockets that name TCP; else an answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    return listener


def _allowed_connections() -> int:
    """As many as there are file descriptors for, beside other files and connections just accepted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(16, min(_MAX_CONNECTIONS, hard - _ACCEPTED_AT_ONCE - _OTHER_FILES))


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"kvreuse: error: {sentence}\n")
    return 1


class _Server(uvicorn.Server):
    """uvicorn, with a model that loads beside it and an engine that is drained before the last answers leave."""

    def __init__(self, process: handler.Process, config: Config, connections: Connections) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(process, config),
                http=connections,  # type: ignore[arg-type]  # it is only called, as the class would be
                backlog=_ACCEPTED_AT_ONCE,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(DRAIN_S) + _ANSWER_S,
            )
        )
        self.exit_code = 0
        self._process = process
        self._settings = config
        self._connections = connections

    def load(self, on_ready: Callable[[], None]) -> None:
        """Load on this thread. A refusal is one sentence and the end of the process."""
        config = self._settings
        try:
            model_dir = config.model_id if Path(config.model_id).is_dir() else DEFAULT_MODEL_DIR
            if config.install_requirements:
                install_requirements(Path(model_dir, "code"))
            toolkit = Toolkit(entry_point=config.entry_point, model_dir=model_dir)
            toolkit.load()
            if self._process.service is not None:
                self._process.service.warm_up.run(budget_s=config.warmup_budget_s)
                self._process.service.warm_up.keep(interval_s=config.warmup_interval_s)
            self._process.ready(toolkit)
            on_ready()
            _LOG.info("ready")
        except ConfigError as error:
            self._fail(error.message)
        except Exception as error:
            log_fault(error)
            reason = error.message if isinstance(error, KVReuseError) else f"{type(error).__name__}: {error}"
            self._fail(f"cannot load the model: {reason}".splitlines()[0])

    def _fail(self, sentence: str) -> None:
        self.exit_code = _refuse(sentence)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        self._connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._process.service is not None:
            stop = self._process.service.engine.stop
            threading.Thread(target=stop, kwargs={"drain_s": DRAIN_S}, daemon=True).start()
        await super().shutdown(sockets)
