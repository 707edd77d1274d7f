"""Text to ids and back: special tokens once, templates without surprises, many threads at a time."""

from __future__ import annotations

import string
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvreuse.engine.demo_model import demo_model_path
from kvreuse.engine.tokenizer import Tokenizer
from kvreuse.errors import RequestError

MESSAGES = [{"role": "user", "content": "Hello"}]
DEMO = Tokenizer(AutoTokenizer.from_pretrained(demo_model_path()))


def make_tokenizer(*, chat_template: str | None = None, **extra: Any) -> Tokenizer:
    """One token per letter; like Llama, BOS is added in front and spaces are U+2581."""
    names = ["<unk>", "<s>", "</s>", *string.ascii_letters, *string.digits, "▁", ":"]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    names_of = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **names_of, **extra)
    hf.chat_template = chat_template
    return Tokenizer(hf)


def test_text_comes_back_from_its_ids() -> None:
    text = "Grüße, 世界! 👩‍👩‍👧‍👦 it 's  here ."
    assert DEMO.decode(DEMO.encode(text)) == text


def test_decoding_leaves_spaces_as_they_are_even_where_the_checkpoint_asks_to_tidy_them() -> None:
    tokenizer = make_tokenizer(clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode("it 's a : b")) == tokenizer.hf.backend_tokenizer.decode(
        list(tokenizer.encode("it 's a : b"))
    )


def test_decoding_skips_special_tokens_and_unknown_ids() -> None:
    assert DEMO.decode([1, *DEMO.encode("a"), 2, 10**6]) == "a"


def test_truncation_and_padding_stored_with_the_tokenizer_are_switched_off() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer.encode("abcdefgh")) == 10
    assert len(tokenizer.encode("a")) == 3


def test_special_tokens_are_added_only_where_asked() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.encode("a")[0] == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)


def test_a_bos_that_the_text_spells_out_is_not_added_again() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.encode("<s>a").count(1) == 1
    assert tokenizer.encode("<s><s>a").count(1) == 2


def test_a_template_that_spells_the_bos_gives_it_once() -> None:
    tokenizer = make_tokenizer(chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.encode_chat(MESSAGES).count(1) == 1


def test_a_template_without_bos_gets_none() -> None:
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.encode_chat(MESSAGES).count(1) == 0


def test_a_conversation_ends_where_the_assistant_speaks() -> None:
    token_ids = DEMO.encode_chat([{"role": "system", "content": "Be brief."}, *MESSAGES])
    assert DEMO.hf.decode(token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_further_variables_and_tools_reach_the_template() -> None:
    template = "{{ date_string }}:{{ tools[0].name if tools else 'none' }}"
    tokenizer = make_tokenizer(chat_template=template)
    variables = {"date_string": "3May"}
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES, variables=variables)) == "3May:none"
    tools = [{"name": "look"}]
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES, tools=tools, variables=variables)) == "3May:look"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "conversation", "tools"])
def test_a_variable_cannot_replace_what_the_server_decides(name: str) -> None:
    with pytest.raises(RequestError, match="reserved") as caught:
        DEMO.encode_chat(MESSAGES, variables={name: "x"})
    assert caught.value.param == "variables"


def test_without_a_template_messages_are_refused() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_what_the_template_says_on_purpose_reaches_the_caller() -> None:
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[7].content.x }}", "{{ 'a' + 1 }}", "{{ 1 // 0 }}", "{{ range(10**9) }}", "{% x"],
)
def test_what_breaks_inside_a_template_is_a_request_error_without_details(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_tokenizer(chat_template=template).encode_chat(MESSAGES)
    assert caught.value.message == "the chat template refuses these messages"


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "user", "content": ["x", 1]}]])
def test_messages_of_the_wrong_shape_are_a_request_error(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError) as caught:
        DEMO.encode_chat(messages)
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_is_a_request_error() -> None:
    with pytest.raises(RequestError) as in_text:
        DEMO.encode("a\ud800")
    with pytest.raises(RequestError) as in_chat:
        DEMO.encode_chat([{"role": "user", "content": "\udfff"}])
    assert (in_text.value.param, in_chat.value.param) == ("inputs", "messages")


def test_the_text_of_a_token_keeps_its_space_and_shows_special_tokens() -> None:
    space_word = DEMO.encode("a the", add_special_tokens=False)[1]
    assert DEMO.token_text(space_word) == " the"
    assert DEMO.token_text(2) == "<|im_end|>"
    sentence_piece = make_tokenizer()
    assert sentence_piece.token_text(sentence_piece.hf.convert_tokens_to_ids("▁")) == " "
    assert sentence_piece.token_text(5) == "c"


def test_only_ids_with_a_token_that_is_not_special_are_visible() -> None:
    assert [DEMO.is_visible(i) for i in (0, 2, 7, 100, DEMO.vocab_size)] == [False, False, False, True, False]


def test_many_threads_get_what_one_gets() -> None:
    texts = [f"text {i} " + "word " * (i % 50) for i in range(400)]
    expected = [DEMO.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(DEMO.encode, texts))
        decoded = list(pool.map(DEMO.decode, expected))
        chats = list(pool.map(lambda text: DEMO.encode_chat([{"role": "user", "content": text}]), texts))
    assert encoded == expected
    assert decoded == texts
    assert chats == [DEMO.encode_chat([{"role": "user", "content": text}]) for text in texts]
