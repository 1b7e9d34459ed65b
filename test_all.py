"""Every check of flatgpt: plain functions named `test_*`, each with its own asserts.

    python test_all.py                 # the smoke test; the last line counts passed, failed and skipped
    python test_all.py -k resume       # those whose name contains a word; --list names all, --slow adds the long ones
    python -m pytest test_all.py       # the same functions, collected by pytest

A test that needs something this machine lacks raises `Skip` with the reason.
"""
import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import gzip
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest
import warnings
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the project comes first, as it does for `python train.py`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small gain nothing from more, and lose on a busy machine

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import and_masks, or_masks

import attention
import checkpoint
import data
import distributed
import model as model_file
import profile
import train as train_file
from attention import KVCache, attend, sliding_window
from checkpoint import Checkpointer
from model import GPT, PRESETS, ModelConfig
from train import TrainConfig, learning_rate

Skip = unittest.SkipTest  # pytest knows it, too


# ---- helpers ---------------------------------------------------------------------------------------------------------

ONE = distributed.World(torch.device("cpu"))  # process
SHAPES = {
    "llama": dict(norm="rmsnorm", position="rope", mlp="swiglu", qk_norm=True),
    "gpt2": dict(norm="layernorm", position="learned", mlp="gelu", bias=True),
}


def tiny(backend="auto", initial=False, **fields):
    """A GPT of a few thousand random parameters; `initial` gives it the initial weights of training."""
    config = ModelConfig(**dict(dict(vocab_size=64, seq_len=16, n_layer=2, n_head=4, n_embd=64), **fields))
    model = GPT(config, backend)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            p.copy_(model.initial(name, 1)) if initial else p.normal_(mean, 0.1, generator=generator)
    return model


@contextlib.contextmanager
def folder():
    """A temporary folder, as a Path."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fails(kind, words, function, *args, **kwargs):
    """`function` raises `kind` in one line that has all the words."""
    try:
        function(*args, **kwargs)
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing raised, expected {kind.__name__} with {words}")
    assert "\n" not in message and all(word in message for word in words.split()), message


def exit_of(function, *args):
    """(exit code, what was printed) of a function that ends with SystemExit."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            function(*args)
        except SystemExit as error:
            return error.code, output.getvalue()
    return 0, output.getvalue()


def start_python(*argv, **options):
    """A Python process of its own with the project on its path, one thread, its output piped."""
    env = dict(os.environ, PYTHONPATH=str(HERE), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    return subprocess.Popen([sys.executable, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env=env, **options)


def run_python(*argv, code=0, timeout=120, **options):
    """Output of `python argv`; its exit code must be `code`."""
    process = start_python(*argv, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}:\n{output}"
    return output


def wait_for(condition, seconds=60):
    """Wait until `condition()` holds."""
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "timed out"
        time.sleep(0.01)


# ---- attention -------------------------------------------------------------------------------------------------------

def brute_force(q, k, v, allowed, cap):
    """Attention as loops over batch, head and query; `allowed(b, h, t, s)` on plain integers says who sees whom."""
    (batch, heads, queries, width), (shared, keys) = q.shape, k.shape[1:3]
    out = []
    for b, h, t in itertools.product(range(batch), range(heads), range(queries)):
        seen = [s for s in range(keys) if allowed(b, h, keys - queries + t, s)]
        scores = k[b, h * shared // heads, seen] @ q[b, h, t] / width ** 0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        out.append(scores.softmax(0) @ v[b, h * shared // heads, seen])
    return torch.stack(out).view(q.shape)


def masks_of(length):
    """Name -> (predicate, the same on integers): attention.py's, combinations, one of a user who thinks of heads."""
    ids = (torch.arange(length) % 5 == torch.tensor([[3], [4]])).cumsum(1)  # documents of 5, cut elsewhere in each row
    prefix = torch.tensor([3, 0])
    window, documents, prefixed = sliding_window(3), attention.document(ids), attention.prefix_lm(prefix)
    return {
        "causal": (attention.causal, lambda b, h, t, s: s <= t),
        "window": (and_masks(attention.causal, window), lambda b, h, t, s: t - 2 <= s <= t),
        "document": (and_masks(attention.causal, documents), lambda b, h, t, s: s <= t and ids[b, s] == ids[b, t]),
        "prefix": (prefixed, lambda b, h, t, s: s <= t or s < prefix[b]),
        "both": (and_masks(attention.causal, window, documents),
                 lambda b, h, t, s: t - 2 <= s <= t and ids[b, s] == ids[b, t]),
        "any": (or_masks(and_masks(attention.causal, window), prefixed), lambda b, h, t, s: s <= t or s < prefix[b]),
        "user": (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 2) == 0,
                 lambda b, h, t, s: (t - s) % (h + 2) == 0),
    }


PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.006}


@mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # half a second a call otherwise
def test_every_mask_on_every_backend_equals_brute_force():
    """Outputs and gradients, for each dtype, GQA ratio, odd lengths, fewer queries than keys, soft-capped scores."""
    torch.manual_seed(0)
    for queries, keys, heads, shared in [(9, 9, 4, 2), (33, 33, 4, 1), (17, 17, 2, 2), (3, 8, 6, 2), (1, 11, 3, 3)]:
        sizes = [(heads, queries), (shared, keys), (shared, keys)]
        q, k, v = (torch.randn(2, h, n, 8, requires_grad=True) for h, n in sizes)
        for (name, (predicate, allowed)), cap in itertools.product(masks_of(keys).items(), (0.0, 0.7)):
            if cap and name != "both":
                continue
            expected = brute_force(q, k, v, allowed, cap)
            slopes = torch.autograd.grad(expected.square().sum(), (q, k, v))
            for backend, dtype in itertools.product(("auto", "reference", "sdpa", "flash", "math", "flex"), PRECISIONS):
                mask = attention.make_mask(predicate, backend, queries, keys, q.device, batch=2, heads=heads)
                where = backend, name, cap, queries, keys, dtype
                if cap and backend in ("sdpa", "flash", "math"):
                    fails(ValueError, "SDPA soft-capping", attend, q, k, v, mask, backend, cap)
                    continue
                slopes_too = backend != "flex"  # torch has no backward pass of it on a CPU
                inputs = (x.to(dtype) if slopes_too else x.detach().to(dtype) for x in (q, k, v))
                found = attend(*inputs, mask, backend, softcap=cap)
                assert found.dtype == dtype and (found - expected).abs().max() < PRECISIONS[dtype], where
                if slopes_too:
                    others = torch.autograd.grad(found.float().square().sum(), (q, k, v))
                    error = max((a - b).abs().max() / a.abs().max() for a, b in zip(slopes, others))
                    assert error < PRECISIONS[dtype], (where, error)
                if name == "causal":
                    plain = attend(q.detach(), k.detach(), v.detach(), None, backend)
                    assert (plain - expected).abs().max() < 1e-5, where


def test_generation_from_prepacked_weights():
    """The logits are the model's, in both dtypes; a copy has them, so that the model stays what it is meanwhile."""
    shapes = dict(n_kv_head=2, qk_norm=True), dict(tied=True, **SHAPES["gpt2"])
    for shape, dtype, rows in itertools.product(shapes, (torch.float32, torch.bfloat16), (1, 2, 5, 9)):
        model, tokens = tiny(**shape).eval().to(dtype), torch.randint(0, 50, (rows, 7))
        with torch.no_grad():
            packed, expected = model_file.prepacked(model, rows), model(tokens)
            found = packed(tokens)
        assert packed is not model or dtype == torch.bfloat16 or not torch.backends.mkldnn.is_available()
        assert found.dtype == dtype and (found - expected).abs().max() < PRECISIONS[dtype] * expected.abs().max()
        assert packed.embed.weight is model.embed.weight and list(packed.state_dict()) == list(model.state_dict())
    model = tiny(window=4)
    with mock.patch.object(model_file, "prepacked", lambda model, rows: model):
        expected = model.generate([[1, 2], [3]], 9, temperature=0)
    stream = model.stream([[1, 2], [3]], 9, temperature=0)
    columns = [next(stream)]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
        after = model(torch.ones(1, 2, dtype=torch.int64))
        for p in model.parameters():
            p.sub_(1.0)
        assert (after - model(torch.ones(1, 2, dtype=torch.int64))).abs().max() > 0.1, "stale weights"
    columns += stream
    assert [list(column) for column in zip(*columns)] == expected
    handle, hooked = model.blocks[0].mlp.register_forward_hook(lambda part, *_: hooked.append(part)), []
    assert model_file.prepacked(model, 1) is model and model.generate([[1]], 1) and hooked == [model.blocks[0].mlp]
    handle.remove()
    pack = torch.ops.mkldnn._reorder_linear_weight
    with mock.patch.object(torch.ops.mkldnn, "_reorder_linear_weight", wraps=pack) as made:
        model_file.prepacked(model, 1)
    assert made.call_count == 2 * 7 + 1  # the head once
    model, tokens = tiny(), torch.ones(1, 3, dtype=torch.int64)
    up, model.lock = model.blocks[1].mlp.up, threading.Lock()  # what deepcopy cannot take
    plain = up.forward
    up.forward = lambda x: plain(x) * -3
    model.blocks[0].attn.o = nn.utils.parametrizations.weight_norm(model.blocks[0].attn.o)
    model.logits = lambda x: -GPT.logits(model, x)
    with torch.no_grad():
        assert (model_file.prepacked(model, 1)(tokens) - model(tokens)).abs().max() < 1e-5
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model_file.prepacked(model, 1) is model
    assert model_file.prepacked(tiny().half(), 1).embed.weight.dtype == torch.float16
    assert model_file.prepacked(meta(model.config), 1).embed.weight.is_meta


def test_a_bf16_models_cache_is_read_in_fp32_on_a_cpu():
    """Also when the cache is full, and not under autocast, where SDPA would turn it back at each token."""
    for window in 0, 3:
        model = tiny(n_kv_head=2, window=window).eval().bfloat16()
        tokens, cache = torch.randint(0, 50, (2, 9)), KVCache(window or 16)
        with torch.no_grad():
            whole = model(tokens)
            parts = torch.cat([model(part, cache=cache) for part in tokens.split([4, 1, 1, 3], dim=1)], dim=1)
        assert cache.kept["k0"].dtype == torch.float32 and parts.dtype == torch.bfloat16
        assert (whole - parts).abs().max() < 0.02 * whole.abs().max()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model.float()(tokens, cache=(cache := KVCache(window or 16)))
        assert cache.kept["k0"].dtype == torch.bfloat16
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--steps=2", "--dtype=bf16", "--window=8")
        assert code == 0 and "---- sample" in output, output


def test_cached_logits_equal_uncached():
    """One token at a time, in chunks, prompts longer than the window or of unequal length; RoPE, learned, all masks."""
    masks = [{}, dict(window=4), dict(window=1), dict(doc_start=7), dict(doc_start=7, restart_positions=True),
             dict(window=4, doc_start=7, restart_positions=True, softcap=1.0, head_softcap=2.0)]
    shapes = dict(n_kv_head=2, qk_norm=True), dict(tied=True, **SHAPES["gpt2"])
    for shape, mask in itertools.product(shapes, masks):
        model = tiny(**shape, **mask, seq_len=32).eval()
        tokens = torch.randint(8, 64, (2, 27))
        tokens[0, 5] = tokens[1, 1] = tokens[1, 9] = tokens[1, 24] = 7
        with torch.no_grad():
            whole = model(tokens)
            for sizes in [1] * 27, [5, 5, 17], [9, *[1] * 18], [3, 2, 1] * 4 + [3], [25, 2]:
                cache = KVCache(mask.get("window", 27))
                pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split(sizes, dim=1)], dim=1)
                assert (pieces - whole).abs().max() < 1e-5, (shape, mask, sizes)
            cache = KVCache(mask.get("window", 30), padding=torch.tensor([[3], [0]]))
            padded = torch.cat([nn.functional.pad(tokens[:1], (3, 0)), torch.randint(64, (1, 30))])
            shifted = torch.cat([model(piece, cache=cache) for piece in padded.split(6, dim=1)], dim=1)[0, 3:]
            assert (shifted - whole[0]).abs().max() < 1e-5, (shape, mask)


def test_a_cache_keeps_the_newest():
    """Its memory is allocated once, and what the new tokens may look at comes in order."""
    for capacity, sizes in [(32, [1] * 20), (4, [1] * 20), (4, [6, 1, 2, 3, 4, 1, 1, 2]), (1, [1, 2, 1, 3])]:
        cache, come, where = KVCache(capacity), 0, set()
        for size in sizes:
            new, seen = torch.arange(come, come + size).view(1, 1, size, 1), cache.advance(size)
            kept, come = cache.extend("k", new).flatten().tolist(), come + size
            assert kept == [*range(come - seen, come)]
            assert seen == min(come, capacity - 1 + size) and cache.kept["k"].size(-2) == capacity
            where.add(cache.kept["k"].data_ptr())
        assert len(where) == 1


def test_positions_restart_with_each_document():
    """Then a document's logits do not depend on its place; RoPE sees a difference of rounding alone."""
    for shape in SHAPES.values():
        model, plain = (tiny(doc_start=7, restart_positions=restart, **shape) for restart in (True, False))
        tokens = torch.randint(8, 64, (2, 16))
        tokens[:, 0] = tokens[0, 6] = tokens[1, 9] = 7
        alone = torch.cat([model(tokens[:1, :6])[0], model(tokens[:1, 6:])[0]])
        assert (model(tokens)[0] - alone).abs().max() < 1e-5
        differ = (model(tokens) - plain(tokens)).abs().amax(dim=-1)
        assert differ[0, :6].max() < 1e-5 and (differ[0, 6:].min() > 1e-2) == (shape["position"] == "learned"), differ
        assert differ.max() < 1e-5 or shape["position"] == "learned"
    fails(ValueError, "--restart_positions without --doc_mask", ModelConfig, restart_positions=True)
    configs = [checkpoint.hf_config(dataclasses.asdict(m.config)) for m in (model, plain, tiny(**SHAPES["gpt2"]))]
    assert configs[0] == configs[1] == configs[2], "one document, which is what is continued, has the same positions"


def test_masks_are_built_once_per_shape_or_batch():
    """Never once a layer; a compiled model takes a mask that is there already, and never asks for one token's."""
    attention.MASKS.clear()
    for fields, rule, expected in [(dict(window=4), {}, 1), (dict(doc_start=7), {}, 3), ({}, {}, 0),
                                   ({}, dict(rule=attention.prefix_lm(torch.tensor([3, 9]))), 3)]:
        model, tokens = tiny(n_layer=3, **fields), torch.randint(64, (2, 12))
        with mock.patch.object(attention, "make_mask", wraps=attention.make_mask) as made:
            for _ in range(3):
                model(tokens, **rule)
            assert made.call_count == expected, f"{fields}: {made.call_count}; right where rules differ by batch"
            model.generate([[1, 2, 3]], 30 if fields.get("window") else 10)
            assert made.call_count <= expected + 11 * (expected == 3), "a token sees all that the cache keeps"
    model, graphs = tiny(window=4), []
    model(tokens)
    torch.compile(model, backend=lambda graph, inputs: graphs.append(graph.code) or graph, fullgraph=True)(tokens)
    assert len(graphs) == 1 and graphs[0].count("torch.arange(") == 2, "the positions' and RoPE's, and no mask's"
    for length in range(5, 16):
        model(tokens[:, :length])
    assert len(attention.MASKS) <= 8
    attention.MASKS.clear()
    for mode in FakeTensorMode, contextlib.nullcontext, FakeTensorMode:  # neither takes the other's
        with mode():
            tiny(window=4)(torch.zeros(2, 12, dtype=torch.int64))
    assert [type(mask) for mask in attention.MASKS.values()] == [torch.Tensor]


def test_slow_lengths_that_vary_leave_three_graphs():
    """The first length's, one for all, and one for those within a window; every one of them exact."""
    tokens = torch.randint(64, (2, 12))
    for fields in {}, dict(window=4):
        torch._dynamo.reset()
        attention.MASKS.clear()
        model, graphs, parts = tiny(**fields), [], [tokens[:, :length] for length in (9, 10, 12, 7, 3)]
        call = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
        found = [call(part) for part in parts]
        assert all((logits - model(part)).abs().max() < 1e-5 for logits, part in zip(found, parts))
        assert len(graphs) <= 3, len(graphs)


def test_a_rule_in_causals_place():
    """Prefix-LM: all see the prefix, which is each row's own, also in a cache and behind filler; heads of their own."""
    model, prompts = tiny(window=9).eval(), [[3, 1, 4, 1, 5], [9, 2]]
    tokens, rule = torch.tensor([prompts[0]]), attention.prefix_lm(torch.tensor([4]))
    other = tokens.clone()
    other[0, 3] = 8
    assert all((model(tokens, rule=rule) - model(other, rule=rule))[0, t].any() for t in range(5))
    assert not (model(tokens) - model(other))[0, :3].any()
    rows = [model.generate([row], 8, temperature=0, rule=attention.prefix_lm(torch.tensor([n])))[0]
            for row, n in zip(prompts, (4, 2))]
    assert rows == model.generate(prompts, 8, temperature=0, rule=attention.prefix_lm(torch.tensor([4, 2])))
    def strided(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx) % (h + 1) == 0)

    def sinks(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx >= 0) & torch.arange(14).lt(3)[kv_idx].logical_or(q_idx - kv_idx < 4)
    tokens = torch.randint(64, (1, 14))
    for rule, fields in (strided, {}), (sinks, {}), (sinks, dict(softcap=1.0)):
        model = tiny(window=9, **fields).eval()
        whole = model(tokens, rule=rule)
        for sizes in 1, 5:
            cache, filled = KVCache(9), KVCache(9, torch.tensor([[3], [0]]))
            pieces = torch.cat([model(piece, cache=cache, rule=rule) for piece in tokens.split(sizes, dim=1)], dim=1)
            assert (pieces - whole).abs().max() < 1e-5 and (whole - model(tokens)).abs().max() > 0.1
            padded = torch.cat([nn.functional.pad(tokens, (3, 0))[:, :14], tokens])
            pieces = torch.cat([model(piece, cache=filled, rule=rule) for piece in padded.split(sizes, dim=1)], dim=1)
            assert (pieces[0, 3:] - whole[0, :11]).abs().max() < 1e-5 and (pieces[1] - whole[0]).abs().max() < 1e-5


def test_a_mask_that_a_fork_adds_counts_everywhere():
    """One more rule in model_mask: neither SDPA's triangle nor another model's mask comes in its place."""
    source = Path(attention.__file__).read_text()
    assert source.count("    rules = [rule]  #") == 1, "a fork with rules of its own may drop this test"
    forked = source.replace("    rules = [rule]", "    rules = [rule] + [lambda b, h, q, k: (q - k) % STEP == 0]")
    tokens = torch.randint(64, (2, 12))
    for step in 2, 3:
        names = {"__name__": "forked", "STEP": step}
        exec(compile(forked, "forked", "exec"), names)
        for fields in {}, dict(window=9):
            with mock.patch.object(model_file, "model_mask", names["model_mask"]):
                model, cache = tiny(**fields), names["KVCache"](fields.get("window", 12))
                whole = model(tokens)
                pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split(5, dim=1)], dim=1)
                other = tokens.clone()
                other[:, 0] = (other[:, 0] + 1) % 64
                moved = (model(other) - whole).abs().amax(dim=(0, 2))
            assert (pieces - whole).abs().max() < 1e-5 and moved[step] and not moved[1]
            assert (whole - tiny(**fields)(tokens)).abs().max() > 0.1


def test_attention_keeps_to_its_document_and_its_window():
    """Another token in document 1 moves the logits of document 2 by exactly 0; so beyond the window, in one layer."""
    for backend in "sdpa", "reference", "math":
        tokens = torch.randint(8, 64, (2, 16))
        tokens[:, 0] = tokens[0, 6] = tokens[1, 9] = 7
        other = tokens.clone()
        other[:, 3] = (other[:, 3] + 1) % 56 + 8
        moved = tiny(backend, doc_start=7)(tokens) - tiny(backend, doc_start=7)(other)
        assert moved[0, 3:6].abs().amin(dim=0).max() > 0 and not moved[0, 6:].any() and not moved[1, 9:].any()
        assert moved[1, 3:9].any() and (tiny(backend)(tokens) - tiny(backend)(other))[0, 6:].any()
        moved = tiny(backend, window=4, n_layer=1)(tokens) - tiny(backend, window=4, n_layer=1)(other)
        assert all(moved[:, t].any() for t in range(3, 7)) and not moved[:, 7:].any() and not moved[:, :3].any()


def test_generation_goes_on_past_the_context_or_says_so():
    """With RoPE the cache keeps the newest; learned positions end, and the message carries the numbers."""
    model = tiny().eval()
    new = model.generate([[1, 2, 3], [4]], 40, temperature=0)  # seq_len is 16
    assert [len(row) for row in new] == [40, 40]
    assert new[1] == model.generate([[4]], 40, temperature=0)[0], "a row must not depend on its neighbours"
    fails(ValueError, "sees 16 tokens", tiny(position="learned").generate, [[1]], 40)
    fails(ValueError, "prompt of 17", model.generate, [[1] * 17], 1)
    fails(ValueError, "prompt is empty", model.generate, [[]], 1)


def test_sampling_options():
    """temperature 0, top-k, top-p, seed and stop do what they say."""
    model = tiny(vocab_size=8).eval()
    likeliest = model.generate([[1, 2]], 12, temperature=0)
    assert model.generate([[1, 2]], 12, top_k=1) == likeliest == model.generate([[1, 2]], 12, top_p=1e-9)
    assert model.generate([[1, 2]], 12, seed=5) == model.generate([[1, 2]], 12, seed=5)
    assert len({str(model.generate([[1, 2]], 12, seed=seed)) for seed in range(5)}) > 1
    drawn, = model.generate([[1, 2]], 12, seed=5)
    stop = drawn[3]
    assert model.generate([[1, 2]], 12, seed=5, stop=stop)[0] == drawn[:drawn.index(stop)]
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    drawn = {model_file.pick(logits, 1.0, 0, 0.6, None).item() for _ in range(100)}
    assert drawn == {0, 1}, f"0.5 is less than top_p 0.6, 0.5 + 0.3 is not: drew {drawn}"


# ---- model -----------------------------------------------------------------------------------------------------------

def test_published_parameter_counts():
    """Every preset has exactly the published number of parameters."""
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
                 "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920}
    for name in PRESETS.keys() - {"nano"}:
        with torch.device("meta"):
            found = GPT(ModelConfig(**PRESETS[name])).num_params()
        assert found == published.get(name), f"{name}: {found:,}, published {published.get(name)}"


def test_untrained_loss_is_ln_v():
    """Before training all tokens are about equally likely, whatever the shape."""
    for fields in {}, dict(tied=True), dict(n_embd=256, vocab_size=1000), dict(n_embd=384, tied=True, **SHAPES["gpt2"]):
        model = tiny(**fields, initial=True)
        tokens = torch.randint(model.config.vocab_size, (8, 17))
        loss = model(tokens[:, :-1], tokens[:, 1:]).item() / tokens[:, 1:].numel()
        assert abs(loss - math.log(model.config.vocab_size)) < 0.1, (fields, loss)


def test_loss_is_a_sum_and_ignores_minus_100():
    """The loss of a batch is the sum over its halves, and an ignored target adds nothing."""
    model, tokens = tiny(), torch.randint(64, (4, 17))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    halves = model(x[:2], y[:2]) + model(x[2:], y[2:])
    assert abs(model(x, y) - halves) / halves < 1e-6
    y[2:] = -100
    assert abs(model(x, y) - model(x[:2], y[:2])) < 1e-3
    assert model(x, y).dtype == torch.float32


def test_chunked_loss_equals_plain():
    """Loss and gradients are the same when the logits are made chunk by chunk."""
    model, tokens = tiny(vocab_size=1000), torch.randint(1000, (4, 17))
    results = []
    for chunks in 1, 10:
        with mock.patch.object(model_file, "loss_chunks", lambda *sizes: chunks):
            model.zero_grad()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            if chunks > 1:
                with torch.no_grad():
                    assert abs(model(tokens[:, :-1], tokens[:, 1:]) - loss) / loss < 1e-6
                loss = model(tokens[:, :-1], tokens[:, 1:])
                fails(RuntimeError, "second derivatives", torch.autograd.grad, loss, model.embed.weight, None, None, 1)
        results.append((loss.item(), model.head.weight.grad.clone(), model.embed.weight.grad.clone()))
    (loss, *grads), (chunked, *others) = results
    assert abs(chunked - loss) / loss < 1e-6
    for grad, other in zip(grads, others):
        assert (grad - other).abs().max() < 1e-5 * grad.abs().max()


def test_slow_chunked_loss_memory():
    """V=50304, T=1024, B=8: the chunked loss peaks below 40 % of the plain one's memory."""
    script = """
import resource, sys, torch, model
C, V, N = 64, 50304, 8 * 1024
model.loss_chunks = model.loss_chunks if int(sys.argv[1]) else lambda *sizes: 1
torch.manual_seed(0)
gpt = model.GPT(model.ModelConfig(vocab_size=V, n_layer=1, n_embd=C, n_head=1, seq_len=1024))
x = torch.randint(V, (8, 1024))
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = gpt(x, x)
loss.backward()
print(loss.item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"""
    (plain_loss, plain), (loss, chunked) = (
        map(float, run_python("-c", script, str(chunked)).split()) for chunked in (0, 1))
    assert abs(loss - plain_loss) / plain_loss < 1e-6
    assert chunked < 0.4 * plain, f"chunked {chunked / 1e6:.2f} GB, plain {plain / 1e6:.2f} GB"


def test_a_model_survives_the_meta_device():
    """A model built on the meta device and materialized computes what a directly built one does."""
    direct = tiny()
    with torch.device("meta"):
        model = GPT(direct.config)
    model.to_empty(device="cpu")
    model.load_state_dict(direct.state_dict())
    assert not [*model.buffers()]  # which would be garbage
    tokens = torch.randint(64, (1, 9))
    assert torch.equal(model(tokens), direct(tokens))


def test_llama3_rope_scaling():
    """Fast pairs turn as before, slow ones `factor` times slower, and nothing in between leaves that range."""
    config = ModelConfig(**PRESETS["llama-3.1-8b"])
    plain = model_file.rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    ratio = model_file.rope_frequencies(config) / plain
    assert ratio[0] == 1 and abs(ratio[-1] - 1 / 8) < 1e-6 and (ratio.diff() <= 0).all()
    wavelength = 2 * math.pi / plain
    assert torch.equal(ratio == 1, wavelength <= 8192 / 4) and torch.equal(ratio < 0.12501, wavelength >= 8192)


def test_positions_are_relative_with_rope():
    """Attention scores of rotated queries and keys depend on the distance of their positions alone."""
    model = tiny()
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    turned = [(model_file.rotate(q, model.rope(torch.tensor([n + 3]))),
               model_file.rotate(k, model.rope(torch.tensor([n])))) for n in (0, 5, 50)]
    scores = [(query * key).sum() for query, key in turned]
    assert max(scores) - min(scores) < 1e-4


