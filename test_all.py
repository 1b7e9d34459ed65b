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
import gzip
import io
import itertools
import json
import math
import os
import pickle
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
from functools import lru_cache
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the project comes first, as it does for `python train.py`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small gain nothing from more, and lose on a busy machine

import numpy as np
import torch
from torch import nn

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

SHAPES = {
    "llama": dict(norm="rmsnorm", position="rope", mlp="swiglu", qk_norm=True),
    "gpt2": dict(norm="layernorm", position="learned", mlp="gelu", bias=True),
}


def tiny(backend="sdpa", initial=False, **fields):
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

def test_attention_backends_agree_with_brute_force():
    """Both backends equal the formula written as a loop, for GQA, odd lengths and fewer queries than keys."""
    torch.manual_seed(0)
    for queries, keys, heads, shared in [(7, 7, 4, 4), (9, 9, 4, 2), (3, 11, 6, 2), (1, 8, 4, 1)]:
        sizes = [(heads, queries), (shared, keys), (shared, keys)]
        q, k, v = (torch.randn(2, h, n, 8, dtype=torch.double) for h, n in sizes)
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
    for fields in dict(n_kv_head=2, qk_norm=True), dict(tied=True, **SHAPES["gpt2"]):
        model = tiny(**fields).eval()
        tokens = torch.randint(64, (2, 12))
        with torch.no_grad():
            whole = model(tokens)
            for chunk in 1, 5:
                cache = KVCache(model.config.n_layer, 12)
                pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split(chunk, dim=1)], dim=1)
                assert (pieces - whole).abs().max() < 1e-5, chunk
            cache = KVCache(model.config.n_layer, 15, padding=torch.tensor([3, 0]))
            padded = torch.cat([nn.functional.pad(tokens[:1], (3, 0)), torch.randint(64, (1, 15))])
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
        assert found == published[name], f"{name}: {found:,}, published {published[name]:,}"


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
    for budget in 2 ** 28, 4 * 1000 * 7:
        with mock.patch.object(model_file, "CHUNK_BYTES", budget):
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
    turned = [(model_file.rotate(q, model.rope(torch.tensor([n + 3]))),
               model_file.rotate(k, model.rope(torch.tensor([n])))) for n in (0, 5, 50)]
    scores = [(query * key).sum() for query, key in turned]
    assert max(scores) - min(scores) < 1e-4


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


def test_compiled_equals_eager_without_graph_breaks(backend="aot_eager"):
    """Loss and gradients of the compiled model; `fullgraph=True` fails at the first graph break."""
    model, tokens = tiny(n_layer=1, qk_norm=True), torch.randint(64, (2, 17))
    results = []
    for call in model, torch.compile(model, fullgraph=True, backend=backend):
        model.zero_grad()
        loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss.item(), model.embed.weight.grad.clone()))
    (eager, grad), (compiled, other) = results
    assert abs(compiled / eager - 1) < 1e-5 and (grad - other).abs().max() < 1e-4 * grad.abs().max()


def test_slow_compiled_by_inductor():
    """The same through the C++ (or Triton) code that training runs."""
    if not train_file.pick_compile("on", torch.device("cpu"))[0]:
        raise Skip("torch.compile needs a C++ compiler")
    test_compiled_equals_eager_without_graph_breaks("inductor")


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
                        (["--steps=x"], "invalid int"), (["--n_embd=100", "--n_head=3"], "not divisible"),
                        (["--model=gpt3"], "gpt2-medium"), (["--lr=nan"], "--lr is nan"),
                        (["--resume=maybe"], "auto, never"), (["--no_reshard"], "no effect without --fsdp"),
                        (["--tp=0"], "--tp is 0"), (["--timeout=0"], "--timeout is 0")]:
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
        flags = [f"--data={d}/data", "--steps=100", "--save_every=20", "--eval_every=50", "--dropout=0.1"]
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "validation loss" in output and "sample" in output, output
        whole = metrics_of(d / "whole")
        code, output = train_here(f"--out={d}/whole", *flags)
        assert code == 0 and "complete at step 100" in output and "--steps 200" in output, output

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
        names = "step loss lr grad_norm tokens tokens_per_s mfu peak_mem_gb data_wait_s elapsed_s"
        assert " ".join(step) == names and step["tokens"] == 8 * 32 and step["elapsed_s"] > 0
        assert " ".join(validation) == "step val_loss val_bpb elapsed_s"
        meta = json.loads((d / "data/meta.json").read_text())
        nats_per_bit = validation["val_loss"] / validation["val_bpb"]
        assert abs(nats_per_bit / math.log(2) - meta["val_bytes"] / meta["val_tokens"]) < 1e-9


