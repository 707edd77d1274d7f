"""What the scheduler chooses, without a model: order, single flight, groups, fairness, budgets."""

import random

import pytest

from kvreuse.cache.store import PrefixCache
from kvreuse.engine.scheduler import Scheduler, SchedulerLimits
from kvreuse.engine.sequence import Answers, Sequence
from kvreuse.engine.waiting import GroupRules
from kvreuse.types import Request, SamplingParams
from tests.engine.harness import IdTokenizer

B = 4


class World:
    """A scheduler over a cache of plain ints, a clock that is set by hand, and a model that always says 9."""

    def __init__(self, *, num_slots=400, max_batch_size=4, max_batch_tokens=16, **groups):
        self.now = 0.0
        self.cache = PrefixCache(
            num_slots=num_slots, block_size=B, bytes_per_token=1, move_slots=lambda *_: None, clock=lambda: self.now
        )
        limits = SchedulerLimits(
            max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens, groups=GroupRules(**groups)
        )
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.now)
        self.names: dict[Sequence, str] = {}
        self.failed: list[str] = []

    def add(self, name, prompt, *, num_new=3, reuse=True):
        request = Request(
            request_id=name,
            token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=num_new, ignore_eos=True),
            reuse=reuse,
        )
        answers = Answers(request, lambda event: None, lambda: self.now)
        sequence = Sequence.start(answers, 0, tokenizer=IdTokenizer(), block_size=B)
        self.names[sequence] = name
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """One step; what was computed, as {name: tokens} in batch order."""
        batch, failed = self.scheduler.schedule()
        assert len({item.sequence for item in batch}) == len(batch)
        self.failed += [self.names[sequence] for sequence, _ in failed]
        did = {self.names[item.sequence]: item.num_tokens for item in batch}
        sampled = [item.sequence for item in batch if item.is_sampled]
        self.scheduler.commit(batch)
        for sequence in sampled:
            if sequence.take(9, None, eos_token_ids=()).finish_reason:
                self.scheduler.remove(sequence)
        self.cache.check_integrity()
        return did

    def run(self, max_steps=500):
        """Steps until nothing is left; all that was computed."""
        done = []
        while any(self.scheduler.snapshot(num_slots=1)[gauge] for gauge in ("running", "waiting")):
            assert len(done) < max_steps, "no end in sight"
            done.append(self.step())
        return done


def _unique(seed, length):
    return [1000 * (seed + 1) + i for i in range(length)]


def test_decode_comes_before_prefill_and_prefill_is_cut_to_the_budget():
    world = World()
    world.add("a", _unique(0, 5), num_new=9)
    assert world.step() == {"a": 5}
    world.add("b", _unique(1, 40))
    assert world.step() == {"a": 1, "b": 15}
    assert world.step() == {"a": 1, "b": 15}
    assert world.step() == {"a": 1, "b": 10}
    assert world.step() == {"a": 1, "b": 1}


def test_a_short_suffix_does_not_wait_for_a_long_prefill_and_its_step_is_a_short_one():
    world = World(max_batch_tokens=16)
    world.add("template", _unique(0, 12))
    world.run()
    world.add("long", _unique(1, 40))
    assert world.step() == {"long": 16}
    world.add("hit", [*_unique(0, 12), 7, 7, 7])
    world.add("other", _unique(2, 9))
    assert world.step() == {"hit": 3, "long": 5}
    assert world.step() == {"hit": 1, "long": 15}


def test_short_suffixes_leave_a_quarter_of_a_step_to_a_long_prefill():
    world = World(max_batch_size=8, max_batch_tokens=16)
    world.add("template", _unique(0, 12))
    world.run()
    world.add("long", _unique(1, 40))
    assert world.step() == {"long": 16}
    for i in range(4):
        world.add(f"hit {i}", [*_unique(0, 12), 7 + i, 7, 7, 7], num_new=1)
    assert world.step() == {"hit 0": 4, "hit 1": 4, "long": 4}
    assert world.step() == {"hit 2": 4, "hit 3": 4, "long": 4}
    assert world.step() == {"long": 16}


