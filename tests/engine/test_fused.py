"""Fused layers give what the stock ones give, on every backend, and no layer is fused that computes something else."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvreuse.engine.attention.cpu import CPUBackend
from kvreuse.engine.attention.native import NativeBackend
from kvreuse.engine.attention.plan import StepSlice
from kvreuse.engine.attention.reference import ReferenceBackend
from kvreuse.engine.attention.step import NAME, Step, register, running
from kvreuse.engine.fused import FusedLayer, fuse_layers
from kvreuse.engine.native.kernels import load_kernels
from kvreuse.engine.packed import pack_linears
from kvreuse.engine.probe import probe_layout
from kvreuse.kv.pool import KVPool
from kvreuse.types import Done
from tests.engine.families import VOCAB
from tests.engine.harness import generate, plain_tiny, running_engine, send, tiny

# In two steps: rows of a chunk and a whole prompt, then the rest of the chunk and a decode row. Own slots in pieces.
FIRST = (
    StepSlice(first_row=0, num_rows=12, num_context=0, runs=((40, 12),)),
    StepSlice(first_row=12, num_rows=18, num_context=0, runs=((0, 9), (90, 9))),
)
SECOND = (
    StepSlice(first_row=0, num_rows=8, num_context=12, runs=((40, 20),)),
    StepSlice(first_row=8, num_rows=1, num_context=18, runs=((0, 9), (90, 10))),
)
NUM_SLOTS = 100
NUM_NOBODYS = 3  # rows
BACKENDS = {
    "cpu": lambda: NativeBackend(load_kernels()),
    "cpu-torch": CPUBackend,
    "reference": ReferenceBackend,
}
KINDS = {
    "llama": ("llama_wide", {"attention_bias": False, "mlp_bias": False}),
    "llama with attention biases": ("llama_wide", {"attention_bias": True, "mlp_bias": False}),
    "llama with all biases": ("llama_wide", {}),
    "llama with large heads": ("llama_wide", {"head_dim": 64}),
    "llama with one KV head": ("llama_wide", {"num_key_value_heads": 1}),
    "llama with scaled rotation": (
        "llama_wide",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral_wide", {}),
    "qwen2": ("qwen2_wide", {}),
    "qwen2 with a window": (
        "qwen2_wide",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
        },
    ),
}

pytestmark = pytest.mark.skipif(isinstance(load_kernels(), str), reason=str(load_kernels()))


def _model(family, changes=None, *, dtype=torch.float32, attn_implementation=NAME):
    """The family's model with weights, biases too, that depend on nothing but the shapes."""
    register()
    config = copy.deepcopy(plain_tiny(family).config)
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean="norm" in name, std=0.1)
    return model.to(dtype).eval()


IDS = [[2 + (5 * i * i + 11 * seed) % (VOCAB - 2) for i in range(20 - seed)] for seed in (0, 1)]


def _expected(model):
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float() for ids in IDS]


def _stepped(model, layout, backend):
    """The logits of both sequences, computed in two steps that have rows of nobody behind them."""
    pool = KVPool(layout, num_slots=NUM_SLOTS)
    for slab in (*pool.keys, *pool.values):
        slab.fill_(float("nan"))
    parts = [[], []]
    for slices in (FIRST, SECOND):
        positions = [range(piece.num_context, piece.num_tokens) for piece in slices]
        rows = [ids[i] for ids, where in zip(IDS, positions, strict=True) for i in where]
        numbers = [i for where in positions for i in where]
        nobodys = [0] * NUM_NOBODYS
        with torch.inference_mode(), running(Step(pool, slices, backend)):
            logits = model(
                input_ids=torch.tensor([rows + nobodys]),
                position_ids=torch.tensor([numbers + nobodys]),
                use_cache=False,
            ).logits[0]
        assert logits.isfinite().all()
        for part, piece in zip(parts, slices, strict=True):
            part.append(logits[piece.first_row : piece.first_row + piece.num_rows].float())
    owned = sorted({slot for piece in SECOND for start, length in piece.runs for slot in range(start, start + length)})
    for slab in (*pool.keys, *pool.values):
        assert slab[owned].isfinite().all()
        assert slab[sorted(set(range(NUM_SLOTS)) - set(owned))].isnan().all()
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_layer_is_fused_and_the_logits_are_those_of_the_stock_model(kind, backend, is_packed):
    model, stock = _model(*KINDS[kind]), _model(*KINDS[kind], attn_implementation="eager")
    layout = probe_layout(model)
    assert fuse_layers(model) == model.config.num_hidden_layers == 3
    if is_packed:
        pack_linears(model)
    for got, expected in zip(_stepped(model, layout, BACKENDS[backend]()), _expected(stock), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_bfloat16_they_are_as_near_to_exact_ones_as_the_stock_model_is(kind, backend):
    exact, stock = (_expected(_model(*KINDS[kind], dtype=dtype, attn_implementation="eager"))
                    for dtype in (torch.float64, torch.bfloat16))  # fmt: skip
    model = _model(*KINDS[kind], dtype=torch.bfloat16)
    layout = probe_layout(model)
    assert fuse_layers(model) == 3
    for got, plain, right in zip(_stepped(model, layout, BACKENDS[backend]()), stock, exact, strict=True):
        assert (got - right).square().mean() < 1.5 * (plain - right).square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_may_be_kept_in_another_type_than_the_layers(backend):
    kind = KINDS["llama with all biases"]
    model, stock = _model(*kind), _model(*kind)
    layout = probe_layout(model).stored_as(torch.bfloat16)
    fuse_layers(model)
    fused, plain = (_stepped(one, layout, BACKENDS[backend]()) for one in (model, stock))
    for got, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", ["llama_wide", "mistral_wide", "qwen2_wide"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_answers_as_plain_generate_again_and_again(family, backend):
    prompts = [ids[:length] for ids in IDS for length in (1, 8, 17)]
    for _ in range(2):
        with running_engine(tiny(family), attention_backend=backend, max_batch_size=8, max_batch_tokens=13) as engine:
            answers = [send(engine, prompt, num_new=6) for prompt in prompts]
            expected = [generate(plain_tiny(family), prompt, 6) for prompt in prompts]
            assert [answer.tokens() for answer in answers] == expected
    assert sum(isinstance(module, FusedLayer) for module in tiny(family).model.modules()) == 3


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp16"])
def test_a_second_engine_may_keep_the_kv_of_the_same_model_in_another_type(kv_cache_dtype):
    for options in ({}, {"kv_cache_dtype": kv_cache_dtype}, {}):
        with running_engine(tiny("llama_wide"), **options) as engine:
            assert isinstance(send(engine, IDS[0], num_new=6).result(), Done)


def test_no_weight_is_held_twice():
    model = _model(*KINDS["llama with all biases"])
    num_weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    layer = model.model.layers[0]
    joined = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    stock = [weakref.ref(layer), *(weakref.ref(layer.get_submodule(name).weight) for name in joined)]
    del layer
    fuse_layers(model)
    gc.collect()
    assert [ref() for ref in stock] == [None] * len(stock)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2) == num_weights