def test_flops_of_a_window_are_those_of_its_keys():
    """The formula's mean number of keys is the mask's, to half a key."""
    for window in 1, 5, 15:
        model, plain = tiny(window=window), tiny()
        rule = and_masks(attention.causal, sliding_window(window))
        mask = attention.make_mask(rule, "sdpa", 16, 16, torch.device("cpu"))
        per_key = 12 * model.config.n_layer * model.config.n_embd
        keys = 8 - (plain.flops_per_token(16) - model.flops_per_token(16)) / per_key
        assert abs(keys - mask.sum().item() / 16) <= 0.5, (window, keys)


def test_flops_per_token_match_the_counter():
    """6 per parameter in a matrix product, and attention: what torch's counter sees on the plain backend."""
    from torch.utils.flop_counter import FlopCounterMode
    model = tiny(backend="reference")
    tokens = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    masked = 6 * model.config.n_layer * model.config.n_embd * 16
    expected = (model.flops_per_token(16) + masked) * tokens.numel()  # the plain backend computes the masked half, too
    assert abs(counter.get_total_flops() / expected - 1) < 0.01, (counter.get_total_flops(), expected)


def test_initial_weights_depend_on_seed_and_name_alone():
    """A wider vocabulary or another layer count leaves the other parameters as they were; another seed does not."""
    few, many = tiny(n_layer=1, initial=True), tiny(n_layer=3, initial=True)
    assert torch.equal(few.blocks[0].attn.q.weight, many.blocks[0].attn.q.weight)
    assert not torch.equal(few.blocks[0].attn.q.weight, few.blocks[0].attn.k.weight)
    assert not torch.equal(few.initial("embed.weight", 1), few.initial("embed.weight", 2))


# ---- training: the toolkit's exercises, on our GPT -------------------------------------------------------------------

def test_overfit_one_batch():
    """A model that cannot learn eight sequences by heart has a bug."""
    model, tokens = tiny(initial=True), torch.randint(64, (8, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / 128
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1, loss.item()


def test_every_optimizer_learns_and_adamw_beats_sgd():
    """100 steps of next-token prediction on real text, from the same weights."""
    text = torch.frombuffer(bytearray(Path(model_file.__file__).read_bytes()), dtype=torch.uint8).long()
    losses = {}
    for name, lr in [("sgd", 0.05), ("adamw", 3e-3), ("muon", 3e-3)]:
        model = tiny(vocab_size=256, initial=True)
        config = TrainConfig(optimizer=name)
        optimizers = train_file.build_optimizer(model, config, lr, torch.float32)
        assert {p for o in optimizers for g in o.param_groups for p in g["params"]} == set(model.parameters())
        generator = torch.Generator().manual_seed(0)
        for step in range(100):
            starts = torch.randint(len(text) - 17, (16, 1), generator=generator)
            tokens = text[starts + torch.arange(17)]
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 256
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.setdefault(name, []).append(loss.item())
    last = {name: sum(values[-10:]) / 10 for name, values in losses.items()}
    assert losses["sgd"][0] == losses["adamw"][0] and last["sgd"] < losses["sgd"][0] - 1
    assert last["adamw"] < last["sgd"] - 0.2 and last["muon"] < last["sgd"] - 0.2, last


def test_newton_schulz_makes_orthogonal():
    """All singular values end up near 1, for wide and tall matrices, in fp32 as torch's own does in bf16."""
    from torch.optim._muon import _zeropower_via_newtonschulz
    for shape in (16, 40), (40, 16):
        x = torch.randn(shape)
        found = train_file.newton_schulz(x, 5)
        assert ((values := torch.linalg.svdvals(found)) > 0.5).all() and (values < 1.3).all(), values
        theirs = _zeropower_via_newtonschulz(x, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
        assert (found - theirs).abs().max() < 0.05


def test_bf16_loss_is_close_to_fp32():
    """Autocast moves the loss by less than 0.5 %, and the loss itself stays fp32."""
    model, tokens = tiny(), torch.randint(64, (8, 17))
    full = model(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        half = model(tokens[:, :-1], tokens[:, 1:])
    assert half.dtype == torch.float32 and half != full and abs(half / full - 1) < 0.005, (half, full)


def test_compiled_equals_eager_without_graph_breaks(backend="aot_eager", shapes=("masked",)):
    """Loss and gradients of the compiled model, with masks; `fullgraph=True` fails at the first graph break."""
    for shape in shapes:
        model, tokens = tiny(initial=True, **dict(vars(shaped(shape, False)), n_layer=1)), torch.randint(67, (2, 17))
        tokens[:, 7], results = 3, []
        for call in model, torch.compile(model, fullgraph=True, backend=backend):
            model.zero_grad()
            loss = call(tokens[:, :-1], tokens[:, 1:], **rule_of(shape, tokens))
            loss.backward()
            results.append((loss.item(), model.embed.weight.grad.clone()))
        (eager, grad), (compiled, other) = results
        assert abs(compiled / eager - 1) < 1e-5 and (grad - other).abs().max() < 1e-4 * grad.abs().max(), shape


def test_slow_masks_leave_two_compiled_graphs():
    """Fifty steps, five evaluations, a sample: one graph for training, one without gradients. Flex: the same."""
    from torch._dynamo.testing import CompileCounterWithBackend
    masks = dict(window=4), dict(doc_start=7, restart_positions=True), dict(window=4, doc_start=7, softcap=2.0), {}
    for backend, fields in itertools.product(("auto", "flex"), masks):
        torch._dynamo.reset()
        model, plain = tiny(backend, n_layer=1, **fields), tiny(n_layer=1, **fields)
        with torch.no_grad():
            model(torch.zeros(1, 16, dtype=torch.int64))  # the masks of this shape, which `pick_backend` makes on a GPU
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for step in range(50):
            tokens = torch.randint(64, (2, 17))
            tokens[:, step % 16] = 7
            x, y = tokens[:, :-1], tokens[:, 1:]
            rule = {} if fields else dict(rule=attention.prefix_lm(tokens[:, 0] % 9))
            if backend == "auto":  # Flex has no backward pass on a CPU
                compiled(x, y, **rule).backward()
            if step % 10 == 0:
                with torch.no_grad():
                    assert abs(compiled(x, y, **rule) / plain(x, y, **rule) - 1) < 1e-5
        with torch.compiler.set_stance("force_eager"):
            model.generate([[1, 2, 3]], 10)
        with torch.no_grad():
            compiled(x, y, **rule)
        assert counter.frame_count <= 2, (backend, fields, counter.frame_count)


def test_slow_flex_compiled_on_a_cpu():
    """What runs on CUDA outside a compiled model, as far as a CPU can: block mask and kernel by inductor, forward."""
    if not train_file.pick_compile(TrainConfig(compile="on"), ONE, None)[0]:
        raise Skip("torch.compile needs a C++ compiler")
    plain, fused = (tiny(backend, window=4, doc_start=7, softcap=2.0) for backend in ("reference", "flex"))
    with torch.no_grad(), mock.patch.object(attention, "fused", lambda function, device: attention.compiled(function)):
        for place in 3, 5:
            tokens = torch.randint(8, 64, (2, 16))
            tokens[:, place] = 7
            assert (fused(tokens) - plain(tokens)).abs().max() < 1e-5


def test_slow_compiled_by_inductor():
    """The same through the C++ (or Triton) code that training runs."""
    if not train_file.pick_compile(TrainConfig(compile="on"), ONE, None)[0]:
        raise Skip("torch.compile needs a C++ compiler")
    test_compiled_equals_eager_without_graph_breaks("inductor", ("llama", "window", "document", "masked", "prefix"))


def test_learning_rate_schedules():
    """Warm-up, peak, end; never negative, and defined for every step of any run length."""
    for schedule, end in [("cosine", 0.1), ("wsd", 0.0)]:
        config = TrainConfig(steps=100, warmup=10, schedule=schedule)
        rates = [learning_rate(step, config, 1.0) for step in range(100)]
        assert abs(rates[0] - 0.1) < 1e-9 and abs(rates[10] - 1) < 1e-9 and abs(rates[-1] - end) < 0.03
        assert all(0 < rate <= 1 for rate in rates)
    assert 0 < learning_rate(0, TrainConfig(steps=1, warmup=0), 1.0) <= 1


def test_command_line():
    """Both spellings of every form; a misspelt flag names the nearest one and ends with exit code 2, in one line."""
    parse = functools.partial(train_file.parse_args, TrainConfig, "train.py")
    config = parse(["--batch-size=8", "--n_layer", "3", "--lr=1e-3", "--save-every", "7"])
    assert (config.batch_size, config.n_layer, config.lr, config.save_every) == (8, 3, 1e-3, 7)
    for argv, words in [(["--bath_size", "3"], "did you mean --batch_size?"), (["--steps=0"], "--steps is 0"),
                        (["--block_size=8"], "did you mean --seq_len?"), (["--max_iters=8"], "did you mean --steps?"),
                        (["--steps=x"], "invalid int"), (["--n_embd=100", "--n_head=3"], "not divisible"),
                        (["--model=gpt3"], "gpt2-medium"), (["--lr=nan"], "--lr is nan"),
                        (["--resume=maybe"], "auto, never"), (["--no_reshard"], "no effect without --fsdp"),
                        (["--tp=0"], "--tp is 0"), (["--timeout=0"], "--timeout is 0")]:
        code, output = exit_of(parse, argv)
        assert code == 2 and words in output and output.count("\n") == 1, (argv, output)
    assert len(dataclasses.fields(TrainConfig)) <= 60
    assert train_file.parse_args(data.DataConfig, "data.py", ["a", "--out=o", "b"]).sources == ["a", "b"]
    usage = "(usage: model.py [flags] [--] run [prompt ...]; model.py --help)"
    for argv, words in [([], "required: run"), (["--start=x"], "argument --start (usage"),  # not what is missing
                        (["out", "-x"], f"unrecognized arguments: -x {usage}"),
                        (["out", "--max_new_tokens=9"], "did you mean --tokens?"),
                        (["out", "--seed", "--", "5"], "argument --seed: expected one argument"),
                        (["out", "--seed=--"], f"argument --seed: expected one argument {usage}"),
                        (["out", "--seed=x"], usage),
                        (["out", "--top_k=-1"], "--top_k is -1, expected 0 or more"),
                        (["out", "--top_p=0"], "--top_p is 0.0, expected above 0, at most 1")]:
        code, output = exit_of(train_file.parse_args, model_file.SampleConfig, "model.py", argv)
        assert code == 2 and words in output and output.count("\n") == 1, output
    argv = ["--top-k=3", "out", "--", "-x", "--a-b", "--"]
    literal = train_file.parse_args(model_file.SampleConfig, "model.py", argv)
    assert (literal.top_k, literal.run, literal.prompt) == (3, "out", ["-x", "--a-b", "--"])
    assert train_file.parse_args(checkpoint.CheckpointConfig, "checkpoint.py", ["--", "verify", "-x"]).folder == "-x"
    code, output = exit_of(parse, ["--no_fsdp", "--", "-x"])
    assert code == 2 and "unrecognized arguments: -x (usage: train.py [flags]; train.py --help)" in output, output
    code, output = exit_of(parse, ["--help"])
    assert code == 0 and "None" not in output and "(wsd)" in output, output
    for name in PRESETS:  # which TrainConfig repeats, for it is there before torch
        assert parse([f"--model={name}"]).model == name
    narrow = train_file.model_config(TrainConfig(model="llama-3.2-1b", n_embd=256, n_head=8), 257)
    assert (narrow.n_embd, narrow.n_hidden) == (256, 1024)  # the preset's proportion, in whole 64s
    assert train_file.model_config(TrainConfig(model="qwen3-0.6b", n_embd=33, n_head=8), 257).n_hidden == 128
    script = """
import runpy, sys
sys.argv = ["train.py", "--help"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)"""
    assert run_python("-c", script, cwd=HERE).splitlines()[-1] == "False", "--help waits for torch"


SMALL = ["--n_layer=2", "--n_embd=32", "--n_head=2", "--seq_len=32", "--batch_size=8", "--device=cpu", "--dtype=fp32",
         "--log_every=5", "--eval_tokens=640"]


def train_here(*flags, catch=True):
    """train.py in this process -> (exit code, output); the signal handlers are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what tests have imported takes `distributed.stop` most of a second to look through
    try:
        config = train_file.parse_args(TrainConfig, "train.py", [*SMALL, *flags])
        return exit_of(lambda: sys.exit(train_file.train(config))) if catch else train_file.train(config)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def metrics_of(run):
    """metrics.jsonl -> {step: loss}, {step: val_loss}; every step is there once and in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1)), losses
    return dict(losses), {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def test_a_checkpoint_is_said():
    """When it is on the disk, and with --async_save when training goes on."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        for kind, word in ("--no_async_save", "written"), ("--async_save", "begun"):
            code, output = train_here(f"--data={d}/data", f"--out={d}/{word}", kind, "--steps=4", "--save_every=2")
            assert code == 0 and re.findall(r"step (\d)  checkpoint (\w+) in \d\.\d s\n", output) == [
                ("2", word), ("4", word)], output


def test_resumed_run_is_the_run():
    """Law 3: stopped by SIGKILL or Ctrl-C and resumed, the losses are the uninterrupted run's, bit for bit."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", "--steps=60", "--save_every=20", "--eval_every=30", "--dropout=0.1"]
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "validation loss" in output and "sample" in output, output
        whole = metrics_of(d / "whole")
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "complete at step 60" in output and "--steps 120" in output, output

        process = start_python(train_file.__file__, *SMALL, f"--out={d}/killed", *flags)
        wait_for(lambda: (d / "killed/checkpoints/step_00000020").exists() or process.poll() is not None)
        process.kill()
        process.communicate()
        code, output = train_here(f"--out={d}/killed", *flags)
        assert code == 0 and "resumed at step" in output and metrics_of(d / "killed") == whole, output

        def interrupt():
            wait_for(lambda: (d / "stopped/metrics.jsonl").exists() and (d / "stopped/metrics.jsonl").stat().st_size)
            os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        thread.start()
        code, output = train_here(f"--out={d}/stopped", *flags)
        thread.join()
        assert code == 130 and "stopped at step" in output and "SIGINT" in output, output
        code, output = train_here(f"--out={d}/stopped", *flags)
        assert code == 0 and "resumed at step" in output and metrics_of(d / "stopped") == whole, output

        code, output = train_here(f"--out={d}/stopped", *flags, "--n_layer=3")
        assert code == 1 and "n_layer 2 (here 3): use its flags (--" in output and "(--resume" not in output, output
        code, output = train_here(f"--out={d}/stopped", *flags, "--resume=never", "--steps=1")
        assert code == 0 and "stopped.1" in output and metrics_of(d / "stopped.1") == whole, output


def test_what_a_run_says_of_going_on_is_true():
    """From before wsd's decay a run becomes the longer one; stopped after --resume STEP, the next one takes auto."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags, handler = [f"--data={d}/data", "--save_every=4"], signal.getsignal(signal.SIGTERM)
        output = train_here(f"--out={d}/out", "--steps=8", *flags)[1]
        assert signal.getsignal(signal.SIGTERM) is handler  # a notebook goes on
        assert "To go on, add to the command --steps 16 --resume 4 (once: later checkpoints go)" in output, output
        shutil.copytree(d / "out", d / "late")
        output = train_here(f"--out={d}/late", "--steps=16", *flags)[1]
        assert "note      the learning rate had come to 0.00e+00 and goes on at 9.00e-03" in output, output
        # What goes on from a finished run's end has no checkpoint of a longer run; what is lower does not rise.
        assert "--steps 32 (where the rate rises again)" in output, output
        output = train_here(f"--out={d}/late", "--steps=32", "--resume=12", "--lr=1e-9", *flags)[1]
        assert "the learning rate had" not in output, output
        output = train_here(f"--out={d}/late", "--steps=32", "--sdpa=math", *flags)[1]
        assert "what computes float32, attention flash is now float32, attention math" in output, output
        with mock.patch.object(train_file, "loop", lambda *_: 1):  # killed before the next save: auto must not take 8
            train_here(f"--out={d}/out", "--steps=16", "--resume=4", *flags)
        assert Checkpointer(d / "out").steps() == [4]
        with mock.patch.object(train_file, "watch_signals", lambda aloud: contextlib.nullcontext([signal.SIGTERM])):
            code, output = train_here(f"--out={d}/out", "--steps=16", "--resume=4", *flags)
        assert "learning rate had" not in output, output
        assert code == 143 and "step 5 by SIGTERM: --resume auto goes on from there" in output, output
        # A signal is a save rather than an evaluation, and breaks off the one that it comes in, also the last.
        whole = train_file.evaluate
        for name, caught, last in ("before", [signal.SIGTERM], 2), ("within", [], 2), ("end", [], 1):
            def evaluate(run, step, stopped):
                return whole(run, step, lambda: caught.append(signal.SIGTERM) or stopped())
            watch = mock.Mock(return_value=contextlib.nullcontext(caught))
            with mock.patch.multiple(train_file, watch_signals=watch, evaluate=evaluate):
                code, output = train_here(f"--out={d}/{name}", f"--steps={last}", "--eval_every=1", *flags)
            assert code == 143 and "stopped at step 1 by SIGTERM: the same command goes on from there" in output, output
            assert "validation loss" not in output and Checkpointer(d / name).steps() == [1], output
            assert (len(caught) == 1) == (name == "before")  # that one does not even begin
            # A run that was stopped, or killed, between the two makes up for the evaluation, once.
            for steps, due in (last, {1, last}), (3, {2, 3}), (3, set()):
                assert train_here(f"--out={d}/{name}", f"--steps={steps}", "--eval_every=1", *flags)[0] == 0
                evaluated = metrics_of(d / name)[1]
                assert due <= evaluated.keys() and len(evaluated) == steps, evaluated
        assert train_here(f"--out={d}/out", "--steps=16", *flags)[0] == 0
        assert train_here(f"--out={d}/whole", "--steps=16", *flags)[0] == 0
        assert metrics_of(d / "out") == metrics_of(d / "whole")
        note = (d / "out/checkpoints/step_00000016/state.json").read_text()
        for broken in note.replace('"n_layer"', '"layers"'), '{"step": 16, "extra": {}}':
            (d / "out/checkpoints/step_00000016/state.json").write_text(broken)
            relist(d / "out/checkpoints/step_00000016")
            code, output = exit_of(lambda: train_here(f"--out={d}/out", "--steps=16", *flags, catch=False))
            assert code == 1 and "another version" in output and output.count("\n") == 1, output
            assert "another version" in command(model_file, d / "out")[0]


def test_metrics_lines_have_every_field():
    """The fields that plotting tools may count on, and null for what is not known."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        train_here(f"--data={d}/data", f"--out={d}/out", "--steps=2", "--warmup=1")
        step, *_, validation = map(json.loads, (d / "out/metrics.jsonl").read_text().splitlines())
        names = "step loss lr grad_norm tokens tokens_per_s mfu peak_mem_gb data_wait_s elapsed_s"
        assert " ".join(step) == names and step["tokens"] == 8 * 32 and step["elapsed_s"] > 0
        assert " ".join(validation) == "step val_loss val_bpb elapsed_s"
        meta = json.loads((d / "data/meta.json").read_text())
        nats_per_bit = validation["val_loss"] / validation["val_bpb"]
        assert abs(nats_per_bit / math.log(2) - meta["val_bytes"] / meta["val_tokens"]) < 1e-9


def test_metrics_are_whole_lines_after_a_full_disk():
    """What is refused is written with the next line; a line torn by a power cut goes, and the one glued to it."""
    with folder() as d:
        path, row = d / "metrics.jsonl", dict(step=1, loss=2.0)
        run = SimpleNamespace(world=SimpleNamespace(writer=True), config=SimpleNamespace(out=str(d)), unwritten=b"")
        train_file.write_metrics(run, [row])

        class Full(io.FileIO):
            def write(self, content):
                return super().write(content[:9])
        with mock.patch.object(train_file, "open", lambda path, *_, **__: Full(path, "a"), create=True):
            fails(OSError, "No space metrics.jsonl", train_file.write_metrics, run, [dict(row, step=2)])
        assert path.read_text().count("\n") == 1 and path.read_text().endswith("\n")
        train_file.write_metrics(run, [dict(row, step=3, loss=math.nan)])
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
        with open(path, "a") as file:
            file.write('{"step": 4, "lo{"step": 5, "loss": 1.0}\n')
            file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "loss": 1.0}\n')
            file.buffer.write(b"\xff\xfe{rubbish\n")
        train_file.cut_metrics(path, 6)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 6]


def test_nobody_reads_the_output():
    """`train.py | head`, or a log on a full disk: the run goes on, without a word; also one that goes back a step."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        nobody, pipe = os.pipe()
        os.close(nobody)
        for sink, resume in (pipe, "auto"), *([("/dev/full", "1")] if os.path.exists("/dev/full") else []):
            with contextlib.redirect_stdout(open(sink, "w")):
                assert train_here(f"--data={d}/data", f"--out={d}/out", "--steps=3", "--save_every=1", "--keep=9",
                                  f"--resume={resume}", catch=False) == 0
            assert Checkpointer(d / "out").steps() == [1, 2, 3] == sorted(metrics_of(d / "out")[0])


def test_fp16_with_its_scaler_runs_and_resumes():
    """From its own and from an fp32 checkpoint."""
    assumed = mock.patch.object(profile, "peak_flops", lambda *_: (1e12, "assumed"))  # measuring a slow fp16 takes long
    with folder() as d, assumed:
        data.prepare([model_file.__file__], d / "data")
        for dtype, steps in ("fp32", 2), ("fp16", 4), ("fp16", 6):
            code, output = train_here(f"--data={d}/data", f"--out={d}/out", f"--steps={steps}", f"--dtype={dtype}",
                                      "--n_embd=16", "--n_layer=1", "--batch_size=2", "--seq_len=8", "--eval_tokens=8")
            assert code == 0 and f"complete at step {steps}" in output, output
        assert len(metrics_of(d / "out")[0]) == 6


def planted(raw, scaler, poison):
    """The run whose `update` comes next, after a backward pass and with a gradient made infinite by `poison`."""
    run = SimpleNamespace(raw=raw, scaler=scaler, config=TrainConfig(), skipped=0, world=None, peak_lr=0.01,
                          optimizers=train_file.build_optimizer(raw, TrainConfig(), 0.01, torch.float32))
    tokens = torch.arange(17)[None]
    scaler.scale(raw(tokens[:, :-1], tokens[:, 1:])).backward()
    if poison:
        local(raw.blocks[0].attn.q.weight.grad)[0, 0] = float("inf")
    return run


def test_what_is_not_finite_skips_all_optimizers_alike():
    """An inf in one hidden matrix, or in the loss, leaves every parameter and moment alone; fp16's scale halves."""
    for enabled, poison, loss in itertools.product((True, False), (True, False), (1.0, math.nan)):
        model, scaler = tiny(initial=True), torch.amp.GradScaler("cpu", enabled=enabled)
        run = planted(model, scaler, poison)
        before = [p.detach().clone() for p in model.parameters()]
        train_file.update(run, torch.tensor(loss), 0.01)
        skipped = poison or math.isnan(loss)
        assert run.skipped == skipped
        assert not enabled or scaler.get_scale() == (2.0 ** 15 if skipped else 2.0 ** 16)
        assert skipped == all(map(torch.equal, before, model.parameters()))
        assert skipped == (not any(optimizer.state for optimizer in run.optimizers))


def test_too_many_skips_end_the_run_and_keep_the_last_good_checkpoint():
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = ["--save_every=1", "--max_skips=2", "--steps=40", "--lr=1e30", "--warmup=0", "--eval_every=0"]
        code, output = train_here(f"--data={d}/data", f"--out={d}/out", *flags)
        assert code == 1 and output.count("update skipped") == 3 and "--max_skips" in output, output
        lines = [json.loads(line) for line in (d / "out/metrics.jsonl").read_text().splitlines()]
        assert all(None in (line["loss"], line["grad_norm"]) for line in lines[-3:]), lines
        checkpointer = Checkpointer(d / "out")
        model = GPT(ModelConfig(**checkpointer.read_extra()["model"]))
        assert checkpointer.load(model) and all(p.isfinite().all() for p in model.parameters())


def test_law_1_and_2_accumulation_equals_one_batch():
    """Four micro-batches of four are one batch of sixteen, also when targets are ignored unevenly among them."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        losses = []
        ragged = data.batches

        def ignoring(*args):  # the first sequence of each batch has hardly a target, later ones have all
            for number, (x, y) in enumerate(ragged(*args)):
                y[0, number % 2 + 1:] = -100
                yield x, y
        for flags in ["--micro_batch=16"], ["--micro_batch=4"]:
            train_here(f"--data={d}/data", f"--out={d}/{flags[0]}", "--batch_size=16", "--steps=5", *flags)
            losses.append(metrics_of(d / flags[0]))
        for first, second in zip(losses[0], losses[1]):
            assert all(abs(first[step] / second[step] - 1) < 1e-5 for step in first), losses


def test_evaluation_gives_the_same_value_twice_and_for_any_micro_batch():
    """Fixed windows: the validation loss of a checkpoint does not depend on when or in what portions it is computed."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        args = [f"--data={d}/data", f"--out={d}/out", "--steps=1"]
        config = train_file.parse_args(TrainConfig, "train.py", [*SMALL, *args])
        with contextlib.redirect_stdout(io.StringIO()):
            run = train_file.setup(config, distributed.start("cpu"), 8)
        with contextlib.redirect_stdout(io.StringIO()):
            first = train_file.evaluate(run, 1)
            assert train_file.evaluate(run, 1) == first
            for micro_batch in 1, 3:
                run.micro_batch = micro_batch
                assert abs(train_file.evaluate(run, 1)["val_loss"] / first["val_loss"] - 1) < 1e-6


def test_wrong_input_to_training_is_one_line():
    """Mistakes are found before step 0: exit code 2 for flags, 1 for files, one line, nothing written."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        (d / "file").write_text("")
        flags = [f"--data={d}/data", f"--out={d}/out", "--steps=3"]
        for wrong, expected, words in [
                (["--micro_batch=3"], 2, "--micro_batch 3 --batch_size 8 take"), (["--fsdp"], 2, "--fsdp torchrun"),
                (["--tp=2"], 2, "--tp 2 torchrun"), (["--timeout=9"], 2, "--timeout 9 torchrun"),
                (["--replicas=2"], 2, "--replicas 2"),
                (["--attention=flex"], 1, "--attention flex CPU"), (["--sdpa=cudnn"], 1, "--sdpa cudnn"),
                (["--attention=sdpa", "--softcap=9"], 1, "--attention sdpa soft-capping"),
                (["--fsdp", "--offload"], 2, "--offload Muon adamw bf16"),
                (["--attention=reference", "--sdpa=math"], 2, "--attention reference --sdpa math"),
                (["--n_layer=99999999999"], 2, "n_layer"),
                (["--restart_positions"], 2, "--restart_positions --doc_mask"),
                (["--window=-1"], 2, "window -1"), (["--window=32"], 2, "window 32 seq_len 32 leave out"),
                (["--softcap=nan"], 2, "softcap nan"), (["--weight_decay=inf"], 2, "--weight_decay inf"),
                (["--profile"], 1, "--profile 10 3 --steps"),
                (["--seed=99999999999999999999"], 2, "--seed 99999999999999999999"),
                (["--timeout=99999999999"], 2, "--timeout 99999999999"), (["--data="], 2, "--data empty"),
                (["--init_from="], 2, "--init_from empty"), (["--n_embd=1000000"], 1, "allocate memory smaller"),
                (["--data=nowhere"], 1, "nowhere data.py"), (["--seq_len=100000"], 1, "--seq_len 100000"),
                ([f"--out={d}/data/"], 2, "--out and --data are both"),
                ([f"--out={d}/file"], 2, "file is a file, expected a folder"), (["--resume=7"], 1, "7")]:
            code, output = exit_of(lambda: train_here(*flags, *wrong, catch=False))
            assert code == expected and output.count("\n") == 1, (wrong, code, output)
            assert all(word in output for word in words.split()), (wrong, output)
            assert not (d / "out").exists(), wrong
        for name in "TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT":
            with mock.patch.dict(os.environ, {name: "1"}):
                code, output = exit_of(lambda: train_here(*flags, "--resume=never", catch=False))
            assert code == 2 and "--max-restarts" in output and output.count("\n") == 1, output
        output = run_python(train_file.__file__, "--data=nowhere", code=1)
        assert output.count("\n") == 1 and output.startswith("train.py: nowhere"), output


def test_a_fallback_says_so_once_with_its_reason():
    """Law 8: eager instead of compiled, the reference instead of SDPA, fp32 instead of bf16."""
    config = TrainConfig(compile="on", tp=2, activation_checkpoint="block")
    assert "take --sdpa math" in train_file.pick_compile(config, ONE, "flash")[1]
    ddp = distributed.World(torch.device("cpu"), mesh=SimpleNamespace(mesh_dim_names=("replicate",)))
    config = TrainConfig(compile="on", activation_checkpoint="selective")
    for version, world, told in ("2.12.1", ddp, True), ("2.13.0", ddp, False), ("2.12.1", ONE, False):
        with mock.patch.object(torch, "__version__", torch.torch_version.TorchVersion(version)), \
                mock.patch.object(shutil, "which", lambda name: name):
            compiled, why = train_file.pick_compile(config, world, None)
        assert compiled and ("keeps no more" in why) == told, (version, why)
    with folder() as d, mock.patch.object(shutil, "which", lambda name: None), \
            mock.patch.object(torch.cpu, "get_capabilities", dict):
        data.prepare([model_file.__file__], d / "data")
        code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--steps=2", "--dtype=auto", "--compile=on",
                                  "--softcap=9")
        assert code == 0, output
        for words in ("compile off: it needs a C++ compiler and found none, install g++", "fp32 (bf16 is not fast",
                      "attention reference, not flash: SDPA has no soft-capping"):
            assert output.count(words) == 1, (words, output)


def test_slow_nothing_grows_over_2000_steps():
    """With evaluations and both kinds of saves: the process's peak memory after a fifth of the run is the last one."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        for kind in "--async_save", "--no_async_save":
            run_python(train_file.__file__, *SMALL, f"--data={d}/data", f"--out={d}/{kind}", kind, "--steps=2000",
                       "--save_every=100", "--eval_every=100")
            rows = [json.loads(line) for line in (d / kind / "metrics.jsonl").read_text().splitlines()]
            peaks = [row["peak_mem_gb"] for row in rows if "loss" in row]
            assert len(peaks) == 2000 and peaks[-1] < 1.01 * peaks[400], (kind, peaks[::200])


def test_a_signal_that_takes_a_compiler_with_it_is_one_line():
    """As Ctrl-C does, which reaches the whole process group; without a signal, or of our own, the traceback stays."""
    def failing(run, batches, step, signalled=True, kind=torch._dynamo.exc.TorchDynamoException):
        if signalled:
            os.kill(os.getpid(), signal.SIGINT)
        raise kind("g++ has ended\nwith many lines")
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = f"--data={d}/data", f"--out={d}/out", "--steps=3"
        train_here(*flags, "--save_every=1")
        with mock.patch.object(train_file, "optimizer_step", failing):
            code, output = train_here(*flags, "--steps=5")
        assert code == 130 and output.endswith("from the newest checkpoint, if there is one\n"), (code, output)
        assert "train.py: SIGINT ended a compilation" in output and "many lines" not in output, output
        for hidden in dict(signalled=False), dict(kind=RuntimeError):
            with mock.patch.object(train_file, "optimizer_step", functools.partial(failing, **hidden)):
                try:
                    train_here(*flags, "--steps=5")
                except RuntimeError as error:
                    assert "many lines" in str(error)
                else:
                    raise AssertionError(f"an error was hidden: {hidden}")
        assert "resumed at step 3" in train_here(*flags, "--steps=5")[1]


def test_two_runs_in_one_folder():
    """The second one is refused, also where it would rename the first; when that has gone, however, it may."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", f"--out={d}/out", "--steps=2", *SMALL]
        (d / "out").mkdir()

        def first(out):
            claimed = train_file.claim(out)
            (out / "config.json").write_text('{\n  "config": {}}')
            time.sleep(60 if claimed else 0)
        pid, = forked(1, first, d / "out")
        wait_for((d / "out/config.json").exists)
        for more in [], ["--resume=never"], ["--resume=7"]:
            code, output = exit_of(lambda: train_here(*flags, *more, catch=False))
            assert code == 1 and "another run" in output and output.count("\n") == 1, output
        os.kill(pid, signal.SIGKILL)
        assert exit_codes([pid]) == [-signal.SIGKILL] and train_here(*flags)[0] == 0

        def begins(run):  # after this one has looked for a run
            pids.extend(forked(1, first, d / "new"))
            wait_for((d / "new/config.json").exists)
        pids = []
        with mock.patch.object(train_file, "open_run", begins):
            code, output = train_here(*flags, f"--out={d}/new", "--resume=never")
        os.kill(pids[0], signal.SIGKILL)
        assert code == 1 and "another run" in output and not (d / "new.1").exists(), output


def test_what_cannot_be_leaves_what_is_there():
    """No run is renamed, and no folder half filled, by a command that fails; defaults fit learned positions."""
    def command(file, *argv):
        with mock.patch.object(sys, "argv", [f"{file.__name__}.py", *map(str, argv)]):
            code, output = exit_of(file.main)
        return (code, output) if not isinstance(code, str) else (1, code)
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", f"--out={d}/out", "--eval_every=0", "--model=gpt2"]
        assert train_here(*flags, "--steps=2")[0] == 0
        refused = ["--resume=never", "--attention=flex"] if not torch.cuda.is_available() else ["--steps=1"]
        assert train_here(*flags, *refused)[0] == 1 and not (d / "out.1").exists()
        code, output = train_here(*flags, "--steps=1")
        assert code == 1 and "--steps 1 is below step 2" in output, output
        code, output = command(model_file, d / "out", "def", "--seed", 1)
        assert code == 0 and output.startswith("def"), output
        shutil.copytree(d / "out/checkpoints", d / "other_checkpoints")
        # A copy anywhere is the checkpoint it was.
        os.rename(d / "other_checkpoints/step_00000002", d / "step_00000002")
        same = command(model_file, d / "step_00000002", "def", "--seed", 1)
        missing = command(model_file, d / "out/checkpoints/step_00000009", "def")
        assert same == (0, output) and missing[0] == 1 and "9: there is no such checkpoint" in missing[1], missing
        data.prepare([checkpoint.__file__], d / "other")
        code, output = train_here(*flags, f"--data={d}/other", "--steps=4")
        assert code == 1 and "is a run with tokens to train on" in output and output.count("\n") == 1, output
        assert f"use its flags (--data {d}/data --model gpt2" in output, output  # that differ, that were given
        metrics = (d / "out/metrics.jsonl").read_text()
        shutil.copytree(d / "out", d / "bare")
        shutil.rmtree(d / "bare/checkpoints")
        (d / "bare/checkpoints").touch()
        code, output = train_here(*flags, f"--out={d}/bare", "--steps=1")
        assert code == 1 and "checkpoints is no folder: remove it" in output, output
        (d / "bare/checkpoints").unlink()
        (d / "bare/checkpoints").symlink_to("unmounted")
        for resume in "auto", "never":
            code, output = train_here(*flags, f"--out={d}/bare", "--steps=1", f"--resume={resume}")
            assert code == 1 and "mount what it links to" in output and not (d / "bare.1").exists(), output
        assert (d / "bare/metrics.jsonl").read_text() == metrics
        (d / "bare/checkpoints").unlink()
        for kept in metrics, None:
            code, output = train_here(*flags, f"--out={d}/bare", "--steps=1")
            assert code == 0 and "the lines of metrics.jsonl are now in metrics.old.jsonl" in output, output
            kept = kept or metrics + again
            again = (d / "bare/metrics.jsonl").read_text()
            assert (d / "bare/metrics.old.jsonl").read_text() == kept
            shutil.rmtree(d / "bare/checkpoints")
        (d / "hf").mkdir()
        (d / "hf/config.json").write_text('{"model_type": "gpt2"}')
        code, output = train_here(*flags, f"--out={d}/hf", "--steps=2")
        assert code == 1 and "hf/config.json is not of a run" in output, output
        (d / "hf/metrics.jsonl").touch()
        assert "hf is a run without a complete checkpoint" in command(model_file, d / "hf")[1]
        fails(ValueError, "hf is a run: python checkpoint.py export", checkpoint.read_hf, d / "hf")
        fails(ValueError, "nowhere does not exist; expected a Hugging Face folder", checkpoint.read_hf, d / "nowhere")
        shutil.rmtree(d / "hf")
        os.rename(d / "data", d / "out/data")
        code, output = train_here(*flags, f"--data={d}/out/data", "--steps=2")
        assert code == 0 and "is now" in output, output
        assert checkpoint.open_model(d / "out", lambda fields: GPT(ModelConfig(**fields)))[1]["data"] == f"{d}/out/data"
        assert train_here(*flags, f"--data={d}/out/data", f"--out={d}/out/below", "--steps=1")[0] == 0
        before = sorted(d.rglob("*"))
        code, output = train_here(*flags, f"--data={d}/out/data", "--steps=2", "--resume=never")
        assert code == 0 and "out.1" in output and set(os.listdir(d / "out.1")) == {"config.json", "metrics.jsonl",
                                                                                    "checkpoints"}, output
        # Data and another run, which were below, are where they were. What is no run is not moved.
        (d / "mine/profile").mkdir(parents=True)
        assert train_here(*flags, f"--data={d}/out/data", f"--out={d}/mine", "--steps=1", "--resume=never")[0] == 0
        assert (d / "mine/profile").exists() and not (d / "mine.1").exists()
        assert all(path.exists() for path in before)
        os.rename(d / "out/data", d / "data")
        (d / "out/config.json").write_text("[]")
        extra = checkpoint.open_model(d / "out", lambda fields: GPT(ModelConfig(**fields)))[1]
        assert extra["data"] == f"{d}/out/data" and train_here(*flags, "--steps=2")[0] == 0
        code, output = command(checkpoint, "import", d / "out", d / "imported")
        output = exit_of(lambda: train_here(*flags, f"--out={d}/imported", catch=False))[1]
        assert "export it, then --init_from" in output and output.count("\n") == 1, output
        assert code == 0 and command(train_file, f"--data={d}/data", f"--init_from={d}/imported")[0] == 2
        with open(d / "out/metrics.jsonl", "a") as file:
            file.write('{"step": 3, "lo')
        assert command(profile, "plot", d / "out")[0] == 0
        code, output = command(profile, "plot", d / "nothere")
        assert (code, output) == (1, f"profile.py plot: {d}/nothere/metrics.jsonl: No such file or directory"), output
        for argv in ["--tp=2"], ["--save_every=9"], ["--resume=never"], ["--no_reshard", "--fsdp"], ["plot", "--typo"]:
            code, output = command(profile, *argv)
            assert code == 2 and output.count("\n") == 1 and argv[-1].split("=")[0] in output, output
        assert set(profile.IDLE) < {field.name for field in dataclasses.fields(TrainConfig)}
        model = tiny()
        with torch.no_grad():
            model.embed.weight[0, 0] = 1e30
        fails(ValueError, "float16 --dtype fp32", checkpoint.export_hf, model,
              dataclasses.asdict(model.config), d / "hf", torch.float16)
        assert not (d / "hf").exists()


def test_a_command_ends_in_silence_when_nobody_reads_on():
    """As before `| head`."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, distributed.__file__], stdout=pipe, stderr=pipe) as run:
        run.stdout.close()
        assert run.stderr.read() == b"" and run.wait(60) == 1
    with mock.patch.object(sys, "argv", ["distributed.py"]), mock.patch.object(sys, "stdout", None):  # `>&-`
        distributed.main()
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) as narrow:
        train_file.parse_args(TrainConfig, "train.py", [])
        print("é", flush=True)
        assert narrow.buffer.getvalue() == b"?\n"


