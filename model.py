"""The network: one GPT that is two families, chosen by the fields of `ModelConfig`.

Llama/Qwen: RMSNorm, rotary positions (RoPE), SwiGLU, grouped-query attention, no biases. GPT-2: LayerNorm, learned
positions, GELU, biases. Parameters are fp32; `torch.autocast` around `forward` chooses the matrix products' dtype.

    python model.py out/nano "def main"        # stream a sample from the newest checkpoint of a run

Shapes: B batch, T tokens, C model width, H heads, K key/value heads, D head width, V vocabulary, L layers.
"""
import codecs
import hashlib
import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import KVCache, attend, causal, document_starts, model_mask, soft_cap


@dataclass
class ModelConfig:
    """What makes a GPT; a preset's is ModelConfig(**PRESETS["nano"]).

    Zero is derived: n_kv_head = n_head, head_dim = C / H, n_hidden from C and the MLP's kind.
    """
    vocab_size: int = 257
    seq_len: int = 256  # tokens the model is made for: rows of the learned positions, keys kept while generating
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 0
    n_embd: int = 128
    head_dim: int = 0
    n_hidden: int = 0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    position: Literal["rope", "learned"] = "rope"
    mlp: Literal["swiglu", "gelu", "gelu_exact"] = "swiglu"  # gelu: its tanh form
    bias: bool = False
    tied: bool = False  # the head is the embedding
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, as Qwen3
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Llama 3's, see `rope_frequencies`
    # Of embeddings and what blocks add. Dropping attention weights, too, takes T random numbers a token and head, which
    # halve a step's speed on a CPU, and not every kernel has it.
    dropout: float = 0.0
    window: int = 0  # a token sees so many of the newest tokens, itself among them; 0: all
    doc_start: int = -1  # the id that begins a document, to which attention keeps; -1: attention crosses documents
    restart_positions: bool = False  # positions count from 0 in each document; RoPE then differs by rounding alone
    softcap: float = 0.0  # limit of the attention scores, s -> softcap tanh(s / softcap); 0: none
    head_softcap: float = 0.0  # the same of the logits

    def __post_init__(self):
        """Derive what is zero; raise ValueError where the numbers do not make a network."""
        if self.doc_start is None:
            raise ValueError("a mask of documents needs the id that begins one: \"eot\" of meta.json is null")
        if self.restart_positions and self.doc_start < 0:
            raise ValueError("--restart_positions has no effect without --doc_mask: add --doc_mask, or drop it")
        if self.window >= self.seq_len:
            raise ValueError(f"window {self.window} has no effect: seq_len {self.seq_len} is no larger, leave it out")
        least = dict(vocab_size=1, seq_len=1, n_head=1, n_embd=1, n_layer=1, head_dim=0, n_hidden=0, norm_eps=0,
                     dropout=0, window=0, rope_theta=1, softcap=0, head_softcap=0)
        top = dict(n_layer=10 ** 5, norm_eps=1, dropout=1, rope_theta=math.inf, softcap=math.inf, head_softcap=math.inf)
        for kind in fields(self):
            if get_origin(kind.type) is Literal and getattr(self, kind.name) not in get_args(kind.type):
                raise ValueError(f"{kind.name} is {getattr(self, kind.name)!r}, expected one of {get_args(kind.type)}")
        for name, low in least.items():
            if not (high := top.get(name, 2 ** 31)) > getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low} <= {name} < {high}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: "
                             f"take n_embd {self.n_embd // self.n_head * self.n_head or self.n_head}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_kv_head < 0 or self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head width {self.head_dim} is odd: rotary positions turn pairs, take an even one")
        # SwiGLU has three matrices where GELU has two: 8/3 C keeps the parameters of GPT-2's 4 C, 64 suits the kernels.
        self.n_hidden = self.n_hidden or (math.ceil(self.n_embd / 24) * 64 if self.mlp == "swiglu" else 4 * self.n_embd)


GPT2 = dict(vocab_size=50257, seq_len=1024, norm="layernorm", position="learned", mlp="gelu", bias=True, tied=True,
            norm_eps=1e-5)
# Llama 3.1's and 3.2's stretch of the rotary positions from 8,192 tokens; the factor is each model's own.
STRETCH = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA = dict(vocab_size=128256, seq_len=131072, n_kv_head=8, n_head=32, norm_eps=1e-5, rope_theta=500000.0)

