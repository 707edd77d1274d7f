"""Bodies of requests gone wrong, from a seed: near misses of good ones, so that every rule of the parsers is met.

Knows JSON, the field names and which route takes them. What is valid among them is short to compute.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from kvreuse.api import openai, sagemaker

__all__ = ["ROUTES", "SECRET", "body"]

ROUTES = ("/invocations", "/v1/chat/completions", "/v1/completions")
SECRET = "xyzzy-plugh"  # in most prompts: it must never be said in a refusal or a log
_ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, 10**400, 1e-320),
    *(
        "",
        "a",
        SECRET,
        "\x00",
        "\ud800",
        "é" * 300,
        "\u202e",
        "1",
        "true",
        "null",
        "NaN",
        "../../etc/passwd",
        "{{7*7}}",
    ),
    *([], {}, [[]], [None], [SECRET], [[1, 2], [3]], [1, "a"], [-1], [2**40], {"a": {"b": []}}, {SECRET: 1}, {"1": 2}),
    *({"type": "text", "text": SECRET}, [{"role": "user", "content": SECRET}], [{"role": "user"}], [{}]),
]
_SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1, 2, 100],
    "top_k": [0, 1, 50],
    "top_p": [0.1, 0.9, 1],
    "typical_p": [0.2, 1],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [0.5, 1.2],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "stop": ["\n", ["a", "b"], SECRET],
    "stop_token_ids": [[0, 2]],
    "seed": [0, -(2**63)],
    "n": [1, 2, 3],
    "logit_bias": [{"5": -100}, {"7": 100}],
    "kv_cache_reuse": [True, False],
    "ignore_eos": [True],
    "stream": [True, False],
}
_LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_ROLES = ["system", "developer", "user", "assistant", "tool", "function"]


def body(seed: int) -> tuple[str, bytes]:
    """Route and body of that number; the same number gives the same ones."""
    dice = random.Random(seed)
    make, routes = dice.choice(_KINDS)
    route = dice.choice(routes) if dice.random() < 0.9 else dice.choice(ROUTES)
    value = make(dice)
    for _ in range(dice.choice([0, 0, 1, 1, 2])):
        _spoil(dice, value)
    data = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    return route, _garble(dice, data) if dice.random() < 0.1 else data


def _text(dice: random.Random) -> str:
    return dice.choice([SECRET, f"{SECRET} ü 日本 🙂", SECRET * 40, "a\u0000b " + SECRET, f"<|im_end|>{SECRET}", " "])


def _settings(dice: random.Random) -> dict[str, Any]:
    names = dice.sample(sorted(_SAMPLING), dice.randrange(5))
    return {name: dice.choice(_SAMPLING[name]) for name in names}


def _inputs(dice: random.Random) -> dict[str, Any]:
    parameters = _settings(dice) | {"max_new_tokens": dice.choice([1, 2])}
    more = {
        "details": True,
        "return_full_text": True,
        "top_n_tokens": 3,
        "truncate": 5,
        "do_sample": True,
        "logprobs": True,
    }
    parameters |= {name: more[name] for name in dice.sample(sorted(more), dice.randrange(3))}
    inputs = _text(dice) if dice.random() < 0.7 else [_text(dice) for _ in range(dice.randrange(4))]
    return {"inputs": inputs, "parameters": parameters}


def _chat(dice: random.Random) -> dict[str, Any]:
    messages = [{"role": dice.choice(_ROLES), "content": _text(dice)} for _ in range(dice.randrange(1, 4))]
    more = {"logprobs": True, "stream_options": {"include_usage": True}, "tools": [{"type": "function"}], "user": "me"}
    chosen = {name: more[name] for name in dice.sample(sorted(more), dice.randrange(3))}
    return {"messages": messages, "max_tokens": dice.choice([1, 2]), **_settings(dice), **chosen}


def _completion(dice: random.Random) -> dict[str, Any]:
    prompts: list[Any] = [_text(dice), [_text(dice), _text(dice)], [1, 2, 3], [[1], [2, 10**6]]]
    return {"prompt": dice.choice(prompts), "max_tokens": dice.choice([1, 2]), **_settings(dice)}


def _spoil(dice: random.Random, value: dict[str, Any]) -> None:
    """One field goes, comes, or gets another value, somewhere in the tree. No answer gets longer by it."""
    names = [*openai.CHAT, *openai.COMPLETION, *openai.IGNORED, *sagemaker.PARAMETERS, *sagemaker.TOP_LEVEL, SECRET]
    target: Any = value
    while True:
        below = [item for item in _items(target) if isinstance(item, dict | list) and item]
        if not below or dice.random() < 0.5:
            break
        target = dice.choice(below)
    if isinstance(target, list):
        target[dice.randrange(len(target))] = _odd(dice)
        return
    name = dice.choice(names if dice.random() < 0.4 else sorted(target) or names)
    if name in _LENGTHS:
        target[name] = _odd(dice, may_be=lambda odd: odd is not None and not (isinstance(odd, int) and odd > 2))
    elif name == "parameters":
        target[name] = _odd(dice, may_be=lambda odd: odd is not None and not isinstance(odd, dict))
    elif dice.random() < 0.2:
        target.pop(name, None)
    else:
        target[name] = _odd(dice)


def _odd(dice: random.Random, *, may_be: Callable[[Any], bool] = lambda odd: True) -> Any:
    return copy.deepcopy(dice.choice([odd for odd in _ODD if may_be(odd)]))


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _garble(dice: random.Random, data: bytes) -> bytes:
    place = dice.randrange(len(data) + 1)
    junk = bytes(dice.randrange(256) for _ in range(dice.randrange(1, 4)))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:place],
        lambda: data[:place] + junk + data[place:],
        lambda: data[:place] + data[place + 1 :],
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 50_000,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data + data,
        lambda: junk,
        lambda: b"",
    ]
    return dice.choice(ways)()


_KINDS: list[tuple[Callable[[random.Random], dict[str, Any]], tuple[str, ...]]] = [
    (_inputs, ROUTES[:1]),
    (_chat, ROUTES[:2]),
    (_completion, ROUTES[::2]),
]
