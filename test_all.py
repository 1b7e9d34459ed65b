"""Every check of flatgpt: plain functions named `test_*`, each with its own asserts.

    python test_all.py                 # the smoke test; the last line counts passed, failed and skipped
    python test_all.py -k resume       # those whose name contains a word; --list names all, --slow adds the long ones
    python -m pytest test_all.py       # the same functions, collected by pytest

A test that needs something this machine lacks raises `Skip` with the reason.
"""
import argparse
import ast
import base64
import contextlib
import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the project comes first, as it does for `python train.py`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are no faster on two cores, and much slower on busy ones

import numpy as np
import torch
from torch import nn

import attention
import checkpoint
import data
import distributed
import model as model_file
import profile
import train as train_file
from attention import KVCache, attend
from checkpoint import Checkpointer
from model import GPT, PRESETS, ModelConfig
from train import TrainConfig, learning_rate

Skip = unittest.SkipTest  # pytest knows it, too


# ---- helpers ---------------------------------------------------------------------------------------------------------

def tiny(backend="sdpa", initial=False, **fields):
    """A GPT of a few thousand random parameters; `initial` gives it the initial weights of training."""
    config = ModelConfig(**dict(dict(vocab_size=64, seq_len=16, n_layer=2, n_head=4, n_embd=64), **fields))
    model = GPT(config, backend)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(model.initial(name, 1)) if initial else p.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


@contextlib.contextmanager
def folder():
    """A temporary folder, as a Path."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextlib.contextmanager
def patched(module, **values):
    """Module globals replaced for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@contextlib.contextmanager
def environment(**values):
    """Environment variables set for a while."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


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
    return subprocess.Popen([sys.executable, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=env, **options)


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

def test_attention_backends_agree_with_brute_force():
    """Both backends equal the formula written as a loop, for GQA, odd lengths and fewer queries than keys."""
    torch.manual_seed(0)
    for queries, keys, heads, shared in [(7, 7, 4, 4), (9, 9, 4, 2), (3, 11, 6, 2), (1, 8, 4, 1)]:
        q, k, v = (torch.randn(2, h, n, 8, dtype=torch.double) for h, n in [(heads, queries), (shared, keys), (shared, keys)])
        expected = torch.zeros_like(q)
        for b in range(2):
            for h in range(heads):
                for t in range(queries):
                    seen = keys - queries + t + 1
                    scores = k[b, h * shared // heads, :seen] @ q[b, h, t] / 8 ** 0.5
                    expected[b, h, t] = scores.softmax(0) @ v[b, h * shared // heads, :seen]
        for backend in "sdpa", "reference":
            assert (attend(q, k, v, backend=backend) - expected).abs().max() < 1e-12, (backend, queries, keys)


def test_cached_logits_equal_uncached():
    """One token at a time, in chunks, and for prompts of unequal length, with RoPE and with learned positions."""
    for fields in [dict(n_kv_head=2, qk_norm=True), dict(norm="layernorm", position="learned", mlp="gelu", bias=True, tied=True)]:
        model = tiny(**fields).eval()
        tokens = torch.randint(64, (2, 12))
        with torch.no_grad():
            whole = model(tokens)
            for chunk in 1, 5:
                cache = KVCache(model.config.n_layer, 12)
                pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split(chunk, dim=1)], dim=1)
                assert (pieces - whole).abs().max() < 1e-5, chunk
            cache = KVCache(model.config.n_layer, 15, padding=torch.tensor([3, 0]))
            padded = torch.cat([torch.cat([torch.zeros(3, dtype=torch.long), tokens[0]])[None], torch.randint(64, (1, 15))])
            shifted = torch.cat([model(piece, cache=cache) for piece in padded.split(6, dim=1)], dim=1)[0, 3:]
            assert (shifted - whole[0]).abs().max() < 1e-5


def test_generation_goes_on_past_the_context_or_says_so():
    """With RoPE the cache is a ring; learned positions end, and the message carries the numbers."""
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
    stop = model.generate([[1, 2]], 12, seed=5)[0][3]
    assert model.generate([[1, 2]], 12, seed=5, stop=stop)[0] == model.generate([[1, 2]], 12, seed=5)[0][:model.generate(
        [[1, 2]], 12, seed=5)[0].index(stop)]
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
        assert found == published[name], f"{name}: {found:,}, published {published[name]:,}"


def test_untrained_loss_is_ln_v():
    """Before training all tokens are about equally likely, whatever the shape."""
    for fields in [{}, dict(tied=True), dict(n_embd=256, vocab_size=1000), dict(n_embd=384, tied=True, norm="layernorm",
                                                                                position="learned", mlp="gelu", bias=True)]:
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
    for budget in 2 ** 28, 4 * 1000 * 7:
        with patched(model_file, CHUNK_BYTES=budget):
            model.zero_grad()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
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
model.CHUNK_BYTES = int(sys.argv[1])
torch.manual_seed(0)
gpt = model.GPT(model.ModelConfig(vocab_size=V, n_layer=1, n_embd=C, n_head=1, seq_len=1024))
x = torch.randint(V, (8, 1024))
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = gpt(x, x)
loss.backward()
print(loss.item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"""
    (plain_loss, plain), (loss, chunked) = (
        map(float, run_python("-c", script, str(budget)).split()) for budget in (2 ** 40, model_file.CHUNK_BYTES))
    assert abs(loss - plain_loss) / plain_loss < 1e-6
    assert chunked < 0.4 * plain, f"chunked {chunked / 1e6:.2f} GB, plain {plain / 1e6:.2f} GB"


