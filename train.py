"""The main job: text in, a trained GPT out. Read `loop` and `optimizer_step` first, near the end: all else serves them.

    python train.py                                              # a small model, on this machine, in half a minute
    python train.py --data data/mine --model gpt2 --out out/mine # your text (see data.py), a published shape
    torchrun --standalone --nproc_per_node=8 train.py --model gpt2    # on eight GPUs

Every number the loop needs follows from the flags, the seed and the step, so a run that was interrupted goes on exactly
where it was: batches are a function of (seed, step), initial weights of (seed, name), dropout of (seed, step, rank).
"""
import signal
import time

STARTED = time.perf_counter()  # elapsed_s counts from here: importing torch is part of what a user waits for
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports is no traceback

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import difflib
import gc
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import sysconfig
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, get_args, get_origin


@dataclasses.dataclass
class TrainConfig:
    """Train a GPT."""
    data: Annotated[str, "folder of token shards from data.py; one named stdlib prepares itself",
                    "what is read and written, and the network"] = "data/stdlib"  # a third text begins a part of --help
    out: Annotated[str, "folder of the run: config, metrics, checkpoints"] = "out"
    # The names of model.PRESETS, again, so that --help need not import torch.
    model: Annotated[Literal["nano", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-3.2-1b", "llama-3.1-8b",
                             "qwen3-0.6b"] | None, "preset, by default nano; the next flags change its fields"] = None
    n_layer: Annotated[int | None, "blocks"] = None
    n_head: Annotated[int | None, "query heads"] = None
    n_kv_head: Annotated[int | None, "key/value heads, for grouped-query attention"] = None
    n_embd: Annotated[int | None, "width; that of the MLP goes with it"] = None
    init_from: Annotated[str | None, "start from a Hugging Face folder or nanoGPT's ckpt.pt, not from --model"] = None
    seq_len: Annotated[int | None, "tokens a training sequence has; default: the preset's, at most 4096"] = None
    dropout: Annotated[float | None, "probability of dropping an activation (attention weights stay)"] = None
    # These down to --seed, the data, the network and the masks decide the run's numbers (micro_batch only rounding).
    steps: Annotated[int, "optimizer steps of the whole run", "the optimizer's steps"] = 200
    batch_size: Annotated[int, "sequences per optimizer step, over all processes"] = 16
    micro_batch: Annotated[int | None, "sequences per device and forward; default: its share, up to 32"] = None
    optimizer: Annotated[Literal["muon", "adamw", "sgd"], "muon: for the hidden matrices, AdamW for the rest"] = "muon"
    lr: Annotated[float | None, "peak learning rate; default: min(0.01, 0.64 / width), with --init_from a tenth"] = None
    warmup: Annotated[int, "steps over which the learning rate rises from 0"] = 10
    schedule: Annotated[Literal["wsd", "cosine"], "wsd: warm-up, stable, then linear decay over the last half"] = "wsd"
    weight_decay: Annotated[float, "of matrices, decoupled (sgd: in the gradient); vectors have none"] = 0.1
    grad_clip: Annotated[float, "largest global gradient norm; 0: no clipping"] = 1.0
    max_skips: Annotated[int, "updates in a row that may be skipped because a number is not finite"] = 10
    seed: Annotated[int, "of the initial weights, the order of the data, dropout"] = 1337
    # Those down to --activation_checkpoint change the speed, and the numbers by rounding (and dropout's draws) alone.
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], "auto: the fastest there is", "machine, layout"] = "auto"
    dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], "of matrix products; auto: bf16 if it is fast"] = "auto"
    compile: Annotated[Literal["auto", "on", "off"], "torch.compile; auto: on CUDA"] = "auto"
    fsdp: Annotated[bool, "shard parameters, gradients, moments (FSDP2), rather than replicate (DDP)"] = False
    reshard: Annotated[bool, "free a block's gathered weights between forward and backward"] = True
    offload: Annotated[bool, "with --fsdp on GPUs: parameters, moments and the update on the CPU"] = False
    replicas: Annotated[int, "with --fsdp: copies of the sharded model (HSDP)"] = 1
    tp: Annotated[int, "processes that share each matrix product (tensor parallel)"] = 1
    timeout: Annotated[int | None, "seconds that processes wait for one another before the job fails (600)"] = None
    activation_checkpoint: Annotated[Literal["none", "block", "selective"],
                                     "recompute in backward; selective keeps matmul and attention outputs"] = "none"
    attention: Annotated[Literal["auto", "sdpa", "flex", "reference"], "reference: the textbook formula",
                         "attention: the kernel, and what it may see"] = "auto"
    sdpa: Annotated[Literal["auto", "flash", "cudnn", "efficient", "math"], "auto: the faster"] = "auto"
    window: Annotated[int | None, "attention sees so many of the newest tokens, below --seq_len; default: all"] = None
    doc_mask: Annotated[bool, "attention keeps to its document, which an end-of-text token begins"] = False
    restart_positions: Annotated[bool | None, "with --doc_mask: each document's positions count from 0"] = None
    softcap: Annotated[float | None, "limit of the attention scores, by tanh; Gemma 2 has 50"] = None
    head_softcap: Annotated[float | None, "limit of the logits, by tanh; Gemma 2 has 30"] = None
    save_every: Annotated[int, "steps between checkpoints; 0: only at the end", "what is kept, shown, measured"] = 100
    keep: Annotated[int, "newest checkpoints to keep"] = 2
    keep_every: Annotated[int, "also keep each checkpoint whose step this divides; 0: none"] = 0
    async_save: Annotated[bool, "write checkpoints while training goes on"] = False
    resume: Annotated[str, "auto: go on from the newest checkpoint in --out; never: start over; or a step"] = "auto"
    eval_every: Annotated[int, "steps between evaluations; 0: only at the end"] = 100
    eval_tokens: Annotated[int, "tokens of an evaluation; 0: the whole validation split"] = 2 ** 16
    log_every: Annotated[int, "steps between printed lines; the first step has one, too"] = 10
    profile: Annotated[bool, "trace three steps into OUT/profile and say where their time went"] = False
    profile_detail: Annotated[bool, "the same of one step, with shapes, stacks and memory"] = False
    peak_tflops: Annotated[float | None, "what MFU is measured against; default: data sheet, or measured"] = None

    def __post_init__(self):
        """Refuse what cannot work, before anything is read or started."""
        # Of the network's numbers ModelConfig knows the bounds.
        least = dict(steps=1, batch_size=1, keep=1, log_every=1, micro_batch=1, seq_len=2, warmup=0, weight_decay=0,
                     grad_clip=0, save_every=0, keep_every=0, eval_every=0, eval_tokens=0, seed=0, max_skips=0,
                     replicas=1, tp=1, timeout=1, peak_tflops=0.001)
        for name, low in least.items():
            value, high = getattr(self, name), dict(seed=2 ** 63, timeout=2 ** 31).get(name, math.inf)
            require(value is None or low <= value < high, f"--{name} is {value}, expected {low} <= {name} < {high}")
        for name in "data", "out", "init_from":
            require(getattr(self, name) != "", f"--{name} is empty, expected a path")
        require(self.lr is None or 0 < self.lr < math.inf, f"--lr is {self.lr}, expected a positive number")
        require(not os.path.isfile(self.out), f"--out {self.out} is a file, expected a folder")
        require(os.path.realpath(self.out) != os.path.realpath(self.data), f"--out and --data are both {self.out}")
        require(self.resume in ("auto", "never") or self.resume.isdecimal(),
                f"--resume is {self.resume!r}, expected auto, never or the number of a step")
        require(self.sdpa == "auto" or self.attention not in ("flex", "reference"),
                f"--sdpa {self.sdpa} has no effect with --attention {self.attention}: drop one")
        for flag, given in ("--no_reshard", not self.reshard), ("--offload", self.offload):
            require(self.fsdp or not given, f"{flag} has no effect without --fsdp: add --fsdp, or drop {flag}")
        require(not self.offload or self.optimizer != "muon" and self.dtype != "fp16",
                "--offload runs the update on the CPU, where Muon is slow and fp16's GradScaler does not work: take "
                "--optimizer adamw or sgd, and --dtype bf16 or fp32")
        for name in "model", "n_layer", "n_head", "n_kv_head", "n_embd":
            require(not self.init_from or getattr(self, name) is None,
                    f"--{name} has no effect with --init_from, which gives the model's shape: drop one")
        # The vocabulary comes with the data; all else that a network can be wrong in is known now.
        model_config(self, vocab_size=1)