def test_fp16_with_its_scaler_runs_resumes_and_skips_in_all_optimizers_or_none():
    """From its own and from an fp32 checkpoint; an inf in a hidden matrix leaves the embedding alone, too."""
    assumed = mock.patch.object(profile, "peak_flops", lambda *_: (1e12, "assumed"))  # measuring a slow fp16 takes long
    with folder() as d, assumed:
        data.prepare([model_file.__file__], d / "data")
        for dtype, steps in ("fp32", 2), ("fp16", 4), ("fp16", 6):
            code, output = train_here(f"--data={d}/data", f"--out={d}/out", f"--steps={steps}", f"--dtype={dtype}",
                                      "--n_embd=16", "--n_layer=1", "--batch_size=2", "--seq_len=8", "--eval_tokens=8")
            assert code == 0 and f"complete at step {steps}" in output, output
        assert len(metrics_of(d / "out")[0]) == 6
    model, tokens = tiny(initial=True), torch.randint(64, (2, 17))
    optimizers = train_file.build_optimizer(model, TrainConfig(), 0.01, torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(tokens[:, :-1], tokens[:, 1:])).backward()
    model.blocks[0].attn.q.weight.grad[0, 0] = float("inf")
    before = model.embed.weight.detach().clone()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    distributed.agree(scaler, optimizers, distributed.clip_grad_norm(model.parameters(), 1.0))
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert torch.equal(model.embed.weight, before)


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
                (["--data=nowhere"], 1, "nowhere data.py"), (["--seq_len=100000"], 1, "--seq_len 100000"),
                ([f"--out={d}/file"], 1, "file"), (["--resume=7"], 1, "7")]:
            code, output = exit_of(lambda: train_here(*flags, *wrong, catch=False))
            assert code == expected and output.count("\n") == 1, (wrong, code, output)
            assert all(word in output for word in words.split()), (wrong, output)
            assert not (d / "out").exists(), wrong
        output = run_python(train_file.__file__, "--data=nowhere", code=1)
        assert output.count("\n") == 1 and output.startswith("train.py: nowhere"), output


def test_profile_leaves_the_standard_library_alone():
    """With the project first on the path, cProfile and what imports it work."""
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
            documented = [node.body[0] for node in ast.walk(tree) if isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)]
            documentation = {line for text in documented for line in range(text.lineno, text.end_lineno + 1)}
            text = enumerate((HERE / f"{name}.py").read_text(encoding="utf-8").splitlines(), 1)
            lines += sum(number not in documentation and bool(line.split("#")[0].strip()) for number, line in text)
    assert lines <= 1800, f"{lines} lines of code"


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
    encoder = data.Encoder(encoding)
    split, ids, size, last = encoder.__getitems__([("train", 1, text), ("val", 2, "y"), ("train", 0, "x")])[0]
    assert ids.tolist() == [256, *encoding.encode_ordinary(text), ord("x")] and ids.dtype == "<u2"
    assert (split, size, last) == ("train", len(ids) - 1, 1)


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
        for name, content in {"b.txt": b"bee", "a/z.md": b"zed \xff", ".git/x": b"no", "c.png": b"\x89\x00\x01",
                              ".hidden": b"no", "empty.txt": b"", "B.jsonl": b'{"text": "row \\ud800"}\n'}.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            meta = data.prepare([str(source)], where / "out", val_fraction=0)
        assert documents_of(read_tokens(where / "out", "train")) == ["row ?", "zed \ufffd", "bee"]
        assert meta["documents"] == 3
        assert "1 binary" in said.getvalue()
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
        fails(ValueError, "row 1 no 'n'", list, data.read_table(where / "t.parquet", "body"))
        (where / "bad.parquet").write_bytes(b"PAR1 nonsense")
        fails(ValueError, "bad.parquet row 1 magic", list, data.read_table(where / "bad.parquet", "text"))


