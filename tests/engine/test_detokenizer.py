"""Text comes out in whole characters, stops where it must, and adds up to the plain decoding."""

from __future__ import annotations

import string
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvreuse.engine.demo_model import demo_model_path
from kvreuse.engine.detokenizer import Detokenizer
from kvreuse.engine.tokenizer import Tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧‍👦 naïve ☃ 🇨🇭 końcówka: ½ — नमस्ते  two  spaces\n\n\ttab " + "汉" * 40


def byte_level() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(demo_model_path()))


def byte_fallback() -> Tokenizer:
    """Like Llama 2: spaces are U+2581, unknown characters are spelled in bytes, the first space is dropped."""
    letters = [*string.ascii_letters, "▁", "▁the", "▁a", ".", ",", "世", "\ufffd"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    backend = Backend(
        models.BPE(
            vocab={name: token_id for token_id, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    )


def word_piece() -> Tokenizer:
    names = ["[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    backend = Backend(models.WordPiece(vocab={name: i for i, name in enumerate([*names, ".", "\ufffd"])}))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]"))


KINDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "word_piece": word_piece()}
PARTIAL_IDS = {
    # Tokens of the byte-level vocabulary that hold only a part of a character.
    token_id
    for token_id in range(17, 2000)
    if "\ufffd" in KINDS["byte_level"].decode([token_id])
}
any_kind = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())


def push_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def cut_at_first_stop(text: str, stop: Sequence[str]) -> str:
    """Reads the text character by character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [part for part in stop if part and text[:end].endswith(part)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    some = st.integers(0, tokenizer.vocab_size + 3)
    kinds = [some, st.integers(0, min(300, tokenizer.vocab_size))]
    if tokenizer is KINDS["byte_level"]:
        kinds.append(st.sampled_from(sorted(PARTIAL_IDS)))
    return st.lists(st.one_of(kinds), max_size=40)


@any_kind
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_parts_join_to_the_plain_decoding_of_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(ids_of(tokenizer))
    assert "".join(push_all(Detokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@any_kind
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_parts_join_to_the_decoding_cut_at_the_first_complete_stop_string(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    token_ids = data.draw(ids_of(tokenizer))
    text = tokenizer.decode(token_ids)
    pieces = [text[i:j] for i in range(len(text)) for j in range(i, min(i + 5, len(text)) + 1)]
    stop = data.draw(st.lists(st.sampled_from([*pieces, "zzz", "a", "\n\n"]), max_size=3))
    detokenizer = Detokenizer(tokenizer, stop=stop)
    joined = "".join(push_all(detokenizer, token_ids))
    assert joined == cut_at_first_stop(text, stop)
    assert detokenizer.stopped == any(part and part in text for part in stop)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30))
def test_no_part_of_sound_text_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = push_all(Detokenizer(tokenizer), token_ids)
    assert "".join(parts) == tokenizer.decode(token_ids)
    # A vocabulary may lack a byte of a rare character; such text is broken from the start.
    assert "\ufffd" in tokenizer.decode(token_ids) or not any("\ufffd" in part for part in parts)


def test_every_character_comes_out_with_its_last_token() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer, seen = Detokenizer(tokenizer), ""
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    for end, token_id in enumerate(token_ids, start=1):
        seen += detokenizer.push(token_id)
        assert seen == tokenizer.decode(token_ids[:end]).rstrip("\ufffd")


def test_an_endless_run_of_broken_bytes_is_not_held_back() -> None:
    tokenizer = KINDS["byte_level"]
    broken = next(token_id for token_id in PARTIAL_IDS if tokenizer.decode([token_id] * 2) == "\ufffd" * 2)
    detokenizer = Detokenizer(tokenizer)
    seen = "".join(detokenizer.push(broken) for _ in range(200))
    assert len(seen) == 199
    assert seen + detokenizer.flush() == "\ufffd" * 200


@any_kind
def test_work_per_token_does_not_grow_with_the_answer(tokenizer: Tokenizer) -> None:
    """Counted in ids decoded: at most a small constant for each token, whatever the ids are."""
    counted = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            nonlocal counted
            counted += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    for token_id in (5, 40, tokenizer.vocab_size - 1, *sorted(PARTIAL_IDS)[:3]):
        counted = 0
        push_all(Detokenizer(Counting(tokenizer.hf)), [token_id % tokenizer.vocab_size] * 300)
        assert counted < 300 * 50


def test_special_tokens_leave_no_trace() -> None:
    tokenizer = KINDS["byte_level"]
    first, second = tokenizer.encode("世界", add_special_tokens=False)[:2]
    eos = tokenizer.hf.eos_token_id
    assert "".join(push_all(Detokenizer(tokenizer), [eos, first, eos, second])) == tokenizer.decode([first, second])


def test_text_that_may_begin_a_stop_string_waits_for_the_next_token() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("\nUser:",))
    token_ids = [tokenizer.encode(part, add_special_tokens=False)[0] for part in ("ok", "\n", "User", "s")]
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["ok", "", "", "\nUsers"]


def test_nothing_follows_a_complete_stop_string() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    parts = push_all(detokenizer, tokenizer.encode("so END it is", add_special_tokens=False))
    assert "".join(parts) == "so "
    assert detokenizer.stopped


def test_a_held_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    assert "".join(push_all(detokenizer, tokenizer.encode("so EN", add_special_tokens=False))) == "so EN"
    assert not detokenizer.stopped


def test_an_empty_stop_string_stops_nothing() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=("",))
    assert "".join(push_all(detokenizer, tokenizer.encode("abc", add_special_tokens=False))) == "abc"


def test_an_answer_that_continues_the_prompt_keeps_its_leading_space() -> None:
    tokenizer = KINDS["byte_fallback"]
    prompt_ids, answer_ids = tokenizer.encode("is"), tokenizer.encode("the")
    assert "".join(push_all(Detokenizer(tokenizer, prompt_ids=prompt_ids), answer_ids)) == " the"
    assert "".join(push_all(Detokenizer(tokenizer), answer_ids)) == "the"


def test_an_answer_after_a_special_token_starts_a_new_text() -> None:
    tokenizer = KINDS["byte_fallback"]
    prompt_ids = [*tokenizer.encode("is"), tokenizer.hf.eos_token_id]
    assert "".join(push_all(Detokenizer(tokenizer, prompt_ids=prompt_ids), tokenizer.encode("the"))) == "the"


def test_a_character_that_the_prompt_began_is_completed() -> None:
    tokenizer = KINDS["byte_level"]
    token_ids = tokenizer.encode("ok 汉", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids=token_ids[:-1])
    assert tokenizer.decode(token_ids[:-1]).endswith("\ufffd")
    assert "".join(push_all(detokenizer, token_ids[-1:])) == "汉"


def test_a_prompt_that_ends_in_many_bytes_does_not_spoil_the_answer() -> None:
    tokenizer = KINDS["byte_fallback"]
    prompt_ids = tokenizer.encode("a" + "é汉" * 3, add_special_tokens=False)
    assert "".join(push_all(Detokenizer(tokenizer, prompt_ids=prompt_ids), tokenizer.encode("b", param="x")[1:])) == "b"