# nanoGPT's names, where they are not nearly ours.
NANOGPT = {"--block_size": "--seq_len", "--max_iters": "--steps", "--learning_rate": "--lr", "--out_dir": "--out",
           "--gradient_accumulation_steps": "--micro_batch", "--dataset": "--data", "--eval_interval": "--eval_every",
           "--decay_lr": "--schedule", "--min_lr": "--schedule", "--lr_decay_iters": "--steps",
           "--log_interval": "--log_every", "--max_new_tokens": "--tokens"}


def parse_args(kind, prog, argv=None):
    """Command line -> instance of dataclass `kind`, the single source of flags, types, defaults and help.

    A field is Annotated[type, help] or, where a part of the help begins, Annotated[type, help, the part's title]. Types
    are str, int, float, bool (--x and --no_x), Literal, each of these | None, and list[str], which takes the remaining
    arguments. One without default is a positional argument. Hyphens and underscores are alike. Anything wrong, and any
    ValueError of the dataclass, is one line and exit code 2.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a sample may have characters that a locale has not
        sys.stdout.reconfigure(errors="replace")
    # No abbreviations: a flag added later would change what they mean. What is not given, `kind` has a default for.
    place = parser = argparse.ArgumentParser(prog, description=kind.__doc__, allow_abbrev=False,
                                             argument_default=argparse.SUPPRESS)

    fields = dataclasses.fields(kind)
    usage = f"usage: {prog} [flags]" + " [--]" * any(field.default is dataclasses.MISSING for field in fields)

    def refuse(text):
        distributed.refuse(f"{prog}: {text} ({usage}; {prog} --help)".replace("\0", ""), 2)
    parser.error = refuse

    def plain(word):  # what stood behind -- has this mark, or argparse would take -x for a flag
        return word.removeprefix("\0")
    for field in fields:
        hint, text, *title = get_args(field.type)
        place = parser.add_argument_group(*title) if title else place
        positional = field.default is dataclasses.MISSING
        hint = get_args(hint)[0] if type(None) in get_args(hint) else hint  # X | None is X, or not given
        kinds = {bool: dict(action=argparse.BooleanOptionalAction), Literal: dict(choices=get_args(hint), type=plain),
                 list: dict(nargs="*", type=plain, default=[]), str: dict(type=plain)}
        text += "" if positional or field.default is None else f" ({field.default})"
        usage += (f" [{field.name} ...]" if get_origin(hint) is list else f" {field.name}") * positional
        place.add_argument(field.name if positional else "--" + field.name, help=text,
                           **kinds.get(get_origin(hint) or hint, dict(type=hint)))
    argv = sys.argv[1:] if argv is None else argv
    end = [*argv, "--"].index("--")  # what stands behind it is no flag
    words = [re.sub("(?<=^--)[^=]+", lambda name: re.sub("^no_", "no-", name[0].replace("-", "_")), word)
             for word in argv[:end]]
    known, flags = parser._option_string_actions, [word.partition("=")[0] for word in words if word.startswith("--")]
    # Before argparse, which would first name what is missing.
    if name := next((flag for flag in flags if flag not in known), ""):
        near = [option for option in known if option.startswith(name)] or (
            difflib.get_close_matches(NANOGPT.get(name, name), known, n=1, cutoff=0.7))
        parser.error(f"unknown argument {name}" + (f", did you mean {near[0]}?" if near else ""))
    # The last one would take what comes behind --, and argparse drops a -- behind =.
    bare = [word for word in words[-1:] if argv[end:] and getattr(known.get(word), "nargs", 0) is None]
    if bare := bare + [word[:-3] for word in words if word.startswith("--") and word.endswith("=--")]:
        parser.error(f"argument {bare[0]}: expected one argument")
    try:
        # Sources or a prompt may stand behind flags.
        return kind(**vars(parser.parse_intermixed_args([*words, *("\0" + word for word in argv[end + 1:])])))
    except ValueError as error:
        distributed.refuse(f"{prog}: {error}", 2)


def spell(flags):
    """A dict of flags as one types them."""
    return " ".join(f"--{'no_' * (value is False)}{name}" + f" {shlex.quote(str(value))}" * (type(value) is not bool)
                    for name, value in flags.items())


if __name__ == "__main__" and sys.argv[1:] in (["--help"], ["-h"]):
    parse_args(TrainConfig, "train.py")  # prints it, and ends: what is imported from here on takes more than a second

import torch

import checkpoint
import data
import distributed
import profile
from attention import pick_backend
from data import require
from model import GPT, PRESETS, ModelConfig


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextlib.contextmanager
def command(kind, prog, *mistakes, argv=None):
    """Context of a program other than training -> its parsed command line.

    ValueError, OSError, ImportError and what else are `mistakes` of its user are one line, and exit code 1.
    """
    gc.freeze()  # or Python's end would look through all that torch's import has made, for 0.3 s
    try:
        yield parse_args(kind, prog, argv)
        print(end="", flush=True)  # a closed pipe shows here, and not at Python's exit
    except BrokenPipeError:  # nobody reads on, as after `| head`; an ordinary exit would try to print the rest
        os._exit(1)
    except (ValueError, OSError, ImportError, *mistakes) as error:
        hint = f" (pip install {error.name.split('.')[0]})" if getattr(error, "name", None) else ""
        named = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        sys.exit(f"{prog}: {named}{hint}")
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def model_config(config, vocab_size, eot=0):
    """The ModelConfig of preset and flags; raises ValueError where they do not make a network.

    Before the data is known, vocab_size=1 and eot=0 stand for what it will say: all else can be checked.
    """
    fields = dict(PRESETS[config.model or "nano"], vocab_size=vocab_size)
    if config.init_from:
        fields = checkpoint.read_hf(config.init_from)[1]
        fields["vocab_size"] = max(fields["vocab_size"], vocab_size)  # too few are refused with the tensors, by shape
    if config.n_embd and "n_hidden" in fields:  # in the preset's proportion, in 64s, which suit the kernels
        fields["n_hidden"] = 64 * math.ceil(fields["n_hidden"] * config.n_embd / fields["n_embd"] / 64)
    # Sequences of 131,072 tokens, as Llama 3's preset has, are for those who ask for them by --seq_len.
    fields |= dict(seq_len=min(fields["seq_len"], 4096), doc_start=eot if config.doc_mask else -1)
    # Flags and fields of the model have the same names.
    given = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(ModelConfig)}
    for name in given:
        require(getattr(TrainConfig, name, None) is None, f"TrainConfig.{name} hides a preset's: make its default None")
    return ModelConfig(**fields | {name: value for name, value in given.items() if value is not None})


def peak_rate(config, width):
    """--lr or its default: wider models take smaller steps, in proportion to 1 / width (Yang et al. 2022, table 3)."""
    return config.lr or min(0.01, 0.64 / width) * (0.1 if config.init_from else 1)


def learning_rate(step, config, peak):
    """Rate of step 0 .. steps - 1: a linear warm-up, then stable and a linear decay to zero, or a cosine to a tenth."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    if config.schedule == "wsd":  # (Hu et al. 2024) its first half does not know how long the run will be
        return peak * min(warm, (config.steps - step) / (config.steps - config.steps // 2))
    require(config.schedule == "cosine", f"there is no schedule {config.schedule}")
    progress = max(0, step - config.warmup) / max(1, config.steps - config.warmup)
    # 0.1 + 0.9 (1 + cos) / 2: from 1 to the tenth that GPT-3 ends with (Brown et al. 2020)
    return peak * warm * (0.55 + 0.45 * math.cos(math.pi * progress))


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Jordan et al. 2024), for runs without bf16 and for sharded matrices.

    torch's iteration always runs in bf16, a hundred times slower than fp32 on a CPU without the instructions, and on a
    sharded matrix it communicates in each of its 15 products. Here it runs in `dtype` and on whole matrices.
    """

    dtype = torch.float32

    @torch.no_grad()
    def step(self, closure=None):
        """p -= lr * 0.2 sqrt(max(rows, columns)) * orthogonalized Nesterov momentum, after decoupled weight decay.

        The factor makes an update about as large as AdamW's (Liu et al. 2025, eq. 4): one learning rate serves both.
        """
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                # The mean m = 0.95 m + 0.05 g of all gradients so far, and one more step of it ahead (Nesterov).
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = distributed.whole(p.grad.lerp(momentum, group["momentum"])).to(self.dtype)
                update = newton_schulz(update, group["ns_steps"]).float()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(distributed.share(update, p), alpha=group["lr"] * 0.2 * max(p.shape) ** 0.5)


def newton_schulz(x, steps):
    """About the nearest semi-orthogonal matrix to the matrix x: singular values of 0.7 to 1.2."""
    if x.size(0) > x.size(1):  # x^T has the same singular values and the smaller square
        return newton_schulz(x.T, steps).T
    # The quintic a x + b (x x^T) x + c (x x^T)^2 x acts on each singular value alone (Jordan et al. 2024).
    x = x / x.norm().clamp(min=1e-7)  # no singular value exceeds 1 now, and the polynomial pulls all of them towards 1
    for _ in range(steps):
        gram = x @ x.T
        # a x + (b gram + c gram^2) x, where a = 3.4445, b = -4.7750, c = 2.0315
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


def build_optimizer(model, config, peak, dtype):
    """List of optimizers that hold each parameter once; matrices are decayed, vectors (norms, biases) are not.

    A group's lr, divided by `peak`, is its share of the schedule's rate. Of what an optimizer remembers, checkpoints
    have the tensors in its `state` of a parameter, of its shape or of none: a count in a group or in self is lost.
    """
    hidden, others, vectors = [], [], []
    tables = {part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    for name, p in model.named_parameters():
        # Muon is for matrices that map activations to activations; embedding and head map from and to ids. What has
        # one long dimension, as (C, 1), is a vector.
        wide = sum(size > 1 for size in p.shape) > 1
        within = p.dim() == 2 and name.startswith("blocks.") and p not in tables
        (vectors if not wide else hidden if within else others).append(p)
    decayed = others if config.optimizer == "muon" else others + hidden
    groups = [dict(params=decayed), dict(params=vectors, weight_decay=0.0)]
    options = dict(lr=peak, weight_decay=config.weight_decay)
    if config.optimizer == "sgd":
        return [torch.optim.SGD(groups, momentum=0.9, nesterov=True, **options)]
    # GPT-3's second beta (Brown et al. 2020): the gradients' scale is one of the last twenty steps, not of a thousand.
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, **options)
    if config.optimizer == "adamw":
        return [adamw]
    require(config.optimizer == "muon", f"build_optimizer has no {config.optimizer}")
    muon = Muon(hidden, **options)
    muon.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return [muon, adamw]


def pick_dtype(name, device):
    """(torch dtype of the matrix products, its name and why it). By default bf16 where it is fast, else fp32."""
    if name != "auto":
        return DTYPES[name], f"{name} (as asked)"
    # On a CPU without these instructions it takes a hundred times as long as fp32.
    fast = (any(map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16"))) if device.type == "cpu" else
            torch.cuda.is_bf16_supported(including_emulation=False))
    return (torch.bfloat16, "bf16 (fast here)") if fast else (torch.float32, "fp32 (bf16 is not fast here)")


def keep_memory():
    """Tell glibc not to return the memory of freed large tensors to the system, but for what is free now.

    Returned, it would come back page by page, by faults that take 10 % of a step with 257 ids and 35 % with 50,304.
    The price: the process never shrinks.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mappings of their own
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def pick_compile(config, world, backend):
    """(whether to compile, why). Without a C++ compiler torch.compile fails only at the model's first call."""
    kind, policy = world.device.type, config.activation_checkpoint
    if config.compile == "off" or config.compile == "auto" and kind != "cuda":
        return False, "off" if config.compile == "off" else "off by default without CUDA"
    if (config.tp > 1, policy, kind, backend) == (True, "block", "cpu", "flash"):
        # It takes the mesh, saved for a recomputed block after flash's random state, for a tensor.
        return False, "off: torch 2.13 fails on --tp, block checkpoints and a CPU's flash: take --sdpa math"
    if not any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++", "cl"])):
        return False, "off: it needs a C++ compiler and found none, install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False, "off: it needs Python.h and found none, install python3-dev"
    if policy == "selective" and world.has("replicate") and not config.fsdp and torch.__version__ < "2.13":
        # DDP's buckets cut the graph, and what is to be kept is not handed on to the pieces.
        return True, "on, but with DDP torch before 2.13 keeps no more than block checkpoints do: take --fsdp"
    return True, "on"


def pick_micro_batch(config, processes):
    """Sequences per device and forward; ValueError where the global batch does not divide, naming one that would."""
    unit = processes * (config.micro_batch or 1)  # what the global batch must be a multiple of
    near = max(1, round(config.batch_size / unit)) * unit
    require(config.batch_size % unit == 0, f"--batch_size {config.batch_size} does not divide into {processes} "
                                           f"processes x --micro_batch {unit // processes}: take --batch_size {near}")
    return config.micro_batch or max(n for n in range(1, 33) if config.batch_size // processes % n == 0)


def cut_metrics(path, step):
    """Leave out of metrics.jsonl the lines after `step`, or they would come twice -> whether `step` was evaluated."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # Not json.loads: a power cut may leave torn lines, and those go, too.
    found = re.findall(r'^({"step": (\d+),[^{}\n]*})$', text, re.MULTILINE)
    write_whole(path, "".join(line + "\n" for line, number in found if int(number) <= step))
    return any(line.startswith(f'{{"step": {step}, "val_loss"') for line, _ in found)


def write_whole(path, text):
    """Write under a temporary name, then rename, which systems do in one step: `path` is never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error.strerror}): make room, or take another --out") from None