def test_processes_give_the_shards_of_one_process_cut_at_the_limit():
    with folder() as where, mock.patch.object(data, "PIECE", 1 << 10):
        (where / "a.txt").write_text("some words to count\n" * 5000)
        one, two = [data.prepare([str(where / "a.txt")], where / str(workers), shard_tokens=30_001, workers=workers)
                    for workers in (0, 2)]
        assert one == two and one["train_tokens"] == 90_001 and one["documents"] == 1  # which is in both splits
        for split in ("train", "val"):
            assert np.array_equal(read_tokens(where / "0", split), read_tokens(where / "2", split))
        assert [s[3] for s in data.TokenDataset(where / "2", "train", 8).shards] == [30_001] * 2 + [29_999]


def test_a_dead_tokenizer_process_is_one_line():
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with folder() as where, mock.patch.object(data.Encoder, "encode", die):
        (where / "a.txt").write_text("some text to prepare")
        if torch.multiprocessing.get_start_method() != "fork":
            raise Skip("a replaced function reaches a forked process only")
        fails(OSError, "1 tokenizer died --workers", data.prepare, [str(where / "a.txt")], where / "out", workers=1)
        assert [path.name for path in where.iterdir()] == ["a.txt"]


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
        fails(ValueError, "train_000000.bin 65,536 1,000", data.TokenDataset(where, "train", 2).fixed, 0)


def test_wrong_preparation_is_one_line_and_leaves_nothing():
    with folder() as where:
        (where / "a.txt").write_text("some text to prepare")
        (where / "bin").mkdir()
        (where / "bin" / "x").write_bytes(b"\0")
        (where / "rows.jsonl").write_text('{"text": "x"}\n{"txt": "x", "id": 2}\n')
        (where / "late.jsonl").write_text('{"text": "x"}\nnot json\n')
        (where / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abcdefgh"}\n' * 99)[:40])
        (where / "empty.txt").write_text("")
        before = sorted(where.rglob("*"))
        with contextlib.redirect_stdout(io.StringIO()):
            for kind, words, source, options in [
                    (FileNotFoundError, "nothing.txt neither", "nothing.txt", {}),
                    (ValueError, "no text", "bin", {}),
                    (ValueError, "x NUL", "bin/x", {}),
                    (ValueError, "rows.jsonl row 2 --text_key 'txt' 'id'", "rows.jsonl", {}),
                    (ValueError, "late.jsonl row 2", "late.jsonl", {}),
                    (ValueError, "cut.jsonl.gz end-of-stream", "cut.jsonl.gz", {}),
                    (ValueError, "no text", "empty.txt", {}),
                    (ValueError, "--val_fraction 1.5 0.5", "a.txt", {"val_fraction": 1.5}),
                    (ValueError, "--val_fraction nan", "a.txt", {"val_fraction": float("nan")}),
                    (ValueError, "workers", "a.txt", {"workers": -1}),
                    (ValueError, "--shard_tokens 0 2147483647", "a.txt", {"shard_tokens": 0}),
                    (ValueError, "--shard_tokens 2147483648", "a.txt", {"shard_tokens": 1 << 31}),
                    (ValueError, "--train_bpe 12 257", "a.txt", {"train_bpe": 12}),
                    (ValueError, "--train_bpe --tokenizer gpt2", "a.txt", {"train_bpe": 300, "tokenizer": "gpt2"}),
                    (ValueError, "unknown bpe", "a.txt", {"tokenizer": "bpe"})]:
                fails(kind, words, data.prepare, [str(where / source)], where / "out", **options)
                assert sorted(where.rglob("*")) == before, options
        for module in ("rustbpe", "datasets", "pyarrow"):
            saved, sys.modules[module] = sys.modules.get(module), None
            fails(ImportError, f"pip install {module}", data.need, module)
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


def test_slow_dataset_survives_fork_and_spawn():
    with folder() as where:
        shards(where, [2000])
        dataset = data.TokenDataset(where, "train", 16)
        expected = dataset[3][0]
        assert len(pickle.dumps(dataset)) < 2000  # not the shards' contents
        for method in {"fork", "spawn"} & set(torch.multiprocessing.get_all_start_methods()):
            loader = torch.utils.data.DataLoader(dataset, batch_sampler=[[3, 4]], num_workers=1, collate_fn=tuple,
                                                 multiprocessing_context=method)
            assert torch.equal(next(iter(loader))[0][0], expected), method


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
        fails(FileNotFoundError, "*val*.bin data.py", data.TokenDataset, where, "val", 8)
        fails(FileNotFoundError, "absent data.py", data.TokenDataset, where / "absent", "train", 8)
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
                note = {"tokens": 2}
                checkpointer.save(2, model, optimizers, note)
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
            checkpointer.check()
            checkpointer.save(2, model, optimizers)
            checkpointer.finish()
            assert checkpointer.steps() == [2]
    """.replace("TESTS", repr(str(HERE)))
    with tempfile.TemporaryDirectory() as folder:
        saved_run(folder, 5)
        run_python("-c", textwrap.dedent(code), folder)


# One group of two processes runs all the checks that need one.
TWO = """
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
            checkpointer.check()
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
        message = error_of(checkpointer.check, kind=OSError)
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
        script.write_text("import time\n" + TWO.replace("TESTS", repr(str(HERE))))
        run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, folder)
        for name, build in (("ddp", muon_and_adamw), ("fsdp", adamw)):
            reference = torch.load(f"{folder}/{name}True/reference.pt", weights_only=True)
            assert same(load_fresh(f"{folder}/{name}True", build=build)[2], reference)


