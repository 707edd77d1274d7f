"""The command line: what it refuses and how, what goes to stdout and what to stderr."""

from __future__ import annotations

import pytest

from kvreuse.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["serv"], "unknown command serv", "did you mean serve?"),
        (["--bogus"], "unknown flag --bogus", "kvreuse --help lists what is known"),
        (["serve", "--max-bach-size", "3"], "unknown flag --max-bach-size", "did you mean --max_batch_size?"),
        (["serve", "--kv_cache_tt=3"], "unknown flag --kv_cache_tt", "did you mean --kv_cache_ttl_s?"),
        (["bench", "decode", "--stepz", "3"], "unknown flag --stepz", "did you mean --steps?"),
        (["serve", "--port"], "argument --port: expected one argument", "kvreuse serve --help"),
        (["serve", "model"], "unexpected argument model", "kvreuse serve --help"),
        (
            ["serve", "--option.port=x"],
            "option.port is 'x', allowed is an integer from 0 to 65535",
            "it is set by flag --port",
        ),
    ],
)
def test_a_refusal_is_one_sentence_and_a_hint_on_stderr_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str, hint: str
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"kvreuse: error: {error}\nhint: {hint}\n")


def test_the_last_of_two_spellings_of_one_flag_wins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max_batch_size", "1", "--max-batch-size", "x", "--max_batch_size", "y"]) == 1
    assert "option.max_batch_size is 'y'" in capsys.readouterr().err


def test_the_version_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    assert out.startswith("kvreuse ")


def test_without_arguments_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert "serve a model" in capsys.readouterr().out