def write_metrics(run, rows):
    """Append a line to out/metrics.jsonl for each of `rows`, dicts of int and float; what is NaN or unknown is null.

    All of them or none: what a full disk refuses waits for the next call.
    """
    for row in rows if run.world.writer else ():
        known = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
        run.unwritten += json.dumps({"step": row["step"]} | {name: known.get(name) for name in row}).encode() + b"\n"
    if run.unwritten:
        path = Path(run.config.out, "metrics.jsonl")
        with open(path, "ab", buffering=0) as file:  # what the disk refuses must show here, not when it is closed
            end = file.tell()
            if file.write(run.unwritten) < len(run.unwritten):
                file.truncate(end)
                raise OSError(f"No space left for {path}")
        run.unwritten = b""


@contextlib.contextmanager
def watch_signals(aloud):
    """Context: a list that fills with signals to stop: Ctrl-C, SIGTERM, SIGUSR1. A second Ctrl-C leaves at once."""
    caught = []

    def note(number, frame):
        if number == signal.SIGINT and number in caught:
            os._exit(128 + signal.SIGINT)
        caught.append(number)
        if aloud:
            with contextlib.suppress(OSError):  # not by print, which this may have interrupted
                os.write(2, f"{signal.Signals(number).name}: the step under way ends, then the run saves; a second "
                            "Ctrl-C leaves at once\n".encode())
    # Nothing is saved within a handler: it may interrupt any line, also one that is saving.
    stops = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]  # Windows
    before = {number: signal.signal(number, note) for number in stops}
    try:
        yield caught
    finally:
        for number, handler in before.items():  # a notebook goes on, whose kernel a second Ctrl-C would end
            signal.signal(number, handler)


