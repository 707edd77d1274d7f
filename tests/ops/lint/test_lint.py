"""Planted faults are found and named, clean prompts are left in peace."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.lint.cli import lint
from kvreuse.ops.lint.groups import group_similar, similarity, sketch
from kvreuse.ops.lint.prompts import read_prompts, splitter
from kvreuse.ops.lint.template import ChatTemplate, check_template, plain

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real templates and prompts are not on this machine")
TEXTS = Path(__file__).parents[3] / "src" / "kvreuse" / "ops" / "bench" / "texts"
RULES = next(iter(sorted(TEXTS.glob("*.txt")))).read_text("utf-8").partition("===")[0][:2400].rsplit(" ", 1)[0]
ASK = "\nParcel: "
OWN = ["a small box with a torn lid", "three letters in one wrapper", "a tube that rattles", "one crate, wet below"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a parcel and says where it was last seen and who signed for it",
            "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}},
        },
    }
    for name in ("weight", "route", "owner", "seal")
]


def variants(form: str) -> list[Any]:
    """Four prompts; {own} is each one's own text, {n} its number."""
    return [form.replace("{own}", own).replace("{n}", str(n)) for n, own in enumerate(OWN)]


def shuffled(value: Any, seed: int) -> Any:
    if isinstance(value, dict):
        names = list(value)
        random.Random(seed).shuffle(names)
        return {name: shuffled(value[name], seed) for name in names}
    return [shuffled(item, seed) for item in value] if isinstance(value, list) else value


def chat(system: str, own: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": own}], **fields}


UUIDS = [f"{n}b1f0c2a-77aa-4e1b-9c3d-{n}5a6b7c8d9e0" for n in range(4)]
PLANTED: dict[str, tuple[str, list[Any]]] = {
    "an ISO date in front": ("date", variants(f"Today is 2026-11-2{{n}}. {RULES}{ASK}{{own}}")),
    "a written date in the middle": (
        "date",
        variants(f"{RULES[:400]} It is May {{n}}1, 2026. {RULES[400:]}{ASK}{{own}}"),
    ),
    "a time of day": ("date", [chat(f"Now: 1{n}:05:2{n}. {RULES}", own) for n, own in enumerate(OWN)]),
    "a uuid": ("id", [f"[{uuid}] {RULES}{ASK}{own}" for uuid, own in zip(UUIDS, OWN, strict=True)]),
    "a request number": ("id", variants(f"request_id: r{{n}}\n{RULES}{ASK}{{own}}")),
    "keys in changing order": (
        "json-key-order",
        [f"Schema: {json.dumps(shuffled(TOOLS[0], n))}\n{RULES}{ASK}{own}" for n, own in enumerate(OWN)],
    ),
    "tools in changing order": (
        "list-order",
        [chat(RULES, own, tools=TOOLS[n:] + TOOLS[:n]) for n, own in enumerate(OWN)],
    ),
    "spaces that come and go": (
        "whitespace",
        [f"Sort parcels.{' ' * (1 + n % 2)}{RULES}{ASK}{own}" for n, own in enumerate(OWN)],
    ),
    "a variable in front": ("variable", [f"{own}.\n{RULES}\nSort the parcel named above." for own in OWN]),
    "a system prompt behind the question": (
        "system-last",
        [{"messages": [*reversed(chat(RULES, own)["messages"])]} for own in OWN],
    ),
    "reasoning taken out of the history": (
        "reasoning-dropped",
        [
            {"messages": [*chat(RULES, "Hi")["messages"], {"role": "assistant", "content": said}, *more]}
            for said, more in (("<think>hm</think>Hello", []), ("Hello", [{"role": "user", "content": "And?"}]))
        ],
    ),
    "blocks larger than what is shared": (
        "block-size",
        [f"Say in one word whether this parcel may be sent on, be careful and polite: {own}" for own in "abcd"],
    ),
}
CLEAN: dict[str, list[Any]] = {
    "variables last": variants(f"{RULES}{ASK}{{own}}\nAnswer:"),
    "chat with one system prompt and fixed tools": [chat(RULES, own, tools=TOOLS) for own in OWN],
    "a date and an id in the caller's own text": [
        f"{RULES}{ASK}{own}, came on 2026-11-2{n}, number 10000{n}\nAnswer:" for n, own in enumerate(OWN)
    ],
}


def run_lint(tmp_path: Path, records: list[Any], *flags: str) -> tuple[int, dict[str, Any]]:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(json.dumps(record) for record in records), "utf-8")
    code = main(["lint", str(prompts), "--json", str(out), *flags])
    return code, json.loads(out.read_text("utf-8"))


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_fault_is_found_and_no_other(tmp_path: Path, name: str) -> None:
    kind, records = PLANTED[name]
    flags = ("--similarity", "0.5") if kind == "block-size" else ()
    code, said = run_lint(tmp_path, records, *flags)
    assert [finding["kind"] for finding in said["findings"]] == [kind]
    assert code == 2


@pytest.mark.parametrize("name", CLEAN)
def test_clean_prompts_are_left_in_peace(tmp_path: Path, name: str) -> None:
    code, said = run_lint(tmp_path, CLEAN[name])
    assert said["findings"] == []
    assert code == 0


