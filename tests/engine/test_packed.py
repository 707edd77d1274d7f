"""Packed linear layers give what the stock ones give."""

import copy

import pytest
import torch
from torch import nn

from kvreuse.engine.packed import PackedLinear, pack_linears, padded_rows


class Tied(nn.Module):
    """Two plain layers, one of them with the weights of an embedding, and one of another class."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(50, 24, dtype=dtype)
        self.up = nn.Linear(24, 40, dtype=dtype)
        self.down = nn.Linear(40, 24, bias=False, dtype=dtype)
        self.head = nn.Linear(24, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(self.up(self.embed(ids)).relu()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_rows", [1, 7, 32, 200])
def test_a_packed_model_gives_the_same_values_for_any_number_of_rows(dtype, tolerance, num_rows):
    model = Tied(dtype)
    ids = torch.randint(50, (1, num_rows))
    expected = copy.deepcopy(model)(ids)
    if not pack_linears(model):
        pytest.skip(f"this CPU does not pack {dtype}")
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), expected, rtol=tolerance, atol=tolerance)


def test_only_plain_layers_are_packed_and_the_embedding_keeps_its_weights():
    class Special(nn.Linear):
        pass

    model = Tied(torch.float32)
    model.special = Special(3, 3)
    assert pack_linears(model) == 3
    assert isinstance(model.head, PackedLinear)
    assert type(model.special) is Special
    assert model.embed.weight.shape == (50, 24)


def test_types_that_the_kernels_cannot_do_stay_stock():
    assert pack_linears(Tied(torch.float64)) == 0


def test_few_numbers_of_rows_are_used_and_little_is_wasted():
    padded = [padded_rows(n) for n in range(1, 1025)]
    assert len(set(padded)) < 70
    assert padded == sorted(padded)
    for num_rows, used in enumerate(padded, start=1):
        assert num_rows <= used < max(1.18 * num_rows, 5)
        assert padded_rows(used) == used


def test_a_packed_layer_tells_the_shape_and_type_of_its_weights():
    model = Tied(torch.float32)
    pack_linears(model)
    assert (model.up.weight.shape, model.up.weight.dtype) == ((40, 24), torch.float32)