def setup(config, world, micro_batch):
    """All that can fail before step 0 -> the run's parts. ValueError, OSError or ImportError hold one clear line.

    Two of them are the same network: `raw`, the GPT with plain parameter names, and `model`, which is called: compiled
    and wrapped as the layout asks. `dataset` and `validation` are the splits, `note` what a checkpoint says of its run;
    `say` prints on one process; `accumulation` micro-batches make a step; `skipped` counts refused updates in a row;
    `unsaved` tells that a write has failed, `unwritten` holds the metrics it concerned, `claim` the lock on --out;
    `step` is where the run begins, `evaluated` whether that step's evaluation is in metrics.jsonl.
    """
    say = checkpoint.tell if world.writer else lambda *words, **options: None
    run = SimpleNamespace(config=config, world=world, say=say, micro_batch=micro_batch, skipped=0, unsaved=False,
                          unwritten=b"", accumulation=config.batch_size // world.data_size // micro_batch)
    # Data first: it says how many ids the model needs, and the checkpoint must be of this model.
    fields = open_data(run)
    run.checkpointer = checkpoint.Checkpointer(config.out, config.keep, config.async_save, config.keep_every)
    run.claim = claim(config.out) if world.writer and (world.size > 1 or os.path.isdir(config.out)) else None
    if world.size > 1:
        share_out(run)
    if world.device.type == "cpu":
        keep_memory()
    # What this machine computes with. Each choice comes with its reason, for the lines of `describe`.
    agree = run.checkpointer.agree  # on rank 0's: each process measures for itself, with another result perhaps
    dtype, why_dtype = agree(pick_dtype(config.dtype, world.device))
    backend, why_backend = agree(pick_backend(config.attention, config.sdpa, fields, world.device, dtype, micro_batch))
    compiled, why_compile = agree(pick_compile(config, world, backend))
    run.note["kernels"] = f"{str(dtype)[6:]}, attention {backend}"
    resumed = open_run(run)
    # Shapes alone until the model is sharded: no process ever holds more than its share, and then the weights come.
    with torch.device("meta"):
        run.raw = GPT(fields, backend)
    if config.init_from and resumed is None:
        run.raw.initial = checkpoint.import_hf(run.raw, config.init_from)
        weights = checkpoint.read_hf(config.init_from)[2].values()  # mapped: the few that are looked at are read
        seen = sum(tensor.flatten()[:9].double().sum().item() for tensor in weights)
        require(math.isfinite(seen), f"--init_from {config.init_from} has weights that are not finite")
        distributed.same({"the sum of some of --init_from's weights": seen})
    run.model = distributed.parallelize(
        run.raw, world, param_dtype=dtype, activation_checkpoint=config.activation_checkpoint, compile=compiled,
        seed=config.seed, reshard_after_forward=config.reshard, offload=config.offload)
    run.peak_lr = peak_rate(config, fields.n_embd)
    run.optimizers = build_optimizer(run.raw, config, run.peak_lr, dtype)
    held = [id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]
    for name, p in run.raw.named_parameters():
        require(held.count(id(p)) == 1, f"build_optimizer has {name} in none of its groups, or twice")
    run.scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    run.step, extra = (0, {}) if resumed is None else run.checkpointer.load(run.raw, run.optimizers, resumed)
    run.scaler.load_state_dict(extra.get("scaler") or run.scaler.state_dict())  # only fp16's checkpoint has one
    # FSDP2 hands its modules weights that are in `dtype` already.
    run.autocast = torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32 and not world.has("shard"))
    left, traced = config.steps - run.step, sum(profile.SCHEDULE.values())
    require(left >= 0, f"--steps {config.steps} is below step {run.step} of {config.out}: take more, or --resume never")
    profiled = (config.profile or config.profile_detail) and Path(config.out, "profile")
    require(not profiled or run.step or left >= traced, f"--profile takes {traced} steps, {left} remain: raise --steps")
    # Only now is an earlier run in --out touched: all that can be refused has been checked.
    run.evaluated = world.any(world.writer and prepare_out(run))
    peak, source = profile.peak_flops(world.device, dtype, config.peak_tflops)
    run.meter = profile.Meter(run.raw.flops_per_token(fields.seq_len), peak * world.size, world.device)
    run.profiler = profile.Profiler(profiled, world.device, world.rank, say, config.profile_detail)
    run.step_tokens = config.batch_size * fields.seq_len
    describe(run, why_backend, f"{why_dtype}, compile {why_compile}, peak {peak / 1e12:.2f} TFLOP/s ({source})")
    return run