def test_a_word_that_no_test_has_fails():
    with mock.patch.object(sys, "argv", ["test_all.py", "-k", "nowhere"]):
        code, output = exit_of(lambda: sys.exit(main()))
    assert code == 1 and output.startswith("no test has nowhere in its name: --list names them\n"), output


def test_profile_leaves_the_standard_library_alone():
    """With the project first on the path, cProfile, pdb and what imports them work."""
    script = """
import cProfile, pstats, profile, io
cProfile.run("sum(range(10))", "/dev/null" if __import__("os").name != "nt" else "nul")
profile.Profile().runctx("sum(range(10))", {}, {})
import pdb
pdb.Pdb(stdin=io.StringIO("step\\ncontinue\\n"), stdout=io.StringIO()).run("sum(range(10))")
import torch.distributed.checkpoint, torch._dynamo
assert profile.__file__.endswith("profile.py") and profile.Meter
print("fine")"""
    assert run_python("-c", script).strip() == "fine"


def test_slow_cprofile_of_the_main_job():
    """`python -m cProfile train.py` from the project's folder."""
    output = run_python("-m", "cProfile", "-s", "cumtime", "train.py", "--fsdp", "--help", cwd=HERE)
    assert "--profile_detail" in output and "function calls" in output and "train.py:1(<module>)" in output, output


def test_prun_of_ipython_from_the_projects_folder():
    """%prun takes `cProfile`, which imports `profile`."""
    if not importlib.util.find_spec("IPython"):
        raise Skip("pip install ipython")
    script = """
from IPython.core.interactiveshell import InteractiveShell
print(InteractiveShell.instance().run_line_magic("prun", "-q -r sum(range(10))").total_calls)"""
    assert int(run_python("-c", script, cwd=HERE).split()[-1]) > 1


def test_mfu_of_a_matrix_product_is_100_percent():
    """Peak and Meter agree within 3 % on the same product.

    On the processor's clock, which stands still while other programs run. Both are measured one after the other, in
    several rounds: a machine that others share may be slower from one second to the next.
    """
    cpu, size = torch.device("cpu"), 1024
    repeat = functools.partial(profile.timeit.repeat, timer=time.process_time)
    a, b = torch.randn(2, size, size)
    with mock.patch.object(profile, "timeit", SimpleNamespace(repeat=repeat, default_timer=time.process_time)):
        for _ in range(20):
            peak, source = profile.peak_flops(cpu, torch.float32)
            meter, found = profile.Meter(2 * size, peak, cpu), []  # a "token" is one of size^2 results
            for _ in range(4):
                meter.start()
                a @ b
                found.append(meter.read(size ** 2)["mfu"])
            if abs(max(found) - 1) < 0.03:
                break
    assert "measured" in source and abs(max(found) - 1) < 0.03, found
    assert profile.peak_flops(cpu, torch.float32, 5.0) == (5e12, "--peak_tflops")