# ---- many processes --------------------------------------------------------------------------------------------------

def shaped(shape, tied, nano=False):
    """A GPT of 2 layers with 2 key/value heads, `nano` or smaller; no number of processes divides its vocabulary."""
    sizes = dict(vocab_size=257, seq_len=64, n_embd=128) if nano else dict(vocab_size=67, seq_len=16, n_embd=32)
    return ModelConfig(n_layer=2, n_head=4, n_kv_head=2, tied=tied, **sizes, **SHAPES[shape])


def meta(config):
    with torch.device("meta"):
        return GPT(config)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run_steps(world, shape, tied, steps=3, accumulation=2, optimizer="adamw", dtype="float32", nano=False,
              evaluations=True, backend="inductor", **options):
    """A short run on one layout: losses, gradient norms, the parameters that did not move, counts of elements.

    It evaluates before the first step and after the last, where the train mode's hooks and the optimizer would notice.
    """
    config, dtype, batch = shaped(shape, tied, nano), getattr(torch, dtype), 16 if nano else 8
    raw = meta(config)
    with mock.patch.object(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend)), \
            mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        model = distributed.parallelize(raw, world, seed=1, param_dtype=dtype, **options)
    before = {name: whole(p).detach().clone() for name, p in raw.named_parameters()}
    if optimizer == "muon":
        optimizers = train_file.build_optimizer(raw, TrainConfig(), 0.01, dtype)
    else:
        # Ten steps at 1e-2 let AdamW blow up rounding: a key's bias has no gradient but noise, whatever its size.
        optimizers = [torch.optim.AdamW(raw.parameters(), lr=1e-3 if steps > 3 else 1e-2)]
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and not world.has("shard"))
    generator, losses, norms, validation = torch.Generator().manual_seed(0), [], [], []

    def batch_of():
        tokens = torch.randint(config.vocab_size, (batch, config.seq_len + 1), generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        y[0, :9] = y[5, 3:] = y[-3:, 1:] = -100  # processes and micro-batches differ in their number of targets
        share = batch // world.data_size
        mine = slice(world.data_rank * share, (world.data_rank + 1) * share)
        return x[mine], y[mine]

    def evaluate():
        x, y = batch_of()
        with torch.no_grad(), autocast:
            validation.append((world.sum(model(x, y)) / world.sum((y != -100).sum())).item())
        distributed.reshard(raw)
    if evaluations:
        evaluate()
    for step in range(steps):
        x, y = batch_of()
        count, total = world.sum((y != -100).sum()), torch.zeros(())
        for i, (a, b) in enumerate(zip(x.chunk(accumulation), y.chunk(accumulation))):
            distributed.accumulate(model, i == accumulation - 1)
            with autocast:
                loss = model(a, b)
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
    held = sum(local(p).nbytes for p in raw.parameters())
    state = sum(local(t).nbytes for optimizer in optimizers for s in optimizer.state.values()
                for t in s.values() if t.ndim)  # without AdamW's step counters
    return dict(losses=losses, norms=norms, validation=validation, still=still, held=held, state=state,
                names=[name for name, _ in raw.named_parameters()])


@lru_cache(maxsize=None)
def alone(shape, tied, **options):
    """The one-process run that the others must equal."""
    return run_steps(distributed.World(torch.device("cpu")), shape, tied, accumulation=1, **options)


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
    """Run each [layout, options] one after the other in one process group; rank 0 prints a JSON line for each."""
    world = distributed.start("cpu", timeout=120)
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
        now = run_steps(distributed.World(torch.device("cpu")), shape, tied, accumulation=4)
        assert not now["still"] and difference(now, alone(shape, tied)) < 1e-4


def test_the_main_job_on_two_processes_and_then_on_one():
    """`torchrun train.py --fsdp` evaluates, saves, samples, ends with 0; one process goes on: the losses of one run."""
    with folder() as d:
        data.prepare([model_file.__file__], d / "data")
        flags = [f"--data={d}/data", "--schedule=cosine", "--warmup=2", "--eval_every=4", "--save_every=4"]
        train_here(f"--out={d}/whole", *flags, "--steps=12")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train_file.__file__]
        output = run_python(*torchrun, *SMALL, f"--out={d}/out", *flags, "--steps=12", "--fsdp")
        assert "2 processes" in output and "sample" in output and "complete at step 12" in output, output
        shutil.rmtree(d / "out/checkpoints/step_00000012")
        code, output = train_here(f"--out={d}/out", *flags, "--steps=12")
        assert code == 0 and "--fsdp True is now False" in output and "resumed at step 8" in output, output
        for found, expected in zip(metrics_of(d / "out"), metrics_of(d / "whole")):
            assert found.keys() == expected.keys()
            assert all(abs(found[step] / expected[step] - 1) < 1e-4 for step in found), (found, expected)