def test_a_finding_says_where_and_what_it_would_save(tmp_path: Path) -> None:
    _, said = run_lint(tmp_path, PLANTED["an ISO date in front"][1])
    (finding,) = said["findings"]
    assert 0 < finding["at_token"] < 10
    assert "2026-11-2" in finding["where"]
    assert 0.5 < finding["saves_tokens"] / said["prompt_tokens"] < 0.75  # three of four prompts, almost whole


def test_mending_the_prompts_saves_what_was_promised(tmp_path: Path) -> None:
    _, broken = run_lint(tmp_path, PLANTED["a variable in front"][1])
    _, mended = run_lint(tmp_path, [f"{RULES}\nSort the parcel named below.\n{own}." for own in OWN])
    gained = mended["groups"][0]["shared_tokens"] - broken["groups"][0]["shared_tokens"]
    assert mended["findings"] == []
    assert broken["findings"][0]["saves_tokens"] == gained // 32 * 32 * 3


def test_a_group_is_shown_with_where_its_members_part(tmp_path: Path) -> None:
    _, said = run_lint(tmp_path, CLEAN["variables last"])
    (group,) = said["groups"]
    assert group["num_prompts"] == 4
    assert all(own[:10] in own_text for own, own_text in zip((OWN[0],), group["next_texts"][:1], strict=True))


def test_the_report_for_people_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_lint(tmp_path, PLANTED["a uuid"][1])
    out = capsys.readouterr().out
    assert "group 1: 4 prompts share" in out
    assert "id in group 1 at token" in out


def test_a_tokenizer_counts_real_tokens(tmp_path: Path) -> None:
    words, tokens = (splitter(name) for name in (None, "demo"))
    assert len(tokens(RULES)[0]) > len(words(RULES)[0]) > 300
    for split in (words, tokens):
        assert split(RULES)[1][-1] == len(RULES)


@pytest.mark.parametrize("text", ["", "a  b", "naïve 12345 ..__\n\n", "日本語 text"])
def test_estimated_tokens_cover_the_text_without_a_gap(text: str) -> None:
    tokens, ends = splitter(None)(text)
    assert "".join(str(token) for token in tokens) == text
    assert ends == [sum(len(str(t)) for t in tokens[: i + 1]) for i in range(len(tokens))]


def test_similarity_is_that_of_the_shingles_for_short_texts() -> None:
    one, other = sketch("a b c d e f g"), sketch("a b c d e x y")
    assert similarity(one, one) == 1.0
    assert similarity(one, other) == pytest.approx(3 / 7)


def test_groups_hold_near_duplicates_only_and_all_of_them() -> None:
    other = " ".join(reversed(RULES.split()))
    texts = [f"{RULES} {own}" for own in OWN] + [f"{other} {own}" for own in OWN] + ["alone " * 30]
    assert group_similar(texts, threshold=0.85) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert group_similar(texts, threshold=1.0) == []


@pytest.mark.parametrize("record", [{"x": 1}, 7, None, {"messages": []}])
def test_a_record_without_a_prompt_is_refused(record: Any) -> None:
    with pytest.raises(ConfigError, match="record 1 has no prompt"):
        read_prompts([record], render=plain)


def test_prompts_are_found_in_bodies_and_lists() -> None:
    records = ["a", {"inputs": ["b", "c"]}, {"body": {"prompt": "d"}}]
    assert [prompt.text for prompt in read_prompts(records, render=plain)] == ["a", "b", "c", "d"]


def test_what_later_turns_say_is_no_fault() -> None:
    messages = [*chat(RULES, "Hi")["messages"], {"role": "assistant", "content": "Hello"}]
    (prompt,) = read_prompts([{"messages": messages}], render=plain)
    assert prompt.text.endswith("user: Hi")


TODAY = "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%H:%M') }}"
IN_ORDER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("source", "kinds"), [(TODAY, ["template-date"]), (IN_ORDER, [])])
def test_a_template_is_tried_without_prompts(source: str, kinds: list[str]) -> None:
    assert [finding.kind for finding in check_template(ChatTemplate(source))] == kinds


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat template is broken"):
        ChatTemplate("{% for %}")


@needs_data
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("openai-gpt-oss-120b", ["template-date"]),
        ("ibm-granite-granite-3.3-2B-Instruct", ["template-date"]),
        ("mistralai-Mistral-Nemo-Instruct-2407", ["system-last"]),
        ("Qwen-Qwen3-0.6B", ["reasoning-dropped"]),
        ("deepseek-ai-DeepSeek-V3.1", ["reasoning-dropped"]),
        ("Qwen-Qwen2.5-7B-Instruct", []),
        ("microsoft-Phi-3.5-mini-instruct", []),
    ],
)
def test_what_real_templates_do_is_known(name: str, kinds: list[str]) -> None:
    template = ChatTemplate.load(str(DATA / "chat_templates" / f"{name}.jinja"))
    assert [finding.kind for finding in check_template(template)] == kinds


@needs_data
def test_real_conversations_with_one_system_prompt_are_clean() -> None:
    system = (DATA / "prompts/tau_bench/airline_system.md").read_text("utf-8")
    path = DATA / "prompts/tau_bench/gpt4o_airline_conversations.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()[:40]
    records = [
        chat(system, "", messages=[{"role": "system", "content": system}, *json.loads(line)["messages"]])
        for line in lines
    ]
    prompts = read_prompts(records, render=plain)
    findings, groups, _ = lint(prompts, template=None, tokenizer=None, block_size=32, threshold=0.85)
    assert findings == []
    assert groups[0].num_prompts == len(lines)
