"""A folder as a tier: restarts, damage, two owners, storage that fails."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from kvreuse.kv.tiers.disk import DiskTier
from tests.kv.tiers.contract import TierContract
from tests.kv.tiers.harness import (
    NAMESPACE,
    OTHER_NAMESPACE,
    Clock,
    files_of,
    is_same,
    load,
    make_block,
    put_all,
    used_bytes,
)

ENTRY_BYTES = 4096


@pytest.fixture
def open_disk():
    opened = []

    def open_disk(folder, *, namespace=NAMESPACE, max_bytes=2**20, **options):
        opened.append(DiskTier(folder, namespace=namespace, max_bytes=max_bytes, **options))
        return opened[-1]

    yield open_disk
    for tier in opened:
        tier.close()


class TestDiskTier(TierContract):
    @pytest.fixture
    def open_tier(self, tmp_path, open_disk):
        return lambda max_bytes: open_disk(tmp_path, max_bytes=max_bytes)

    @pytest.fixture
    def stored_bytes(self, tmp_path):
        def stored_bytes():
            for _ in range(1000):
                try:
                    return used_bytes(tmp_path)
                except FileNotFoundError:
                    continue  # a file left between listing and looking
            raise AssertionError("the folder is never still")

        return stored_bytes


@pytest.fixture
def clock():
    return Clock()


def test_a_restart_finds_everything_with_its_tenant_and_its_order_of_use(tmp_path, open_disk):
    first = open_disk(tmp_path)
    put_all(first, [make_block(number, tenant="ab"[number % 2]) for number in range(4)])
    for number, path in enumerate(first._path(make_block(n).key) for n in range(4)):
        os.utime(path, (number, number))
    assert load(first, make_block(0)) is not None
    first.close()
    second = open_disk(tmp_path, max_bytes=4 * ENTRY_BYTES)
    assert second.usage().num_bytes == used_bytes(tmp_path) == 4 * ENTRY_BYTES
    assert second.usage().tenant_bytes == {"a": 2 * ENTRY_BYTES, "b": 2 * ENTRY_BYTES}
    assert second.put(make_block(9))
    assert [load(second, make_block(n, tenant="ab"[n % 2])) is not None for n in range(4)] == [1, 0, 1, 1]
    assert second.purge("b") == 1


def test_a_restart_reads_no_payload(tmp_path, open_disk):
    first = open_disk(tmp_path)
    put_all(first, [make_block(1, num_bytes=2**20 - 8192)])
    first.close()
    counts = Path("/proc/self/io")
    before = int(counts.read_text().split()[1])
    second = open_disk(tmp_path)
    assert int(counts.read_text().split()[1]) - before < 2**16
    assert second.find([make_block(1).key]) == 1


def test_a_smaller_cap_at_a_restart_holds_before_anything_is_served(tmp_path, open_disk):
    first = open_disk(tmp_path)
    put_all(first, [make_block(number) for number in range(6)])
    first.close()
    second = open_disk(tmp_path, max_bytes=2 * ENTRY_BYTES)
    assert used_bytes(tmp_path) == second.usage().num_bytes == 2 * ENTRY_BYTES


def test_unfinished_and_senseless_files_are_cleaned_at_the_start_and_strangers_are_left_alone(tmp_path, open_disk):
    first = open_disk(tmp_path)
    put_all(first, [make_block(1), make_block(2)])
    first.close()
    good, cut = first._path(make_block(1).key), first._path(make_block(2).key)
    cut.write_bytes(cut.read_bytes()[:-1])
    good.with_suffix(".part").write_bytes(bytes(9000))
    strangers = [tmp_path / "notes.txt", good.parent / "notes.txt", tmp_path / "ab" / "notes"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    second = open_disk(tmp_path)
    assert sorted(files_of(tmp_path)) == sorted([good, *strangers])
    assert (second.usage().num_entries, second.usage().num_bytes) == (1, ENTRY_BYTES)


def test_entries_of_another_model_count_and_go_first_and_are_never_served(tmp_path, open_disk):
    old = open_disk(tmp_path, namespace=OTHER_NAMESPACE)
    put_all(old, [make_block(number, tenant="a") for number in range(3)])
    old.close()
    new = open_disk(tmp_path, max_bytes=4 * ENTRY_BYTES)
    assert new.usage().num_bytes == 3 * ENTRY_BYTES
    assert load(new, make_block(0)) is None
    left = []
    for number in (10, 11, 12, 13):
        assert new.put(make_block(number), on_evict=left.append)
    assert left == []
    assert all(load(new, make_block(number)) for number in (10, 11, 12, 13))
    assert not (tmp_path / OTHER_NAMESPACE).exists()


def test_a_purge_of_a_tenant_reaches_what_another_model_stored(tmp_path, open_disk):
    old = open_disk(tmp_path, namespace=OTHER_NAMESPACE)
    put_all(old, [make_block(1, tenant="a"), make_block(2, tenant="b")])
    old.close()
    new = open_disk(tmp_path)
    assert new.purge("a") == 1
    assert len(files_of(tmp_path)) == 1


def test_one_process_uses_the_folder_and_the_next_takes_over(tmp_path, open_disk, clock):
    first, second = open_disk(tmp_path), open_disk(tmp_path, clock=clock)
    put_all(first, [make_block(1)])
    assert not second.put(make_block(2))
    assert (second.usage().is_healthy, second.usage().num_errors) == (False, 1)
    first.close()
    clock.now_s += 6
    assert second.put(make_block(2))
    assert all(load(second, make_block(number)) for number in (1, 2))
    assert second.usage().num_bytes == used_bytes(tmp_path)


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def resealed(raw, at, part):
    """Another header that matches its checksum."""
    header = raw[: -make_block(1).num_bytes - 16]
    header = header[:at] + part + header[at + len(part) :]
    return header + xxh3_128_digest(header) + raw[len(header) + 16 :]


DAMAGE = {
    "empty": lambda raw: b"",
    "one byte": lambda raw: raw[:1],
    "cut in the header": lambda raw: raw[:100],
    "cut in the payload": lambda raw: raw[:-1],
    "too long": lambda raw: raw + b"\0",
    "zeros": lambda raw: bytes(len(raw)),
    "text": lambda raw: b"not what you think" * 100,
    "the magic number": lambda raw: flipped(raw, 0),
    "the key": lambda raw: flipped(raw, 40),
    "the tokens' size": lambda raw: flipped(raw, 68),
    "the tokens' size, by much": lambda raw: flipped(raw, 71),
    "the payload's size": lambda raw: flipped(raw, 74),
    "the tokens": lambda raw: flipped(raw, 85),
    "the header's checksum": lambda raw: flipped(raw, len(raw) - 1001),
    "the payload's first byte": lambda raw: flipped(raw, len(raw) - 1000),
    "the payload's last byte": lambda raw: flipped(raw, len(raw) - 1),
    "another byte order": lambda raw: resealed(raw, 6, bytes([3 - raw[6], 0])),
    "another version": lambda raw: resealed(raw, 4, bytes([raw[4] + 1, 0])),
    "another model": lambda raw: resealed(raw, 16, bytes.fromhex(OTHER_NAMESPACE)),
    "another payload's size": lambda raw: resealed(raw, 72, (1).to_bytes(8, "little")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("is_restarted", [False, True], ids=["while it runs", "while it is down"])
def test_a_damaged_file_is_a_miss_and_deleted_and_the_tier_goes_on(tmp_path, open_disk, damage, is_restarted):
    tier = open_disk(tmp_path)
    put_all(tier, [make_block(1), make_block(2)])
    path = tier._path(make_block(1).key)
    path.write_bytes(damage(path.read_bytes()))
    if is_restarted:
        tier.close()
        tier = open_disk(tmp_path)
    assert load(tier, make_block(1)) is None
    assert not path.exists()
    assert (tier.usage().num_corrupt, tier.usage().num_errors) == (1, 0)
    assert is_same(load(tier, make_block(2)), make_block(2))
    assert tier.put(make_block(1))
    assert is_same(load(tier, make_block(1)), make_block(1))


def test_every_flipped_bit_of_an_entry_is_noticed(tmp_path, open_disk):
    tier, block = open_disk(tmp_path), make_block(1, num_bytes=16)
    tier.put(block)
    path = tier._path(block.key)
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 5):
        path.write_bytes(good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :])
        assert load(tier, block) is None
        tier.put(block)
    assert is_same(load(tier, block), block)


def test_swapped_files_are_misses(tmp_path, open_disk):
    tier = open_disk(tmp_path)
    blocks = [make_block(1), make_block(2)]
    put_all(tier, blocks)
    paths = [tier._path(block.key) for block in blocks]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    assert [load(tier, block) for block in blocks] == [None, None]


def test_a_full_disk_costs_one_put_and_nothing_of_what_is_there(tmp_path, open_disk, clock):
    tier = open_disk(tmp_path, clock=clock)
    put_all(tier, [make_block(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the kernel refuses to write more
    try:
        assert not tier.put(make_block(2, num_bytes=50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tier.usage().num_errors, tier.usage().is_healthy) == (1, False)
    assert used_bytes(tmp_path) == tier.usage().num_bytes == ENTRY_BYTES
    assert (tier.find([make_block(1).key]), tier.put(make_block(3))) == (0, False)
    clock.now_s += 6
    assert is_same(load(tier, make_block(1)), make_block(1))
    assert tier.put(make_block(2, num_bytes=50_000))


@pytest.fixture
def small_file_system(tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_file_system_that_is_smaller_than_the_cap_degrades_to_misses(small_file_system, open_disk, clock):
    tier = open_disk(small_file_system, clock=clock)
    stored = []
    for number in range(20):
        clock.now_s += 6
        stored.append(tier.put(make_block(number, num_bytes=10_000)))
    assert not all(stored)
    clock.now_s += 6
    assert all(is_same(load(tier, make_block(n, num_bytes=10_000)), make_block(n, num_bytes=10_000))
               for n in range(20) if stored[n])  # fmt: skip
    tier.check_integrity()
    tier.close()


def test_a_read_only_folder_serves_nothing_new_keeps_counting_and_recovers(small_file_system, open_disk, clock):
    tier = open_disk(small_file_system, clock=clock, max_bytes=2 * ENTRY_BYTES)
    put_all(tier, [make_block(1), make_block(2)])
    subprocess.run(["mount", "-o", "remount,ro", small_file_system], check=True)
    try:
        assert not tier.put(make_block(3))
        clock.now_s += 6
        assert is_same(load(tier, make_block(2)), make_block(2))
        assert tier.purge(None) == 2
        assert used_bytes(small_file_system) == tier.usage().num_bytes == 2 * ENTRY_BYTES
        assert load(tier, make_block(2)) is None
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_file_system], check=True)
    clock.now_s += 6
    assert tier.put(make_block(3))
    assert used_bytes(small_file_system) == tier.usage().num_bytes == ENTRY_BYTES
    tier.close()


@pytest.mark.parametrize("is_back", [False, True], ids=["gone", "gone and empty again"])
def test_a_folder_that_vanishes_is_made_again(tmp_path, open_disk, is_back):
    folder = tmp_path / "cache"
    tier = open_disk(folder)
    put_all(tier, [make_block(1), make_block(2)])
    shutil.rmtree(folder)
    if is_back:
        folder.mkdir()
    assert load(tier, make_block(1)) is None
    assert tier.put(make_block(3))
    assert is_same(load(tier, make_block(3)), make_block(3))
    assert not open_disk(folder).put(make_block(4))
    tier.check_integrity()


def test_a_place_that_cannot_be_a_folder_is_a_tier_that_stores_nothing(tmp_path, open_disk):
    (tmp_path / "file").write_text("")
    tier = open_disk(tmp_path / "file" / "cache")
    assert not tier.put(make_block(1))
    assert (tier.find([make_block(1).key]), tier.usage().is_healthy, tier.usage().num_errors) == (0, False, 1)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from tests.kv.tiers.harness import NAMESPACE, files_of, is_same, load, make_block, used_bytes
from kvreuse.kv.tiers.disk import DiskTier

folder, cap = Path(sys.argv[1]), 12 * 24576
blocks = [make_block(number, num_bytes=20_000) for number in range(40)]
open_tier = lambda: DiskTier(folder, namespace=NAMESPACE, max_bytes=cap)
moments, num_parts = random.Random(5), 0
for round in range(50):
    child = os.fork()
    if child == 0:
        tier, order = open_tier(), random.Random(round)
        while True:
            tier.put(order.choice(blocks))
    time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    num_parts += any(path.suffix for path in files_of(folder))
    assert used_bytes(folder) <= cap, used_bytes(folder)
    tier = open_tier()
    assert tier.usage().num_bytes == used_bytes(folder) <= cap
    assert all(is_same(load(tier, b), b) for b in blocks if tier.find([b.key]))
    assert tier.usage().num_corrupt == tier.usage().num_errors == 0
    tier.close()
print(tier.usage().num_entries, num_parts)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_no_corrupt_entry_and_no_byte_over_the_cap(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": "src:."},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_entries, num_unfinished = map(int, done.stdout.split())
    assert num_entries > 0
    assert num_unfinished > 0  # some were caught in the act


class UnreliableDisk(DiskTier):
    """Fails before the work, after it, or damages what it wrote; half of the time it does as it should."""

    def __init__(self, folder, **options):
        self.rng, self.num_faults = random.Random(3), 0
        super().__init__(folder, namespace=NAMESPACE, **options)

    def _write(self, block):
        self.fault()
        super()._write(block)
        if self.rng.random() < 0.15:
            self.num_faults += 1
            path = self._path(block.key)
            raw = path.read_bytes()
            at = self.rng.randrange(len(raw))
            path.write_bytes(self.rng.choice([flipped(raw, at), raw[:at]]))
        self.fault()

    def _read(self, key, token_bytes):
        self.fault()
        block = super()._read(key, token_bytes)
        self.fault()
        return block

    def _delete(self, key):
        self.fault()
        super()._delete(key)
        self.fault()

    def fault(self):
        if self.rng.random() < 0.2:
            self.num_faults += 1
            raise OSError(self.rng.choice([errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE]), "injected")


def test_ten_thousand_faults_of_the_storage_never_reach_a_caller_nor_change_a_block(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("kvreuse.kv.tiers.base.log.disabled", True)
    tier = UnreliableDisk(tmp_path, max_bytes=6 * ENTRY_BYTES, clock=clock)
    blocks = [make_block(number, tenant=str(number % 2)) for number in range(10)]
    while tier.num_faults < 10_000:
        clock.now_s += 6
        block = tier.rng.choice(blocks)
        tier.put(block)
        loaded = load(tier, tier.rng.choice([block, *blocks]))
        assert loaded is None or is_same(loaded, next(block for block in blocks if block.key == loaded.key))
        if tier.rng.random() < 0.02:
            tier.purge(block.tenant)
            assert used_bytes(tmp_path) <= tier.usage().num_bytes <= tier.max_bytes
            tier.check_integrity()
    assert tier.usage().num_hits > 100
    tier.close()