PRESETS = {  # train.TrainConfig's --model has their names, too
    "nano": dict(seq_len=256, n_layer=2, n_head=4, n_embd=128, qk_norm=True),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, **GPT2),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, **GPT2),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, **GPT2),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, **GPT2),
    "llama-3.2-1b": dict(n_layer=16, n_embd=2048, n_hidden=8192, tied=True, rope_scaling=dict(STRETCH, factor=32.0),
                         **LLAMA),
    "llama-3.1-8b": dict(n_layer=32, n_embd=4096, n_hidden=14336, rope_scaling=dict(STRETCH, factor=8.0), **LLAMA),
    "qwen3-0.6b": dict(vocab_size=151936, seq_len=40960, n_layer=28, n_head=16, n_kv_head=8, n_embd=1024, head_dim=128,
                       n_hidden=3072, tied=True, qk_norm=True, rope_theta=1e6)}


def rope_frequencies(config, device="cpu"):
    """Angle per position of each of the D/2 pairs, fp32 (D/2,): theta^(-2i/D) (RoFormer, Su et al. 2021, eq. 15).

    Llama 3's scaling divides the slow ones by `factor`: pairs whose wavelength exceeds the original context over
    `low_freq_factor` wholly, those below it over `high_freq_factor` not at all, linearly in between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequency = config.rope_theta ** -exponent
    if (scaling := config.rope_scaling) is None:
        return frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it was, 0: divided by the factor
    return frequency * (keep + (1 - keep) / scaling["factor"])


def rotate(x, rope):
    """Turn the pairs (i, i + D/2) of x (B, H, T, D) by the angles in `rope`: Llama's half-split convention.

    (a, b) -> (a cos - b sin, b cos + a sin). `roll` by half the width puts each element's partner in its place.
    """
    cos, sin = rope  # (..., T, D); the sine of the first half carries the minus
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).type_as(x)


def make_norm(config):
    """The network's norm over C; both compute their statistics in fp32 under autocast, for their input is fp32."""
    kind, options = {"rmsnorm": (nn.RMSNorm, {}), "layernorm": (nn.LayerNorm, dict(bias=config.bias))}[config.norm]
    return kind(config.n_embd, eps=config.norm_eps, **options)


