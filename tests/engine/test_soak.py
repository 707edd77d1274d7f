"""A thousand requests with random lengths, aborts and errors: everything lent comes back and memory stays flat."""

import random
from pathlib import Path

from kvreuse.types import Done
from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, check_at_rest, generate, plain_tiny, running_engine, send, tiny


def _resident_bytes():
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def test_a_thousand_requests_leave_nothing_behind(monkeypatch):
    rng = random.Random(3)
    templates = [rng.choices(range(2, VOCAB), k=rng.randrange(1, 12) * BLOCK + 3) for _ in range(12)]
    canary = templates[0] + [5, 6, 7]
    expected = generate(plain_tiny("llama"), canary, 8)
    # A pool of 40 blocks: eviction, compaction and preemption all happen.
    with running_engine(tiny("llama"), kv_cache_memory_bytes=384 * 40 * BLOCK, max_batch_size=8) as engine:
        run = engine._parts.runner.run
        halfway = 0
        num_done = 0
        for round_ in range(125):
            monkeypatch.setattr(engine._parts.runner, "run", (lambda batch: 1 / 0) if round_ % 25 == 7 else run)
            answers = []
            for _ in range(8):
                prompt = rng.choice(templates) + rng.choices(range(2, VOCAB), k=rng.randrange(0, 20))
                answers.append(send(engine, prompt, num_new=rng.randrange(1, 40), n=rng.choice([1, 1, 1, 2])))
            for answer in rng.sample(answers, k=rng.randrange(0, 4)):
                engine.abort(answer.request_id)
            num_done += sum(isinstance(answer.result(), Done) for answer in answers)
            monkeypatch.setattr(engine._parts.runner, "run", run)
            if round_ % 20 == 0:
                check_at_rest(engine)
                assert send(engine, canary).tokens() == expected
            if round_ == 62:
                halfway = _resident_bytes()
        assert num_done >= 900
        assert _resident_bytes() - halfway < 8 * 2**20
        usage = engine.snapshot()["store"]
        assert usage.num_evicted_blocks > 0
        assert engine.snapshot()["preempted"] > 0