def adamw_of(raw):
    return [torch.optim.AdamW(raw.parameters())]


def muon_of(raw):
    return train_file.build_optimizer(raw, TrainConfig(), 0.01, torch.bfloat16)


def test_law_1_two_processes():
    """DDP, FSDP2 and tensor parallel equal one process; the planner's parameters and moments are the real bytes."""
    layouts = [dict(replicate=2), dict(shard=2), dict(tp=2)]
    found = check_layouts(2, layouts, [("llama", True, dict(optimizer="muon")), ("gpt2", False, {})])
    for layout, flags, *runs in zip(layouts, (dict(), dict(fsdp=True), dict(tp=2)), found[::2], found[1::2]):
        for now, shape, optimizers in zip(runs, ("llama", "gpt2"), (muon_of, adamw_of)):
            predicted = distributed.plan(lambda: meta(shaped(shape, shape == "llama")), optimizers, gpus=2, seq_len=16,
                                         **flags)["memory"]
            assert (predicted["parameters"], predicted["moments"]) == (now["held"], now["state"]), (layout, predicted)


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
        now = run_steps(distributed.World(torch.device("cpu")), shape, tied, accumulation=4, **options)
        assert difference(now, alone(shape, tied, **options)) < 1e-4
    check_layouts(2, TWO, runs)
    check_layouts(4, FOUR, runs[::3])  # one of each family, one tied: all four take 100 s more


def test_slow_law_1_activation_checkpoints_muon_and_bf16():
    """Muon sees whole matrices in every layout (1e-3); FSDP2's mixed precision is within 1 % of autocast's."""
    checkpointed = with_options(CHECKPOINTED, steps=5)
    muon = [("llama", True, dict(optimizer="muon", steps=5)), ("gpt2", False, dict(optimizer="muon", steps=5))]
    bf16 = [("llama", True, dict(dtype="bfloat16")), ("gpt2", False, dict(dtype="bfloat16"))]
    check_layouts(2, TWO, checkpointed + muon + bf16, [1e-4] * 4 + [1e-3] * 2 + [1e-2] * 2)
    check_layouts(4, FOUR, checkpointed[::3] + muon[:1] + bf16[1:], [1e-4] * 2 + [1e-3, 1e-2])