def test_fusing_again_changes_nothing():
    model = _model("llama_wide")
    fuse_layers(model)
    layers = list(model.model.layers)
    assert fuse_layers(model) == 3
    assert all(a is b for a, b in zip(layers, model.model.layers, strict=True))


# -- what stays stock -------------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    """Adds something, as adapters do."""

    def forward(self, rows):
        return super().forward(rows) + 0.25


def _adapt(layer, part, name):
    linear = getattr(getattr(layer, part), name)
    adapted = Adapted(linear.in_features, linear.out_features, bias=linear.bias is not None)
    adapted.load_state_dict(linear.state_dict())
    setattr(getattr(layer, part), name, adapted)


@pytest.mark.parametrize(("part", "name"), [("self_attn", "q_proj"), ("self_attn", "o_proj"), ("mlp", "up_proj")])
def test_a_layer_with_a_linear_layer_of_another_class_stays(part, name):
    model, stock = _model("llama_wide"), _model("llama_wide", attn_implementation="eager")
    for one in (model, stock):
        _adapt(one.model.layers[1], part, name)
    layout = probe_layout(model)
    assert fuse_layers(model) == 2
    assert not isinstance(model.model.layers[1], FusedLayer)
    for got, expected in zip(_stepped(model, layout, BACKENDS["cpu"]()), _expected(stock), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("qwen3", {"head_dim": 32}),
        ("llama_wide", {"hidden_act": "gelu"}),
        ("llama_wide", {"head_dim": 16}),
        ("llama_wide", {"head_dim": 48}),
        ("llama_wide", {"intermediate_size": 100}),
        ("mistral_wide", {"hidden_size": 132}),
    ],
)
def test_other_models_and_sizes_that_the_kernels_do_not_take_stay_stock(family, changes):
    model, stock = _model(family, changes), _model(family, changes, attn_implementation="eager")
    layout = probe_layout(model)
    assert fuse_layers(model) == 0
    for got, expected in zip(_stepped(model, layout, ReferenceBackend()), _expected(stock), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_stay_stock(dtype):
    assert fuse_layers(_model("llama_wide", dtype=dtype)) == 0


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"])
def test_a_layer_of_two_types_stays_stock(name):
    model = _model("llama_wide")
    model.model.layers[2].get_submodule(name).bfloat16()
    assert fuse_layers(model) == 2


def test_without_kernels_every_layer_stays_stock(monkeypatch):
    monkeypatch.setattr("kvreuse.engine.fused.load_kernels", lambda: "there is no C++ compiler")
    model = _model("llama_wide")
    assert fuse_layers(model) == 0
    assert not any(isinstance(module, FusedLayer) for module in model.modules())


def test_a_model_in_one_step_of_many_rows_is_exact():
    model, stock = _model("llama_wide"), _model("llama_wide", attn_implementation="eager")
    layout, ids = probe_layout(model), torch.randint(2, VOCAB, (1, 500))
    fuse_layers(model)
    pool = KVPool(layout, num_slots=512)
    piece = StepSlice(first_row=0, num_rows=500, num_context=0, runs=((7, 500),))
    with torch.inference_mode():
        with running(Step(pool, [piece], BACKENDS["cpu"]())):
            got = model(input_ids=ids, position_ids=torch.arange(500)[None], use_cache=False).logits
        torch.testing.assert_close(got, stock(ids).logits, rtol=1e-4, atol=1e-4)