class Attention(nn.Module):
    """Multi-head attention; with n_kv_head < n_head several query heads share a key/value head (GQA)."""

    def __init__(self, config, layer, backend):
        super().__init__()
        self.layer, self.backend, self.config = layer, backend, config
        self.heads = range(config.n_head)  # those of this process: tensor parallelism leaves a share
        C, D = config.n_embd, config.head_dim
        # Three products, not one: tensor parallelism gives each process whole heads of each, and k, v may have fewer.
        self.q = nn.Linear(C, config.n_head * D, bias=config.bias)
        self.k, self.v = (nn.Linear(C, config.n_kv_head * D, bias=config.bias) for _ in range(2))
        self.o = nn.Linear(config.n_head * D, C, bias=config.bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None for _ in range(2))

    def forward(self, x, rope=None, mask=None, cache=None):
        """x (B, T, C) -> (B, T, C). Heads are counted in the projection: tensor parallelism leaves a share of them."""
        q, k, v = (project(x).unflatten(-1, (-1, self.config.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None:  # in the dtype of its weight: under autocast fp32, where q and k are bf16
            q, k = (norm(y.to(norm.weight.dtype)).type_as(v) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, T, D), (B, K, T, D), (B, K, T, D)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        # Kept after their rotation: a key's angle is that of its own position, whoever looks at it later.
        if cache is not None:
            k, v = cache.extend(f"k{self.layer}", k), cache.extend(f"v{self.layer}", v)  # (B, K, S, D)
        # With a cache (Flex is for training), or where a batch has its own mask and flash trained (which on CUDA takes
        # none, and nowhere a learned one), "auto" chooses: SDPA or the reference. As the backend is not the same
        # everywhere, a fork's own formula belongs into this method, before `attend`.
        auto = cache or mask is not None and self.backend == "flash" and (mask.is_cuda or mask.requires_grad)
        dtype, q = q.dtype, q.type_as(k)  # a cache may hold bf16 as fp32
        y = attend(q, k, v, mask, "auto" if auto else self.backend, self.config.softcap)
        return self.o(y.to(dtype).transpose(1, 2).flatten(2))  # (B, T, C)


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)) (Shazeer 2020), or down(gelu(up(x))): GPT-2's with the GELU's tanh form."""

    def __init__(self, config):
        super().__init__()
        self.approximate = {"swiglu": None, "gelu": "tanh", "gelu_exact": "none"}[config.mlp]
        self.gate = nn.Linear(config.n_embd, config.n_hidden, bias=config.bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.n_embd, config.n_hidden, bias=config.bias)
        self.down = nn.Linear(config.n_hidden, config.n_embd, bias=config.bias)

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)."""
        up = self.up(x)  # (B, T, hidden)
        return self.down(F.gelu(up, approximate=self.approximate) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the residual stream passes through untouched (pre-norm)."""

    def __init__(self, config, layer, backend):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config, layer, backend)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None):
        """x (B, T, C) -> (B, T, C). Rotary tables and mask are made once for all blocks, see `GPT.hidden`."""
        x = x + self.dropout(self.attn(self.attn_norm(x), rope, mask, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def table(rows, width):
    """An nn.Embedding of zeros, for `initial` to fill; its own random numbers cost 2 s of imports on a meta device."""
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)


def summed_loss(x, weight, targets, softcap=0.0, chunks=1):
    """Sum of the cross-entropies of logits x weight^T: x (N, C), weight (V, C), targets (N,) -> fp32 scalar.

    With several `chunks` the logits are made in so many parts, one after the other. An argument more has to go through
    `ChunkedLoss`, too. A term of training alone belongs into GPT.forward: this is the validation loss as well.
    """
    # (N, V): a softmax over 50,000 bf16 logits would lose three of its digits
    return sum(F.cross_entropy(soft_cap(F.linear(some, weight).float(), softcap), wanted, reduction="sum")
               for some, wanted in zip(x.chunk(chunks), targets.chunk(chunks)))


def loss_chunks(tokens, vocab_size, device_type):
    """How many parts to make the logits in, so that one has at most 64 MB, on a GPU, which is fast in large ones, 512.

    8192 tokens x 50304 ids in fp32 are 1.6 GB, which softmax and its gradient triple.
    """
    return math.ceil(4 * tokens * vocab_size / (2 ** 26 if device_type == "cpu" else 2 ** 29))


class ChunkedLoss(torch.autograd.Function):
    """`summed_loss`, and the gradients of each chunk at once: only one chunk's logits ever exist.

    A loss is where the backward pass begins: in the forward pass its gradients are known already, but for a factor.
    Nothing is computed twice, which a checkpoint would do: 6 % more time than with the logits in one piece, and a
    quarter of the memory.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunks):
        """x (N, C), weight (V, C), targets (N,) -> fp32 scalar."""
        weight, total, found, dweight = weight.detach().requires_grad_(), 0, [], 0
        for some, wanted in zip(x.chunk(chunks), targets.chunk(chunks)):
            some = some.detach().requires_grad_()
            with torch.enable_grad():
                loss = summed_loss(some, weight, wanted, softcap)
            dx, dw = torch.autograd.grad(loss, (some, weight))
            total, dweight = total + loss.detach(), dw.float().add_(dweight)  # bf16 would lose the sum's digits
            found.append(dx)
            del loss, dw  # not while the next chunk's are made
        ctx.save_for_backward(torch.cat(found), dweight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, factor):
        if torch.is_grad_enabled():  # create_graph: these gradients are constants
            raise RuntimeError("second derivatives need the logits in one piece: let model.loss_chunks return 1")
        # In place, for a loss is gone through backward once.
        return *(gradient.mul_(factor) for gradient in ctx.saved_tensors), None, None, None


class GPT(nn.Module):
    """tokens (B, T) -> logits (B, T, V), or with targets -> the sum of the losses.

    Its tables are zeros until `distributed.materialize(model, device, seed)` gives all parameters their initial values.
    """

    def __init__(self, config, backend="auto"):
        super().__init__()
        self.config, self.backend = config, backend
        self.embed = table(config.vocab_size, config.n_embd)
        self.position = table(config.seq_len, config.n_embd) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer, backend) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        # Tied means there is no second parameter at all: nothing that wrapping, moving or loading could untie.
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # No buffers and no other tensors: on the meta device they have no content, and `to_empty` leaves garbage.

    def initial(self, name, seed):
        """Initial value of parameter `name`: a whole fp32 CPU tensor that depends on (seed, name), not on the layout.

        Matrices are normal with GPT-2's deviation 0.02. Those that write to the residual stream start at zero:
        each block begins as the identity. Embedding and head are small enough for an untrained loss of ln V + 0.05;
        tied ones would otherwise predict the token they have just read, with a logit of C times their deviation.
        """
        shape, C = self.get_parameter(name).shape, self.config.n_embd
        part, kind = f".{name}".split(".")[-2:]
        if part.endswith("norm") and kind == "weight":
            return torch.ones(shape)
        if kind == "bias" and len(shape) == 1 or part in ("o", "down"):
            return torch.zeros(shape)
        small = min(0.02, 0.3 / math.sqrt(C), math.log(self.config.vocab_size) / (3 * C) if self.config.tied else 1)
        deviations = dict(embed=small, head=small, position=small, q=0.02, k=0.02, v=0.02, gate=0.02, up=0.02)
        if part not in deviations:
            raise ValueError(f"GPT.initial has no rule for {name}: add one, for what a module's __init__ sets is lost")
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # 63 bits: it is signed
        return torch.empty(shape).normal_(0.0, deviations[part], generator=generator)

    def rope(self, positions):
        """Cosines and sines of `positions` (..., T): a pair of (..., T, D)."""
        angle = positions[..., None].float() * rope_frequencies(self.config, positions.device)  # (..., T, D/2)
        return torch.cat([angle, angle], dim=-1).cos(), torch.cat([-angle, angle], dim=-1).sin()

    def hidden(self, tokens, cache=None, rule=causal):
        """tokens (B, T) -> the last norm's output (B, T, C); cache and rule as for `forward`.

        `index` counts the tokens of a row, with the filler before a short prompt, and goes on in a cache. Positions
        count from the row's first real token, with `restart_positions` from the document's: a row filled up is as if
        alone.
        """
        past = cache or KVCache(0)  # without one, an empty cache: its length, origin and padding are 0
        index = torch.arange(past.length, past.length + tokens.size(1), device=tokens.device)[None]  # (1, T)
        origin = document_starts(tokens, index, self.config.doc_start, past)  # (B, T)
        mask = model_mask(tokens, origin, self.config, "auto" if cache else self.backend, cache, rule,
                          self.blocks[0].attn.heads)
        # The filler's would be negative: nobody sees it, but a table of positions must have its row.
        positions = (index - (origin if self.config.restart_positions else past.padding)).clamp(min=0)  # (1 or B, T)
        rope = self.rope(positions[:, None]) if self.position is None else None  # a pair of (1 or B, 1, T, D)
        x = self.embed(tokens)  # (B, T, C)
        x = self.dropout(x if self.position is None else x + self.position(positions))
        for block in self.blocks:
            x = block(x, rope, mask, cache)
        return self.norm(x)

    def logits(self, x):
        """x (B, T, C) from `hidden` -> (B, T, V), before soft-capping."""
        return F.linear(x, (self.head or self.embed).weight)

    def forward(self, tokens, targets=None, cache=None, last=False, rule=causal):
        """Logits (B, T, V), or with `targets` (B, T) the fp32 *sum* of the losses over all targets that are not -100.

        The sum, not the mean: only the caller knows how many targets the whole global batch has. With a `cache` the
        tokens continue what is in it. `last` sends the last position alone through the head, (B, 1, V): all that
        generation needs. `rule` is the mask predicate that stands in causal's place, as `prefix_lm(lengths)`.
        """
        x = self.hidden(tokens, cache, rule)  # (B, T, C)
        if targets is None:
            return soft_cap(self.logits(x[:, -1:] if last else x), self.config.head_softcap)
        x, targets, weight = x.flatten(0, 1), targets.flatten(), (self.head or self.embed).weight  # (N, C), (N), (V, C)
        softcap, chunks = self.config.head_softcap, loss_chunks(len(x), weight.size(0), x.device.type)
        if chunks == 1:
            return summed_loss(x, weight, targets, softcap)
        # torch.compile stops here: it cannot trace autograd's own functions, and would unroll the loop of the other.
        compute = torch.compiler.disable(ChunkedLoss.apply if torch.is_grad_enabled() else summed_loss)
        return compute(x, weight, targets, softcap, chunks)

    def num_params(self):
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len):
        """FLOPs a trained token costs, forward and backward: 6 per parameter in a matrix product, and causal attention.

        Attention: q k^T and weights v are 4 H D FLOPs for each key that a query sees, tripled by the backward pass.
        That is half the keys (PaLM, Chowdhery et al. 2022, appendix B, with the causal half), or a window's; masks of
        documents, which follow from the data, are not counted off.
        """
        window = min(self.config.window or seq_len, seq_len)
        keys = window - window ** 2 / (2 * seq_len)  # on average; the first `window` queries see half of it
        matrices = sum(p.numel() for p in self.parameters() if p.dim() > 1)
        matrices -= sum(part.weight.numel() for part in self.modules() if isinstance(part, nn.Embedding)
                        and (self.head or part is not self.embed))  # looked up, not multiplied
        return 6 * matrices + 12 * self.config.n_layer * self.config.n_head * self.config.head_dim * keys

    @torch.no_grad()
    def stream(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=None, stop=None, vocab=None,
               rule=causal):
        """Yield, for each new position, the list of B next token ids; None for a row that has ended, with `stop`.

        `prompts` is a list of B non-empty lists of ids, of any lengths up to seq_len. With RoPE it goes on past seq_len
        and sees the newest seq_len tokens; learned positions end there, and asking for more raises ValueError.
        `temperature` 0 takes the likeliest token; `seed` makes the draws repeatable; `vocab` is the tokenizer's number
        of ids: no text stands for those that a padded vocabulary has beyond it.
        """
        longest, limit = max(map(len, prompts)), self.config.seq_len
        if not min(map(len, prompts)):
            raise ValueError("a prompt is empty: give at least one token, for example the end-of-text id")
        if longest > limit or self.position is not None and longest + max_new_tokens > limit:
            raise ValueError(f"prompt of {longest} and {max_new_tokens} new tokens: this model sees {limit} tokens"
                             + (", its learned positions end there" if longest <= limit else ", shorten the prompt"))
        # (B, T): shorter prompts are filled up in front, so that all end together
        tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.embed.weight.device)
        padding = torch.tensor([[longest - len(p)] for p in prompts], device=tokens.device)  # (B, 1)
        cache = KVCache(min(self.config.window or limit, longest + max_new_tokens), padding if padding.any() else 0)
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        # The first pass takes the whole prompts, each later one the token that was drawn last: the cache has the rest.
        # In `new` a row's prompt, then its tokens, stand for not having ended.
        model, new = prepacked(self, len(prompts)), prompts
        for _ in range(max_new_tokens):
            logits = model(tokens, cache=cache, last=True, rule=rule)[:, 0, :vocab].float()  # (B, V)
            tokens = pick(logits, temperature, top_k, top_p, generator)  # (B, 1)
            new = [None if old is None or token == stop else token for old, token in zip(new, tokens[:, 0].tolist())]
            yield new
            if all(token is None for token in new):
                return

    def generate(self, prompts, max_new_tokens, **options):
        """The new tokens of each prompt, a list of B lists of ids (`stop` excluded); options as for `stream`."""
        rows = zip(*self.stream(prompts, max_new_tokens, **options))
        return [[token for token in row if token is not None] for row in rows]