def test_a_little_left_of_a_step_goes_to_the_long_prefill_too():
    world = World(max_batch_size=8, max_batch_tokens=6)
    world.add("template", _unique(0, 12))
    world.run()
    for i in range(3):
        world.add(f"decoding {i}", _unique(5 + i, 2), num_new=50)
    world.step()
    world.add("long", _unique(1, 40))
    assert world.step()["long"] == 3
    world.add("hit", [*_unique(0, 12), 7], num_new=1)
    assert {name: n for name, n in world.step().items() if name in ("hit", "long")} == {"hit": 1, "long": 1}


def test_whose_turn_has_come_is_not_passed_over_by_short_suffixes():
    world = World(max_batch_size=3, max_batch_tokens=16, max_queue_delay_s=1.0)
    world.add("template", _unique(0, 12))
    world.run()
    world.add("long", _unique(1, 60))
    world.step()
    world.add("other", _unique(2, 30))
    for i in range(2):
        world.add(f"hit {i}", [*_unique(0, 12), 7, i], num_new=1)
    assert set(world.step()) == {"hit 0", "hit 1", "long"}
    world.now = 2.0
    world.add("late", [*_unique(0, 12), 7, 9], num_new=1)
    assert set(world.step()) == {"long"}


def test_who_is_preempted_in_a_step_is_not_in_it_twice():
    world = World(num_slots=148, max_batch_tokens=16)
    world.add("old", _unique(0, 8), num_new=68)
    for _ in range(64):
        world.step()
    world.add("new", _unique(1, 18), num_new=59)
    world.run()
    assert world.failed == []


def test_a_step_never_exceeds_its_limits():
    world = World(max_batch_size=3, max_batch_tokens=7)
    for seed in range(12):
        world.add(str(seed), _unique(seed, 3 + seed), num_new=4)
    for did in world.run():
        assert sum(did.values()) <= 7
        assert len(did) <= 3


def test_whoever_needs_a_block_that_is_being_computed_waits_for_it():
    world, template = World(max_batch_tokens=8), _unique(0, 16)
    for name in "abc":
        world.add(name, [*template, ord(name)], num_new=1)
    assert world.step() == {"a": 8}
    assert world.step() == {"a": 8}
    # The template is there: all finish together, with one token of their own each.
    assert world.step() == {"a": 1, "b": 1, "c": 1}
    assert world.scheduler.num_prefilled_tokens == 16 + 3


def test_waiting_ends_where_the_prompts_diverge():
    world, template = World(max_batch_tokens=8), _unique(0, 8)
    world.add("a", template + _unique(1, 24), num_new=1)
    world.add("b", template + _unique(2, 8), num_new=1)
    assert world.step() == {"a": 8}
    assert world.step() == {"a": 8}  # a was there first; b may start as soon as there is budget
    world.scheduler.remove(next(s for s, name in world.names.items() if name == "a"))
    assert world.step() == {"b": 8}


def test_when_the_computing_request_leaves_the_next_one_takes_over():
    world, template = World(max_batch_tokens=4), _unique(0, 12)
    first = world.add("a", [*template, 1])
    world.add("b", [*template, 2])
    assert world.step() == {"a": 4}
    world.scheduler.remove(first)
    assert world.step() == {"b": 4}  # one block is cached, the second is computed now
    assert world.scheduler.num_prefilled_tokens == 8


def test_with_reuse_off_nobody_waits_and_nothing_is_kept():
    world, template = World(max_batch_tokens=40), _unique(0, 16)
    world.add("a", [*template, 1], reuse=False)
    world.add("b", [*template, 2], reuse=False)
    assert world.step() == {"a": 17, "b": 17}
    world.run()
    assert world.cache.usage().num_blocks == 0


def test_a_resident_prefix_goes_first_but_nobody_starves():
    world, template = World(max_batch_size=1, max_queue_delay_s=5.0), _unique(0, 8)
    world.add("seed", [*template, 1], num_new=1)
    world.run()
    world.add("stranger", _unique(5, 9), num_new=1)
    order = []
    for number in range(20):
        world.add(f"hot{number}", [*template, 10 + number], num_new=1)
        order += world.step()
        world.now += 1.0
    assert order[0] == "hot0"
    # Passed over at 0 s; after more than 5 s of that it is its turn.
    assert order.index("stranger") == 6