def test_buffers_survive_the_meta_device():
    """A model built on the meta device and materialized computes what a directly built one does."""
    direct = tiny()
    with torch.device("meta"):
        model = GPT(direct.config)
    model.to_empty(device="cpu")
    model.load_state_dict(direct.state_dict())
    model.reset_buffers()
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
    scores = [(model_file.rotate(q, model.rope(torch.tensor([n + 3]))) * model_file.rotate(k, model.rope(torch.tensor([n])))).sum()
              for n in (0, 5, 50)]
    assert max(scores) - min(scores) < 1e-4


def test_flops_per_token_match_the_counter():
    """6 per parameter in a matrix product, and attention: what torch's counter sees on the plain backend, causal half apart."""
    from torch.utils.flop_counter import FlopCounterMode
    model = tiny(backend="reference")
    tokens = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    attention = 6 * model.config.n_layer * model.config.n_embd * 16
    expected = (model.flops_per_token(16) + attention) * tokens.numel()  # the plain backend computes the masked half, too
    assert abs(counter.get_total_flops() / expected - 1) < 0.01, (counter.get_total_flops(), expected)


def test_initial_weights_depend_on_seed_and_name_alone():
    """A wider vocabulary or another layer count leaves the other parameters as they were; another seed does not."""
    few, many = tiny(n_layer=1, initial=True), tiny(n_layer=3, initial=True)
    assert torch.equal(few.blocks[0].attn.q.weight, many.blocks[0].attn.q.weight)
    assert not torch.equal(few.blocks[0].attn.q.weight, few.blocks[0].attn.k.weight)
    assert not torch.equal(few.initial("embed.weight", 1), few.initial("embed.weight", 2))


# ---- training: the toolkit's exercises, on our GPT ---------------------------------------------------------------------

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
    for name, lr in [("sgd", 0.1), ("adamw", 3e-3), ("muon", 3e-3)]:
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


def test_compiled_equals_eager_without_graph_breaks():
    """Loss and gradients of the compiled model; `fullgraph=True` fails at the first graph break."""
    if not train_file.pick_compile("on", torch.device("cpu"))[0]:
        raise Skip("torch.compile needs a C++ compiler")
    model, tokens = tiny(n_layer=1, qk_norm=True), torch.randint(64, (2, 17))
    results = []
    for call in model, torch.compile(model, fullgraph=True):
        model.zero_grad()
        loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss.item(), model.embed.weight.grad.clone()))
    (eager, grad), (compiled, other) = results
    assert abs(compiled / eager - 1) < 1e-5 and (grad - other).abs().max() < 1e-4 * grad.abs().max()


def test_learning_rate_schedules():
    """Warm-up, peak, end; never negative, and defined for every step of any run length."""
    for schedule, end in [("cosine", 0.1), ("wsd", 0.0)]:
        config = TrainConfig(steps=100, warmup=10, schedule=schedule)
        rates = [learning_rate(step, config, 1.0) for step in range(100)]
        assert abs(rates[0] - 0.1) < 1e-9 and max(rates) <= 1 and abs(rates[10] - 1) < 1e-9 and abs(rates[-1] - end) < 0.03
        assert all(rate > 0 for rate in rates)
    assert 0 < learning_rate(0, TrainConfig(steps=1, warmup=0), 1.0) <= 1


def test_command_line():
    """Both spellings of every form; a misspelt flag names the nearest one and ends with exit code 2, in one line."""
    parse = functools.partial(train_file.parse_args, TrainConfig, "train.py")
    config = parse(["--batch-size=8", "--n_layer", "3", "--lr=1e-3", "--save-every", "7"])
    assert (config.batch_size, config.n_layer, config.lr, config.save_every) == (8, 3, 1e-3, 7)
    for argv, words in [(["--bath_size", "3"], "did you mean --batch_size?"), (["--steps=0"], "--steps is 0"),
                        (["--steps=x"], "invalid int"), (["--n_embd=100", "--n_head=3"], "not divisible"),
                        (["--model=gpt3"], "gpt2-medium"), (["--lr=nan"], "--lr is nan"), (["--resume=maybe"], "auto, never")]:
        code, output = exit_of(parse, argv)
        assert code == 2 and words in output and output.count("\n") == 1, (argv, output)
    assert len(dataclasses.fields(TrainConfig)) <= 60