def prepacked(model, rows):
    """`model`, or on a CPU a copy that generates faster: its matrices are in the order in which oneDNN reads them.

    Each token reads every weight once: at 18 to 30 GB/s on two cores in this order, at 7 to 19 in F.linear's. `rows`:
    how many are generated at a time. All parameters and buffers are the model's own; of matrices with a `forward` or a
    formula of their own there is no copy, of a model with hooks none at all. What `forward` sets on itself is lost.
    """
    # FSDP2 has `reshard`, and may have left plain parameters.
    hooked = any(part._forward_hooks or part._forward_pre_hooks or hasattr(part, "reshard") for part in model.modules())
    if hooked or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.is_available():
        return model
    kinds = {(type(p), p.device.type, p.dtype) for p in model.parameters()}  # a sharded one is a DTensor
    dtypes = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
    large = sum(p.nbytes for p in model.parameters()) > 2 ** 33  # it may not fit twice
    if large or not kinds <= {(nn.Parameter, "cpu", dtype) for dtype in dtypes}:
        return model

    def product(weight, bias=None):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def twin(part):
        other = object.__new__(type(part))  # copy.copy takes no parametrized module
        vars(other).update(vars(part), _modules={name: child and twin(child) for name, child in part._modules.items()})
        if type(part) is nn.Linear and part is not model.head and "forward" not in vars(part):
            other.forward = product(part.weight, part.bias)
        return other
    other = twin(model)
    if type(model).logits is GPT.logits and "logits" not in vars(model):
        other.logits = product((model.head or model.embed).weight)
    return other


