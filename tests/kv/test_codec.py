"""Payloads: exact as they are, within the declared error when quantised, left alone when outliers would break it."""

import pytest
import torch

from kvreuse.kv.codec import ENCODINGS, BlockCodec
from kvreuse.kv.layout import KVLayout, LayerSpec
from kvreuse.kv.pool import KVPool

BLOCK = 32


def _layout(dtype=torch.float32, dims=((3, 64, 64), (3, 64, 64), (2, 24, 16))):
    return KVLayout(
        tuple(
            LayerSpec(
                num_kv_heads=heads,
                key_head_dim=key,
                value_head_dim=value,
                num_query_heads=heads,
                dtype=dtype,
                device=torch.device("cpu"),
            )
            for heads, key, value in dims
        )
    )


def _filled(layout, num_slots=4 * BLOCK):
    torch.manual_seed(0)
    pool = KVPool(layout, num_slots=num_slots)
    for slab in (*pool.keys, *pool.values):
        slab.normal_()
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_raw_payload_restores_every_bit(dtype):
    layout = _layout(dtype)
    pool, codec = _filled(layout), BlockCodec(layout, block_size=BLOCK)
    payload = codec.read(pool, 5)
    assert payload.numel() == codec.raw_bytes == BLOCK * layout.bytes_per_token
    codec.write(pool, 60, payload)
    for slab in (*pool.keys, *pool.values):
        assert torch.equal(slab[5 : 5 + BLOCK], slab[60 : 60 + BLOCK])


@pytest.mark.parametrize(
    ("encoding", "tolerance", "share"),
    [("bf16", 0.01, 0.5), ("fp16", 0.001, 0.5), ("fp8", 0.04, 0.28), ("int8", 0.01, 0.28), ("int4", 0.12, 0.17)],
)
def test_a_packed_payload_is_small_and_close(encoding, tolerance, share):
    layout = _layout()
    pool, codec = _filled(layout), BlockCodec(layout, block_size=BLOCK)
    payload = codec.read(pool, 0)
    packed, used = codec.pack(payload, encoding)
    assert used == encoding
    assert packed.numel() <= share * payload.numel()
    exact, got = payload.view(torch.float32), codec.unpack(packed, encoding).view(torch.float32)
    assert (got - exact).square().mean().sqrt() <= tolerance * exact.square().mean().sqrt()


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_values_that_cannot_be_packed_stay_as_they_are(encoding, value):
    layout = _layout()
    pool, codec = _filled(layout), BlockCodec(layout, block_size=BLOCK)
    pool.keys[1][7, 0, 3] = value
    payload = codec.read(pool, 0)
    packed, used = codec.pack(payload, encoding)
    if used == "raw":
        assert packed is payload
    else:  # bfloat16 reaches as far as float32
        assert encoding == "bf16"
        assert value == 3e38


def test_late_outliers_do_not_clip_and_do_not_spoil_their_neighbours():
    layout = _layout()
    pool, codec = _filled(layout), BlockCodec(layout, block_size=BLOCK)
    pool.keys[0][BLOCK - 1, 1, 5] = 40.0  # one channel, at the last token: only its own group pays
    packed, used = codec.pack(codec.read(pool, 0), "int8")
    assert used == "int8"
    codec.write(pool, 64, codec.unpack(packed, used))
    error = (pool.keys[0][64 : 64 + BLOCK] - pool.keys[0][:BLOCK]).abs()
    assert error[:, 1, 5].max() <= 40 / 127
    error[:, 1, 5] = 0
    assert error.max() <= 5 / 127


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("change", [-1, 1, -7])
def test_a_payload_of_the_wrong_size_is_refused(encoding, change):
    layout = _layout()
    codec = BlockCodec(layout, block_size=BLOCK)
    packed, used = codec.pack(codec.read(_filled(layout), 0), encoding)
    wrong = packed[:change] if change < 0 else torch.cat([packed, packed[:change]])
    with pytest.raises(ValueError, match="payload"):
        codec.unpack(wrong, used)


def test_a_block_of_zeros_survives_every_encoding():
    layout = _layout()
    codec = BlockCodec(layout, block_size=BLOCK)
    payload = torch.zeros(codec.raw_bytes, dtype=torch.uint8)
    for encoding in ENCODINGS:
        packed, used = codec.pack(payload, encoding)
        assert torch.equal(codec.unpack(packed, used), payload)
