"""`kvreuse serve`: flags to configuration, logging to stderr, then the server.

Knows flags and logging. Knows nothing of HTTP or models.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from kvreuse.config import FLAG_NAMES, OPTIONS, Config, load_config, set_torch_defaults

__all__ = ["add_parser", "run"]

_DEST = "option "  # keeps the options apart from everything else in the namespace
_LOG = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` with one flag per option, in each of its spellings; the help shows the plainest."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model",
        usage="kvreuse serve [-h] [--properties FILE] [--OPTION VALUE ...]",
        description="Serve a model. Flags win over OPTION_* variables, which win over serving.properties.",
        epilog="A dash may stand for an underscore, and option. before a name",
    )
    parser.add_argument("--properties", type=Path, metavar="FILE", help="serving.properties to read")
    for flag, name in FLAG_NAMES.items():
        option = OPTIONS[name]
        # "%" is argparse's own mark in a help text.
        text = f"{option.doc} (default: {option.shown(option.default)})".replace("%", "%%")
        parser.add_argument(
            f"--{flag}",
            metavar="VALUE",
            dest=_DEST + name,
            default=argparse.SUPPRESS,
            help=text if flag == name else argparse.SUPPRESS,
        )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Returns the exit code; raises ConfigError before anything was started."""
    flags = {key.removeprefix(_DEST): value for key, value in vars(args).items() if key.startswith(_DEST)}
    config = load_config(flags, properties_path=args.properties)
    _set_up_logging(config)
    set_torch_defaults()
    from kvreuse.server import lifecycle

    return lifecycle.main(config)


def _set_up_logging(config: Config) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for line in config.effective():
        _LOG.info("config: %s", line)