def test_peaks_of_gpus_are_the_data_sheets():
    """By the names that drivers give; GeForce cards at their reference boost clocks have NVIDIA's published figures.

    Only a part of a GPU, and a name that merely holds a known one, are not in the table.
    """
    for name, peak in [("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
                       ("NVIDIA H200", 989), ("NVIDIA B200", 2250), ("NVIDIA L4", 121), ("NVIDIA L40S", 362),
                       ("AMD Instinct MI300X", 1307), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
                       ("NVIDIA RTX A1000", None), ("NVIDIA T4", None)]:
        assert profile.data_sheet(SimpleNamespace(name=name)) == peak, name
    for name, multiprocessors, mhz, peak in [
            ("3060", 28, 1777, 25.5), ("3070", 46, 1725, 40.6), ("3080", 68, 1710, 59.5), ("3090", 82, 1695, 71.2),
            ("3090 Ti", 84, 1860, 80.0), ("4060", 24, 2460, 30.2), ("4080", 76, 2505, 97.5), ("4090", 128, 2520, 165.2),
            ("5070", 48, 2512, 61.7), ("5080", 84, 2617, 112.6), ("5090", 170, 2407, 209.5)]:
        gpu = SimpleNamespace(name=f"NVIDIA GeForce RTX {name}", multi_processor_count=multiprocessors,
                              clock_rate=1000 * mhz)
        assert abs(profile.data_sheet(gpu) / peak - 1) < 0.003, (name, profile.data_sheet(gpu))
        with mock.patch.object(torch.cuda, "get_device_properties", lambda _: gpu):
            flops, source = profile.peak_flops(torch.device("cuda"), torch.bfloat16)
        assert abs(flops / peak / 1e12 - 1) < 0.003 and source == f"NVIDIA GeForce RTX {name}'s dense peak"


def profiled(d, *flags):
    """Output of a short run in folder d with --profile, and the shares of its step in percent."""
    code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--resume=never", "--profile", *flags)
    assert code == 0, output
    return output, dict((name, float(share)) for name, share in re.findall(r"(\w+) ([\d.]+)%", output))


def test_profile_of_a_run_says_where_its_time_went():
    """The regions add up to the step; a loader that sleeps is data-bound."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        output, shares = profiled(d, "--steps=11", "--n_embd=128", "--seq_len=64")
        assert abs(sum(shares[name] for name in profile.REGIONS) - 100) < 5, output
        assert "data-bound" not in output and "communication-bound" not in output, output
        events = trace_of(d)
        names = [event.get("name") for event in events]
        assert names.count("optimizer") == names.count("backward") == profile.SCHEDULE["active"], set(names)
        assert not any("Input Dims" in event.get("args", {}) for event in events)
        assert (d / "out/profile/trace_rank0.json.gz").stat().st_size < 1e6
        assert "aten::mm" in (d / "out/profile/operators.txt").read_text()
        assert (d / "out/profile/summary.txt").read_text() in output
        file = d / "out/profile/trace_rank0.json.gz"
        limit = file.stat().st_size // 3
        profile.shrink(file, limit)
        left = trace_of(d)
        assert file.stat().st_size <= limit and len(left) < len(events) / 2 and sum(
            event in left for event in events if event["ph"] == "M" or event["name"] in profile.REGIONS) > 12

        read = data.TokenDataset.__getitems__
        with mock.patch.object(data.TokenDataset, "__getitems__", lambda *args: time.sleep(0.05) or read(*args)):
            output, _ = profiled(d, "--steps=11", "--n_layer=1", "--micro_batch=4")
        assert "diagnosis: data-bound" in output, output


def trace_of(d):
    with gzip.open(d / "out/profile/trace_rank0.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_slow_profile_detail_has_shapes_stacks_and_memory():
    """In the trace of a single step, for it is twice as large, and in the table of operators."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        output = profiled(d, "--steps=10", "--n_layer=1", "--profile_detail")[0]
        assert "1 steps of" in output and "Input Shapes" in (d / "out/profile/operators.txt").read_text(), output
        events = trace_of(d)
        names = [event.get("name", "") for event in events]
        assert names.count("optimizer") == 1 and "[memory]" in names, set(names)
        assert any("train.py" in name and "optimizer_step" in name for name in names), set(names)
        assert any("Input Dims" in event.get("args", {}) for event in events)


def traced(name, start, end, device="CUDA", annotation=False, parent=None):
    """An event as torch.profiler has them, in microseconds."""
    return SimpleNamespace(name=name, is_user_annotation=annotation, device_type=SimpleNamespace(name=device),
                           time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
                           cpu_parent=parent, self_cpu_time_total=end - start)


def test_summary_on_cuda_has_fragmentation():
    """The allocator's peaks as torch.cuda.memory_stats has them."""
    events = [traced("ProfilerStep#7", 0, 100, "CPU", True), traced("gemm", 0, 90)]
    trace = SimpleNamespace(events=lambda: events, key_averages=lambda **_: SimpleNamespace(table=lambda *_, **__: ""),
                            export_chrome_trace=lambda path: Path(path).touch())
    stats = {"allocated_bytes.all.peak": 3 * 10 ** 9, "reserved_bytes.all.peak": 4 * 10 ** 9}
    with folder() as d, mock.patch.object(torch.cuda, "memory_stats", lambda device: stats):
        code, output = exit_of(profile.Profiler(d, torch.device("cuda")).finish, trace)
        trace.export_chrome_trace = mock.Mock(side_effect=OSError(28, "No space left on device"))
        failed = exit_of(profile.Profiler(d, torch.device("cuda")).finish, trace)[1]
    assert failed == "no profile: [Errno 28] No space left on device\n", failed
    assert "3.00 GB allocated, 4.00 GB reserved, fragmentation 25.0%" in output, output


def test_kernels_are_those_of_the_gpu_or_operators_that_no_other_called():
    linear = traced("aten::linear", 0, 9, "CPU")
    host = [linear, traced("aten::addmm", 1, 8, "CPU", parent=linear), traced("forward", 0, 20, "CPU"),
            traced("aten::mul", 10, 12, "CPU", parent=traced("forward", 0, 20, "CPU"))]
    assert [event.name for event in profile.parts(host)[-1]] == ["aten::linear", "aten::mul"]
    device = [traced("gemm", 0, 9), traced("ncclDevKernel", 0, 9), traced("forward", 0, 9, annotation=True)]
    assert [event.name for event in profile.parts(host + device)[-1]] == ["gemm"]


def test_a_graph_break_is_reported_with_its_line():
    """A planted .item() and a change of shape, each with the place it comes from."""
    def planted(x):
        return x + x.sum().item()
    torch.compiler.reset()
    compiled, line = torch.compile(planted, backend="eager"), planted.__code__.co_firstlineno + 1
    with folder() as d:
        profiler = profile.Profiler(d, torch.device("cpu"), say=lambda *_, **__: None)
        with profiler:
            for n in range(sum(profile.SCHEDULE.values())):
                with profiler.region("forward"):
                    compiled(torch.ones(*[3] * (1 + n % 2)))
                profiler.step()
        found = (d / "summary.txt").read_text().splitlines()
    torch.compiler.reset()
    broken = [text for text in found if "graph break" in text and f"test_all.py, line {line}" in text]
    assert len(broken) == 1 and "item" in broken[0], found
    assert [text for text in found if "recompiled planted" in text and "rank mismatch" in text], found


def test_communication_is_hidden_while_work_is_running():
    """The arithmetic of a GPU's trace: two streams of kernels, half of the communication beside a product."""
    events = [traced("ProfilerStep*", 0, 100, "CPU", True), traced("forward", 0, 40, "CPU", True),
              traced("backward", 40, 100, "CPU", True), traced("forward", 0, 100, annotation=True),
              traced("gemm", 0, 50), traced("ncclDevKernel", 30, 70), traced("gemm", 70, 80)]
    text = "\n".join(profile.summarize(events))
    for words in ["GPU idle 20.0%", "hidden 20.0%, not hidden 20.0%", "forward 40.0%", "60.0%  gemm", "40.0%  nccl"]:
        assert words in text, (words, text)
    assert "bound" in text and "forward" not in text.split("not hidden")[1], text


def test_profiling_off_costs_nothing_and_want_of_memory_is_one_line():
    """No torch.profiler object, no file, microseconds a region; on OutOfMemoryError what to change, and exit code 1."""
    profiler = profile.Profiler(False, torch.device("cpu"))
    with mock.patch.object(torch.profiler, "profile", None), profiler:
        start = time.perf_counter()
        for _ in range(1000):
            with profiler.region("forward"):
                profiler.step()
        assert time.perf_counter() - start < 0.1 and profiler.region("data").__class__ is contextlib.nullcontext

    snapshots = []
    with folder() as d, mock.patch.object(torch.cuda.memory, "_record_memory_history", lambda **_: None), \
            mock.patch.object(torch.cuda.memory, "_dump_snapshot", snapshots.append):
        on_cpu = RuntimeError("[enforce fail at x.cpp:9] . can't allocate memory: 20.00 MiB. Error 12\nframes")
        on_cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        for profiler, error in (profiler, on_cpu), (profile.Profiler(d, torch.device("cuda"), rank=1), on_cuda):
            def fill():
                with profiler:
                    raise error
            said, _ = exit_of(fill)
            assert "\n" not in said, said
            assert "20.00 MiB" in said and "--micro_batch" in said, said
            assert ("--profile, memory_rank1.pickle" in said) == (error is on_cuda), said
        assert snapshots == [str(d / "memory_rank1.pickle")]


def test_plot_of_runs():
    """A picture where matplotlib is, otherwise charts with the first and the last value in their corners."""
    with folder() as d:
        for run, start in ("a", 4.0), ("b", 3.0):
            (d / run).mkdir()
            lines = [dict(step=n, loss=start - n / 10, lr=0.1, grad_norm=1.0, tokens_per_s=9.0) for n in range(1, 11)]
            (d / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs = profile.read_curves([d / "a", d / "b"])
        with mock.patch.dict(sys.modules, {"matplotlib": None}):
            _, output = exit_of(profile.plot, runs)
        assert output.startswith("loss 2 to 3.9, steps 1 to 10: * "), output
        assert output.count("steps 1 to 10") == 4 and "val_loss" not in output, output  # nobody has evaluated yet
        top, *_, bottom = output.splitlines()[1:13]
        assert top.startswith("*") and bottom.endswith("o") and len(bottom) == 100, output
        with mock.patch.object(sys, "argv", ["profile.py", "plot", f"{d}/nothing"]):
            assert "nothing" in str(exit_of(profile.main)[0])
        with mock.patch.object(sys, "argv", ["profile.py", "plot", f"{d}/a", "--tensorboard"]), \
                mock.patch.dict(sys.modules, {"tensorboard": None}):
            sys.modules.pop("torch.utils.tensorboard", None)
            code = exit_of(profile.main)[0]
        assert "pip install tensorboard" in code and "\n" not in code, code


def plotted(*flags):
    """`python profile.py plot` of a run of ten steps, two evaluated -> (output, the run's folder's files)."""
    with folder() as d:
        lines = [dict(step=n, loss=4 - n / 10, lr=0.1, grad_norm=1.0, tokens_per_s=9.0) for n in range(1, 11)]
        lines += [dict(step=n, val_loss=4.0) for n in (5, 10)]
        (d / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with mock.patch.object(sys, "argv", ["profile.py", "plot", str(d), *flags]):
            code, output = exit_of(profile.main)
        assert code == 0 and str(d) in output, (code, output)
        yield d


def test_plot_by_matplotlib():
    if not importlib.util.find_spec("matplotlib"):
        raise Skip("pip install matplotlib")
    for d in plotted():
        assert 10_000 < (d / "metrics.png").stat().st_size < 100_000


def test_plot_for_tensorboard():
    """Each curve with its steps; what a second call writes takes the first one's place."""
    if not importlib.util.find_spec("tensorboard"):
        raise Skip("pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for d in plotted("--tensorboard"):
        profile.write_events(profile.read_curves([d]))
        events = EventAccumulator(str(d / "tensorboard")).Reload()
        found = {name: [(event.step, round(event.value, 4)) for event in events.Scalars(name)]
                 for name in events.Tags()["scalars"]}
        assert found == profile.read_curves([d])[d], found


def test_benchmark_of_a_step():
    """A JSON line for each combination that this machine has, in words what it leaves out, and no file."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [*SMALL[:-2], "--compile=off", "--json", f"--data={d}/data"]
        with mock.patch.object(sys, "argv", ["profile.py", *flags]), \
                mock.patch.object(model_file, "loss_chunks", model_file.loss_chunks):  # which it changes
            code, output = exit_of(profile.main)
        assert code == 0, output
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        rows, (loading, *checkpoints, generation) = rows[:-4], rows[-4:]
        assert loading["tokens_per_s"] > rows[0]["tokens_per_s"] and generation["tokens_per_s"] > 0, output
        assert all(0 < row["training_stalled_s"] <= row["written_after_s"] for row in checkpoints), output
        assert len({(row["activation_checkpoint"], row["loss_chunks"]) for row in rows}) == len(rows) == 4, output
        assert "compiled rows: off" in output and all(row["tokens_per_s"] > 0 < row["mfu"] for row in rows), output
        assert loading["times_the_step"] > 1 and all(row["kernels"] > 100 for row in rows), output
        assert rows[2]["activation_checkpoint"] == "block" and rows[2]["kernels"] > rows[0]["kernels"], output
        assert [path.name for path in d.iterdir()] == ["data"]


def test_readme_names_what_exists():
    """Each `file.name`, test and flag on the page; flags of torchrun, Slurm and this file are listed here."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    files = dict(attention=attention, model=model_file, data=data, distributed=distributed, checkpoint=checkpoint,
                 profile=profile, train=train_file)
    for file, names in re.findall(r"`(\w+)\.([A-Za-z_][\w.]*)`", text):
        if file in files and names not in ("py", "bin"):
            functools.reduce(getattr, names.split("."), files[file])
    assert not set(re.findall(r"\btest_\w+", text)) - globals().keys() - {"test_all"}
    commands = TrainConfig, profile.PlotConfig, data.DataConfig, model_file.SampleConfig, checkpoint.CheckpointConfig
    known = {field.name for command in commands for field in dataclasses.fields(command)}
    others = """help gpus gpu machine json list slow
        standalone nproc_per_node nnodes rdzv_id rdzv_backend rdzv_endpoint
        max-restarts monitor-interval rdzv_conf signals-to-handle
        requeue dependency exclusive mem nodes ntasks-per-node gpus-per-node cpus-per-task time signal kill-on-bad-exit
        local-dir"""
    assert not set(re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", text)) - known - set(others.split())


def test_launches_of_the_readme_are_launches():
    """The flags of each train.py on the page are flags, and its batch and model divide by the processes it starts."""
    text = re.sub(r"\\\n\s*", "", (HERE / "README.md").read_text(encoding="utf-8")).replace('"$SLURM_NNODES"', "4")
    found = re.findall(r"^    (?:srun .*)?(python|torchrun .*) train\.py(.*?)(?:  +#.*)?$", text, re.M)
    assert len(found) >= 7, found
    for launcher, flags in found:
        sizes = [int(n) for n in re.findall(r"--n(?:nodes|proc_per_node)=(\d+)", launcher)]
        config = train_file.parse_args(TrainConfig, "train.py", re.sub(r"--init_from \S+", "", flags).split())
        fields = train_file.model_config(config, 257)
        shape = distributed.layout(config.fsdp, config.replicas, config.tp, math.prod(sizes), n_head=fields.n_head)
        ranks = math.prod(n for name, n in shape.items() if name != "tp")
        assert config.batch_size % (ranks * train_file.pick_micro_batch(config, ranks)) == 0, (launcher, flags)


def test_imports_point_one_way_and_the_tree_stays_small():
    """The leaves import nothing of ours, model imports attention, train glues; few lines of code."""
    modules = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in HERE.glob("*.py")}
    leaves = {"attention", "data", "distributed", "checkpoint", "profile"}
    allowed = {**{leaf: set() for leaf in leaves}, "model": {"attention"}, "train": leaves | {"model"}}
    assert modules.keys() == allowed.keys() | {"test_all"}
    lines = 0
    for name, tree in modules.items():
        shown = [node for node in tree.body if getattr(node, "name", "") == "main" or isinstance(node, ast.If)]
        found = {alias.name if isinstance(node, ast.Import) else node.module
                 for part in tree.body if part not in shown for node in ast.walk(part)
                 if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
        if name != "test_all":
            assert found & modules.keys() <= allowed[name], f"{name} imports {found & modules.keys() - allowed[name]}"
            documented = [node.body[0] for node in ast.walk(tree) if isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)]
            documentation = {line for text in documented for line in range(text.lineno, text.end_lineno + 1)}
            text = enumerate((HERE / f"{name}.py").read_text(encoding="utf-8").splitlines(), 1)
            lines += sum(number not in documentation and bool(line.split("#")[0].strip()) for number, line in text)
    assert lines <= 2921, f"{lines} lines of code: find the shorter form; a fork may raise this"


# ---- data ------------------------------------------------------------------------------------------------------------

SHAKESPEARE = HERE.parent / "shared" / "data" / "tinyshakespeare.txt"


@contextlib.contextmanager
def gpt2_files():
    """tiktoken's cache: GPT-2's own files beside the project, or where the environment says."""
    shared = HERE.parent / "shared" / "tiktoken"
    cache = str(shared) if shared.exists() else os.environ.get("TIKTOKEN_CACHE_DIR")
    if not cache or not Path(cache).exists():
        raise Skip("no TIKTOKEN_CACHE_DIR with GPT-2's files")
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=cache):
        yield


def shakespeare():
    if not SHAKESPEARE.exists():
        raise Skip("no ../shared/data/tinyshakespeare.txt")
    return str(SHAKESPEARE)


def write_shard(path, tokens, magic=20240520, version=1, dtype="<u2", says=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if says is None else says
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def shards(where, sizes, split="train"):
    """Shards that count on: token t of the split is t, so a window shows where it was cut."""
    start = 0
    for n, size in enumerate(sizes):
        write_shard(where / f"{split}_{n:06d}.bin", np.arange(start, start + size))
        start += size
    (where / "meta.json").write_text(json.dumps({"tokenizer": "bytes", "vocab_size": 65536}))


def read_tokens(where, split):
    return np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in sorted(Path(where).glob(f"{split}_*.bin"))])


def documents_of(tokens):
    """The texts of a split of byte tokens, cut at <|endoftext|> (256), which stands before each."""
    text = [[]]
    for t in tokens.tolist():
        text.append([]) if t == 256 else text[-1].append(t)
    assert not text[0]
    return [bytes(t).decode() for t in text[1:]]


# ---- tokenizers


def test_bytes_tokenizer_is_a_tiktoken_encoding_whose_ids_are_the_bytes():
    encoding = data.load_tokenizer("bytes")
    text = "héllo\n\n  <|endoftext|> \U0001f600 \x00 end"
    assert encoding.n_vocab == 257 and encoding.eot_token == 256
    assert encoding.encode_ordinary(text) == list(text.encode()) and encoding.decode(list(text.encode())) == text
    found = data.encode(encoding, [("train", 1, False, text), ("val", 2, True, "y"), ("train", 0, False, "x")])
    assert found["train"].tolist() == [[256, *text.encode(), ord("x")], [1] * (len(text.encode()) + 2)]
    assert found["val"].tolist() == [[256, ord("y")], [1, 0]]  # a prompt's token is no target


def test_trained_bpe_has_the_same_ids_in_tiktoken_as_in_rustbpe():
    try:
        import rustbpe
    except ImportError:
        raise Skip("rustbpe is not installed")
    with folder() as where:
        text = "low lower lowest, the newest and the widest!\n" * 50 + "<|endoftext|> is text\n"
        (where / "a.txt").write_text(text)
        meta = data.prepare([str(where / "a.txt")], where / "out", train_bpe=300, val_fraction=0.1)
        encoding = data.load_tokenizer("bpe", where / "out")
        assert meta["tokenizer"] == "bpe" and meta["vocab_size"] == encoding.n_vocab <= 300
        own = rustbpe.Tokenizer()
        own.train_from_iterator([text[:int(len(text) * 0.9)]], vocab_size=299)
        sample = "the lowest of the newest,  ünseen\n\n\ttext <|endoftext|>"
        assert encoding.encode_ordinary(sample) == own.encode(sample) and encoding.decode(own.encode(sample)) == sample
        tokens = read_tokens(where / "out", "train")
        assert tokens[0] == encoding.eot_token and len(tokens) == meta["train_tokens"]
        assert encoding.decode(tokens[1:].tolist()) == text[:int(len(text) * 0.9)]
        shutil.rmtree(where / "out")  # trained again into the same folder: no cache may give the first one's ids
        (where / "a.txt").write_text("other words, other pairs\n" * 50)
        data.prepare([str(where / "a.txt")], where / "out", train_bpe=280, val_fraction=0)
        again = data.load_tokenizer("bpe", where / "out")
        assert again.decode(read_tokens(where / "out", "train")[1:].tolist()) == "other words, other pairs\n" * 50
        assert again.encode_ordinary(sample) != own.encode(sample)


def test_gpt2_counts_of_tinyshakespeare_are_exact_also_in_pieces():
    with gpt2_files(), folder() as where:
        meta = data.prepare([shakespeare()], where / "out", tokenizer="gpt2")
        assert (meta["train_tokens"], meta["val_tokens"]) == (301_966 + 1, 36_059 + 1)
        assert (meta["train_bytes"], meta["val_bytes"], meta["eot"]) == (1_003_854, 111_540, 50256)
        whole = data.prepare([shakespeare()], where / "whole", tokenizer="gpt2", val_fraction=0)
        assert whole["train_tokens"] == 338_025 + 1 and whole["val_tokens"] == 0


def test_pieces_have_the_tokens_of_the_whole():
    """Also where cutting at newlines would not: several newlines, ".\\n", trailing spaces."""
    text = "".join(f"line {i}.\n\n  x{i}  \n\nüber, 3\u3000{'word ' * (i % 7)}\r\n" for i in range(3000))
    saved, data.PIECE = data.PIECE, 257
    try:
        parts = list(data.pieces(text))
        assert "".join(parts) == text and len(parts) > 100 and max(map(len, parts)) < 2 * 257
        with folder() as where:
            (where / "a").write_bytes(text.encode())
            assert list(data.pieces(where / "a")) == parts
            (where / "b").write_bytes(b"\xff\xfe" + b"a\xc3" * 500)
            assert "".join(data.pieces(where / "b")) == "\ufffd\ufffd" + "a\ufffd" * 500
        assert "".join(data.pieces("x" * 2000)) == "x" * 2000  # no place to cut
    finally:
        data.PIECE = saved
    with gpt2_files():
        gpt2 = data.load_tokenizer("gpt2")
        assert sum(map(gpt2.encode_ordinary, parts), []) == gpt2.encode_ordinary(text)


def test_unknown_or_unreachable_tokenizer_is_one_line():
    fails(ValueError, "unknown gpt3 bytes, cl100k_base --train_bpe", data.load_tokenizer, "gpt3")
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9") | {"NO_PROXY": "", "no_proxy": ""}
    with folder() as empty, mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(empty), **nowhere):
        fails(OSError, "r50k_base network TIKTOKEN_CACHE_DIR bytes", data.load_tokenizer, "r50k_base")


# ---- sources and splits


def test_one_file_is_cut_by_characters():
    with folder() as where:
        meta = data.prepare([shakespeare()], where / "out")
        assert (meta["train_tokens"], meta["val_tokens"]) == (1_003_854 + 1, 111_540 + 1)
        text = SHAKESPEARE.read_bytes().decode()
        assert documents_of(read_tokens(where / "out", "train")) == [text[:1_003_854]]
        assert documents_of(read_tokens(where / "out", "val")) == [text[1_003_854:]]
        head = np.fromfile(where / "out" / "val_000000.bin", "<i4", 256)
        assert head[:3].tolist() == [20240520, 1, 111_541] and not head[3:].any()


