"""The next token follows the model's distribution as the parameters shape it, whoever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from kvreuse.engine.sampler import SamplingState, sample
from kvreuse.types import SamplingParams, TokenLogprob

VOCAB = 64
PROMPT = (1, 2, 3, 3, 60)


def make_logits(*, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_state(*, prompt: tuple[int, ...] = PROMPT, index: int = 0, mask: Any = None, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), prompt, index=index, mask=mask)


def draws(logits: Tensor, *, num: int = 1, **params: Any) -> list[int]:
    """`num` tokens of one answer, all from the same logits [1, vocab]."""
    state = make_state(**params)
    return [sample(logits, [state])[0][0] for _ in range(num)]


class Grid(SamplingState):
    """Draws evenly spaced numbers, so that the share of each token is its probability up to 1/num."""

    num, place = 5_000, 0

    def draw(self) -> float:
        self.place += 1
        return (self.place - 0.5) / self.num

    def record(self, token_id: int) -> None:
        """Every draw is the first one of an answer."""


def distribution(logits: Tensor, **params: Any) -> Tensor:
    """The probabilities that `sample` draws from, [vocab], exact to 1/num."""
    state = Grid(SamplingParams(**params), PROMPT)
    counts = torch.zeros(logits.shape[-1])
    per_call = 500
    for _ in range(state.num // per_call):
        token_ids, _ = sample(logits.expand(per_call, -1), [state] * per_call)
        counts += torch.bincount(torch.tensor(token_ids), minlength=logits.shape[-1])
    return counts / state.num


def expected(logits: Tensor, **params: Any) -> Tensor:
    """The probabilities [vocab] that Transformers' own processors give, in the order of `generate`."""
    wanted = SamplingParams(**params)
    processors = LogitsProcessorList()
    if wanted.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor({(i,): b for i, b in wanted.logit_bias.items()}))
    if wanted.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty))
    processors.append(hf.TemperatureLogitsWarper(float(wanted.temperature)))
    if wanted.top_k:
        processors.append(hf.TopKLogitsWarper(wanted.top_k))
    if wanted.top_p < 1:
        processors.append(hf.TopPLogitsWarper(wanted.top_p))
    if wanted.min_p:
        processors.append(hf.MinPLogitsWarper(wanted.min_p))
    if wanted.typical_p < 1:
        processors.append(hf.TypicalLogitsWarper(wanted.typical_p))
    return processors(torch.tensor([PROMPT]), logits.clone()).softmax(-1)[0]


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.7},
    {"top_p": 0.001},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9, "temperature": 1.3},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_k": 10},
    {"logit_bias": {5: 4.0, 9: -50.0}},
    {"logit_bias": {3: 2.0}, "repetition_penalty": 1.3, "top_p": 0.9},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [VOCAB, 1500])
def test_the_distribution_is_that_of_the_processors_of_transformers(params: dict[str, Any], vocab: int) -> None:
    logits = make_logits(vocab=vocab)
    params = {"temperature": 1.0} | params
    ours, theirs = distribution(logits, **params), expected(logits, **params)
    assert torch.allclose(ours, theirs, atol=4e-4)
    # What is filtered out can never be drawn.
    assert not ours[theirs == 0].any()


def test_everything_equal_to_the_kth_best_is_kept() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 5] = 1
    params = {"temperature": 1.0, "top_k": 3}
    assert torch.allclose(distribution(logits, **params), expected(logits, **params), atol=4e-4)


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    """Chi-square with the row's own random numbers; the bound is that of p = 0.001 for 9 degrees of freedom."""
    logits = make_logits(vocab=10, scale=1.0)
    num = 20_000
    counts = torch.bincount(torch.tensor(draws(logits, num=num, temperature=1.0, seed=7)), minlength=10)
    wanted = logits.softmax(-1)[0] * num
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 27.9


def test_presence_and_frequency_penalties_count_the_answer_and_not_the_prompt() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.5]])
    # Scores before each draw: 5 4 3.5 | 3.75 4 3.5 | 3.75 2.75 3.5 | 3 2.75 3.5
    assert draws(logits, num=4, prompt=(1, 1, 1), presence_penalty=0.5, frequency_penalty=0.75) == [1, 2, 1, 3]


def test_the_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = torch.tensor([[0.5, 3.0, 2.0, 1.6]])
    # 1 is in the prompt: 3 / 2 < 2. Then 2 is in the answer: 2 / 2 < 1.6. Then 3: 1.6 / 2 < 1.5.
    assert draws(logits, num=3, prompt=(1,), repetition_penalty=2.0) == [2, 3, 1]


def test_a_negative_penalty_asks_for_repetition() -> None:
    assert draws(torch.tensor([[1.0, 0.0]]), num=2, logit_bias={1: 1.5}, presence_penalty=-1.0) == [1, 1]


def test_ids_beyond_the_vocabulary_of_the_model_are_ignored() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert draws(logits, prompt=(0, 3, 99), repetition_penalty=3.0, logit_bias={3: 9.0, -1: 9.0}) == [1]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_mask_leaves_only_what_it_allows(params: dict[str, Any]) -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[4, 9]] = True
    assert set(draws(make_logits(), num=100, mask=lambda: allowed, **params)) <= {4, 9}