SMALL = ["--n_layer=2", "--n_embd=32", "--n_head=2", "--seq_len=32", "--batch_size=8", "--device=cpu", "--dtype=fp32",
         "--log_every=5", "--eval_tokens=640"]


def train_here(*flags, catch=True):
    """train.py in this process -> (exit code, output); the signal handlers are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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


def test_resumed_run_is_the_run():
    """Law 3: stopped by SIGKILL or Ctrl-C and resumed, the losses are the uninterrupted run's, bit for bit."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", "--steps=150", "--save_every=20", "--eval_every=50", "--dropout=0.1", "--optimizer=muon"]
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "validation loss" in output and "sample" in output and "complete at step 150" in output, output
        whole = metrics_of(d / "whole")
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "complete at step 150" in output and "--steps 300" in output, output

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
        assert "n_layer 2" in str(code) and "flags say 3" in str(code), (code, output)
        code, output = train_here(f"--out={d}/stopped", *flags, "--resume=never", "--steps=1")
        assert code == 0 and "stopped.1" in output and metrics_of(d / "stopped.1") == whole, output


def test_metrics_lines_have_every_field():
    """The fields that plotting tools may count on, and null for what is not known."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        train_here(f"--data={d}/data", f"--out={d}/out", "--steps=2", "--warmup=1")
        step, *_, validation = map(json.loads, (d / "out/metrics.jsonl").read_text().splitlines())
        assert list(step) == ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "peak_mem_gb", "data_wait_s",
                              "elapsed_s"] and step["tokens"] == 8 * 32 and step["elapsed_s"] > 0
        assert list(validation) == ["step", "val_loss", "val_bpb", "elapsed_s"]
        meta = json.loads((d / "data/meta.json").read_text())
        nats_per_bit = validation["val_loss"] / validation["val_bpb"]
        assert abs(nats_per_bit / math.log(2) - meta["val_bytes"] / meta["val_tokens"]) < 1e-9


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
        first = train_file.evaluate(run)
        assert train_file.evaluate(run) == first
        for micro_batch in 1, 3:
            run.micro_batch = micro_batch
            assert abs(train_file.evaluate(run)["val_loss"] / first["val_loss"] - 1) < 1e-6


def test_wrong_input_to_training_is_one_line():
    """Mistakes are found before step 0: exit code 2 for flags, 1 for files, one line with both values, nothing written."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        (d / "file").write_text("")
        flags = [f"--data={d}/data", f"--out={d}/out", "--steps=3"]
        for wrong, expected, words in [
                (["--micro_batch=3"], 2, "--micro_batch 3 --batch_size 8 take"), (["--fsdp"], 2, "--fsdp torchrun"),
                (["--tp=2"], 2, "--tp 2 torchrun"), (["--replicas=2"], 2, "--replicas 2"), (["--data=nowhere"], 1, "nowhere data.py"),
                (["--seq_len=100000"], 1, "--seq_len 100000"), ([f"--out={d}/file"], 1, "file"), (["--resume=7"], 1, "7")]:
            code, output = exit_of(lambda: train_here(*flags, *wrong, catch=False))
            line = output if expected == 2 else str(code)
            assert code == 2 if expected == 2 else isinstance(code, str), (code, output)  # Python prints a string and exits with 1
            assert line.strip().count("\n") == 0 and all(word in line for word in words.split()), (wrong, line)
            assert not (d / "out").exists(), wrong
        output = run_python(train_file.__file__, "--data=nowhere", code=1)
        assert output.count("\n") == 1 and output.startswith("train.py: nowhere"), output


def test_profile_leaves_the_standard_library_alone():
    """With the project first on the path, cProfile and what imports it work: `profile` hands on what it does not define."""
    script = """
import cProfile, pstats, profile, io
cProfile.run("sum(range(10))", "/dev/null" if __import__("os").name != "nt" else "nul")
profile.Profile().runctx("sum(range(10))", {}, {})
import torch.distributed.checkpoint, torch._dynamo
assert profile.__file__.endswith("profile.py") and profile.Meter
print("fine")"""
    assert run_python("-c", script).strip() == "fine"
    assert "usage" in run_python("-m", "cProfile", "-h", cwd=HERE).lower()


def test_peak_flops_is_what_a_matrix_product_reaches():
    """On a CPU the peak that MFU is measured against is measured, and it says so."""
    peak, source = profile.peak_flops(torch.device("cpu"), torch.float32)
    assert peak > 1e9 and "measured" in source


def test_imports_point_one_way_and_the_tree_stays_small():
    """The leaves import nothing of ours, model imports attention, train glues; at most 1,800 lines of code."""
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
            documentation = {line for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                             and ast.get_docstring(node) for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
            text = enumerate((HERE / f"{name}.py").read_text(encoding="utf-8").splitlines(), 1)
            lines += sum(number not in documentation and bool(line.split("#")[0].strip()) for number, line in text)
    assert lines <= 1800, f"{lines} lines of code"


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
            print(f"{name:72s} {(test.__doc__ or '').splitlines()[0] if test.__doc__ else ''}")
        return 0
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
