"""`kvreuse warm ENDPOINT`: compute the templates of a manifest on a running endpoint, from outside, through boto3.

Each template is sent with two sets of made-up variables: the first request computes what all its prompts begin with,
the second shows how much of it is a hit. Knows the manifest and the client. Knows nothing of servers or tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from kvreuse.api.call import Chat, Prompt, Rules
from kvreuse.api.templates import load_templates, samples
from kvreuse.client import PrefixClient
from kvreuse.errors import ConfigError, RequestError
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.bench.progress import Progress

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `warm`."""
    text = "Compute the templates of a manifest on a running endpoint and show the hit rates"
    parser = subparsers.add_parser("warm", help="compute templates on an endpoint", description=text)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="name of the SageMaker endpoint")
    parser.add_argument("--templates", required=True, metavar="FILE", help="manifest of the templates")
    parser.add_argument("--rounds", type=at_least(1), default=1, metavar="N", help="times to send all, for N instances")


def run(args: argparse.Namespace, *, client: Any = None) -> int:
    """Print a line per template. 1 when one could not be warmed. Raises ConfigError for a bad manifest."""
    templates = load_templates(Path(args.templates))
    endpoint = PrefixClient(args.endpoint, client=client)
    progress = Progress(sys.stderr, num_steps=max(1, len(templates) * args.rounds))
    rules, lines, num_failed = Rules(templates=templates), [], 0
    for name in sorted(templates, key=lambda name: -templates[name].priority):
        attributes = {"CustomAttributes": f"tenant={templates[name].tenant}"} if templates[name].tenant else {}
        rate = None
        for _ in range(args.rounds):
            progress.start(name)
            try:
                rate = _warm(endpoint, samples(name, rules=rules), attributes)
            except (BotoCoreError, ClientError, RequestError) as error:
                num_failed += 1
                lines.append(f"{name}: {error}")
                break
            finally:
                progress.advance()
        else:
            lines.append(f"{name}: {'no facts in the answer' if rate is None else f'hit rate {rate:.1%}'}")
    progress.close()
    print("\n".join(lines))
    if not templates:
        raise ConfigError(f"{args.templates} holds no templates")
    return 1 if num_failed else 0


def _warm(endpoint: PrefixClient, prompts: tuple[Prompt, Prompt], named: Mapping[str, str]) -> float | None:
    """The share of the second prompt that was cached; None where the container does not say."""
    facts = None
    for prompt in prompts:
        facts = endpoint.invoke(_body(prompt), **named).facts
    return facts.cached_tokens / facts.prompt_tokens if facts is not None and facts.prompt_tokens else None


def _body(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Chat):
        return {"messages": list(prompt.messages), "max_tokens": 1}
    return {"inputs": prompt, "parameters": {"max_new_tokens": 1}}
