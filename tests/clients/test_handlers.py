"""Every legal combination of a user's hooks, with and without `context`, in the model's code/ folder."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes import expected_text
from server.conftest import MakeSite

BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
# Each hook does its part by kvreuse and leaves its mark; {context} is ", context" or nothing.
HOOKS = {
    "pre_model_fn": "def pre_model_fn(model_dir{context}):\n    marks.append('pre')\n",
    "model_fn": (
        "def model_fn(model_dir{context}):\n    marks.append('model')\n    return handler.model_fn(model_dir)\n"
    ),
    "model_warmup_fn": "def model_warmup_fn(model_dir, model{context}):\n    marks.append('warm')\n",
    "input_fn": "def input_fn(data, content_type{context}):\n    marks.append('input')\n    return json.loads(data)\n",
    "predict_fn": "def predict_fn(data, model{context}):\n    marks.append('predict')\n    return model.answer(data)\n",
    "output_fn": (
        "def output_fn(prediction, accept{context}):\n    marks.append('output')\n    return prediction.join()\n"
    ),
    "transform_fn": (
        "def transform_fn(model, data, content_type, accept{context}):\n"
        "    marks.append('transform')\n    return model.answer(data).join()\n"
    ),
}
HEAD = "import json\nfrom kvreuse.server import handler\nmarks = []\n"
AROUND = [(), ("model_fn",), ("pre_model_fn",), ("pre_model_fn", "model_fn", "model_warmup_fn")]
STEPS = [
    ("transform_fn",),
    *(
        steps
        for number in range(4)
        for steps in itertools.combinations(("input_fn", "predict_fn", "output_fn"), number)
    ),
]
COMBINATIONS = [
    pytest.param(around + steps, context, id="+".join(around + steps + ((context[2:],) if context else ())) or "none")
    for around in AROUND
    for steps in STEPS
    for context in ("", ", context")
    if around + steps or not context
]


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"hooks_{tmp_path.name}"
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(("hooks", "context"), COMBINATIONS)
def test_a_combination_of_hooks_answers_and_each_of_them_runs_once(
    make_site: MakeSite, tmp_path: Path, name: str, hooks: tuple[str, ...], context: str
) -> None:
    (tmp_path / "code").mkdir()
    source = HEAD + "".join(HOOKS[hook].format(context=context) for hook in hooks)
    (tmp_path / "code" / f"{name}.py").write_text(source)
    site = make_site(is_loaded=False)
    site.load(entry_point=f"{name}.py", model_dir=str(tmp_path))
    response = httpx.post(f"{site.url}/invocations", json=BODY, timeout=20)
    assert response.json() == [{"generated_text": expected_text("hello", 3)}]
    marks = [hook.removesuffix("_fn").replace("pre_model", "pre").replace("model_warmup", "warm") for hook in hooks]
    assert sys.modules[name].marks == marks  # type: ignore[attr-defined]


def test_a_hook_may_fan_out_over_many_prompts_that_run_together(make_site: MakeSite, tmp_path: Path, name: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(
        HEAD + "def transform_fn(model, data, content_type, accept, context):\n"
        "    letters = json.loads(data)\n"
        "    context.set_response_header(0, 'X-Letters', str(len(letters)))\n"
        "    body = {'inputs': ['Sort: ' + x for x in letters], 'parameters': {'max_new_tokens': 3}}\n"
        "    return json.dumps([a['generated_text'] for a in json.loads(model.answer(body).join())])\n"
    )
    site = make_site(is_loaded=False)
    site.load(entry_point=f"{name}.py", model_dir=str(tmp_path))
    response = httpx.post(f"{site.url}/invocations", content=json.dumps(["a", "b", "c"]), timeout=20)
    assert response.json() == [expected_text(f"Sort: {letter}", 3) for letter in "abc"]
    assert response.headers["x-letters"] == "3"
