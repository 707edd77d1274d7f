"""`kvreuse warm`: every template is sent twice with different variables, and its hit rate printed."""

import io
import json

import pytest
from botocore.exceptions import ClientError

from kvreuse.cli.main import build_parser
from kvreuse.errors import ConfigError
from kvreuse.ops import warm

MANIFEST = """
- {id: letter, text: "Answer the letter of {{name}}.", priority: 1}
- id: support
  tenant: acme
  messages: [{role: system, content: You help.}, {role: user, content: "{{question}}"}]
"""


class Runtime:
    """Answers as the endpoint would; the second prompt of a template hits half."""

    def __init__(self, *, fails=False):
        self.sent = []
        self.fails = fails

    def invoke_endpoint(self, **arguments):
        if self.fails:
            raise ClientError({"Error": {"Code": "ValidationError", "Message": "no such endpoint"}}, "InvokeEndpoint")
        self.sent.append(arguments)
        cached = 40 if len(self.sent) % 2 == 0 else 0
        return {
            "Body": io.BytesIO(b"[]"),
            "ContentType": "application/json",
            "CustomAttributes": f"kvreuse=1; cached_tokens={cached}; prompt_tokens=80; tier=device",
        }


def _run(tmp_path, runtime, *flags, manifest=MANIFEST):
    path = tmp_path / "templates.yaml"
    path.write_text(manifest)
    args = build_parser("warm")[0].parse_args(["warm", "my-endpoint", "--templates", str(path), *flags])
    return warm.run(args, client=runtime)


def test_each_template_is_sent_with_two_sets_of_variables_and_its_hit_rate_is_shown(tmp_path, capsys):
    runtime = Runtime()
    assert _run(tmp_path, runtime) == 0
    assert capsys.readouterr().out == "letter: hit rate 50.0%\nsupport: hit rate 50.0%\n"
    bodies = [json.loads(arguments["Body"]) for arguments in runtime.sent]
    assert [body.get("inputs") for body in bodies[:2]] == ["Answer the letter of 0.", "Answer the letter of Z."]
    assert bodies[2]["messages"][0] == {"role": "system", "content": "You help."}
    assert all(body.get("max_tokens", body.get("parameters", {}).get("max_new_tokens")) == 1 for body in bodies)
    assert [arguments.get("CustomAttributes") for arguments in runtime.sent] == [None, None, *["tenant=acme"] * 2]


def test_rounds_reach_several_instances(tmp_path, capsys):
    runtime = Runtime()
    assert _run(tmp_path, runtime, "--rounds", "3") == 0
    assert len(runtime.sent) == 2 * 2 * 3


def test_an_endpoint_that_refuses_is_said_and_is_exit_code_1(tmp_path, capsys):
    assert _run(tmp_path, Runtime(fails=True)) == 1
    assert "no such endpoint" in capsys.readouterr().out


def test_an_empty_manifest_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no templates"):
        _run(tmp_path, Runtime(), manifest="[]")