def test_slow_law_1_compiled():
    """Whole under DDP, per block under FSDP2 and tensor parallel, with checkpointed blocks, by inductor."""
    compiled = [("llama", True, dict(compile=True, steps=2, evaluations=False))]
    check_layouts(2, TWO[::2], compiled)
    check_layouts(2, TWO[1:2], [("llama", True, dict(compiled[0][2], activation_checkpoint="block"))])


def test_slow_law_1_traced_under_fsdp_and_tensor_parallel():
    """Blocks compiled with the collectives of tensor parallelism in them, below FSDP2; the graphs run eagerly."""
    check_layouts(4, FOUR[3:], [("llama", True, dict(compile=True, steps=2, evaluations=False, backend="aot_eager"))])


def worker_manners(_):
    """`first` outlasts the time-out of collectives, in order; `any` and `agree` agree; then rank 1 fails."""
    world = distributed.start("cpu", fsdp=True, timeout=3)
    with world.first():
        if world.writer:
            time.sleep(4)
        print(f"TURN {world.rank}", flush=True)
    assert world.any(world.rank == 1) and not world.any(False)
    assert (world.sum(torch.tensor(1.5)).item(), world.data_size, world.size) == (3.0, 2, 2)

    raw = meta(shaped("llama", True))
    model = distributed.parallelize(raw, world, seed=1)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(raw.parameters(), lr=1.0)
    before = raw.norm.weight.to_local().clone()
    scaler.scale(model(torch.zeros(1, 16, dtype=torch.long), torch.ones(1, 16, dtype=torch.long))).backward()
    if world.rank == 1:
        raw.norm.weight.grad.to_local().fill_(float("inf"))
    scaler.unscale_(optimizer)
    distributed.agree(scaler, [optimizer], distributed.clip_grad_norm(raw.parameters(), 1.0))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(raw.norm.weight.to_local(), before) and scaler.get_scale() == 2.0 ** 15
    print(f"AGREED {world.rank}", flush=True)
    if world.rank == 1:
        print(f"FAILS {time.time()}", flush=True)
        raise RuntimeError("rank one fails")
    world.any(False)


def test_waiting_agreeing_and_failing():
    """One process prepares while the others wait; a rank's exception ends the job, with its traceback."""
    done = torchrun(2, "worker_manners", timeout=100)
    ended = time.time()
    turns = [line for line in done.stdout.splitlines() if line.startswith("TURN")]
    assert turns == ["TURN 0", "TURN 1"], done.stderr[-3000:]
    assert done.stdout.count("AGREED") == 2, done.stderr[-3000:]
    failed = float(next(line for line in done.stdout.splitlines() if line.startswith("FAILS")).split()[1])
    assert done.returncode and "RuntimeError: rank one fails" in done.stderr and ended - failed < 30


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


def test_errors_are_said_once_by_all_processes_together():
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
        assert all(name.split(".")[-2] in distributed.PLAN for name, _ in raw.named_parameters())
    assert set(distributed.PLAN) <= names


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
        world = distributed.World(torch.device("cpu"))
        model = distributed.parallelize(raw, world, seed=1, activation_checkpoint=policy)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        with Products() as products:
            loss.backward()
        counts[policy] = products.count
        gradients[policy] = torch.cat([p.grad.flatten() for p in raw.parameters()])
    assert counts["selective"] == counts["none"] < counts["block"], counts
    assert torch.equal(gradients["none"], gradients["selective"]) and torch.equal(gradients["none"], gradients["block"])


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
    assert code == 0 and "does not fit; the smallest change that does: {'fsdp': True}" in output, output
    for flags, words in {("--gpus", "0"): "--gpus is 0", ("--gpus=8", "--tp=2"): "add --fsdp", ("--tp=0",): "--tp is 0",
                         ("--gpus=64", "--batch_size=16"): "take --batch_size 64"}.items():
        code, output = plan_of(*flags)
        assert code == 2 and words in output and output.count("\n") == 1, output


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
        assert "= 8 processes x 1 micro-batches x 1" in output and "out is complete at step 2" in output, output
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
    world = distributed.start("cpu", fsdp=True)
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
