"""Similar prompts are one group, others are not; the scheduler uses it for order and never to share KV."""

import random

from kvreuse.engine.similarity import SimilarityGroups


def _prompt(seed, length):
    return random.Random(seed).choices(range(40_000), k=length)


def test_variants_of_one_template_are_one_group_even_when_the_variable_comes_first():
    template = _prompt(1, 600)
    groups = SimilarityGroups(0.85)
    first = groups.group_of([1, 2, 3, *template])
    assert groups.group_of([9, 8, 7, 6, *template]) == first
    assert groups.group_of([*template, 5, 5, 5]) == first


def test_prompts_that_share_little_are_different_groups():
    groups = SimilarityGroups(0.85)
    shared = _prompt(2, 100)
    names = {groups.group_of(shared + _prompt(seed, 500)) for seed in range(3, 13)}
    assert len(names) == 10


def test_a_prompt_shorter_than_a_shingle_has_a_group_too():
    groups = SimilarityGroups(0.85)
    assert groups.group_of([1]) == groups.group_of([1])
    assert groups.group_of([1]) != groups.group_of([2])


def test_memory_is_bounded_and_what_is_met_often_stays():
    groups = SimilarityGroups(0.85)
    hot = _prompt(50, 100)
    name = groups.group_of(hot)
    for seed in range(100, 500):
        groups.group_of(_prompt(seed, 100))
        assert groups.group_of(hot) == name
    assert len(groups._known) <= 256