def test_of_two_cold_prefixes_the_one_that_more_wait_for_goes_first():
    world = World(max_batch_size=1)
    world.add("single", _unique(0, 9))
    for name in ("many1", "many2"):
        world.add(name, [*_unique(1, 8), ord(name[-1])])
    assert list(world.step()) == ["many1"]


def test_a_group_is_waited_for_until_it_is_full_or_time_is_up():
    world, template = World(max_batch_tokens=64, group_min_size=3, group_max_wait_s=2.0), _unique(0, 8)
    world.add("a", [*template, 1])
    world.add("b", [*template, 2])
    assert world.step() == {}
    assert world.scheduler.idle_s() == 2.0
    world.add("c", [*template, 3])
    assert list(world.step()) == ["a"]  # full; the others wait for a's blocks
    assert list(world.step()) == ["a", "b", "c"]
    assert world.scheduler.num_prefilled_tokens == 8 + 3
    world.run()
    world.add("late", _unique(7, 9))
    assert world.step() == {}
    world.now += 2.0
    assert list(world.step()) == ["late"]


def test_a_short_pool_preempts_the_newest_and_all_finish():
    world = World(num_slots=40, max_batch_size=4, max_batch_tokens=40)
    for seed in range(4):
        world.add(str(seed), _unique(seed, 6), num_new=24)
    world.run()
    assert world.scheduler.num_preempted > 0
    assert all(sequence.num_generated_tokens == 24 for sequence in world.names)
    assert world.failed == []


def test_a_pool_full_of_pins_fails_what_can_never_start():
    world = World(num_slots=24)
    world.add("a", _unique(0, 16), num_new=1)
    world.run()
    with world.cache.acquire([*_unique(0, 16), 1], scope=Request(request_id="", token_ids=(1,)).scope):
        world.add("b", _unique(1, 16), num_new=1)
        world.run()
        assert world.failed == ["b"]
    world.add("c", _unique(1, 16), num_new=1)
    world.run()
    assert world.failed == ["b"]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_ends_with_everything_given_back(seed):
    rng = random.Random(seed)
    world = World(num_slots=120, max_batch_size=5, max_batch_tokens=24)
    templates = [_unique(seed, rng.randrange(1, 30)) for seed in range(4)]
    for number in range(60):
        prompt = rng.choice(templates) + [rng.randrange(500) for _ in range(rng.randrange(1, 9))]
        world.add(str(number), prompt, num_new=rng.randrange(1, 20), reuse=rng.random() < 0.9)
        if rng.random() < 0.3:
            world.scheduler.remove(victim := rng.choice(list(world.names)))
            world.names.pop(victim)
        world.step()
        world.names = {s: n for s, n in world.names.items() if not s.is_finished}
    world.run()
    usage = world.cache.usage()
    assert (usage.private_slots, usage.pinned_slots) == (0, 0)
    assert world.failed == []


def test_the_expected_hits_of_other_pool_sizes_follow_the_prompts(monkeypatch):
    monkeypatch.setattr("kvreuse.engine.scheduler.CURVE_SAMPLING", 1)
    world = World(num_slots=400)
    for number in range(10):
        world.add(str(number), [*_unique(number % 5, 40), number], num_new=1)
        world.run()
    expected = {name: world.scheduler.snapshot(num_slots=120)[f"expected_cached_tokens_{name}x"] for name in ("1", "2")}
    # Five prompts of 40 tokens take turns: a pool of 120 has forgotten each before it returns, one of 240 has not.
    assert expected == {"1": 0, "2": 5 * 40}


def test_similar_prompts_that_share_no_first_block_are_admitted_together():
    world = World(max_batch_size=1, group_similarity=0.85)
    template = _unique(3, 200)
    world.add("alone", _unique(9, 200), num_new=1)
    for number in range(3):
        world.add(f"similar{number}", [number, *template], num_new=1)
    order = [name for did in world.run() for name in did]
    assert list(dict.fromkeys(order)) == ["similar0", "similar1", "similar2", "alone"]
    assert world.cache.usage().hit_tokens == 0


def test_the_waiting_room_forgets_groups_that_are_empty():
    world = World()
    for number in range(20):
        world.add(str(number), _unique(number, 9))
    world.run()
    assert not world.scheduler._waiting._group_sizes
