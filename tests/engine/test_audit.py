"""The shadow audit: right hits pass unseen, a wrong entry is found, counted, dropped and never served again."""

import logging
import random
import time

import pytest

from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, generate, plain_tiny, running_engine, send, tiny


def _prompt(seed, length):
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def _wait(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_right_hits_pass_and_are_not_disturbed():
    prompt = _prompt(1, 4 * BLOCK + 3)
    with running_engine(tiny("llama"), audit_rate=1.0) as engine:
        for _ in range(4):
            assert send(engine, prompt).tokens() == generate(plain_tiny("llama"), prompt, 8)
        _wait(lambda: engine.snapshot()["audits"] == 3)
        assert engine.snapshot()["audit_mismatches"] == 0
        assert send(engine, prompt).result().facts.cached_tokens == 4 * BLOCK
        _wait(lambda: engine.snapshot()["audits"] == 4)
        _wait(lambda: engine.snapshot()["running"] == 0)


def test_a_wrong_entry_is_found_counted_dropped_and_named_without_text(caplog: pytest.LogCaptureFixture):
    prompt = _prompt(2, 4 * BLOCK + 3)
    with running_engine(tiny("llama"), audit_rate=1.0, host_cache_bytes=2**20) as engine:
        expected = send(engine, prompt).tokens()
        for slab in engine._parts.pool.keys:
            slab[:BLOCK] += 3.0
        with caplog.at_level(logging.ERROR, logger="kvreuse.audit"):
            send(engine, prompt).result()
            _wait(lambda: engine.snapshot()["audit_mismatches"] == 1)
        [record] = [r for r in caplog.records if r.name == "kvreuse.audit"]
        assert "AuditMismatch" in record.message
        assert f"{4 * BLOCK} cached tokens" in record.message
        _wait(lambda: engine.snapshot()["running"] == 0)
        assert send(engine, prompt).tokens() == expected
        _wait(lambda: engine.snapshot()["running"] == 0)


def test_a_rate_of_zero_audits_nothing():
    prompt = _prompt(3, 4 * BLOCK + 3)
    with running_engine(tiny("llama"), audit_rate=0.0) as engine:
        for _ in range(3):
            send(engine, prompt).result()
        assert engine.snapshot()["audits"] == 0