def open_data(run):
    """Prepare the default's data if need be, open both splits, write the run's note -> the model's config."""
    config, fields = run.config, model_config(run.config, vocab_size=1)
    with run.world.first():
        if Path(config.data).name == "stdlib" and not os.path.exists(config.data):
            run.say(f"{config.data} is not there yet: preparing the Python standard library's sources")
            data.prepare([], config.data)
    run.dataset = data.TokenDataset(config.data, "train", fields.seq_len, config.seed)
    run.validation = data.TokenDataset(config.data, "val", fields.seq_len)
    meta, ids, seen = run.dataset.meta, run.dataset.meta["vocab_size"], 0
    for split in run.dataset, run.validation:
        for i in range(64):  # spread over the split: to read all of a terabyte would take too long
            seen = zlib.crc32(torch.cat(split.fixed(i * (split.windows - 1) // 63)).numpy(), seen)
    distributed.same({"the number of --data's tokens": run.dataset.tokens, "of its ids": ids,
                      "the checksum of some of its text": seen})
    fields = model_config(config, ids, meta["eot"])
    if fields.vocab_size > ids:
        run.say(f"note      {config.init_from} has {fields.vocab_size} ids, --data {ids}: same tokenizer?")
    run.note = dict(config=dataclasses.asdict(config), model=dataclasses.asdict(fields), tokenizer=meta["tokenizer"],
                    train_tokens=run.dataset.tokens, data=os.path.abspath(config.data))
    return fields


def describe(run, why_backend, machine):
    """Say what runs: lines from which a reader of the log knows all that was chosen."""
    config, world, fields = run.config, run.world, run.raw.config
    mesh = "".join(f", {name} {n}" for name, n in distributed.layout(config.fsdp, config.replicas, config.tp).items())
    begin = f", resumed at step {run.step}" if run.step else f" from {config.init_from or 'scratch'}"
    run.say(f"data      {config.data}: {run.dataset.tokens:,} tokens to train on, {run.validation.tokens:,} to "
            f"validate, tokenizer {run.note['tokenizer']} of {fields.vocab_size:,}",
            f"model     {config.init_from or config.model or 'nano'}: {run.raw.num_params():,} parameters, "
            f"{fields.n_layer} layers x {fields.n_embd}, {why_backend}",
            f"batch     {config.batch_size} sequences of {fields.seq_len} tokens = micro-batch {run.micro_batch} x "
            f"accumulation {run.accumulation} x data ranks {world.data_size}",
            f"machine   {world.size} x {world.device.type}{mesh}, {machine}",
            f"optimizer {config.optimizer}, peak lr {run.peak_lr:.2e}, {config.schedule}; {config.steps} steps{begin}",
            sep="\n")


def prepare_out(run):
    """Make --out what a run at `run.step` leaves: an earlier run moved aside, or what came after this step removed.

    Returns whether the step was evaluated.
    """
    config, out = run.config, Path(os.path.realpath(run.config.out))
    run.claim = run.claim or claim(out)  # not twice: closing either file would end the lock
    root = run.checkpointer.root
    require(root.is_dir() or not os.path.lexists(root), f"{root} is no folder: remove it, or mount what it links to")
    # With --resume never the earlier run is moved, now that all else is known to be right.
    if config.resume == "never" and ((out / "config.json").exists() or any(out.glob("checkpoints/step_*"))):
        aside = next(path for n in range(1, 10 ** 6) if not (path := out.with_name(f"{out.name}.{n}")).exists())
        aside.mkdir()
        # Not the folder: data and other runs may be in it. Checkpoints last: while they are there the run can go on.
        for name in ("config.json", "metrics.jsonl", "metrics.old.jsonl", "metrics.png", "profile", "tensorboard",
                     "checkpoints"):
            if (out / name).exists():
                (out / name).rename(aside / name)
        run.say(f"--resume never: the earlier run is now {aside}")
    metrics = out / "metrics.jsonl"
    if not run.step and metrics.exists() and metrics.stat().st_size:
        with open(out / "metrics.old.jsonl", "ab") as file:
            file.write(metrics.read_bytes())
        run.say(f"note      {out} has no checkpoint; the lines of metrics.jsonl are now in metrics.old.jsonl")
    started = time.time() - (time.perf_counter() - STARTED)
    write_whole(out / "config.json", json.dumps(run.note | {"started": started}, indent=2) + "\n")
    if config.resume.isdecimal():  # --resume auto must not go on from a later checkpoint
        run.checkpointer.prune(run.step)
    return cut_metrics(metrics, run.step)


def claim(out):
    """Lock the folder `out` -> the open file that holds the lock until it is closed; ValueError if it is not for us.

    Two runs in one folder would remove each other's checkpoints. The lock of a process that dies goes with it. Its text
    tells who has it, and `share_out` whether all processes see this folder.
    """
    found = Path(out, "config.json")
    require(not found.is_file() or any(Path(out).glob("checkpoints/step_*"))
            or found.read_text("utf-8", "replace").startswith('{\n  "config": {'),  # as `prepare_out` writes it
            f"{found} is not of a run: take another --out")
    made = [path for path in (Path(out), *Path(out).parents) if not path.exists()]
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        file = open(Path(out, ".lock"), "a+")
    except OSError as error:
        raise OSError(f"--out {out} cannot be written ({error.strerror}): take another") from None
    with contextlib.suppress(OSError, ImportError):  # a file system without locks; Windows
        import fcntl
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {out} is written by another run: end that one, or take another --out") from None
    file.truncate(0)
    file.write(f"{socket.gethostname()}, process {os.getpid()}, {time.time()}")
    file.seek(0)  # which flushes, and `share_out` reads from here
    os.fsync(file.fileno())
    atexit.register(unclaim, out, made)
    return file


def unclaim(out, made):
    """Nothing stays of a launch that was refused, nor of the folders that it `made`."""
    with contextlib.suppress(OSError):
        if not Path(out, "config.json").exists():
            os.remove(Path(out, ".lock"))
            for path in made:
                path.rmdir()


def share_out(run):
    """ValueError, on all processes, unless --out is one folder for all: each writes its part of a checkpoint there."""
    file, end = Path(run.config.out, ".lock"), time.monotonic() + 60  # network file systems may be late
    written = run.checkpointer.agree(run.claim and run.claim.read())  # by the writer, who must not open it again
    while not (seen := run.claim or file.exists() and file.read_text() == written) and time.monotonic() < end:
        time.sleep(1)
    if place := run.checkpointer.agree("" if seen else f"{socket.gethostname()}:{file.absolute()}"):
        raise ValueError(f"--out {run.config.out} is not one folder for all: {place} is not what process 0 wrote")


def open_run(run):
    """The step to resume from, None for a fresh start.

    Raises ValueError when the checkpoint is of another model (with its masks and dropout), tokenizer, optimizer or
    amount of text. Other flags may change, and the text may have moved; that is said aloud.
    """
    config = run.config
    wanted = int(config.resume) if config.resume.isdecimal() else None
    step = None if config.resume == "never" else run.checkpointer.choose(wanted, read=True)
    if step is not None:
        saved = run.checkpointer.read_extra(step)
        try:
            # Those that were given, or differ here.
            old_flags = {name: value for name, value in saved["config"].items() if name not in ("resume", "out")
                         and value is not None and {value} != {getattr(TrainConfig, name), getattr(config, name)}}
            then, now = ({**vars(TrainConfig()), **note["config"], **vars(ModelConfig(**note["model"])),
                          "tokenizer": note["tokenizer"], "what computes": note.get("kernels", run.note["kernels"]),
                          "tokens to train on": note.get("train_tokens", run.dataset.tokens)}
                         for note in (saved, run.note))
            old_rate, new_rate = (learning_rate(step, flags, peak_rate(flags, flags.n_embd))
                                  for flags in (SimpleNamespace(**then), SimpleNamespace(**now)))
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{config.out} was saved by another version of this program: {error}") from None
        changed = [name for name in now if then.get(name) != now[name] and name not in ("resume", "out")]
        fixed = {"tokenizer", "tokens to train on", "optimizer", *run.note["model"]}.intersection(changed)
        found = ", ".join(f"{name} {then.get(name)} (here {now[name]})" for name in changed if name in fixed)
        require(then["optimizer"], f"{config.out} is imported: python checkpoint.py export it, then --init_from that")
        require(not fixed, f"{config.out} is a run with {found}: use its flags ({spell(old_flags)}), another --out, "
                           "or --resume never")
        for name in changed:
            old, new = ("default" if values.get(name) is None else values[name] for values in (then, now))
            run.say(f"note      since the checkpoint, {'' if ' ' in name else '--'}{name} {old} is now {new}")
        if new_rate > 1.1 * old_rate:
            run.say(f"note      the learning rate had come to {old_rate:.2e} and goes on at {new_rate:.2e}")
    return step


def optimizer_step(run, batches, step):
    """One optimizer step on one global batch -> (loss, gradient norm), fp32 scalars."""
    # For dropout alone: it differs also between --tp's neighbours, who have the same data.
    torch.manual_seed(data.mix(run.config.seed, step, run.world.rank))
    with run.profiler.region("data"):
        micro = [run.meter.wait(batches) for _ in range(run.accumulation)]
    # Of the whole global batch. None at all makes a loss of 0 / 0, and such an update is skipped.
    count = run.world.sum(sum((y != -100).sum() for _, y in micro))
    # loss = sum of all targets' losses / number of all targets, in whatever parts it is computed: each micro-batch adds
    # its share to the gradients, so nothing depends on how many there are (a mean of means would).
    total = torch.zeros((), device=run.world.device)
    # Losses and norms stay tensors: reading a number makes the CPU wait for the GPU, so `update` does it once a step.
    for i, (x, y) in enumerate(micro):
        distributed.accumulate(run.model, last=i == run.accumulation - 1)
        with run.profiler.region("forward"), run.autocast:
            # The wrappers average gradients over the data ranks: times their number, the mean is the sum again.
            loss = run.model(x, y) * (run.world.data_size / count)
        with run.profiler.region("backward"):
            run.scaler.scale(loss).backward()
        total += loss.detach()
    loss = run.world.sum(total) / run.world.data_size
    with run.profiler.region("optimizer"):
        return loss, update(run, loss, learning_rate(step, run.config, run.peak_lr))


def update(run, loss, rate):
    """Clip the gradients and let the optimizers step, unless a number is not finite -> the norm before clipping."""
    # fp16 only: the loss was scaled up so that small gradients do not vanish. Clipping needs them as they are.
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.setdefault("share", group["lr"] / run.peak_lr)  # as `build_optimizer` made it
    norm = distributed.clip_grad_norm(run.raw.parameters(), run.config.grad_clip)
    # Both are global, so all processes and optimizers agree; one that skipped alone would part from the others.
    finite = math.isfinite(norm.item() + loss.item())
    for optimizer in run.optimizers:
        if finite:
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    # The scaler's own count of infinities is one process's; this verdict is everybody's.
    run.scaler.update(None if finite else run.scaler.get_scale() / 2)
    run.skipped = 0 if finite else run.skipped + 1
    return norm


@torch.no_grad()
def evaluate(run, step, stopped=lambda: False):
    """Loss in nats and bits per byte over fixed windows of the validation split: printed, written, returned.

    A sum of losses over a number of targets, both over all processes: the same value every time and in every layout.
    None, and nothing is written, if all are `stopped()` meanwhile.
    """
    world, batch, windows = run.world, run.micro_batch, run.validation.windows
    windows = min(windows, math.ceil(run.config.eval_tokens / run.raw.config.seq_len) or windows)
    run.model.eval()
    total, count = torch.zeros(2, device=world.device)
    for first in range(0, windows, batch * world.data_size):
        if stopped():
            break
        # Past the end: windows without targets, so that all processes make the same number of equally large calls.
        mine = range(first + world.data_rank * batch, first + (world.data_rank + 1) * batch)
        pairs = [run.validation.fixed(min(i, windows - 1)) for i in mine]
        x, y = (torch.stack(part).to(world.device) for part in zip(*pairs))  # (B, T) each
        y[[i >= windows for i in mine]] = -100
        with run.autocast:
            total += run.model(x, y)
        count += (y != -100).sum()
    run.model.train()
    distributed.reshard(run.raw)  # no backward follows, in which FSDP2 would free its weights
    if stopped():
        return None
    loss = (world.sum(total) / world.sum(count)).item()
    # nats / ln 2 x tokens / bytes: a number that tokenizers do not change
    size, elapsed = run.validation.meta.get("val_bytes"), time.perf_counter() - STARTED
    bits = loss / math.log(2) * run.validation.tokens / size if size else math.nan
    values = dict(val_loss=loss, val_bpb=bits)
    guard(run, write_metrics, run, [dict(step=step, **values, elapsed_s=elapsed)])
    known = "" if math.isnan(bits) else f" = {bits:.4f} bits per byte"  # of responses alone there is no such thing
    known = known if world.sum(count) else ", for no target is among these tokens: raise --eval_tokens"
    run.say(f"step {step}  validation loss {loss:.4f} nats{known}  {elapsed:.0f} s")
    return values


def report(run, pending):
    """Write the metrics of the steps in `pending`, [(step, loss, norm, elapsed)], print the last one's, empty it."""
    # Tokens per second and MFU are of all these steps together: single ones vary with what else the machine does.
    speed = run.meter.read(run.step_tokens * len(pending))
    speed["data_wait_s"] /= len(pending)
    # `step` counts the steps that are done, the schedule begins with step 0.
    rows = [dict(step=step, loss=loss.item(), lr=learning_rate(step - 1, run.config, run.peak_lr),
                 grad_norm=norm.item(), tokens=step * run.step_tokens, **speed, elapsed_s=elapsed)
            for step, loss, norm, elapsed in pending]
    guard(run, write_metrics, run, rows)
    pending.clear()
    of = run.config.steps
    run.say("step {step:>{width}}/{of}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.2f}  {tokens_per_s:,.0f} "
            "tokens/s  MFU {mfu:.0%}  {elapsed_s:.0f} s".format(of=of, width=len(str(of)), **rows[-1]))


def save(run, step):
    """Write a checkpoint of `step`; all else that a resumed run needs follows from the step."""
    start = time.perf_counter()
    extra = dict(run.note, scaler=run.scaler.state_dict(), tokens=step * run.step_tokens)
    with run.profiler.region("checkpoint"):
        guard(run, run.checkpointer.save, step, run.raw, run.optimizers, extra)
    if run.checkpointer.saved == step:
        run.say(f"step {step}  checkpoint {'begun' if run.config.async_save else 'written'} in "
                f"{time.perf_counter() - start:.1f} s")


def guard(run, write, *args):
    """Call `write`. A full disk costs what it writes and no more: older checkpoints stay, and the next try may succeed.

    But the run's exit code will tell of it.
    """
    try:
        write(*args)
    except (OSError, ValueError) as error:  # ValueError: parameters that are not finite are never saved over good ones
        run.unsaved = True
        run.say(f"not saved: {error}")


def show_sample(run):
    """Print how the model continues the validation text, after fine-tuning its first prompt.

    Every process computes it, for the model may be sharded.
    """
    tokenizer, problem = None, "another process lacks the tokenizer"
    try:
        require(not run.world.has("tp"), "none with --tp")  # which splits sequences: one token has no parts
        require(not run.config.offload, "none with --offload")  # the embedding is not where the logits are
        require(run.dataset.meta["tokenizer"] is not None, "none with meta.json without a tokenizer")
        tokenizer = data.load_tokenizer(run.dataset.meta["tokenizer"], run.config.data)
    except (OSError, ValueError) as error:  # the run is complete and saved, with or without a sample
        problem = error
    if run.world.any(tokenizer is None):
        return run.say(f"no sample: {problem}")
    # Of text that was not trained on, or the model might recite. Every run of this data begins with the same words.
    x, y = run.validation.fixed(0)
    # After fine-tuning the first prompt, if there is room for a response; of other text the first token is a target.
    begin = (y[:-1] != -100).int().argmax().item()
    prompt = x[:begin + 1 if begin else min(32, run.raw.config.seq_len // 2)].tolist()
    tokens = 200 if run.raw.position is None else min(200, run.raw.config.seq_len - len(prompt))
    run.raw.eval()
    with run.autocast, torch.compiler.set_stance("force_eager"):  # the cache's length would recompile at each token
        new, = run.raw.generate([prompt], tokens, temperature=0.8, seed=run.config.seed, vocab=tokenizer.n_vocab,
                                stop=tokenizer.eot_token if begin else None)
    run.say(f"---- sample: {tokenizer.decode(prompt)!r} goes on ----\n{tokenizer.decode(new)}\n----")


def train(config):
    """Run the whole job that `config` describes -> exit code: 0 complete, 1 not all saved or --max_skips, 128 + signal.

    What cannot work ends in `distributed.refuse`, with 2 for flags and 1 for the rest.
    """
    fields = vars(model_config(config, vocab_size=1))
    # All processes must have the same code and flags, but for places.
    alike = {f"[bytes, checksum] of {path.name}": checkpoint.fingerprint(path)
             for path in Path(__file__).parent.glob("*.py") if path.is_file()}  # an editor's lock is a broken link
    alike["torch"] = torch.__version__
    alike |= {f"--{name}": value for name, value in vars(config).items() if name not in ("data", "out", "init_from")}
    try:
        world = distributed.start(config.device, config.fsdp, config.replicas, config.tp, config.timeout, alike,
                                  **{name: fields[name] for name in ("n_head", "n_kv_head", "seq_len", "n_hidden")})
        micro_batch = pick_micro_batch(config, world.data_size)
        require(not config.offload or world.device.type == "cuda",
                f"--offload has no effect on --device {world.device.type}: drop it")
        restarts = map(distributed.setting, ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"))
        require(config.resume == "auto" or not any(restarts), f"--resume {config.resume} would go back at each restart "
                "by torchrun --max-restarts or Slurm: start once without them, then take --resume auto")
    except (ValueError, OSError) as error:  # flags that do not go together; other processes that do not come
        distributed.refuse(f"train.py: {error}", 2 if isinstance(error, ValueError) else 1)
    try:
        run = setup(config, world, micro_batch)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        advice = profile.want_of_memory(error)
        if isinstance(error, RuntimeError) and not advice:  # no mistake of the user's: the traceback is wanted
            raise
        distributed.refuse(f"train.py: {advice or error}", 1)
    # A signal is only noted: the step under way ends, all processes hear of it, and then they save together. Without
    # stderr, as in a detached process, descriptor 2 may be any file, such as metrics.jsonl.
    with watch_signals(world.writer and sys.stderr is not None) as signals:
        try:
            with run.profiler:
                code = loop(run, signals)
        except RuntimeError as error:
            if not signals or not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise
            # It reached the whole process group, as Ctrl-C does, and took a compiler of this step with it.
            distributed.refuse(f"train.py: {signal.Signals(signals[0]).name} ended a compilation, too: the same "
                               "command goes on from the newest checkpoint, if there is one", 128 + signals[0])
        del run  # the process group is left without a model, see `stop`
        distributed.stop(world)
    return code


def loop(run, signals):
    """The training loop, from the run's step to the last one or one of `signals`, and a sample -> exit code."""
    config, say, step = run.config, run.say, run.step
    batches = data.batches(run.dataset, step, config.batch_size, run.micro_batch, run.world.data_rank,
                           run.world.data_size, run.world.device)
    # `pending` are the steps that no line has told of: printing is for some steps, metrics.jsonl has them all.
    stopping, pending, evaluated = 0, [], run.evaluated

    def due(every):
        return step == config.steps or every and step % every == 0

    def told():
        # Asked of all: one that stopped alone would leave the others waiting. The answer is the signal's number.
        return run.world.any(max(signals, default=0))
    if step and due(config.eval_every) and not evaluated:  # the run was stopped after it had saved
        evaluated, stopping = evaluate(run, step, told), told()
    while step < config.steps and not stopping:
        loss, norm = optimizer_step(run, batches, step)
        step += 1
        pending.append((step, loss, norm, time.perf_counter() - STARTED))
        stopping, evaluated = told(), False
        odd = run.skipped or stopping or step == run.step + 1  # the first: a sign of life, which includes compilation
        if odd or due(config.log_every) or due(config.eval_every) or due(config.save_every):
            report(run, pending)
        if run.skipped:
            say(f"step {step}: update skipped, it has no target or no finite loss or gradient ({run.skipped} in a row)")
        if run.skipped > config.max_skips:
            guard(run, run.checkpointer.finish)
            say("train.py: more than --max_skips: lower --lr, or take another --seed; either goes on from the newest "
                "checkpoint, if there is one")
            return 1
        if due(config.eval_every) and not stopping:  # for time may be short: a resumed run makes up for it
            evaluated, stopping = evaluate(run, step, told), told()
        if stopping or due(config.save_every):
            save(run, step)
        guard(run, run.checkpointer.check, run.raw, run.optimizers)  # has an asynchronous write failed meanwhile?
        run.profiler.step()
        if not pending:
            run.meter.start()  # evaluating, saving and writing a trace are no optimizer work
    guard(run, run.checkpointer.finish)
    auto = "" if config.resume == "auto" else " --resume auto"
    if stopping and not (step == config.steps and evaluated):
        place = "from the newest checkpoint, for not all was saved, see above" if run.unsaved else "from there"
        say(f"stopped at step {step} by {signal.Signals(stopping).name}:{auto or ' the same command'} goes on {place}")
        return 128 + stopping
    show_sample(run)
    # As process 0 sees it: to others a network file system may show the newest one later.
    saved = run.checkpointer.agree(run.checkpointer.steps()) or []
    if saved[-1:] != [step]:
        say(f"{config.out} has reached step {step}, but saved are {saved or 'none'}, see above:"
            f"{auto or ' the same command'} {'goes on from there' if saved else 'starts over'}")
        return 1
    # From here the rate would rise again; a checkpoint before the decay is one of the longer run, too.
    early = [n for n in saved if run.world.writer and undecayed(run, n)]
    resume = f" --resume {early[-1]} (once: later checkpoints go)" if early else f"{auto} (where the rate rises again)"
    resume = auto if early[-1:] == [step] else resume
    lacking = ", but not all was saved, see above" if run.unsaved else ""
    sample = f' Sample: python model.py {shlex.quote(config.out)} "...".' if run.note["tokenizer"] else ""
    say(f"{config.out} is complete at step {step}{lacking}.{sample} To go on, add to the command --steps {2 * step}"
        f"{resume}; to start over, --resume never")
    return int(run.unsaved)


def undecayed(run, step):
    """Whether the run that wrote the checkpoint of `step` had the rate that a run of twice as many steps has there."""
    # Not read_extra, which all ranks must call together: they may not see the same list of steps.
    flags = json.loads((run.checkpointer.folder(step) / "state.json").read_text())["extra"]["config"]
    flags = {**dataclasses.asdict(TrainConfig()), **flags}
    longer = {**flags, "steps": 2 * run.config.steps}
    return len({learning_rate(step - 1, SimpleNamespace(**each), 1.0) for each in (flags, longer)}) == 1


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is KeyboardInterrupt again, see the imports
    try:
        sys.exit(train(parse_args(TrainConfig, "train.py")))
    except data.DataError as error:  # from a reading process it comes with a traceback as its text
        sys.exit(f"train.py: {str(error).rpartition('DataError: ')[2].strip()}")
    except KeyboardInterrupt:  # before the loop, which has its own way to stop
        distributed.refuse("train.py: interrupted", 128 + signal.SIGINT)


if __name__ == "__main__":
    main()