def test_a_mask_of_none_allows_everything() -> None:
    logits = make_logits()
    assert draws(logits, mask=lambda: None) == [int(logits.argmax())]


def test_a_mask_is_asked_again_before_each_draw() -> None:
    masks = iter([torch.tensor([True, False, True]), torch.tensor([False, True, False]), None])
    assert draws(torch.tensor([[1.0, 2.0, 3.0]]), num=3, mask=lambda: next(masks)) == [2, 1, 2]


def test_temperature_0_is_greedy_whatever_the_filters() -> None:
    logits = make_logits()
    assert draws(logits, num=5, top_k=5, top_p=0.3, min_p=0.2, typical_p=0.5) == [int(logits.argmax())] * 5


@pytest.mark.parametrize("temperature", [1e-5, 1e-30])
def test_a_temperature_near_0_is_almost_greedy(temperature: float) -> None:
    logits = make_logits(scale=100.0)
    assert draws(logits, num=5, temperature=temperature, top_p=0.9) == [int(logits.argmax())] * 5


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    logits = make_logits()
    first = draws(logits, num=20, temperature=2.0, seed=11)
    assert draws(logits, num=20, temperature=2.0, seed=11) == first
    assert draws(logits, num=20, temperature=2.0, seed=12) != first


def test_without_a_seed_two_answers_differ() -> None:
    logits = make_logits()
    assert draws(logits, num=30, temperature=2.0) != draws(logits, num=30, temperature=2.0)


def test_the_answers_of_one_request_differ_and_the_first_is_that_of_n_1() -> None:
    logits = make_logits()
    answers = [draws(logits, num=20, temperature=2.0, seed=3, index=index) for index in range(3)]
    assert len(set(map(tuple, answers))) == 3
    assert answers[0] == draws(logits, num=20, temperature=2.0, seed=3)


def test_a_seed_draws_the_same_numbers_in_every_process_and_version() -> None:
    """Guards what users have stored: a changed generator would change their seeded answers."""
    assert make_state(seed=1, temperature=1.0).draw() == 0.9064717269000477


row_params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5]), "seed": st.integers(0, 9)},
    optional={
        "top_k": st.sampled_from([1, 5, 40, 3000]),
        "top_p": st.sampled_from([0.1, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "typical_p": st.sampled_from([0.3, 0.95]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
        "presence_penalty": st.sampled_from([-0.5, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, 30), st.floats(-5, 5), max_size=3),
        "logprobs": st.integers(0, 4),
    },
)


@settings(max_examples=100, deadline=None)
@given(
    params=st.lists(row_params, min_size=2, max_size=5),
    vocab=st.sampled_from([50, 2500]),
    is_rounded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_does_not_depend_on_who_else_is_in_the_batch(
    params: list[dict[str, Any]], vocab: int, is_rounded: bool, seed: int
) -> None:
    logits = make_logits(rows=len(params), vocab=vocab, seed=seed)
    if is_rounded:  # many equal values, as bfloat16 models give
        logits = logits.round()
    together = [make_state(**each) for each in params]
    alone = [make_state(**each) for each in params]
    for _ in range(3):
        token_ids, logprobs = sample(logits, together)
        singly = [sample(logits[i : i + 1], [state]) for i, state in enumerate(alone)]
        assert token_ids == [ids[0] for ids, _ in singly]
        assert logprobs == [reported[0] for _, reported in singly]


def test_logits_are_left_unchanged() -> None:
    logits = make_logits(rows=2)
    before = logits.clone()
    sample(logits, [make_state(repetition_penalty=2.0, logit_bias={1: 5.0}), make_state(temperature=1.0, top_p=0.5)])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model_before_anything_else() -> None:
    logits = make_logits()
    raw = logits.log_softmax(-1)[0]
    state = make_state(logprobs=3, temperature=0.5, top_k=1, logit_bias={7: 100.0}, repetition_penalty=1.5)
    (token_id,), (reported,) = sample(logits, [state])
    assert token_id == 7
    assert reported is not None
    assert (reported.token_id, reported.logprob) == (7, pytest.approx(float(raw[7])))
    best = sorted(range(VOCAB), key=lambda i: -raw[i])[:3]
    assert reported.top == tuple((i, pytest.approx(float(raw[i]))) for i in best)


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    rows = [make_state(logprobs=2), make_state(), make_state(logprobs=0), make_state(logprobs=500)]
    _, reported = sample(make_logits(rows=4), rows)
    assert [entry and len(entry.top) for entry in reported] == [2, None, 0, VOCAB]


def test_a_certain_token_has_logprob_0() -> None:
    logits = torch.tensor([[-math.inf, 0.0]])
    assert sample(logits, [make_state(logprobs=0)])[1] == [TokenLogprob(token_id=1, logprob=0.0)]


def test_an_empty_batch_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), []) == ([], [])