def test_every_kth_of_many_documents_is_validation_and_few_are_cut_at_the_tail():
    with folder() as where:
        rows = [f"document {i} <|endoftext|>" for i in range(25)]
        (where / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows) + "\n")
        data.prepare([str(where / "a.jsonl")], where / "out", val_fraction=0.2)
        assert documents_of(read_tokens(where / "out", "val")) == rows[4::5]
        assert documents_of(read_tokens(where / "out", "train")) == [row for i, row in enumerate(rows, 1) if i % 5]
        with gzip.open(where / "b.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps({"words": row}) + "\n" for row in rows[:3]))
        data.prepare([str(where / "b.jsonl.gz")], where / "few", val_fraction=0.1, text_key="words")
        train, val = (documents_of(read_tokens(where / "few", split)) for split in ("train", "val"))
        assert train[:2] == rows[:2] and [train[2] + val[0]] == rows[2:3] and len(val) == 1
        assert len(val[0]) == sum(map(len, rows[:3])) - int(0.9 * sum(map(len, rows[:3])))


def test_sources_folder_hf_stdin_and_default():
    with folder() as where:
        source = where / "source"
        for name, content in {"b.txt": b"\xef\xbb\xbfbee", "a/z.md": b"zed \xff", ".git/x": b"no", ".hidden": b"no",
                              "c.png": b"\x89\x00\x01", "empty.txt": b"",
                              "B.jsonl": b'\xef\xbb\xbf{"text": "row \\ud800"}\n'}.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        (source / "d.txt").symlink_to("nowhere")
        os.mkfifo(source / "e.jsonl")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            meta = data.prepare([str(source)], where / "out", val_fraction=0)
        assert documents_of(read_tokens(where / "out", "train")) == ["row ?", "zed \ufffd", "bee"]
        assert meta["documents"] == 3
        assert "left out are 3 others, such as" in said.getvalue() and "c.png" in said.getvalue()
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two "))):
            data.prepare(["-"], where / "piped", val_fraction=0.5)
        assert documents_of(read_tokens(where / "piped", "val")) == ["two "]
        assert {p.name for p in (where / "piped").iterdir()} == {"meta.json", "train_000000.bin", "val_000000.bin"}
        files = data.find_files([])
        assert files == sorted(files) and len(files) > 300 and not any("test" in path.parts for path in files)
        seen = []
        sys.modules["datasets"] = type("datasets", (), {"load_dataset": staticmethod(
            lambda *args, **kwargs: seen.append((args, kwargs)) or [{"text": "streamed"}])})
        try:
            for name, args, split in (("hf:a/b/c:validation", ("a/b", "c"), "validation"),
                                      ("hf:a/b", ("a/b",), "train"), ("hf:a", ("a",), "train")):
                assert list(data.read_table(name, "text")) == ["streamed"]
                assert seen.pop() == (args, {"split": split, "streaming": True})
            for wrong in ("hf:", "hf:a/b/c/d", "hf:a//b"):
                fails(ValueError, "hf:NAME[/CONFIG][:SPLIT]", list, data.read_table(wrong, "text"))
        finally:
            del sys.modules["datasets"]


def test_parquet_rows_are_documents():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Skip("pip install pyarrow") from None
    with folder() as where:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"], "n": [1, 2]}), where / "t.parquet")
        assert list(data.read_table(where / "t.parquet", "text")) == ["p", "q"]
        fails(ValueError, "row 1: body absent 'n'", list, data.read_table(where / "t.parquet", "body"))
        (where / "bad.parquet").write_bytes(b"PAR1 nonsense")
        fails(ValueError, "bad.parquet row 1 magic", list, data.read_table(where / "bad.parquet", "text"))


def test_threads_give_the_shards_of_one_thread_cut_at_the_limit():
    with folder() as where, mock.patch.object(data, "PIECE", 1 << 10):
        (where / "a.txt").write_text("some words to count\n" * 5000)
        one, two = [data.prepare([str(where / "a.txt")], where / str(workers), shard_tokens=30_001, workers=workers)
                    for workers in (1, 2)]
        assert one == two and one["train_tokens"] == 90_001 and one["documents"] == 1  # which is in both splits
        for split in ("train", "val"):
            assert np.array_equal(read_tokens(where / "1", split), read_tokens(where / "2", split))
        assert [s[3] for s in data.TokenDataset(where / "2", "train", 8).shards] == [30_001] * 2 + [29_999]


def test_ids_from_65536_need_four_bytes():
    with folder() as where:
        ids = np.array([0, 65_535, 65_536, 100_255], "<u4")
        data.append(where / "train", ids[:2], 0, 3)
        data.append(where / "train", ids[2:], 2, 3)
        assert np.fromfile(where / "train_000000.bin", "<i4", 3).tolist() == [20240801, 7, 3]
        dataset = data.TokenDataset(where, "train", 2)
        assert dataset.meta == {"tokenizer": None, "vocab_size": 128_256, "eot": 128_001}
        assert dataset.tokens == 4 and dataset.windows == 1 and dataset[5][1].tolist() == [65_535, 65_536]
        (where / "meta.json").write_text('{"vocab_size": 1000}')
        fails(ValueError, "train_000000.bin 65,536 1,000", data.TokenDataset, where, "train", 2)


def test_wrong_preparation_is_one_line_and_leaves_nothing():
    with folder() as where:
        (where / "a.txt").write_text("some text to prepare")
        (where / "bin").mkdir()
        (where / "bin" / "x").write_bytes(b"\0")
        (where / "rows.jsonl").write_text('{"text": "x"}\n{"txt": "x", "id": 2}\n')
        (where / "late.jsonl").write_text('{"text": "x"}\nnot json\n')
        (where / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abcdefgh"}\n' * 99)[:40])
        (where / "empty.txt").write_text("")
        (where / "two.txt").write_text("abcdefgh")
        (where / "void").mkdir()
        before = sorted(where.rglob("*"))
        with contextlib.redirect_stdout(io.StringIO()):
            for kind, words, source, options in [
                    (FileNotFoundError, "nothing.txt neither", "nothing.txt", {}),
                    (ValueError, "no text", "bin", {}),
                    (ValueError, "x holds no text pdftotext", "bin/x", {}),
                    (ValueError, "rows.jsonl row 2 --text_key 'txt' 'id'", "rows.jsonl", {}),
                    (ValueError, "late.jsonl row 2: no JSON", "late.jsonl", {}),
                    (ValueError, "void is empty", "void", {}), (ValueError, "2 val tokens more text", "two.txt", {}),
                    (ValueError, "cut.jsonl.gz end-of-stream", "cut.jsonl.gz", {}),
                    (ValueError, "0 train tokens more text", "empty.txt", {}),
                    (ValueError, "--val_fraction 1.5 0.5", "a.txt", {"val_fraction": 1.5}),
                    (ValueError, "--val_fraction nan", "a.txt", {"val_fraction": float("nan")}),
                    (ValueError, "workers", "a.txt", {"workers": -1}),
                    (ValueError, "--shard_tokens 0 2147483647", "a.txt", {"shard_tokens": 0}),
                    (ValueError, "--shard_tokens 2147483648", "a.txt", {"shard_tokens": 1 << 31}),
                    (ValueError, "--train_bpe 12 257", "a.txt", {"train_bpe": 12}),
                    (ValueError, "--train_bpe --tokenizer gpt2", "a.txt", {"train_bpe": 300, "tokenizer": "gpt2"}),
                    (ValueError, "--prompt_key --response_key", "rows.jsonl", {"prompt_key": "text"}),
                    (ValueError, "--prompt_key --response_key", "rows.jsonl", {"response_key": "text"}),
                    (ValueError, "--prompt_key --text_key", "rows.jsonl",
                     {"prompt_key": "text", "response_key": "txt", "text_key": "txt"}),
                    (ValueError, "--prompt_key rows .jsonl", "a.txt", {"prompt_key": "a", "response_key": "b"}),
                    (ValueError, "rows.jsonl row 1 txt --prompt_key 'text'", "rows.jsonl",
                     {"prompt_key": "text", "response_key": "txt"}),
                    (ValueError, "gone/hf has no tokenizer.json", "a.txt", {"tokenizer": "gone/hf"}),
                    (ValueError, "unknown bpe", "a.txt", {"tokenizer": "bpe"})]:
                fails(kind, words, data.prepare, [str(where / source)], where / "out", **options)
                assert sorted(where.rglob("*")) == before, options
        fails(ValueError, "--out is missing", data.DataConfig, ["a.txt"])
        (where / "latin1.txt").write_bytes("a café, a menü".encode("latin-1"))
        output = exit_of(data.prepare, [str(where / "latin1.txt")], where / "replaced")[1]
        assert output.startswith("note: 2 x U+FFFD, in place of") and "(iconv -f latin1 -t utf-8)" in output, output
        (where / "a.parquet").touch()
        for module, source, *flags in [("rustbpe", where / "a.txt", "--train_bpe=300"), ("datasets", "hf:any"),
                                       ("pyarrow", where / "a.parquet")]:
            saved, sys.modules[module] = sys.modules.get(module), None
            code, output = command(data, source, "--out", where / "out", *flags)
            assert f" (pip install {module})" in code and "\n" not in code, (code, output)
            del sys.modules[module]
            if saved:
                sys.modules[module] = saved


def killed(source, out):
    data.append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    data.prepare([str(source)], out)


def test_an_existing_folder_is_kept_and_a_killed_preparation_leaves_nothing_that_trains():
    with folder() as where:
        (where / "a.txt").write_text("some text to prepare")
        (where / "free").mkdir()
        for out in ("out", "free"):
            data.prepare([str(where / "a.txt")], where / out)
        kept = (where / "out" / "train_000000.bin").stat().st_mtime_ns
        fails(FileExistsError, "out exists --out", data.prepare, [str(where / "a.txt")], where / "out")
        fails(FileExistsError, "a.txt exists", data.prepare, [str(where / "a.txt")], where / "a.txt")
        assert (where / "out" / "train_000000.bin").stat().st_mtime_ns == kept
        child = torch.multiprocessing.get_context("fork").Process(target=killed, args=(where / "a.txt", where / "new"))
        child.start()
        child.join(60)
        left = [p.name for p in where.iterdir() if p.name.startswith(".new")]
        assert len(left) == 1 and not (where / "new").exists()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            data.prepare([str(where / "a.txt")], where / "new")
        assert left[0] in said.getvalue() and [p.name for p in where.iterdir() if p.name.startswith(".")] == left


def test_two_may_prepare_one_folder_at_once():
    """One of them finishes it, whole; the other says so."""
    with folder() as where:
        (where / "a.txt").write_text("some text to prepare\n" * 1000)
        both, real, said = threading.Barrier(2), data.append, []

        def prepare():
            try:
                data.prepare([str(where / "a.txt")], where / "out", val_fraction=0)
            except OSError as error:  # FileExistsError, or what rename() says in the moment between
                said.append(error)

        with mock.patch.object(data, "append", lambda *args: (both.wait(60), real(*args))):
            threads = [threading.Thread(target=prepare) for _ in range(2)]
            with contextlib.redirect_stdout(io.StringIO()):
                [thread.start() for thread in threads]
                [thread.join(60) for thread in threads]
        assert len(said) == 1 and data.TokenDataset(where / "out", "train", 8).tokens == 21_001
        assert sorted(p.name for p in where.iterdir()) == ["a.txt", "out"]


# ---- the dataset


def test_the_order_is_a_permutation_of_any_size_and_not_the_identity():
    for n in (1, 2, 3, 7, 64, 1000, 4099):
        for key in (0, 1, 2**64 - 1):
            assert sorted(data.permute(i, n, key) for i in range(n)) == list(range(n)), n
    fixed = [sum(data.permute(i, 1000, data.mix(key)) == i for i in range(1000)) for key in range(20)]
    assert sum(fixed) / 20 < 3  # one is expected
    order = np.array([data.permute(i, 1000, 5) for i in range(1000)])
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1 and abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.1
    assert len({tuple(data.permute(i, 3, data.mix(key)) for i in range(3)) for key in range(100)}) == 6
    assert 0 <= data.permute(10**12 - 1, 10**12, 7) < 10**12


def test_an_epoch_is_every_window_once_within_its_shard():
    with folder() as where:
        sizes = [100, 9, 8, 1, 0, 65, 64]
        shards(where, sizes)
        dataset = data.TokenDataset(where, "train", 8, seed=3)
        assert dataset.windows == sum(max(0, n - 1) // 8 for n in sizes) and dataset.tokens == sum(sizes)
        ends = np.cumsum(sizes)
        windows = dataset.windows
        first = [[int(dataset[i][0][0]) for i in range(e * windows, (e + 1) * windows)] for e in range(4)]
        for i in range(4 * dataset.windows):
            x, y = dataset[i]
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (8,) and torch.equal(x[1:], y[:-1])
            assert np.searchsorted(ends, int(x[0]), "right") == np.searchsorted(ends, int(y[-1]), "right")
        assert sorted(first[0]) == [int(dataset.fixed(i)[0][0]) for i in range(dataset.windows)] != first[0]
        assert len({tuple(sorted(f)) for f in first}) == 4  # later epochs cut elsewhere
        assert all(len(set(f)) == dataset.windows for f in first)
        assert first[0] != [int(data.TokenDataset(where, "train", 8, seed=4)[i][0][0]) for i in range(dataset.windows)]
        fails(IndexError, "range", dataset.fixed, dataset.windows)


def test_law_1_batches_are_a_function_of_seed_and_step():
    """Any ranks, micro-batches and workers divide the same windows; a later step needs none before it."""
    with folder() as where:
        shards(where, [2000, 777])
        dataset = data.TokenDataset(where, "train", 16, seed=1)

        def global_batch(step, world, micro, workers=0):
            parts = []
            for rank in range(world):
                stream = data.batches(dataset, step, 12, micro, rank, world, workers=workers)
                parts += [torch.cat(pair) for pair in zip(*itertools.islice(stream, 12 // world // micro))]
                stream.close()
            return torch.cat(parts[::2]), torch.cat(parts[1::2])

        for step in (0, 40):
            x, y = global_batch(step, 1, 12)
            assert torch.equal(x, torch.stack([dataset[step * 12 + i][0] for i in range(12)])) and x.is_contiguous()
            assert torch.equal(x[:, 1:], y[:, :-1])
            for layout in ((1, 1), (2, 3), (3, 4), (4, 1), (1, 6, 2)):
                assert all(torch.equal(a, b) for a, b in zip((x, y), global_batch(step, *layout))), layout
        before = torch.get_rng_state()
        next(data.batches(dataset, 0, 4, 2))
        assert torch.equal(before, torch.get_rng_state())  # the global random numbers are left alone


def test_a_signal_to_the_group_leaves_the_readers_at_work():
    """torchrun, Slurm and terminals signal all processes: those that read for a GPU last until the run has saved."""
    script = """
        import data, os, signal, sys
        caught, names = [], ("SIGINT", "SIGTERM", "SIGUSR1")
        for name in names:
            signal.signal(getattr(signal, name), lambda *args: caught.append(args))
        batches = data.batches(data.TokenDataset(sys.argv[1], "train", 16), 0, 4, 4, workers=2)
        next(batches), next(batches)  # one of each reader: both have begun
        for name in names:
            os.killpg(0, getattr(signal, name))
        for _ in range(20):
            next(batches)
        print(len(caught), "caught")"""
    with folder() as where:
        shards(where, [2000])
        with start_python("-c", textwrap.dedent(script), where, start_new_session=True) as run:
            output, _ = run.communicate(timeout=60)
    assert run.returncode == 0 and "3 caught" in output, output


def test_slow_dataset_survives_fork_and_spawn():
    """Also an id beyond the vocabulary keeps its line on the way from a worker."""
    with folder() as where:
        shards(where, [2000])
        dataset = data.TokenDataset(where, "train", 16)
        expected = dataset[3][0]
        assert len(pickle.dumps(dataset)) < 2000  # not the shards' contents
        for method in {"fork", "spawn"} & set(torch.multiprocessing.get_all_start_methods()):
            loader = torch.utils.data.DataLoader(dataset, batch_sampler=[[3, 4]], num_workers=1, collate_fn=tuple,
                                                 multiprocessing_context=method)
            assert torch.equal(next(iter(loader))[0][0], expected), method
        write_shard(where / "train_000000.bin", np.append(np.zeros(1000), np.full(1000, 999)))
        (where / "meta.json").write_text('{"vocab_size": 257}')
        try:
            next(data.batches(data.TokenDataset(where, "train", 32), 0, 60, 60, workers=1))
            assert False, "no error"
        except data.DataError as error:
            assert "train_000000.bin has the id 999" in str(error)


def chat(where, rows, **options):
    """Prompts and responses, prepared as bytes; the folder of their tokens and masks."""
    (where / "chat.jsonl").write_text("".join(json.dumps({"p": p, "r": r}) + "\n" for p, r in rows))
    data.prepare([str(where / "chat.jsonl")], where / "chat", prompt_key="p", response_key="r", **options)
    return where / "chat"


def test_prompts_are_read_and_responses_and_their_ends_are_learned():
    """Each target is a byte of a response or the <|endoftext|> after it, in the windows of any epoch and shard."""
    rows = [("ask", "tell"), ("", "no prompt"), ("none learned", ""), ("same", "same"), ("é <|endoftext|>", "ü")] * 8
    with folder() as where, mock.patch.object(data, "PIECE", 3):  # texts in several pieces
        out = chat(where, rows, shard_tokens=50)
        kept = [(p.encode(), r.encode()) for p, r in rows if r]
        for split, mine in ("train", [row for i, row in enumerate(kept, 1) if i % 10]), ("val", kept[9::10]):
            tokens = np.array([t for p, r in mine for t in (256, *p, *r)] + [256])
            # <|endoftext|> belongs to the response before it, also the last one, which no document follows
            learned = np.array([t for p, r in mine for t in (256, *[-100] * len(p), *r)] + [256])
            assert read_tokens(out, split).tolist() == tokens.tolist()
            dataset = data.TokenDataset(out, split, 7, seed=1)
            starts = [i for n in range(0, len(tokens), 50) for i in range(n, min(n + 50, len(tokens)) - 7, 7)]
            assert len(starts) == dataset.windows
            for i, start in enumerate(starts):
                x, y = dataset.fixed(i)
                assert np.array_equal(x, tokens[start:start + 7]) and np.array_equal(y, learned[start + 1:start + 8])
            places = {(*tokens[i:i + 7], *learned[i + 1:i + 8]) for i in range(len(tokens) - 7)}
            assert all((*x.tolist(), *y.tolist()) in places for x, y in map(dataset.__getitem__, range(200)))
        meta = json.loads((out / "meta.json").read_text())
        assert (meta["prompt_key"], meta["response_key"], meta["val_bytes"]) == ("p", "r", None)
        masks = sorted(out.glob("train_*.mask"))
        masks[0].rename(where / "away")
        fails(FileNotFoundError, masks[0].name, data.TokenDataset, out, "train", 7)
        shutil.copy(masks[-1], masks[0])
        fails(ValueError, "masks damaged", data.TokenDataset, out, "train", 7)


def test_a_sample_after_fine_tuning_is_a_response():
    """To the whole of a prompt, and it ends as responses end."""
    with folder() as where:
        out = chat(where, [("the prompt is a long one: say yes or no", "yes")] * 40)
        code, output = train_here(f"--data={out}", f"--out={where}/out", "--steps=30", "--n_embd=32", "--n_layer=1",
                                  "--n_head=2", "--seq_len=64", "--eval_every=0")
        assert code == 0 and "say yes or no' goes on ----\nyes\n----" in output, output


def test_few_prompts_are_not_cut():
    """The last one validates; all in one split is an error as with any text."""
    with folder() as where:
        out = chat(where, [("a", "b"), ("c", "d"), ("long " * 99, "e")])
        assert documents_of(read_tokens(out, "train")) == ["ab", "cd", ""]
        assert documents_of(read_tokens(out, "val")) == ["long " * 99 + "e", ""]
        shutil.rmtree(out)
        fails(ValueError, "0 train tokens more text", chat, where, [("a", "b")])
        assert documents_of(read_tokens(chat(where, [("a", "b")], val_fraction=0), "train")) == ["ab", ""]
        assert not list(out.glob("val*"))


def test_fine_tuning_has_a_loss_of_responses_alone_and_no_bits_per_byte():
    """A validation loss below what prompts of random bytes would allow (3.1); a batch without any target is no NaN."""
    with folder() as d:
        letters = np.random.default_rng(0).integers(33, 126, (60, 80), dtype=np.uint8)
        out = chat(d, [(row.tobytes().decode(), " answer" * 5) for row in letters])
        output = train_here(f"--data={out}", f"--out={d}/out", "--steps=24", "--eval_every=0")[1]
        losses, evaluations = metrics_of(d / "out")
        assert evaluations[24] < 3 and all(map(math.isfinite, losses.values())), output
        assert "bits per byte" not in output and '"val_bpb": null' in (d / "out/metrics.jsonl").read_text(), output
        (out / "train_000000.mask").write_bytes((out / "train_000000.mask").read_bytes()[:1024] + bytes(
            (out / "train_000000.mask").stat().st_size - 1024))
        output = train_here(f"--data={out}", f"--out={d}/none", "--steps=1", "--eval_every=0")[1]
        assert metrics_of(d / "none")[0] == {1: None} and "update skipped, it has no target" in output, output


def test_llm_c_and_nanogpt_files_load_as_they_are():
    with folder() as where:
        write_shard(where / "fineweb_train_000001.bin", [50256, 1, 2, 3, 4])
        write_shard(where / "fineweb_val_000000.bin", [50256, 7, 8, 9])
        dataset = data.TokenDataset(where, "train", 4)
        assert dataset[0][1].tolist() == [1, 2, 3, 4]
        assert dataset.meta == {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256}
        assert data.TokenDataset(where, "val", 3).fixed(0)[0].tolist() == [50256, 7, 8]
    with folder() as where:
        np.arange(10, dtype="<u2").tofile(where / "train.bin")
        fails(ValueError, 'train.bin header meta.json "header": false', data.TokenDataset, where, "train", 4)
        (where / "meta.json").write_text('{"header": false}')
        fails(ValueError, "vocabulary meta.json", data.TokenDataset, where, "train", 4)
        (where / "meta.json").write_text('{"header": false, "vocab_size": 10}')
        dataset = data.TokenDataset(where, "train", 9)
        assert dataset.fixed(0)[1].tolist() == list(range(1, 10)) and dataset.meta["tokenizer"] is None


def test_damaged_or_short_data_is_one_line():
    with folder() as where:
        shards(where, [50, 50], "train")
        fails(FileNotFoundError, "no *val*.bin again --val_fraction", data.TokenDataset, where, "val", 8)
        data.prepare([model_file.__file__], where / "sets/one", val_fraction=0)
        fails(FileNotFoundError, "no *val*.bin again --val_fraction", data.TokenDataset, where / "sets/one", "val", 8)
        for wrong, words in ("sets/onne", "exist: SOURCE"), ("sets", "*train*.bin: --out data/mine one; there"):
            fails(FileNotFoundError, f"{words} {where}/sets/one", data.TokenDataset, where / wrong, "train", 8)
        fails(ValueError, "50 51", data.TokenDataset, where, "train", 50)
        path = where / "train_000001.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-10])
        fails(ValueError, "train_000001.bin 1,114 1,124", data.TokenDataset, where, "train", 8)
        path.write_bytes(whole[:100])
        fails(ValueError, "train_000001.bin 100 1,124", data.TokenDataset, where, "train", 8)
        path.write_bytes(b"")
        fails(ValueError, "train_000001.bin magic", data.TokenDataset, where, "train", 8)
        path.write_bytes(whole)
        (where / "meta.json").write_text('{"vocab_size": 60, "train_tokens": 150}')
        fails(ValueError, "100 150 meta.json", data.TokenDataset, where, "train", 8)
        (where / "meta.json").write_text('{"vocab_size": 60}')
        dataset = data.TokenDataset(where, "train", 49)
        fails(ValueError, "train_000001.bin 99 60", dataset.fixed, 1)
        (where / "meta.json").write_text("{")
        fails(ValueError, "meta.json JSON", data.TokenDataset, where, "train", 8)


def test_hand_written_meta_and_names_of_other_projects():
    """A wrong value in meta.json is one line; the last "train" or "val" that is a word of its own tells the split."""
    with folder() as where:
        shards(where, [40])
        for meta, words in [('{"vocab_size": "50257"}', "meta.json vocab_size '50257' int"), ("[5]", "meta.json"),
                            ('{"vocab_size": 257.0}', "257.0 int"), ('{"vocab_size": -1}', "vocabulary -1 meta.json"),
                            ('{"vocab_size": null, "header": false}', "vocabulary None"), ("", "meta.json JSON"),
                            ('{"header": "no"}', "header 'no' bool"), ('{"tokenizer": 1}', "tokenizer 1 str"),
                            ('{"train_tokens": "40"}', "train_tokens '40' int"), ('{"train_tokens": -1}', "40 -1")]:
            (where / "meta.json").write_text(meta)
            fails(ValueError, words, data.TokenDataset, where, "train", 8)
        (where / "meta.json").write_text('{"header": false, "vocab_size": 65536}')
        (where / "train_000000.bin").write_bytes(b"odd")
        fails(ValueError, "train_000000.bin 3 bytes damaged", data.TokenDataset, where, "train", 8)
    with folder() as where:
        names = dict(train=["fineweb_train_000001.bin", "interval_train.bin", "my-val-set-train_0.bin", "train.bin"],
                     val=["fineweb_val_000000.bin", "train_val.bin", "val.bin"], neither=["trainer.bin", "oval.bin"])
        for name in itertools.chain(*names.values()):
            write_shard(where / name, range(9))
        for split in "train", "val":
            assert [path.name for path, *_ in data.TokenDataset(where, split, 8).shards] == names[split]


def test_mistakes_of_data_are_one_line_with_the_right_exit_code():
    """2 for usage, 1 for files, also for an id beyond the vocabulary that a step meets in the middle of a run."""
    with folder() as where:
        (where / "a.jsonl").write_text('{"text": ""}')
        for wrong, code, words in [
                (["--val_fraction=2"], 2, "--val_fraction 2.0 0.5"), (["--out="], 2, "--out empty"),
                (["--workers=-1"], 2, "--workers -1"), (["--tokenizer=gpt3"], 2, "gpt3 bytes"),
                (["--train_bpe=300", "--tokenizer=gpt2"], 2, "--train_bpe gpt2"),
                (["--prompt_key=p"], 2, "--prompt_key --response_key"), (["--text_key=no"], 1, "a.jsonl text_key")]:
            with mock.patch.object(sys, "argv", ["data.py", f"{where}/a.jsonl", f"--out={where}/out", *wrong]):
                found, output = exit_of(data.main)
            output = output if code == 2 else found + "\n"
            assert (found == 2 if code == 2 else isinstance(found, str)) and output.count("\n") == 1, (wrong, output)
            assert output.startswith("data.py: ") and all(word in output for word in words.split()), (wrong, output)
        ids = np.zeros(3300)
        write_shard(where / "val.bin", ids)
        ids[70] = 999  # in the third of 103 windows, which is not among those that are read at once
        write_shard(where / "train.bin", ids)
        (where / "meta.json").write_text('{"vocab_size": 257}')
        with mock.patch.object(sys, "argv", ["train.py", *SMALL, f"--data={where}", f"--out={where}/run"]):
            found, _ = exit_of(train_file.main)
        assert found == f"train.py: {where}/train.bin has the id 999, beyond its vocabulary of 257"


def test_a_terabyte_opens_in_a_second_without_reading_it():
    """250 sparse shards of 2^31 - 1 tokens, 4.3 GB each."""
    with folder() as where:
        n = (1 << 31) - 1
        for i in range(250):
            write_shard(where / f"train_{i:06d}.bin", [], says=n)
            os.truncate(where / f"train_{i:06d}.bin", 1024 + 2 * n)
        start = time.perf_counter()
        dataset = data.TokenDataset(where, "train", 1024)
        assert dataset[10**9][0].shape == (1024,) and dataset.tokens == 250 * n
        assert time.perf_counter() - start < 1


# ---- checkpoints -----------------------------------------------------------------------------------------------------

def small(seed=0, width=8, extra=False):
    """A stand-in model: an embedding, two matrices, norms."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(16, width), nn.Linear(width, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)]
    return nn.Sequential(*layers, *[nn.Linear(8, 8)] * extra)


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def muon_and_adamw(model):
    two = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("0")]
    rest = [p for p in model.parameters() if not any(p is q for q in two)]
    return [torch.optim.Muon(two, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def steps(model, optimizers, count=1):
    """`count` optimizer steps; gradients stay, as they may when a run loads."""
    for _ in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.arange(16)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def copied(model, optimizers):
    return {key: value.clone() for key, value in checkpoint.tensors(model, optimizers).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def error_of(function, *arguments, kind=ValueError):
    """The message of the error that must come."""
    try:
        function(*arguments)
    except kind as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"{function} raised no {kind.__name__}")


def quietly(function, *arguments, **named):
    """(result, what it printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return function(*arguments, **named), out.getvalue()


def saved_run(folder, *numbers, keep=9, **named):
    """A run with a checkpoint at each of `numbers`; returns model, optimizers and what each checkpoint holds."""
    model, checkpointer, content = small(), Checkpointer(folder, keep=keep, **named), {}
    optimizers = adamw(model)
    for number in numbers:
        steps(model, optimizers)
        content[number] = copied(model, optimizers)
        checkpointer.save(number, model, optimizers, {"tokens": number * 10})
    checkpointer.finish()
    return model, optimizers, content


def load_fresh(folder, step=None, build=adamw):
    """Load into a new model with new optimizers: (step, extra, content)."""
    model = small(seed=1)
    optimizers = build(model)
    number, extra = Checkpointer(folder).load(model, optimizers, step)
    return number, extra, copied(model, optimizers)


def test_checkpoint_roundtrip_is_bit_exact_and_the_run_goes_on_alike():
    """Law 3: weights, moments and counters of AdamW, SGD and Muon + AdamW, though gradients are set at loading."""
    for build in (adamw, sgd, muon_and_adamw):
        for asynchronous in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                model = small()
                optimizers = build(model)
                steps(model, optimizers, 2)
                saved = copied(model, optimizers)
                checkpointer = Checkpointer(folder, asynchronous=asynchronous)
                checkpointer.check(model, optimizers)
                memory = asynchronous and dict(checkpointer.stager.result().state_dict_cache)
                note = {"tokens": 2}
                checkpointer.save(2, model, optimizers, note)
                for key, tensor in (memory or {}).items():  # got before the save, which would stall for it
                    assert tensor is checkpointer.stager.result().state_dict_cache[key], key
                    assert torch.equal(tensor, saved[key]), key
                note["tokens"] = 3
                steps(model, optimizers)  # must not leak into an asynchronous save
                checkpointer.finish()
                fresh = small(seed=1)
                fresh_optimizers = build(fresh)
                fresh(torch.arange(16)).sum().backward()  # the trap: loading with gradients set restores nothing
                assert Checkpointer(folder).load(fresh, fresh_optimizers) == (2, {"tokens": 2})
                assert same(copied(fresh, fresh_optimizers), saved)
                assert all(value.dtype == torch.float32 for value in saved.values())
                steps(fresh, fresh_optimizers)
                assert same(copied(fresh, fresh_optimizers), copied(model, optimizers))


def test_checkpoint_has_one_key_set_whatever_wraps_the_model():
    """Law 5."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = small(), small()
    names = set(checkpoint.tensors(plain))
    assert "model.1.weight" in names
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    assert set(checkpoint.tensors(wrapped)) == names
    for prefix in ("_orig_mod", "module"):  # torch.compile, DDP
        outer = nn.Module()
        outer.add_module(prefix, wrapped)
        assert set(checkpoint.tensors(outer)) == names


def test_checkpoint_model_alone_and_extra_alone():
    with tempfile.TemporaryDirectory() as folder:
        model, _, _ = saved_run(folder, 5)
        fresh = small(seed=1)
        assert Checkpointer(folder).load(fresh) == (5, {"tokens": 50})
        assert same(checkpoint.tensors(fresh), checkpoint.tensors(model))
        assert Checkpointer(folder).read_extra() == {"tokens": 50} == Checkpointer(folder).read_extra(5)
    with tempfile.TemporaryDirectory() as folder:
        assert Checkpointer(folder).load(small()) is None and Checkpointer(folder).read_extra() is None
        assert Checkpointer(folder).steps() == []


def test_checkpoint_any_damage_is_seen_and_the_one_before_loads():
    """Law 4: each file truncated, emptied, missing, a bit flipped; an empty newer folder; a left-over temporary one."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, content = saved_run(folder, 1, 2)
        newest = Path(folder, "checkpoints", "step_00000002")
        for path in sorted(newest.iterdir()):
            whole = path.read_bytes()
            middle = len(whole) // 2
            flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:]
            for damaged in (whole[:-1], b"", None, flipped):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                (number, _, loaded), printed = quietly(load_fresh, folder)
                assert number == 1 and same(loaded, content[1]), (path, number)
                assert "checkpoint 2" in printed and (path.name in printed or path.name == "files.json"), printed
                assert path.name in (message := error_of(load_fresh, folder, 2)) or path.name == "files.json", message
                message = error_of(quietly, checkpoint.verify, folder)
                assert "step_00000002" in message and "step_00000001" not in message
                path.write_bytes(whole)
        assert load_fresh(folder)[0] == 2
        (newest / "files.json").write_text("{}")
        assert quietly(load_fresh, folder)[0][0] == 1 and "files.json is not of a whole" in error_of(
            quietly, checkpoint.verify, folder)
        relist(newest)
        checkpoints = newest.parent
        (checkpoints / "step_00000009").mkdir()
        shutil.copytree(newest, checkpoints / ".tmp-step_00000007")
        (number, _, loaded), printed = quietly(load_fresh, folder)
        assert number == 2 and "checkpoint 9" in printed and "7" not in printed and same(loaded, content[2])
        assert Checkpointer(folder).steps() == [1, 2]
        message = error_of(load_fresh, folder, 900)
        assert "900: there is no such checkpoint" in message and "[1, 2]" in message
        shutil.rmtree(newest)
        shutil.rmtree(checkpoints / "step_00000001")
        assert "checkpoint 9" in error_of(load_fresh, folder)  # all there is is damaged: not a fresh start, silently


def flip(path):
    """Change one bit of a file, which only a checksum tells."""
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_checkpoint_keeps_the_newest_and_milestones():
    with tempfile.TemporaryDirectory() as folder:
        saved_run(folder, *range(1, 8), keep=2, keep_every=3)
        assert Checkpointer(folder).steps() == [3, 6, 7]
        assert not list(Path(folder, "checkpoints").glob(".tmp*"))
        # resumed from further back: what came after belongs to what was undone
        model = small()
        optimizers = adamw(model)
        checkpointer = Checkpointer(folder, keep=2)
        checkpointer.load(model, optimizers, 3)
        checkpointer.save(3, model, optimizers)  # just loaded: nothing to do
        assert checkpointer.steps() == [3, 6, 7]
        steps(model, optimizers)
        _, printed = quietly(checkpointer.save, 4, model, optimizers)
        assert checkpointer.steps() == [3, 4] and "[6, 7]" in printed
        for number, told in (5, ""), (6, "--keep 1 --keep_every 0: removed the checkpoints [4, 5]"):
            checkpointer.keep = 1 if told else 2  # another flag costs more than the one that each save does
            steps(model, optimizers)
            _, printed = quietly(checkpointer.save, number, model, optimizers)
            assert printed.strip() == told, printed
        (checkpointer.folder(6) / "state.json").write_text("{")  # what is damaged is not just the oldest
        steps(model, optimizers)
        assert "removed the checkpoints [6]" in quietly(checkpointer.save, 7, model, optimizers)[1]
        checkpointer.keep = 2
        checkpointer.save(8, model, optimizers)
        flip(next(checkpointer.folder(8).glob("*.distcp")))
        resumed = Checkpointer(folder, keep=2)
        assert "skipped checkpoint 8" in quietly(resumed.load, model, optimizers)[1] and resumed.saved == 7
        assert "removed the checkpoints [8]" in quietly(resumed.save, 9, model, optimizers)[1]
        assert resumed.steps() == [7, 9]
        steps(model, optimizers)
        resumed.save(8, model, optimizers)  # again, and now it is good
        assert resumed.steps() == [7, 8]


def test_checkpoint_replaces_a_damaged_one_of_the_same_step():
    with tempfile.TemporaryDirectory() as folder:
        _, _, content = saved_run(folder, 1, 2)
        Path(folder, "checkpoints", "step_00000002", "state.json").write_text("{")
        model = small()
        optimizers = adamw(model)
        checkpointer = Checkpointer(folder)
        quietly(checkpointer.load, model, optimizers)
        steps(model, optimizers)
        checkpointer.save(2, model, optimizers, {"tokens": 20})
        number, extra, loaded = load_fresh(folder)
        assert (number, extra) == (2, {"tokens": 20}) and same(loaded, content[2])
        assert sorted(p.name for p in Path(folder, "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


def test_checkpoint_refuses_another_model_or_optimizer_and_touches_nothing():
    with tempfile.TemporaryDirectory() as folder:
        saved_run(folder, 1)
        for model, build, words in (
                (small(width=4), adamw, ["model.0.weight", "(16, 8)", "(16, 4)"]),
                (small(extra=True), adamw, ["model.4.weight", "absent", "(8, 8)"]),
                (small()[:3], adamw, ["model.3.weight", "(8, 8)", "absent"]),
                (small(), muon_and_adamw, ["optimizer.AdamW.1.weight.exp_avg", "absent"]),
                (small().half(), sgd, ["model.0.weight", "(16, 8) torch.float32 in it", "(16, 8) torch.float16 here"]),
                (small(), sgd, ["optimizer.AdamW.0.weight.exp_avg", "more"])):
            optimizers = build(model)
            before = copied(model, optimizers)
            message = error_of(Checkpointer(folder).load, model, optimizers)
            assert all(word in message for word in words), message
            assert same(copied(model, optimizers), before)
            assert all(not optimizer.state for optimizer in optimizers)


def test_checkpoint_never_saves_what_is_not_finite():
    with tempfile.TemporaryDirectory() as folder:
        model, optimizers, _ = saved_run(folder, 1)
        for bad in (float("nan"), float("inf"), -float("inf")):
            with torch.no_grad():
                model[1].weight[3, 3] = bad
            assert "1.weight" in error_of(Checkpointer(folder).save, 2, model, optimizers)
        assert Checkpointer(folder).steps() == [1]


def test_forks_that_share_look_up_freeze_or_learn_a_bias():
    model = tiny()
    model.blocks = nn.ModuleList([model.blocks[0]] * 2)  # one layer number, one place in a cache
    fails(ValueError, "k0 already two layer numbers", model.generate, [[1, 2]], 2)
    with folder() as d:
        def build(fields):
            other = tiny(**fields)
            other.blocks = nn.ModuleList([other.blocks[0]] * 2)
            return other
        Checkpointer(d).save(1, model, (), {"model": {}})
        opened = checkpoint.open_model(d, build)[0]
        assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in opened.named_parameters())
    model = tiny()
    model.blocks[0].values = nn.Embedding(64, 8)
    muon, adamw = train_file.build_optimizer(model, TrainConfig(), 0.1, torch.float32)
    assert any(p is model.blocks[0].values.weight for p in adamw.param_groups[0]["params"])
    assert model.flops_per_token(9) == tiny().flops_per_token(9)
    tied = tiny(tied=True)
    assert tied.flops_per_token(9) == tiny().flops_per_token(9)
    bias = nn.Parameter(torch.zeros(1, 4, 16, 16))
    tiny("flash").blocks[0].attn(torch.randn(2, 16, 64), mask=bias).sum().backward()
    assert bias.grad.abs().sum() > 0
    with (world := distributed.pretend(dict(tp=2), 2)).entered:
        model = tiny()
        for name, p in model.named_parameters():
            p.requires_grad_("norm" not in name)
        distributed.tensor_parallel(model, world)
        assert all(p.requires_grad == ("norm" not in name) for name, p in model.named_parameters())


def test_a_forks_mistake_is_an_error_and_no_other_run():
    """What nothing would train, save, fill or split, and names that nothing answers to."""
    fails(ValueError, "norm 'RMSNorm' rmsnorm layernorm", ModelConfig, norm="RMSNorm")
    fails(ValueError, "mlp 'geglu'", ModelConfig, mlp="geglu")
    q = torch.randn(1, 2, 4, 8)
    fails(ValueError, "no attention linear", attend, q, q, q, None, "linear")
    model = tiny()
    assert attention.model_mask(torch.zeros(1, 8, dtype=torch.int64), None, model.config, "linear") is not None
    model.blocks[0].experts = nn.Parameter(torch.randn(2, 3, 4))
    for name in "muon", "adamw", "sgd":
        optimizers = train_file.build_optimizer(model, TrainConfig(optimizer=name), 0.1, torch.float32)
        held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        assert sorted(held) == sorted(map(id, model.parameters())), name
    for moment in 0, torch.zeros(3, 1), torch.zeros(64, 64, dtype=torch.uint8):
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.head.weight]["odd"] = moment
        fails(ValueError, "optimizer.SGD.head.weight.odd is no tensor", checkpoint.tensors, model, [optimizer])
    model.register_buffer("gain", torch.ones(3))
    fails(ValueError, "gain is a buffer", distributed.materialize, model, "cpu", 1)
    fails(ValueError, "no rule for blocks.0.experts", model.initial, "blocks.0.experts", 0)
    assert model.flops_per_token(9) == tiny().flops_per_token(9) + 6 * 24  # the experts are products
    model.blocks[0].scale = nn.Parameter(torch.ones(4, 1))  # one number a head is no matrix to orthogonalize or decay
    muon, adamw = train_file.build_optimizer(model, TrainConfig(), 0.1, torch.float32)
    decayed = muon.param_groups[0]["params"] + adamw.param_groups[0]["params"]
    assert not any(p is model.blocks[0].scale for p in decayed)
    # A choice without a branch is no other choice, and a name that only looks like a norm's is none.
    unknown = SimpleNamespace(steps=9, warmup=0, schedule="linear", optimizer="lion", lr=1.0, weight_decay=0.0)
    fails(ValueError, "no schedule linear", learning_rate, 5, unknown, 1.0)
    fails(ValueError, "has no lion", train_file.build_optimizer, model, unknown, 1.0, torch.float32)
    for field in "norm", "mlp":
        odd = ModelConfig()
        setattr(odd, field, "relu2")
        fails(KeyError, "relu2", GPT, odd)
    model.blocks[0].normalizer = nn.Linear(3, 3)
    fails(ValueError, "no rule for blocks.0.normalizer.weight", model.initial, "blocks.0.normalizer.weight", 0)
    # Numbers in the place of a mask are added to the scores by all that take them.
    bias = torch.randn(1, 2, 4, 4)
    assert torch.allclose(attend(q, q, q, bias, "reference"), attend(q, q, q, bias, "math"), atol=1e-6)

    @dataclasses.dataclass
    class More(TrainConfig):
        """Flags of a fork: what is not given is None, not False."""
        alibi: Annotated[bool | None, "a"] = None
        mlp: Annotated[Literal["swiglu", "gelu"] | None, "m"] = None
    for argv, found in ("", (None, None)), ("--alibi --mlp=gelu", (True, "gelu")), ("--no_alibi", (False, None)):
        config = train_file.parse_args(More, "train.py", argv.split())
        assert (config.alibi, config.mlp) == found
    with mock.patch.object(TrainConfig, "tied", False, create=True):
        fails(ValueError, "TrainConfig.tied default None", TrainConfig)
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        with mock.patch.object(train_file, "build_optimizer", lambda model, config, peak, dtype: [torch.optim.Muon([
                p for p in model.parameters() if p.dim() == 2])]):
            code, output = train_here(f"--data={d}/data", f"--out={d}/out")
        assert code == 1 and "has blocks.0.attn_norm.weight in none of its groups" in output, output
        scaled = []

        def build(model, config, peak, dtype):
            groups = [dict(params=[p], lr=peak * 2 ** i) for i, p in enumerate(model.parameters())]
            scaled[:] = [torch.optim.SGD(groups)]
            return scaled
        with mock.patch.object(train_file, "build_optimizer", build):
            assert train_here(f"--data={d}/data", f"--out={d}/scaled", "--steps=3")[0] == 0
        first, second = (group["lr"] for group in scaled[0].param_groups[:2])
        assert 0 < first < 0.01 and second == 2 * first  # the schedule's, by the share that each group began with
        run = SimpleNamespace(world=ONE, config=SimpleNamespace(out=str(d)), unwritten=b"")
        train_file.write_metrics(run, [dict(extra=2.0, unknown=None, odd=math.nan, step=7)])
        assert (d / "metrics.jsonl").read_text() == '{"step": 7, "extra": 2.0, "unknown": null, "odd": null}\n'
        for odd in "words", {"a": 1}, torch.ones(()), np.float32(1):
            fails(TypeError, "", train_file.write_metrics, run, [dict(step=7, odd=odd)])
    fails(ValueError, "LlamaForCausalLM has no blocks.0.router.weight", checkpoint.hf_names, "llama",
          ["embed.weight", "blocks.0.router.weight"])
    fails(ValueError, "has no scale", checkpoint.hf_names, "gpt2", ["scale"])
    with folder() as d:
        checkpointer, optimizer = Checkpointer(d, asynchronous=True), torch.optim.SGD(model.parameters())
        optimizer.state[model.head.weight]["count"] = 1
        fails(ValueError, "count is no tensor", checkpointer.check, model, [optimizer])
        checkpointer.check(model, [optimizer])  # told once, until it is to be saved
        os.symlink("loop", d / "loop")
        data.prepare([model_file.__file__], d / "data")
        code, output = train_here(f"--data={d}/data", f"--out={d}/loop", "--steps=1")
        assert code == 1 and output.count("\n") == 1, output
    raw = meta(model.config)
    raw.blocks[1].router = nn.Linear(64, 2, device="meta")
    with (world := distributed.pretend(dict(tp=2), 2)).entered:
        fails(ValueError, "--tp blocks.1.router.weight PLAN", distributed.tensor_parallel, raw, world)


class Evil:
    """Pickles to a call that leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def relist(folder):
    """Make a tampered checkpoint's list of files agree with the files: an attacker can do that too."""
    files = {path.name: checkpoint.fingerprint(path) for path in folder.iterdir() if path.name != "files.json"}
    (folder / "files.json").write_text(json.dumps(files))


def test_checkpoint_index_of_any_python_is_read():
    """Python 3.11.2 pickles a member of an enumeration by getattr: read as that alone, and of enumerations alone."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as layout

    class Stored:
        def __init__(self, *arguments):
            self.arguments = arguments

        def __reduce__(self):
            return getattr, self.arguments

    def read(stored):
        return checkpoint.IndexUnpickler(io.BytesIO(pickle.dumps(stored))).load()
    assert read(Stored(layout, "TORCH_PRESERVE_FORMAT")) is layout.TORCH_PRESERVE_FORMAT
    fails(ValueError, "mro Size", read, Stored(torch.Size, "mro"))
    fails(KeyError, "mro", read, Stored(layout, "mro"))


def test_checkpoint_runs_no_code_of_a_hostile_file():
    """Law 6: in the index, in an entry that is not a tensor, in a tensor's bytes, and a path that leaves the folder."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata

    with tempfile.TemporaryDirectory() as top:
        mark, good = Path(top, "mark"), Path(top, "good")
        saved_run(good, 1)

        def tampered(name):
            shutil.copytree(good, Path(top, name))
            return Path(top, name, "checkpoints", "step_00000001")

        index = tampered("index")
        (index / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
        nested = tampered("nested")
        (nested / ".metadata").write_bytes(pickle.dumps(Metadata({"model.0.weight": Evil(mark)}, storage_data={})))
        entry = tampered("entry")  # what DCP itself reads with torch.load(weights_only=False)
        content = dict(checkpoint.tensors(small()), **{"model.note": Evil(mark)})
        shutil.rmtree(entry)
        dcp.save(content, checkpoint_id=entry)
        for index_without_path in [entry / ".metadata"]:
            metadata = pickle.loads(index_without_path.read_bytes())
            metadata.storage_meta = None
            index_without_path.write_bytes(pickle.dumps(metadata))
        (entry / "state.json").write_text('{"step": 1, "extra": {}}')
        tensor = tampered("tensor")  # each tensor is a torch.save of its own; replace the first one, same length
        data = next(tensor.glob("*.distcp"))
        metadata = checkpoint.read_index(tensor)
        buffer = io.BytesIO()
        torch.save(Evil(mark), buffer)
        spot = max(metadata.storage_data.values(), key=lambda info: info.length)
        raw = bytearray(data.read_bytes())
        assert len(buffer.getvalue()) <= spot.length
        spot_key = next(key for key, info in metadata.storage_data.items() if info is spot)
        raw[spot.offset:spot.offset + len(buffer.getvalue())] = buffer.getvalue()
        metadata.storage_data[spot_key].length = len(buffer.getvalue())
        data.write_bytes(raw)
        (tensor / ".metadata").write_bytes(pickle.dumps(metadata))
        outside = tampered("outside")
        metadata = checkpoint.read_index(outside)
        for info in metadata.storage_data.values():
            info.relative_path = "../../../good/checkpoints/step_00000001/__0_0.distcp"
        (outside / ".metadata").write_bytes(pickle.dumps(metadata))
        for folder, words in ((index, "system"), (nested, "system"), (entry, "BytesStorageMetadata"),
                              (tensor, "posix.system"),
                              (outside, "../../../good")):
            relist(folder)
            model = small(seed=1)
            message = error_of(Checkpointer(folder.parent.parent).load, model, adamw(model))
            assert words in message, message
            assert not mark.exists(), folder
            if folder not in (tensor,):
                error_of(quietly, checkpoint.inspect, folder)
                assert not mark.exists(), folder
        files = json.loads((outside / "files.json").read_text())
        files["../../../good/checkpoints/step_00000001/__0_0.distcp"] = files["__0_0.distcp"]
        (outside / "files.json").write_text(json.dumps(files))
        assert "out of the folder" in error_of(Checkpointer(Path(top, "outside")).load, small())


def test_checkpoint_inspect_and_verify():
    with tempfile.TemporaryDirectory() as folder:
        saved_run(folder, 1, 2)
        _, printed = quietly(checkpoint.inspect, folder)
        assert "step: 2" in printed and "tokens" in printed and "model.1.weight" in printed and "(8, 8)" in printed
        assert "float32" in printed
        one = Path(folder, "checkpoints", "step_00000001")
        assert "step: 1" in quietly(checkpoint.inspect, one)[1]
        assert quietly(checkpoint.verify, folder)[1].count("as it was written") == 2
    with tempfile.TemporaryDirectory() as folder:
        assert folder in error_of(checkpoint.inspect, folder) and folder in error_of(checkpoint.verify, folder)
        assert "nowhere" in error_of(checkpoint.inspect, "nowhere")


def test_checkpoint_write_that_fails_names_the_file_and_costs_nothing():
    """A full disk (a limit on file size stands for it), sync and async: the older one stays, the next save succeeds."""
    code = """
        import resource, signal, sys
        sys.path.insert(0, TESTS)
        from test_all import *
        assert Checkpointer(sys.argv[1]).steps() == [5] and Checkpointer(sys.argv[1]).read_extra() == {"tokens": 50}
        assert "torch.distributed.checkpoint" not in sys.modules  # 1.5 s that these must not cost
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for asynchronous in (False, True):
            folder = sys.argv[1] + str(asynchronous)
            model, optimizers, content = saved_run(folder, 1)
            checkpointer = Checkpointer(folder, keep=1, asynchronous=asynchronous)
            steps(model, optimizers)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
            if asynchronous:
                checkpointer.save(2, model, optimizers)
                message = error_of(checkpointer.finish, kind=OSError)
                checkpointer.save(2, model, optimizers)
                checkpointer.save(3, model, optimizers)  # waits for the one before, whose failure must not be lost
                message = error_of(checkpointer.finish, kind=OSError)
            else:
                message = error_of(checkpointer.save, 2, model, optimizers, kind=OSError)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert "File too large" in message and "__0_" in message, message
            assert [path.name for path in Path(folder, "checkpoints").iterdir()] == ["step_00000001"]
            assert same(load_fresh(folder)[2], content[1])
            checkpointer.check(model, optimizers)
            checkpointer.save(2, model, optimizers)
            checkpointer.finish()
            assert checkpointer.steps() == [2]
    """.replace("TESTS", repr(str(HERE)))
    with tempfile.TemporaryDirectory() as folder:
        saved_run(folder, 5)
        run_python("-c", textwrap.dedent(code), folder)


def test_a_failed_write_costs_one_checkpoint_and_the_exit_code():
    """The run says what and why, goes on, saves again, ends with 1: a disk full, a folder removed or not permitted."""
    commit, save = Checkpointer.commit, Checkpointer.save

    def full(self, step, *arguments):
        if step == 2:
            raise OSError(28, "No space left on device")
        commit(self, step, *arguments)

    def removed(self, step, *arguments):
        if step == 2:
            shutil.rmtree(self.root.parent)
        commit(self, step, *arguments)

    def denied(self, step, *arguments):
        user = os.geteuid()
        self.root.mkdir(exist_ok=True)
        os.chmod(self.root, 0o500 if step == 2 else 0o700)
        if step == 2 and user == 0:  # who may write everywhere
            os.seteuid(65534)
        try:
            save(self, step, *arguments)
        finally:
            os.seteuid(user)
    for flag, name, fault, words in [
            ("--async_save", "commit", full, ["No space left"]), ("--no_async_save", "commit", full, ["No space left"]),
            ("--no_async_save", "commit", removed, ["state.json", "metrics.jsonl"]),
            ("--no_async_save", "save", denied, ["Permission denied", "out/checkpoints"])]:
        with folder() as d, mock.patch.object(Checkpointer, name, fault):
            data.prepare([model_file.__file__], d / "data")
            code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--steps=6", "--save_every=2", flag)
            assert code == 1 and "not saved: checkpoint 2 is not written: " in output, output
            assert all(word in output for word in [*words, "complete at step 6, but not all was saved"]), output
            assert Checkpointer(d / "out").steps() == [4, 6]
    with folder() as d, mock.patch.object(Checkpointer, "commit", full):
        data.prepare([model_file.__file__], d / "data")
        code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--steps=9", "--save_every=1", "--log_every=1",
                                  "--async_save")  # there is always a write under way, and it is said nevertheless
        assert code == 1 and output.index("not saved: checkpoint 2") < output.index("step 5/9"), output
    with folder() as d, mock.patch.object(Checkpointer, "commit", mock.Mock(side_effect=OSError(28, "No space left"))):
        data.prepare([model_file.__file__], d / "data")
        code, output = train_here(f"--data={d}/data", f"--out={d}/out", "--steps=2")
        words = "step 2, but saved are none, see above: the same command starts over"
        assert code == 1 and words in output and "Sample:" not in output, output


# One group of two processes runs all the checks that need one.
SCRIPT = """
import gc, os, sys
sys.path.insert(0, TESTS)
from test_all import *
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))


def ddp(seed=0):
    model = small(seed)
    return DistributedDataParallel(model), model


def fsdp(seed=0):
    model = small(seed)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), model


def whole(model, optimizers):
    return {key: value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
            for key, value in checkpoint.tensors(model, optimizers).items()}


layouts = dict(ddp=ddp, fsdp=fsdp)
for asynchronous in (False, True):
    for name, build in layouts.items():
        wrapped, model = build()
        optimizers = muon_and_adamw(model) if name == "ddp" else adamw(model)
        out = f"{folder}/{name}{asynchronous}"
        checkpointer = Checkpointer(out, asynchronous=asynchronous, keep=2)
        for step in range(1, 4):
            steps(wrapped, optimizers)
            reference = whole(model, optimizers)
            checkpointer.check(model, optimizers)
            checkpointer.save(step, model, optimizers, {"rank": rank})
        steps(wrapped, optimizers)
        checkpointer.finish()
        assert checkpointer.steps() == [2, 3]
        for other in layouts.values():  # and on one process, below
            _, fresh = other(seed=1)
            fresh_optimizers = muon_and_adamw(fresh) if name == "ddp" else adamw(fresh)
            assert Checkpointer(out).load(fresh, fresh_optimizers) == (3, {"rank": 0})
            assert same(whole(fresh, fresh_optimizers), reference), (name, other)
        if rank == 0:
            torch.save(reference, out + "/reference.pt")
        files = {path.name for path in (checkpointer.folder(3)).iterdir()}
        assert {"__0_0.distcp", "__1_0.distcp"} <= files, files

# A parameter that is not finite on one rank alone is refused on both; damage that one rank reads is skipped by both.
wrapped, model = fsdp()
optimizers = adamw(model)
if rank == 1:
    with torch.no_grad():
        model[3].weight.to_local()[0, 0] = float("nan")
checkpointer = Checkpointer(folder + "/fsdpFalse")
assert "3.weight" in error_of(checkpointer.save, 9, model, optimizers)
if rank == 0:
    path = checkpointer.folder(3) / "__1_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
dist.barrier()
(step, _), printed = quietly(checkpointer.load, model, optimizers)
assert step == 2 and ("__1_0.distcp" in printed) == (rank == 0), printed

# One rank fails to write: both raise the same error, what was there stays, and the next save succeeds.
import torch.distributed.checkpoint as dcp
good = dcp.FileSystemWriter.write_data
for asynchronous in (False, True):
    checkpointer = Checkpointer(folder + "/fsdpFalse", asynchronous=asynchronous)
    before = checkpointer.steps()
    if rank == 1:
        def full(self, plan, planner):
            raise OSError(28, "No space left on device")
        dcp.FileSystemWriter.write_data = full
    if asynchronous:
        checkpointer.save(20, model, optimizers)
        while not checkpointer.pending.done():
            time.sleep(0.01)
        message = error_of(checkpointer.check, model, kind=OSError)
    else:
        message = error_of(checkpointer.save, 20, model, optimizers, kind=OSError)
    assert "No space left" in message and "__1_" in message and "rank 1" in message, message
    dcp.FileSystemWriter.write_data = good
    assert checkpointer.steps() == before
    dist.barrier()
    checkpointer.save(20 + asynchronous, model, optimizers)
    checkpointer.finish()
    assert 20 + asynchronous in checkpointer.steps()
    dist.barrier()

# rank 0's commit fails
checkpointer = Checkpointer(folder + "/fsdpFalse")
checkpointer.commit = lambda *arguments: (_ for _ in ()).throw(OSError(13, "Permission denied"))
assert "Permission denied" in error_of(checkpointer.save, 40, model, optimizers, kind=OSError)
del wrapped, model, optimizers, fresh, fresh_optimizers, checkpointer
gc.collect()
dist.barrier()
dist.destroy_process_group()
"""


def test_slow_checkpoint_on_two_processes():
    """DDP and FSDP2, saved and loaded across and on one process, sync and async; failures on one rank reach both."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "two.py")
        script.write_text("import time\n" + SCRIPT.replace("TESTS", repr(str(HERE))))
        run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, folder)
        for name, build in (("ddp", muon_and_adamw), ("fsdp", adamw)):
            reference = torch.load(f"{folder}/{name}True/reference.pt", weights_only=True)
            assert same(load_fresh(f"{folder}/{name}True", build=build)[2], reference)


# ---- Hugging Face's form ---------------------------------------------------------------------------------------------

PUBLISHED = {  # shapes that transformers has a class for, each odd in its own way
    "gpt2": dict(SHAPES["gpt2"], norm_eps=1e-5, tied=True), "gpt2-untied": dict(SHAPES["gpt2"], n_hidden=100),
    "gpt2-exact": dict(SHAPES["gpt2"], mlp="gelu_exact"),
    "llama": dict(n_kv_head=2), "llama-mqa": dict(tied=True, n_kv_head=1, head_dim=24, n_hidden=96, rope_theta=5e5),
    "llama3": dict(n_kv_head=2, norm_eps=1e-5, rope_scaling=dict(
        dict(model_file.STRETCH, factor=8.0), original_max_position_embeddings=16)),
    "qwen3": dict(qk_norm=True, n_kv_head=2, head_dim=32), "qwen3-tied": dict(qk_norm=True, tied=True, rope_theta=1e6),
}


def transformers():
    """The package, without its progress bars and with warnings, which are failures here."""
    try:
        import transformers
    except ImportError:
        raise Skip("pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def published(name, seed=0, **fields):
    """A GPT of that shape, its parameters random."""
    config = ModelConfig(**dict(dict(vocab_size=67, seq_len=96, n_layer=2, n_head=4, n_embd=64), **PUBLISHED[name],
                                **fields))
    model, generator = GPT(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(1.0 if "norm" in key else 0.0, 0.1, generator=generator)
    return model


def to_hf(model, where, **options):
    """Export, and load with transformers: nothing missing, nothing odd, no warning."""
    checkpoint.export_hf(model, dataclasses.asdict(model.config), where, **options)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            theirs, info = transformers().AutoModelForCausalLM.from_pretrained(where, output_loading_info=True)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not any(info.values()) and not said.getvalue(), (info, said.getvalue())
    return theirs.eval()


def from_hf(where):
    return checkpoint.open_model(where, lambda fields: GPT(ModelConfig(**fields)))[0].eval()


def agree_and_learn_alike(ours, theirs):
    """Logits within 1e-4, before and after a step of SGD on the same loss."""
    tokens = torch.randint(67, (2, 41), generator=torch.Generator().manual_seed(5))
    x, y = tokens[:, :-1], tokens[:, 1:]
    for _ in range(2):
        logits = ours(x), theirs(x).logits
        assert logits[1].dtype == torch.float32 and (logits[0] - logits[1]).abs().max() < 1e-4
        for model, out in zip((ours, theirs), logits):
            torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (logits[0] - ours(x)).abs().max() > 1e-3  # it did learn


def test_hf_loads_what_is_exported_with_equal_logits_and_learns_alike():
    """Export: every family, one file or many; the round trip is bit-exact, and the 64 greedy tokens are the same."""
    for seed, name in enumerate(PUBLISHED):
        with folder() as d:
            ours = published(name, seed)
            theirs = to_hf(ours, d / "hf", shard_bytes=10 ** 9 if seed % 2 else 30000)
            assert (d / "hf/model.safetensors").exists() == bool(seed % 2)
            back = from_hf(d / "hf")
            assert same(checkpoint.tensors(back), checkpoint.tensors(ours)), name
            fields = dataclasses.asdict(back.config)
            assert fields == dict(dataclasses.asdict(ours.config), seq_len=fields["seq_len"]), name
            if seed % 2 == 0:  # generate() of theirs takes a second
                prompt = [3, 1, 4, 1, 5]
                new = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 5:]
                assert ours.generate([prompt], 64, temperature=0) == [new.tolist()], name
            agree_and_learn_alike(ours, theirs)


def test_hf_random_models_of_transformers_load_here():
    """Import: random configurations of each class, as transformers saves them, in each dtype."""
    hf, draw = transformers(), np.random.default_rng(0)
    for seed in range(9):
        C, heads = int(draw.choice([32, 48])), int(draw.choice([2, 4]))
        shape = dict(vocab_size=67, tie_word_embeddings=bool(draw.integers(2)), bos_token_id=0, eos_token_id=0)
        if seed % 3 == 0:
            config = hf.GPT2Config(n_positions=64, n_embd=C, n_layer=2, n_head=heads, n_inner=[None, 72][seed % 2],
                                   activation_function=["gelu", "gelu_new", "gelu_pytorch_tanh"][seed // 3],
                                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape)
        else:
            kind = hf.LlamaConfig if seed % 3 == 1 else hf.Qwen3Config
            config = kind(hidden_size=C, intermediate_size=80, num_hidden_layers=3, num_attention_heads=heads,
                          num_key_value_heads=int(draw.choice([1, heads])), head_dim=int(draw.choice([8, 20])),
                          max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=float(draw.choice([1e4, 1e6])),
                          **shape)
        torch.manual_seed(seed)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed // 3]
        theirs = hf.AutoModelForCausalLM.from_config(config).to(dtype)
        with folder() as d:
            theirs.save_pretrained(d, max_shard_size=[10 ** 9, 20000][seed % 2])
            ours, theirs = from_hf(d), hf.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval()
        assert all(p.dtype == torch.float32 for p in ours.parameters())
        agree_and_learn_alike(ours, theirs)


def test_hf_each_tensor_arrives_under_its_own_name():
    """Filled with a constant of its own, each is found under the class's name for it, the packed ones in order."""
    from safetensors.torch import load_file
    llama = ["model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight",
             "model.layers.0.post_attention_layernorm.weight", "model.norm.weight"]
    gpt2 = ["transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.bias", "transformer.wte.weight",
            "transformer.h.0.ln_2.weight", "transformer.ln_f.bias"]
    names = {"qwen3": ["blocks.1.attn.k.weight", "blocks.1.mlp.gate.weight", "head.weight", "blocks.0.mlp_norm.weight",
                       "norm.weight"],
             "gpt2": ["blocks.1.attn.v.weight", "blocks.1.mlp.up.bias", "embed.weight", "blocks.0.mlp_norm.weight",
                      "norm.bias"]}
    for family, theirs in ("qwen3", llama), ("gpt2", gpt2):
        model = published(family)
        constants = {name: float(i) for i, (name, _) in enumerate(model.named_parameters())}
        with torch.no_grad(), folder() as d:
            for name, p in model.named_parameters():
                p.fill_(constants[name])
            checkpoint.export_hf(model, dataclasses.asdict(model.config), d / "hf")
            file = load_file(d / "hf/model.safetensors")
            assert len(file) == len(constants) - (8 if family == "gpt2" else 0)  # q, k, v and their biases in one
            for ours, name in zip(names[family], theirs):
                assert (file[name][..., -1] == constants[ours]).all(), name
            assert all((p == constants[name]).all() for name, p in from_hf(d / "hf").named_parameters())


ODD = ["e\u0301é", "👩‍👩‍👧‍👦🇩🇪", "\r\n\r", "\t\0\x1c\x0b\x7f\x85", " " * 37, "    x", "中文한글ไทยहिन्दी",
       "שלום\u202eمرحبا", "\ufeff\u00a0\u200b", "ſK'ſ'LL I'm don't", "1234567٣٤٥½²", "ǅİßﬁ", "\U0010ffff\u0378\ue000",
       "aaaaaaaaaaaaa", "=======", ".\n\n\n", "\u2028"]


def test_hf_tokenizer_gives_the_ids_of_tiktoken():
    """bytes, gpt2 and a trained BPE, on odd characters in any order and in the order of Unicode; and read back."""
    hf, draw = transformers(), np.random.default_rng(0)
    texts = ["".join(draw.choice(ODD, 300)) for _ in range(5)] + ["".join(map(chr, range(1, 0x4000)))]
    texts += ["", " ", "a" * 999, "".join(draw.choice(["a", "b", " "], 500)), Path(model_file.__file__).read_text()]
    with gpt2_files(), folder() as d:
        names = ["bytes", "gpt2"]
        with contextlib.suppress(ImportError):
            data.store_bpe([*texts, "<|endoftext|> " * 9], 1000, d)
            names.append("bpe")
        for name in names:
            encoding = data.load_tokenizer(name, d)
            for file, content in data.hf_tokenizer(encoding).items():
                (d / file).write_text(json.dumps(content))
            theirs = hf.AutoTokenizer.from_pretrained(d)
            back = data.load_tokenizer(str(d))
            assert theirs.eos_token_id == encoding.eot_token == back.eot_token
            assert theirs("<|endoftext|>")["input_ids"] == [encoding.eot_token]
            for text in texts:
                ids = encoding.encode_ordinary(text)
                assert theirs(text)["input_ids"] == ids == back.encode_ordinary(text), name
                assert theirs.decode(ids) == text
        (d / "tokenizer.json").write_text('{"model": {"type": "Unigram"}, "pre_tokenizer": null}')
        fails(ValueError, "byte-level tiktoken", data.load_tokenizer, str(d))


def edit(path, **fields):
    """Change fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_hf_what_is_not_known_is_refused_with_field_and_value():
    """Both ways: never loaded into, or exported as, something that merely has the same shapes."""
    with folder() as d:
        for family, changes in {
                "llama": [dict(model_type="mistral"), dict(num_experts=8), dict(attention_bias=True),
                          dict(mlp_bias=True), dict(hidden_act="gelu"), dict(rope_scaling=dict(type="yarn", factor=4)),
                          dict(rope_parameters=dict(rope_type="linear", factor=2.0)), dict(pretraining_tp=2),
                          dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), dict(partial_rotary_factor=0.5),
                          dict(rope_scaling=dict(model_file.STRETCH, factor=0.0)),
                          dict(quantization_config={"bits": 4}), dict(rope_interleaved=True)],
                "qwen3": [dict(use_sliding_window=True), dict(layer_types=["full_attention", "sliding_attention"])],
                "gpt2": [dict(activation_function="relu"), dict(scale_attn_by_inverse_layer_idx=True),
                         dict(scale_attn_weights=False), dict(add_cross_attention=True)]}.items():
            model = published(family)
            checkpoint.export_hf(model, dataclasses.asdict(model.config), d / family)
            whole = (d / family / "config.json").read_text()
            for change in changes:
                edit(d / family / "config.json", **change)
                (name, value), = change.items()
                value = value.get("rope_type", value.get("type", "")) if isinstance(value, dict) else value
                fails(ValueError, f"{str(name)[:4]} {value}", from_hf, d / family)
                (d / family / "config.json").write_text(whole)
        numbers = dict(rms_norm_eps=float("nan"), rope_theta=-1, head_dim=10 ** 20, vocab_size="67")
        for name, value in numbers.items():
            whole = (d / "qwen3/config.json").read_text()
            edit(d / "qwen3/config.json", **{name: value})
            fails(ValueError, f"{name[-4:]} {value} expected", from_hf, d / "qwen3")
            (d / "qwen3/config.json").write_text(whole)
        for name, change in [("bias", dict(bias=True)), ("norm", dict(norm="layernorm")), ("mlp", dict(mlp="gelu")),
                             ("window", dict(window=8)), ("softcap", dict(softcap=30.0))]:
            fields = dict(dataclasses.asdict(published("llama").config), **change)
            fails(ValueError, f"{name} {change[name]}", checkpoint.export_hf, published("llama"), fields, d / "no")
        fields = dict(dataclasses.asdict(published("gpt2").config), n_kv_head=2)
        fails(ValueError, "n_kv_head 2 GPT2LMHeadModel", checkpoint.export_hf, published("gpt2"), fields, d / "no")
        assert not (d / "no").exists()
        fails(ValueError, "not empty", checkpoint.export_hf, model, dataclasses.asdict(model.config), d / "gpt2")
        with torch.no_grad():
            model.embed.weight[3, 3] = 1e6
        fails(ValueError, "wte float16 fp32", checkpoint.export_hf, model, dataclasses.asdict(model.config), d / "big",
              dtype=torch.float16)


def test_hf_damaged_and_hostile_folders_are_one_line():
    """Missing, unexpected and misshapen tensors by name; damaged files; an index that leaves the folder; no pickle."""
    from safetensors.torch import load_file, save_file
    with folder() as d:
        model = published("llama")
        checkpoint.export_hf(model, dataclasses.asdict(model.config), d / "hf")
        file, name = d / "hf/model.safetensors", "model.layers.1.mlp.up_proj.weight"
        good, tensors = file.read_bytes(), load_file(file)

        def refused(words, **changed):
            save_file({key: value for key, value in (tensors | changed).items() if value is not None}, file)
            fails(ValueError, words, from_hf, d / "hf")
        refused(f"{name} absent", **{name: None})
        refused("model.layers.7.mlp.extra.weight absent", **{"model.layers.7.mlp.extra.weight": torch.zeros(2)})
        refused(f"{name} (5, 7)", **{name: torch.zeros(5, 7)})
        refused(f"{name} torch.int8", **{name: tensors[name].to(torch.int8)})
        for damaged in good[:-9], good[:5], b"\xff" * 200, b"":
            file.write_bytes(damaged)
            fails(ValueError, "model.safetensors", from_hf, d / "hf")
        file.write_bytes(good)
        edit(d / "hf/config.json", tie_word_embeddings=True)
        fails(ValueError, "lm_head tie_word_embeddings", from_hf, d / "hf")
        edit(d / "hf/config.json", tie_word_embeddings=None)  # absent, it means what the class's default means
        from_hf(d / "hf")
        index = d / "hf/model.safetensors.index.json"
        for weights, words in [({"a": "../hf/model.safetensors"}, "out of the folder"),
                               ({"a": "/etc/passwd"}, "/etc/passwd"), ({"a": "gone.safetensors"}, "gone"),
                               ([], "index.json"), ({"a": 3}, "index.json")]:
            index.write_text(json.dumps({"weight_map": weights}))
            fails(ValueError, words, from_hf, d / "hf")
        (d / "hf/config.json").write_text("{")
        fails(ValueError, "config.json", from_hf, d / "hf")
        fails(ValueError, "nowhere exist run download", from_hf, "nowhere")
        torch.save({"model": Evil(d / "mark"), "model_args": {}}, d / "ckpt.pt")
        fails(ValueError, "ckpt.pt system", from_hf, d / "ckpt.pt")
        sizes = dict(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=9)
        for saved, words in ([1], "ckpt.pt read"), ({"transformer.wte.weight": 3}, "ckpt.pt wte int"):
            torch.save({"model": saved, "model_args": sizes}, d / "ckpt.pt")
            fails(ValueError, words, from_hf, d / "ckpt.pt")
        assert not (d / "mark").exists()


def test_a_ckpt_of_nanogpt_is_imported():
    """Prefix _orig_mod., matrices not transposed, the tied head twice, masks among the tensors."""
    model = published("gpt2")
    state = {}
    for theirs, ours in checkpoint.hf_names("gpt2", [name for name, _ in model.named_parameters()]).items():
        state["_orig_mod." + theirs] = torch.cat([model.get_parameter(name).detach() for name in ours])
    state["_orig_mod.lm_head.weight"] = state["_orig_mod.transformer.wte.weight"]
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 96, 96)
    args = dict(n_layer=2, n_head=4, n_embd=64, block_size=96, bias=True, vocab_size=67, dropout=0.0)
    with folder() as d:
        saved = dict(model=state, model_args=args, iter_num=3, best_val_loss=torch.tensor(1.0), config={})
        torch.save(saved, d / "ckpt.pt")
        back = from_hf(d / "ckpt.pt")
        assert same(checkpoint.tensors(back), checkpoint.tensors(model)) and back.config.mlp == "gelu_exact"
        saved["model_args"]["n_experts"] = 8
        torch.save(saved, d / "ckpt.pt")
        fails(ValueError, "n_experts 8", from_hf, d / "ckpt.pt")


def command(file, *argv):
    """(exit code, output) of a file's main() in this process."""
    with mock.patch.object(sys, "argv", [file.__file__, *map(str, argv)]):
        return exit_of(file.main)


def test_hf_commands_and_training_from_a_folder():
    """export, import, model.py of each, --init_from and its mistakes, and the run resumed."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        checkpoint.export_hf(model := published("gpt2", vocab_size=320, dropout=0.1), dataclasses.asdict(model.config),
                             d / "hf", eot=256, files=data.hf_tokenizer(data.load_tokenizer("bytes")))
        flags = ["--batch_size=8", "--device=cpu", "--dtype=fp32", f"--data={d}/data", f"--out={d}/out", "--lr=1e-30",
                 "--steps=2", "--eval_tokens=640", f"--init_from={d}/hf", "--seq_len=48"]
        run = functools.partial(command, train_file)
        code, output = run(*flags)
        assert code == 0 and f"from {d}/hf" in output, output
        now = from_hf(d / "out")
        then = dict(model.named_parameters())
        for name, p in now.named_parameters():  # the rate is zero, nearly, and the positions are fewer
            assert torch.allclose(p, then[name][:48] if name == "position.weight" else then[name], atol=1e-20), name
        code, output = run(*flags, "--steps=3")
        assert code == 0 and "resumed at step 2" in output, output
        code, output = run(*flags, "--seq_len=97", f"--out={d}/longer")
        assert code == 1 and "(96, 64)" in output and "--seq_len" in output, (code, output)
        for wrong, words in [(["--n_layer=2"], "--n_layer --init_from"), (["--model=nano"], "--model --init_from"),
                             (["--init_from=nowhere"], "nowhere")]:
            code, output = run(*flags, *wrong)
            assert code == 2 and output.count("\n") == 1 and all(word in output for word in words.split()), output
        edit(d / "data/meta.json", vocab_size=321)
        code, output = run(*flags, f"--out={d}/more")
        assert code == 1 and "320" in output and "321" in output and "tokenizer" in output, (code, output)

        run = functools.partial(command, checkpoint)
        assert run("export", d / "out", d / "again", "--dtype=bf16")[0] == 0
        assert run("import", d / "again", d / "run")[0] == 0
        assert "not empty" in run("import", d / "again", d / "out")[0] and Checkpointer(d / "out").steps() == [2, 3]
        samples = {command(model_file, d / where, "def", "--temperature=0", "--tokens=9") for where in ("again", "run")}
        assert len(samples) == 1 and samples.pop()[0] == 0
        for argv, words in [(["export", d], "2 paths 1"), (["inspect", d / "run", "--dtype=bf16"], "--dtype inspect"),
                            (["export", d, d / "x", "--max_shard_size=5"], "--max_shard_size 500MB")]:
            code, output = run(*argv)
            assert code == 2 and output.count("\n") == 1 and all(word in output for word in words.split()), output


def test_slow_hf_weights_pass_through_two_sharded_processes():
    """--init_from into FSDP2 and TP, saved, exported: what was in the folder, bit for bit (the rate is nearly zero)."""
    from safetensors.torch import load_file
    for name, layout in [("gpt2", "--fsdp"), ("llama", "--tp=2"), ("qwen3", "--fsdp")]:
        with folder() as d:
            data.prepare([model_file.__file__], d / "data")
            model = published(name, vocab_size=258)
            checkpoint.export_hf(model, dataclasses.asdict(model.config), d / "hf", shard_bytes=50000)
            flags = ["--batch_size=8", "--device=cpu", "--dtype=fp32", f"--data={d}/data", f"--out={d}/out",
                     "--lr=1e-30", "--steps=1", "--eval_tokens=640", f"--init_from={d}/hf", layout]
            run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train_file.__file__, *flags)
            assert command(checkpoint, "export", d / "out", d / "again")[0] == 0
            first = {key: value for file in (d / "hf").glob("*.safetensors") for key, value in load_file(file).items()}
            assert same(load_file(d / "again/model.safetensors"), first)


def test_slow_hf_export_of_a_sharded_run_is_that_of_one_process():
    """Five steps of training, then the same files: equal numbers but for rounding, and everything beside them equal."""
    from safetensors.torch import load_file
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [*SMALL, f"--data={d}/data", "--steps=5"]
        train_here(f"--out={d}/alone", *flags)
        run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train_file.__file__, *flags,
                   f"--out={d}/sharded", "--fsdp")
        for run in "alone", "sharded":
            assert command(checkpoint, "export", d / run, d / f"{run}-hf")[0] == 0
        files = {run: sorted(path.name for path in (d / run).iterdir()) for run in ("alone-hf", "sharded-hf")}
        assert files["alone-hf"] == files["sharded-hf"] and len(files["alone-hf"]) >= 4, files
        for name in files["alone-hf"]:
            if name.endswith(".json"):
                assert (d / "alone-hf" / name).read_text() == (d / "sharded-hf" / name).read_text(), name
        alone, sharded = (load_file(d / f"{run}-hf/model.safetensors") for run in ("alone", "sharded"))
        assert alone.keys() == sharded.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(sharded[name], tensor, atol=1e-5, rtol=1e-4)


# ---- many processes --------------------------------------------------------------------------------------------------

def forked(processes, function, *arguments):
    """Pids of children of this process that run `function` together, as torchrun would have started them."""
    port, pids = free_port(), []
    for rank in range(processes):
        pid = os.fork()  # a child begins with everything imported: 5 s sooner than a new process
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) if processes > 1 else None
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
                code = function(*arguments)
            os._exit(code)
        pids.append(pid)
    return pids


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def exit_codes(pids, seconds=240):
    """The children's exit codes (negative: the signal that ended them); after `seconds` they are killed."""
    codes, end = {}, time.time() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
            elif pid not in codes and time.time() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def test_slow_fifty_runs_killed_at_random_moments():
    """Most of them inside a save, on one and two processes, saves synchronous or not: each resumes bit for bit."""
    moments, seen = random.Random(0), []
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")

        def run(out, *flags):
            return train_here(f"--data={d}/data", f"--out={d}/{out}", "--steps=6", "--save_every=1", "--eval_every=3",
                              "--n_layer=1", *flags, catch=False)
        run("warm")  # what it imports, the children need not
        for processes, asynchronous in itertools.product((1, 2), ("--no_async_save", "--async_save")):
            whole = f"whole{processes}{asynchronous}"
            start = time.time()
            assert exit_codes(forked(processes, run, whole, asynchronous)) == [0] * processes
            duration = time.time() - start
            for trial in range(13 if processes == 1 else 12):
                out = f"{processes}{asynchronous}{trial}"
                pids = forked(processes, run, out, asynchronous)
                time.sleep(duration * moments.uniform(0.1, 0.9))
                os.kill(moments.choice(pids), signal.SIGKILL)
                codes = exit_codes(pids, seconds=1)  # a peer that waits for the dead one is ended, too
                found = Checkpointer(d / out).steps()
                assert exit_codes(forked(processes, run, out, asynchronous)) == [0] * processes, out
                assert metrics_of(d / out) == metrics_of(d / whole), out
                seen.append((codes.count(-signal.SIGKILL) > 0, bool(found)))
                shutil.rmtree(d / out)
    killed, resumed = map(sum, zip(*seen))
    assert len(seen) == 50 and killed > 35 and resumed > 25, (killed, resumed)


def test_slow_one_of_two_processes_dies_between_shard_and_commit():
    """Rank 1 with its shard written, or rank 0 with all of them: that checkpoint is not there, the one before is."""
    fingerprint = checkpoint.fingerprint
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")

        def run(out, dies=None, *flags):
            def dying(path):
                if (path.parent.name, path.name) == (".tmp-step_00000004", dies):
                    os.kill(os.getpid(), signal.SIGKILL)
                return fingerprint(path)
            with mock.patch.object(checkpoint, "fingerprint", dying):
                return train_here(f"--data={d}/data", f"--out={d}/{out}", "--steps=6", "--save_every=2",
                                  "--eval_every=3", *flags, catch=False)
        run("warm")  # what it imports, the children need not
        assert exit_codes(forked(2, run, "whole", None, "--fsdp")) == [0, 0]
        for (rank, dies), flag in itertools.product([(1, "__1_0.distcp"), (0, "state.json")],
                                                    ["--no_async_save", "--async_save"]):
            codes = exit_codes(forked(2, run, dies, dies, "--fsdp", flag))
            assert codes[rank] == -signal.SIGKILL and codes[1 - rank] and Checkpointer(d / dies).steps() == [2], codes
            left = {path.name for path in d.glob(f"{dies}/checkpoints/.tmp-step_00000004/*")}
            assert rank == 1 or {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= left, "rank 0, if it lives, tidies up"
            assert exit_codes(forked(2, run, dies, None, "--fsdp")) == [0, 0]
            assert metrics_of(d / dies) == metrics_of(d / "whole") and Checkpointer(d / dies).steps() == [4, 6]
            shutil.rmtree(d / dies)


def close_to(run, expected):
    """Losses and validation losses of two runs are the same steps' and within 1e-4."""
    for now, then in zip(metrics_of(run), metrics_of(expected)):
        assert now.keys() == then.keys()
        assert all(abs(now[step] / then[step] - 1) < 1e-4 for step in now), (run, now, then)


def compiling_by(backend):
    """Context: torch.compile and Module.compile take this backend; "eager" traces, and runs what it has traced."""
    stack = contextlib.ExitStack()
    compile = functools.partialmethod(nn.Module.compile, backend=backend)
    stack.enter_context(mock.patch.object(nn.Module, "compile", compile))
    stack.enter_context(mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)))
    return stack


def test_slow_a_checkpoint_of_any_layout_goes_on_in_any_other(every=3):
    """One process, DDP, FSDP2, FSDP2 x TP, compiled and not, resumed by each, compiled and not: equal losses.

    Of these 100 pairs every third, so that each pair of layouts is there: all of them take six minutes more.
    """
    layouts = {"alone": (1, []), "ddp": (2, []), "fsdp2": (2, ["--fsdp"]), "fsdp4": (4, ["--fsdp"]),
               "fsdp_tp": (4, ["--fsdp", "--tp=2"])}
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")

        def run(out, layout, compiled):
            with compiling_by("eager"):
                return train_here(f"--data={d}/data", f"--out={d}/{out}", "--steps=6", "--eval_every=3",
                                  "--save_every=3", f"--compile={['off', 'on'][compiled]}", *layouts[layout][1],
                                  catch=False)
        run("whole", "alone", False)
        run("traced", "alone", True)  # what it imports, the children need not
        pairs = [*itertools.product(layouts, (False, True), layouts, (False, True))][::every]
        for source, compiled, target, resumed in pairs:
            if not (d / f"{source}{compiled}").exists():
                processes = layouts[source][0]
                assert exit_codes(forked(processes, run, f"{source}{compiled}", source, compiled)) == [0] * processes
                close_to(d / f"{source}{compiled}", d / "whole")
                shutil.rmtree(d / f"{source}{compiled}" / "checkpoints/step_00000006")  # as if killed before
            processes = layouts[target][0]
            shutil.copytree(d / f"{source}{compiled}", d / "other")
            assert exit_codes(forked(processes, run, "other", target, resumed)) == [0] * processes, (source, target)
            close_to(d / "other", d / "whole")
            shutil.rmtree(d / "other")


def test_slow_a_signal_to_one_process_stops_both():
    """They agree on the step, save it once, and go on from it; most of their time is evaluation."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")

        def run(out):
            return train_here(f"--data={d}/data", f"--out={d}/{out}", "--steps=60", "--save_every=0", "--eval_every=2",
                              "--eval_tokens=0", catch=False)
        run("whole")
        for number, rank in (signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGINT, 1):
            out = d / f"{number}"
            pids = forked(2, run, out.name)
            wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size)
            os.kill(pids[rank], number)
            assert exit_codes(pids) == [128 + number] * 2
            assert len(Checkpointer(out).steps()) == 1 and Checkpointer(out).steps() != [60]
            assert exit_codes(forked(2, run, out.name)) == [0, 0]
            close_to(out, d / "whole")


def test_slow_what_one_process_alone_finds_parts_none():
    """A tokenizer that one machine lacks costs the sample; an --out that rank 0 cannot make ends both at once."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        (d / "file").touch()

        def run(out):
            lacks = mock.Mock(side_effect=OSError("not here")) if os.environ.get("RANK") == "1" else data.load_tokenizer
            with mock.patch.object(data, "load_tokenizer", lacks):
                return train_here(f"--data={d}/data", f"--out={d}/{out}", "--steps=2", "--fsdp", catch=False)
        assert exit_codes(forked(2, run, "out"), seconds=100) == [0, 0]
        assert exit_codes(forked(2, run, "file"), seconds=100) == [1, 1]


def test_slow_what_ends_one_machine_ends_all():
    """Two machines, each with its torchrun: one lacks the data, or a process fails; the other soon ends, too."""
    with folder() as d:
        (d / "b").mkdir()
        data.prepare([model_file.__file__], d / "a" / "data")
        script = "import os, sys, train; os.environ['RANK'] == '{}' and setattr(train, 'evaluate', {}); train.main()"
        reasons = {"data does not exist: python data.py": "", "'int' object is not callable": script.format(1, 3),
                   "because of (process 1 on|the machine that holds) .*killed":
                       script.format(1, "lambda *args: os.kill(os.getpid(), 9)"),
                   "ends because process 0|closed by peer|reset by peer": script.format(0, "lambda *args: sys.exit()")}
        for number, (reason, code) in enumerate(reasons.items()):
            program = ["--no_python", sys.executable, "-c", code] if code else [train_file.__file__]
            options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=job",
                       f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
            jobs = []
            for machine in "aa" if code else "ab":
                jobs.append(start_python("-m", "torch.distributed.run", *options, *program, *SMALL, "--data=data",
                                         f"--out={d}/out{number}", "--steps=9", cwd=d / machine))
            said = [job.communicate(timeout=60)[0] for job in jobs]
            assert all(job.returncode for job in jobs), said
            assert sum(bool(re.search(reason, text)) for text in said) == 1, said


def test_slow_elastic():
    """torchrun starts again from the newest checkpoint by itself: a worker is killed, a whole machine is, one comes."""
    with folder() as d, socket.socket() as meeting:
        data.prepare([model_file.__file__], d / "data")
        flags = [*SMALL, f"--data={d}/data", "--steps=40", "--save_every=2", "--eval_every=20"]
        train_here(f"--out={d}/whole", *flags)

        def launch(out, *options):
            command = ["-m", "torch.distributed.run", *options, *flags, f"--out={d}/{out}"]
            with mock.patch.dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
                return start_python(*command)

        def kill(out, job, *others):
            """The last worker of `job` and all `others`, once there is a checkpoint."""
            wait_for(lambda: Checkpointer(d / out).steps() or job.poll() is not None)
            worker = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[-1]
            for pid in int(worker), *others:
                os.kill(pid, signal.SIGKILL)

        def goes_on(out, job):
            output, _ = job.communicate(timeout=120)
            assert job.returncode == 0 and "resumed at step" in output, output
            close_to(d / out, d / "whole")
            return output
        job = launch("worker", "--standalone", "--nproc_per_node=2", "--max-restarts=1", train_file.__file__)
        kill("worker", job)
        goes_on("worker", job)

        port = free_port()
        options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=job",
                   f"--rdzv_endpoint=127.0.0.1:{port}", "--monitor-interval=5",
                   "--rdzv_conf=last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3", "--no_python",
                   sys.executable, "-c", "import time, train; step = train.optimizer_step; "
                   "train.optimizer_step = lambda *args: (time.sleep(0.5), step(*args))[1]; train.main()"]
        first = launch("machine", *options)
        wait_for(lambda: meeting.connect_ex(("127.0.0.1", port)) == 0)  # it is where the machines meet
        second = launch("machine", *options)
        kill("machine", second, second.pid)
        second.communicate()
        wait_for(lambda: max(Checkpointer(d / "machine").steps()) > 8 or first.poll() is not None)
        third = launch("machine", *options)
        output = goes_on("machine", first)
        third.communicate()
        assert re.findall(r"data ranks (\d)", output) == ["2", "1", "2"], output


def shaped(shape, tied, nano=False):
    """A GPT of 2 layers with 2 key/value heads, `nano` or smaller; no number of processes divides its vocabulary."""
    sizes = dict(vocab_size=257, seq_len=64, n_embd=128) if nano else dict(vocab_size=67, seq_len=16, n_embd=32)
    more = dict(masked=dict(SHAPES["llama"], window=5, doc_start=3, softcap=2.0, head_softcap=4.0),
                window=dict(SHAPES["llama"], window=5), prefix=SHAPES["llama"],
                document=dict(SHAPES["gpt2"], doc_start=3, restart_positions=True))
    return ModelConfig(n_layer=2, n_head=4, n_kv_head=2, tied=tied, **sizes, **dict(SHAPES, **more)[shape])


def rule_of(shape, tokens):
    """The `rule` with which GPT is called: in shape "prefix" the first tokens of a sequence see one another.

    All other keys are seen by every second, third, ... query, another for each head.
    """
    prefix = attention.prefix_lm(tokens[:, 0] % 9)
    rule = and_masks(prefix, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0)
    return dict(rule=rule) if shape == "prefix" else {}


def meta(config, backend="auto"):
    with torch.device("meta"):
        return GPT(config, backend)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


LOSS_CHUNKS = model_file.loss_chunks


def run_steps(world, shape, tied, steps=3, accumulation=2, optimizer="adamw", dtype="float32", nano=False,
              evaluations=True, backend="inductor", chunks=1, attention="auto", **options):
    """A short run on one layout: losses, gradient norms, the parameters that did not move, counts of elements.

    It evaluates before the first step and after the last, where the train mode's hooks and the optimizer would notice.
    """
    model_file.loss_chunks = lambda *sizes: chunks
    config, dtype, batch = shaped(shape, tied, nano), getattr(torch, dtype), 16 if nano else 8
    raw = meta(config, attention)
    with compiling_by(backend):
        model = distributed.parallelize(raw, world, seed=1, param_dtype=dtype, **options)
    before = {name: whole(p).detach().clone() for name, p in raw.named_parameters()}
    if optimizer == "muon":
        optimizers = train_file.build_optimizer(raw, TrainConfig(), 0.01, dtype)
    else:
        # Ten steps at 1e-2 let AdamW blow up rounding: a key's bias has no gradient but noise, whatever its size.
        optimizers = [torch.optim.AdamW(raw.parameters(), lr=1e-3 if steps > 3 else 1e-2)]
    autocast = torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32 and not world.has("shard"))
    generator, losses, norms, validation = torch.Generator().manual_seed(0), [], [], []

    def batch_of():
        tokens = torch.randint(config.vocab_size, (batch, config.seq_len + 1), generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        y[0, :9] = y[5, 3:] = y[-3:, 1:] = -100  # processes and micro-batches differ in their number of targets
        share = batch // world.data_size
        mine = slice(world.data_rank * share, (world.data_rank + 1) * share)
        return x[mine].to(world.device), y[mine].to(world.device)

    def evaluate():
        x, y = batch_of()
        with torch.no_grad(), autocast:
            validation.append((world.sum(model(x, y, **rule_of(shape, x))) / world.sum((y != -100).sum())).item())
        distributed.reshard(raw)
    if evaluations:
        evaluate()
    for step in range(steps):
        x, y = batch_of()
        count, total = world.sum((y != -100).sum()), torch.zeros((), device=world.device)
        for i, (a, b) in enumerate(zip(x.chunk(accumulation), y.chunk(accumulation))):
            distributed.accumulate(model, i == accumulation - 1)
            with autocast:
                loss = model(a, b, **rule_of(shape, a))
            (loss * (world.data_size / count)).backward()
            total += loss.detach()
        norms.append(distributed.clip_grad_norm(raw.parameters(), 1.0).item())
        losses.append(world.sum(total).item() / count.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if evaluations:
        evaluate()
    still = [name for name, p in raw.named_parameters() if torch.equal(whole(p), before[name])]
    model_file.loss_chunks = LOSS_CHUNKS
    held = sum(local(p).nbytes for p in raw.parameters())
    state = sum(local(t).nbytes for optimizer in optimizers for s in optimizer.state.values()
                for t in s.values() if t.ndim)  # without AdamW's step counters
    return dict(losses=losses, norms=norms, validation=validation, still=still, held=held, state=state,
                names=[name for name, _ in raw.named_parameters()])


@lru_cache(maxsize=None)
def alone(shape, tied, **options):
    """The one-process run that the others must equal."""
    return run_steps(ONE, shape, tied, accumulation=1, **options)


def torchrun(processes, *arguments, timeout=240):
    """Run this file's `worker` in `processes` processes -> CompletedProcess."""
    folder, file = os.path.split(os.path.abspath(__file__))
    code = f"import sys, {file[:-3]} as tests; tests.worker(*sys.argv[1:])"
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
               "--no_python", sys.executable, "-c", code]
    process = subprocess.Popen(command + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path))
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers; killed, it would leave them behind
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def worker(name, argument="null"):
    """What each process of `torchrun` runs: the function `name`, on the JSON `argument`."""
    globals()[name](json.loads(argument))


def worker_layouts(cases):
    """Run each [layout, options] one after the other in one process group; rank 0 prints a JSON line for each.

    On a machine with a GPU for each process, there and with NCCL.
    """
    gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    world = distributed.start("cuda" if gpus else "cpu", timeout=120)
    for shape, options in cases:
        place = distributed.connect(shape, world.device)
        found = run_steps(place, **options)
        place.entered.close()
        if world.writer:
            print("FOUND" + json.dumps(found), flush=True)
    distributed.stop(world)


def difference(now, then):
    """Largest relative difference of two runs' losses, gradient norms and validation losses."""
    return max(abs(a - b) / abs(b) for key in ("losses", "norms", "validation")
               for a, b in zip(now[key], then[key], strict=True))


def check_layouts(processes, layouts, runs, tolerances=None):
    """Every layout x run equals one process to 1e-4 (or the run's tolerance), and moves every parameter."""
    cases = [(layout, dict(shape=shape, tied=tied, **options))
             for layout, (shape, tied, options) in itertools.product(layouts, runs)]
    done = torchrun(processes, "worker_layouts", json.dumps(cases), timeout=300 + 40 * len(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(found) == len(cases)
    for (layout, options), now, tolerance in zip(cases, found, itertools.cycle(tolerances or [1e-4])):
        then = alone(**{key: value for key, value in options.items()
                        if key not in ("compile", "backend", "activation_checkpoint")})
        assert difference(now, then) < tolerance, (layout, options, now, then)
        assert now["names"] == then["names"], "wrappers must not change the parameters' names"
        assert not now["still"], (layout, options, now["still"])
    return found


def test_one_process_moves_every_parameter():
    for shape, tied in itertools.product(SHAPES, (True, False)):
        now = run_steps(ONE, shape, tied, accumulation=4)
        assert not now["still"] and difference(now, alone(shape, tied)) < 1e-4


def test_the_main_job_on_two_processes_and_then_on_one():
    """`torchrun train.py --fsdp` evaluates, saves, samples, ends with 0; one process goes on: the losses of one run."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", "--schedule=cosine", "--warmup=2", "--eval_every=4", "--save_every=4"]
        train_here(f"--out={d}/whole", *flags, "--steps=12")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train_file.__file__]
        output = run_python(*torchrun, *SMALL, f"--out={d}/out", *flags, "--steps=12", "--fsdp", "--profile")
        assert len([*d.glob("out/profile/trace_rank[01].json.gz")]) == 2 and output.count("diagnosis") == 1, output
        assert "USDT" not in output and "Warning" not in output, output
        assert "data ranks 2" in output and "sample" in output and "complete at step 12" in output, output
        flip(next((d / "out/checkpoints/step_00000012").glob("*.distcp")))
        output = run_python(*torchrun, *SMALL, f"--out={d}/out", *flags, "--steps=12", "--fsdp")
        assert "skipped checkpoint 12" in output and "complete at step 12" in output, output
        shutil.rmtree(d / "out/checkpoints/step_00000012")
        code, output = train_here(f"--out={d}/out", *flags, "--steps=12")
        assert code == 0 and "--fsdp True is now False" in output and "resumed at step 8" in output, output
        close_to(d / "out", d / "whole")


def adamw_of(raw):
    return [torch.optim.AdamW(raw.parameters())]


def muon_of(raw):
    return train_file.build_optimizer(raw, TrainConfig(), 0.01, torch.bfloat16)


def test_law_1_two_processes():
    """DDP, FSDP2, tensor parallel equal one process, also with masks; the planner's parameters and moments are real.

    FSDP2 holds half of what one process does.
    """
    layouts = [dict(replicate=2), dict(shard=2), dict(tp=2)]
    found = check_layouts(2, layouts, [("llama", True, dict(optimizer="muon")), ("gpt2", False, {}),
                                        ("masked", True, dict(activation_checkpoint="selective", steps=2))])
    for layout, flags, *runs in zip(layouts, (dict(), dict(fsdp=True), dict(tp=2)), found[::3], found[1::3]):
        for now, shape, optimizers in zip(runs, ("llama", "gpt2"), (muon_of, adamw_of)):
            predicted = distributed.plan(lambda: meta(shaped(shape, shape == "llama")), optimizers, gpus=2, seq_len=16,
                                         **flags)["memory"]
            assert (predicted["parameters"], predicted["moments"]) == (now["held"], now["state"]), (layout, predicted)
            then = alone(shape=shape, tied=shape == "llama", **dict(optimizer="muon") if shape == "llama" else {})
            part = (now["held"] + now["state"]) / (then["held"] + then["state"])
            assert "shard" not in layout or 0.475 < part < 0.525, part


# Each family tied and untied, with both policies of activation checkpointing; all with two key/value heads.
EVERY_SHAPE = [("llama", True, {}), ("llama", False, {}), ("gpt2", True, {}), ("gpt2", False, {})]
CHECKPOINTED = [(shape, tied, dict(activation_checkpoint=("block", "selective")[tied ^ (shape == "gpt2")]))
                for shape, tied, _ in EVERY_SHAPE]
TWO = [dict(replicate=2), dict(shard=2), dict(tp=2)]  # DDP, --fsdp, --tp 2
FOUR = [dict(replicate=4), dict(shard=4), dict(replicate=2, shard=2), dict(shard=2, tp=2)]  # and HSDP, FSDP2 x TP


def with_options(runs, **more):
    return [(shape, tied, dict(options, **more)) for shape, tied, options in runs]


def test_slow_law_1_ten_steps_of_nano_in_every_layout():
    """1 x 16, 1 x 4, and 2 and 4 processes, every shape: losses, norms and validation losses of ten steps."""
    runs = with_options(EVERY_SHAPE, nano=True, steps=10)
    for shape, tied, options in runs:
        now = run_steps(ONE, shape, tied, accumulation=4, **options)
        assert difference(now, alone(shape, tied, **options)) < 1e-4
    check_layouts(2, TWO, runs)
    check_layouts(4, FOUR, runs[::3])  # one of each family, one tied: all four take 100 s more


def test_slow_law_1_activation_checkpoints_muon_and_bf16():
    """And each mask. Muon sees whole matrices everywhere (1e-3); FSDP2's bf16 is within 1 % of autocast's."""
    checkpointed = with_options(CHECKPOINTED, steps=5)
    muon = [("llama", True, dict(optimizer="muon", steps=5)), ("gpt2", False, dict(optimizer="muon", steps=5))]
    bf16 = [("llama", True, dict(dtype="bfloat16")), ("gpt2", False, dict(dtype="bfloat16"))]
    masks = [(shape, False, dict(steps=2)) for shape in ("window", "document", "prefix")]
    chunked = [("masked", tied, dict(steps=2, chunks=4)) for tied in (True, False)]
    check_layouts(2, TWO, checkpointed + muon + bf16 + masks + chunked,
                  [1e-4] * 4 + [1e-3] * 2 + [1e-2] * 2 + [1e-4] * 5)
    check_layouts(4, FOUR, checkpointed[::3] + muon[:1] + bf16[1:] + chunked[:1], [1e-4] * 2 + [1e-3, 1e-2, 1e-4])


def test_slow_law_1_offloaded():
    """Parameters, gradients and moments in the host's memory; here it is the same memory, by the same calls."""
    check_layouts(2, TWO[1:2], [("llama", False, dict(offload=True, optimizer="muon"))], [1e-3])


def test_slow_law_1_compiled():
    """By inductor: whole under DDP, per block under FSDP2, HSDP and tensor parallel, with checkpointed blocks."""
    options = dict(compile=True, steps=2, evaluations=False)
    check_layouts(2, TWO[::2], [("llama", True, options)])
    check_layouts(2, TWO[1:2], [("gpt2", False, dict(options, activation_checkpoint="block")),
                                 ("masked", True, options)])
    check_layouts(2, TWO[2:], [("llama", True, dict(options, activation_checkpoint="block", attention="math"))])
    check_layouts(4, FOUR[2:], [("llama", True, dict(options, activation_checkpoint="selective"))])


def worker_manners(_):
    """`first` outlasts the time-out of collectives, in order; `any` and a skipped update agree; then rank 1 fails."""
    world = distributed.start("cpu", fsdp=True, timeout=3)
    with world.first():
        if world.writer:
            time.sleep(4)
        print(f"TURN {world.rank}", flush=True)
    assert world.any(world.rank == 1) and not world.any(False)
    assert (world.sum(torch.tensor(1.5)).item(), world.data_size, world.size) == (3.0, 2, 2)

    raw = meta(shaped("llama", True))
    distributed.parallelize(raw, world, seed=1)
    run = planted(raw, torch.amp.GradScaler("cpu"), poison=world.rank == 1)
    before = raw.norm.weight.to_local().clone()
    train_file.update(run, torch.tensor(1.0), 0.01)
    assert torch.equal(raw.norm.weight.to_local(), before) and run.scaler.get_scale() == 2.0 ** 15
    print(f"AGREED {world.rank}", flush=True)
    world.any(False)  # both have said so
    if world.rank == 1:
        print(f"FAILS {time.time()}", flush=True)
        raise RuntimeError("rank one fails")
    world.any(False)


def test_slow_machines_that_are_not_alike_are_said():
    """Two torchruns with other flags, data, weights, or an --out that is not one folder: one line, before step 0."""
    with folder() as d:
        model = tiny(initial=True, vocab_size=257, seq_len=32)
        for machine, source in ("one", model_file), ("two", data):
            data.prepare([source.__file__], d / machine / "data")
            checkpoint.export_hf(model, dataclasses.asdict(model.config), d / machine / "hf")
            model.requires_grad_(False).embed.weight.add_(0.1)
        imported = ["--device=cpu", "--dtype=fp32", "--init_from=hf", f"--data={d}/one/data"]
        kept = [f"--data={d}/one/data", "--save_every=2"]
        assert train_here(*kept, f"--out={d}/one/out-kept", "--steps=4")[0] == 0
        shutil.copytree(d / "one/out-kept", d / "two/out-kept")
        for name, flags, words in [
                ("lr", [[*SMALL, "--lr=0.02"], [*SMALL, "--lr=0.01"]], "--lr is 0.0"),
                ("fsdp", [[*SMALL, "--fsdp"], SMALL], "--fsdp is "),
                ("data", [SMALL, SMALL], "the number of --data's tokens is "),
                ("code", [SMALL, SMALL], "[bytes, checksum] of "),
                ("usage", [SMALL, [*SMALL, "--nonsense"]], "unknown argument --nonsense"),
                ("kept", [[*SMALL, *kept, "--resume=2"]] * 2, "--out out-kept is not one folder for all: "),
                ("weights", [imported, imported], "the sum of some of --init_from's weights is "),
                ("out", [[*SMALL, f"--data={d}/one/data"]] * 2, "--out out-out is not one folder for all: ")]:
            # With a clock that is so fast that nobody waits a minute for a network file system.
            script = "import os, time, train; "
            script += "time.monotonic = lambda: 20 * time.perf_counter(); " * (name in ("kept", "out"))
            script += "train.checkpoint.fingerprint = lambda path: os.getcwd(); " * (name == "code") + "train.main()"
            rendezvous = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=1",
                          "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "--no_python",
                          sys.executable, "-c", script]
            shared = "../" * (name == "weights")  # or the folders that differ would be said
            rendezvous += [f"--out={shared}out-{name}", "--data=data", "--steps=4"]
            processes = [start_python(*rendezvous, *own, cwd=d / machine)
                         for machine, own in zip(("one", "two"), flags)]
            outputs = [process.communicate(timeout=120)[0] for process in processes]
            assert [process.returncode for process in processes] == [1, 1], outputs
            assert all(f"train.py: {words}" in text and '"<string>"' not in text for text in outputs), outputs
            assert not any("step 1" in text or "terminate called" in text for text in outputs), outputs
        for run in d / "one/out-kept", d / "two/out-kept":  # nothing is begun, and the run that was there is as it was
            assert Checkpointer(run).steps() == [2, 4] and len(metrics_of(run)[0]) == 4
        assert {path.parts[-3] for path in d.rglob("step_*")} == {"out-kept"}
        assert not list(d.rglob("out-[ldcwu]*/.lock"))  # nor is there anything of those that were refused
    met = iter([(torch.distributed.HashStore(), 0, 2)])
    with mock.patch.object(torch.distributed, "rendezvous", return_value=met):
        fails(TimeoutError, "processes [1] have not come within 1 s", distributed.meet, 1)
    with mock.patch.multiple(torch.distributed, is_initialized=lambda: True, get_world_size=lambda: 2,
                             all_gather_object=lambda found, mine: found.__setitem__(1, ("x", {"b": 1}))):
        fails(ValueError, "a is 1 on process 0 unknown on process 1 (x):", distributed.same, {"a": 1, "b": 1})
        fails(ValueError, "b is unknown on process 0 1 on process 1", distributed.same, {})
        distributed.same({"b": 1})


def test_slow_waiting_agreeing_and_failing():
    """One process prepares while the others wait; a rank's exception ends the job, with its traceback."""
    done = torchrun(2, "worker_manners", timeout=100)
    ended = time.time()
    turns = [line for line in done.stdout.splitlines() if line.startswith("TURN")]
    assert turns == ["TURN 0", "TURN 1"], done.stderr[-3000:]
    assert done.stdout.count("AGREED") == 2, done.stderr[-3000:]
    failed = float(next(line for line in done.stdout.splitlines() if line.startswith("FAILS")).split()[1])
    assert done.returncode and "RuntimeError: rank one fails" in done.stderr and ended - failed < 30
    assert done.stderr.count("]: Traceback") == 1, done.stderr  # not also of what follows from it


def test_wrong_layouts_are_one_line():
    """Each is found before any process group waits."""
    def launched(processes):
        return mock.patch.dict(os.environ, {"WORLD_SIZE": str(processes)} if processes else {}, clear=False)
    with launched(0):
        os.environ.pop("WORLD_SIZE", None)
        assert distributed.layout() == {}
        fails(ValueError, "torchrun --standalone --nproc_per_node=2", distributed.layout, fsdp=True)
        fails(ValueError, "--tp 4", distributed.start, "cpu", tp=4)
    with launched(8):
        fails(ValueError, "has no effect without --fsdp", distributed.layout, replicas=2)
        fails(ValueError, "8 processes do not divide by 3, start 6", distributed.layout, fsdp=True, replicas=3)
        fails(ValueError, "add --fsdp", distributed.layout, tp=2)
        fails(ValueError, "n_head 6 is not divisible by --tp 4", distributed.layout, fsdp=True, tp=4, n_head=6)
        assert distributed.layout() == dict(replicate=8)
        assert distributed.layout(fsdp=True, replicas=2, tp=2) == dict(replicate=2, shard=2, tp=2)
        assert distributed.layout(tp=8) == dict(tp=8)
    with launched(1):
        assert distributed.layout(fsdp=True) == dict(shard=1)
    if not torch.cuda.is_available():
        fails(ValueError, "take --device cpu", distributed.start, "cuda")
    with mock.patch.object(torch.cuda, "device_count", lambda: 2), mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"):
        fails(ValueError, "8 processes here found 2 --nproc_per_node=2", distributed.find_device, "auto")


def test_slow_errors_are_said_once_by_all_processes_together():
    """A mistake that every process finds is one line; one that rank 1 alone finds is said, too."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = run_python(*torchrun, train_file.__file__, "--fsdp", "--stepps=3", "--device=cpu", code=1)
    assert output.count("did you mean --steps?") == 1, output
    with mock.patch.dict(os.environ, LOCAL_RANK="1"), mock.patch.object(time, "sleep"):
        assert exit_of(distributed.refuse, "words", 1) == (1, "words\n")


def test_every_row_of_the_tensor_parallel_plan_names_a_module():
    """And every parameter of both families belongs to a row."""
    names = set()
    for shape, tied in itertools.product(SHAPES, (True, False)):
        raw = meta(shaped(shape, tied))
        names |= {name.rpartition(".")[2] for name, _ in raw.named_modules()}
        lost = [name for name, _ in raw.named_parameters() if name.split(".")[-2] not in distributed.PLAN]
        assert not lost, f"PLAN has no row for the modules of {lost}"
    lost = set(distributed.PLAN) - names
    assert not lost, f"no module of SHAPES' models is called {lost}: add a shape that has it"


def test_checkpointed_blocks_recompute_what_they_should():
    """`selective` recomputes no matrix product, `block` all of them; both leave the gradients bit for bit the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return function(*args, **(kwargs or {}))
    counts, gradients = {}, {}
    tokens = torch.arange(17)[None]
    for policy in "none", "selective", "block":
        raw = meta(shaped("llama", True))
        world = ONE
        model = distributed.parallelize(raw, world, seed=1, activation_checkpoint=policy)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        with Products() as products:
            loss.backward()
        counts[policy] = products.count
        gradients[policy] = torch.cat([p.grad.flatten() for p in raw.parameters()])
    assert counts["selective"] == counts["none"] < counts["block"], counts
    assert torch.equal(gradients["none"], gradients["selective"]) and torch.equal(gradients["none"], gradients["block"])


@mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
def test_selective_checkpoint_keeps_what_flex_made():
    """As far as a CPU can say, which has no backward pass of it: asked again, the same output, whatever the inputs."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts
    q, zeros = torch.randn(1, 2, 9, 8), torch.zeros(1, 2, 9, 8)
    mask = attention.make_mask(attention.causal, "flex", 9, 9, q.device)
    forward, again = create_selective_checkpoint_contexts(distributed.expensive_ops())
    with forward:
        out = attend(q, q, q, mask, "flex")
    with again:
        other = attend(zeros, zeros, zeros, mask, "flex")
    assert torch.equal(other, out)


def test_planner():
    """Llama-3.1-8B over 64 GPUs: shards of the real model, what fits, and what to change where it does not."""
    def plan_of(*flags):
        with mock.patch.object(sys, "argv", ["distributed.py", "--model", "llama-3.1-8b", "--seq_len", "8192", *flags]):
            return exit_of(distributed.main)
    def build():
        return meta(ModelConfig(**PRESETS["llama-3.1-8b"]))
    found = distributed.plan(build, adamw_of, gpus=64, fsdp=True, seq_len=8192, activation_checkpoint="block")
    assert found["fits"] and abs(found["memory"]["parameters"] / (4 * 8_030_261_248 / 64) - 1) < 0.01, found
    code, output = plan_of("--gpus", "8")
    assert code == 0 and "does not fit; the smallest change that does: --fsdp" in output, output
    # Within one machine all links are fast, whatever number it has of them.
    six, seven = (plan_of("--gpus=6", "--fsdp", f"--machine={n}")[1].replace(f"{n} in a", "") for n in (6, 7))
    assert six == seven
    for flags, words in {("--gpus", "0"): "--gpus is 0", ("--gpus=8", "--tp=2"): "add --fsdp", ("--tp=0",): "--tp is 0",
                         ("--attention=reference",): "reference is not predicted", ("--device=cpu",): "not predicted",
                         ("--gpus=64", "--batch_size=16"): "take --batch_size 64"}.items():
        code, output = plan_of(*flags)
        assert code == 2 and words in output and output.count("\n") == 1, output
    with mock.patch.object(distributed, "STATES", {}):
        code, output = plan_of("--gpus", "8")
    assert code == 2 and output.count("\n") == 1 and "'Muon' has no row in STATES" in output, output
    # A fork's second MLP leaves as much as the first one.
    block = build().blocks[0]
    once = distributed.activation_bytes(block, "none")
    block.mlp2 = block.mlp
    block.mlp = nn.ModuleList([block.mlp2, meta(ModelConfig(**PRESETS["llama-3.1-8b"])).blocks[0].mlp])
    del block.mlp2
    assert distributed.activation_bytes(block, "none") == once + 2 * (4 * 14336), once
    # Of micro-batches the largest that fits comes first.
    code, output = plan_of("--fsdp", "--batch_size=256", "--micro_batch=32", "--activation_checkpoint=block")
    assert "does: --micro_batch 8 " in output and "checkpoint        " in output, output
    # Its advice, typed beside what it printed, fits.
    for argv in (["--fsdp", "--activation_checkpoint=block", "--gpus=4", "--micro_batch=16"], ["--gpus=8"],
                 ["--gpus=8", "--fsdp", "--micro_batch=4"]):
        output = plan_of(*argv)[1]
        assumed, advice = re.search(r"(--batch.*?h \d+).*that does: (.*) \(one", output, re.DOTALL).groups()
        again = plan_of(*argv, *assumed.split(), *advice.split())[1]
        assert "\nfits" in again, (argv, output, again)
    # Over slower links HSDP's gradients take longer; what the kernels do does not.
    near, far = (distributed.plan(build, adamw_of, gpus=16, fsdp=True, replicas=2, seq_len=8192, machine=machine)
                 for machine in (16, 8))
    inside, outside = distributed.GPUS["H100"][2:]
    sent = near["sent"]["shard"], near["sent"]["replicate"]
    for found, speed in (near, inside), (far, outside):
        expected = sent[0] / 1e9 / inside + sent[1] / 1e9 / speed
        assert math.isclose(found["spent"]["sent meanwhile"], expected, rel_tol=1e-6), (found, expected)
        assert found["seconds"] == max(found["spent"]["model"], expected) and found["spent"]["Muon"] == 0, found


def measured_peak(config, policy, fsdp, micro_batch):
    """Bytes alive at once in the forward and backward of a training step, on fake tensors, which have only a size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    world = distributed.pretend(dict(shard=4) if fsdp else dict(replicate=4), 4)
    with world.entered, FakeTensorMode(allow_non_fake_inputs=True):
        raw, tokens = GPT(config), torch.zeros(micro_batch, config.seq_len, dtype=torch.long)
        distributed.shard(raw, world, torch.bfloat16, policy)
        optimizer, = adamw_of(raw)

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=not fsdp):
                loss = raw(tokens, tokens)
            loss.backward()
        step()
        optimizer.step()  # now the moments are there, and DDP's gradients, which live in its buckets, stay
        optimizer.zero_grad(set_to_none=fsdp)
        tracker = MemTracker()
        tracker.track_external(raw, optimizer)
        with tracker:
            step()
            return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input alone, as a GPU's kernel does; the CPU's keeps three fp32 copies. Sizes only."""
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(context, gradient):
        return tuple(map(torch.empty_like, context.saved_tensors))


def test_planner_peak_is_the_measured_one(cases=(("gpt2", "none", True), ("gpt2", "selective", False),
                                                 ("llama", "block", True))):
    """Within 15 %, for DDP and FSDP2, both families, every checkpoint policy; most of it activations."""
    with mock.patch.object(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight)):
        for shape, policy, fsdp in cases:
            config = ModelConfig(vocab_size=1024, seq_len=512, n_layer=2, n_head=8, n_kv_head=2, n_embd=512,
                                 **SHAPES[shape])
            predicted = distributed.plan(lambda: meta(config), adamw_of, gpus=4, fsdp=fsdp, micro_batch=4, seq_len=512,
                                         activation_checkpoint=policy)["memory"]["peak"]
            measured = measured_peak(config, policy, fsdp, micro_batch=4)
            assert abs(predicted / measured - 1) < 0.15, (shape, policy, fsdp, predicted, measured)


def test_slow_planner_peaks():
    test_planner_peak_is_the_measured_one(itertools.product(SHAPES, ("none", "block", "selective"), (False, True)))


def test_slow_eight_processes_on_a_fresh_checkout():
    """`torchrun --nproc_per_node=8 train.py --fsdp` without data: one process prepares, the others wait."""
    with folder() as d:
        output = run_python("-m", "torch.distributed.run", "--nproc_per_node=8", train_file.__file__, "--fsdp", *SMALL,
                            "--n_layer=1", "--steps=2", timeout=400, cwd=d)
        assert output.count("preparing the Python standard library") == 1, output
        assert "micro-batch 1 x accumulation 1 x data ranks 8" in output and "complete at step 2" in output, output
        assert len(metrics_of(d / "out")[0]) == 2 and (d / "data/stdlib/meta.json").exists()


def test_slow_thirty_runs_end_with_code_0():
    """Two processes each, forked where torch is imported already; they leave through the interpreter's own exit."""
    code = """
        import gc, os, socket, sys, torch
        import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel
        import test_all as tests

        def fork(rank, port):
            if pid := os.fork():
                return pid
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            tests.worker("worker_exit")
            sys.exit()

        tests.alone("llama", True, steps=1)  # what is imported late is imported here
        gc.freeze()
        for run in range(30):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            children = [fork(rank, port) for rank in range(2)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            if codes != [0, 0]:
                sys.exit(f"run {run} ended with {codes}")
        print("thirty")
    """
    assert "thirty" in run_python("-c", textwrap.dedent(code), timeout=600)


def worker_exit(_):
    world = distributed.start("cpu", fsdp=True, replicas=2, timeout=99)
    for group in map(world.mesh.get_group, ("replicate", "shard")):
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 99
    run_steps(world, "llama", True, steps=1)
    distributed.stop(world)


# ---- the runner ------------------------------------------------------------------------------------------------------

def main():
    """Run the tests one after the other; exit code 1 if any failed."""
    parser = argparse.ArgumentParser(description="Every check of flatgpt.")
    parser.add_argument("-k", default="", metavar="WORD", help="only tests whose name contains WORD")
    parser.add_argument("--list", action="store_true", help="name the tests and what they hold")
    parser.add_argument("--slow", action="store_true", help="the long ones, too")
    options = parser.parse_args()
    tests = {name: test for name, test in globals().items() if name.startswith("test_") and options.k in name
             and (options.slow or options.list or options.k or not name.startswith("test_slow_"))}
    if options.list:
        for name, test in tests.items():
            checkpoint.tell(f"{name:72s} {(test.__doc__ or '').partition(chr(10))[0]}")
        return 0
    if not tests:
        print(f"no test has {options.k} in its name: --list names them")
    counts = dict(passed=0, failed=0, skipped=0)
    for name, test in tests.items():
        start, result, note = time.perf_counter(), "passed", ""
        try:
            test()
        except Skip as reason:
            result, note = "skipped", f": {reason}"
        except Exception:
            result, note = "failed", "\n" + traceback.format_exc()
        counts[result] += 1
        print(f"{result:7s} {time.perf_counter() - start:6.1f} s  {name}{note}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["failed"] or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