def pick(logits, temperature, top_k, top_p, generator):
    """Draw an id per row of logits (B, V) -> (B, 1): of the `top_k` likeliest (0: all) the fewest that hold `top_p`."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    values, ids = (logits / temperature).sort(dim=-1, descending=True)  # (B, V) each
    values[:, top_k or values.size(1):] = float("-inf")
    probabilities = values.softmax(dim=-1)
    # What the likelier ones hold already: 0 before the first, which always stays.
    probabilities[probabilities.cumsum(dim=-1) - probabilities >= top_p] = 0.0
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))


@dataclass
class SampleConfig:
    """Sample from the newest checkpoint of a run."""
    run: Annotated[str, "a run (--out of train.py), its step_* folder, a Hugging Face folder, or nanoGPT's ckpt.pt"]
    prompt: Annotated[list[str], "text to continue; none: the beginning of a document"] = field(default_factory=list)
    tokens: Annotated[int, "how many new tokens; 0: 200, or what learned positions leave"] = 0
    temperature: Annotated[float, "0 takes the likeliest token, 1 samples the model's own distribution"] = 0.8
    top_k: Annotated[int, "sample among the K likeliest tokens; 0: all"] = 0
    top_p: Annotated[float, "sample among the fewest tokens that hold this probability"] = 1.0
    seed: Annotated[int | None, "makes the sample repeatable"] = None
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], "auto: the fastest there is"] = "auto"

    def __post_init__(self):
        """Refuse what no sampling does."""
        for name, expected, right in (
                ("tokens", "0 or more", self.tokens >= 0), ("top_k", "0 or more", self.top_k >= 0),
                ("temperature", "0 or at least 0.001", self.temperature == 0 or 1e-3 <= self.temperature < math.inf),
                ("top_p", "above 0, at most 1", 0 < self.top_p <= 1),
                ("seed", "0 to 2^63 - 1", 0 <= (self.seed or 0) < 2 ** 63)):
            if not right:
                raise ValueError(f"--{name} is {getattr(self, name)}, expected {expected}")


def main():
    """Stream a sample: each character is printed when its last byte has come."""
    from train import checkpoint, command, data, distributed
    with command(SampleConfig, "model.py", RuntimeError) as config:  # RuntimeError: the model's numbers are not finite
        model, extra = checkpoint.open_model(config.run, lambda fields: GPT(ModelConfig(**fields)))
        if extra["tokenizer"] is None:
            raise ValueError(f"{config.run} names no tokenizer (a folder: has no tokenizer.json), so there is no text")
        tokenizer = data.load_tokenizer(extra["tokenizer"], extra["data"])
        model.to(distributed.find_device(config.device)).eval()
        shown = " ".join(config.prompt)
        ids = tokenizer.encode_ordinary(shown) or [tokenizer.eot_token]  # no prompt: the beginning of a document
        if max(ids) >= model.config.vocab_size:
            raise ValueError(f"the tokenizer gives id {max(ids)}, the model has {model.config.vocab_size} ids")
        room = 200 if model.position is None else max(1, min(200, model.config.seq_len - len(ids)))
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token, in model.stream([ids], config.tokens or room, config.temperature, config.top_k, config.top_p,
                                   config.seed, tokenizer.eot_token, tokenizer.n_vocab):
            new = b"" if token is None else tokenizer.decode_single_token_bytes(token)
            print(shown + text.decode(new), end="", flush=True)
            shown = ""
        print(text.decode(b"", final=True))


if __name__ == "__main__":
    main()
