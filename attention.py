"""Attention: who may look at whom, and the kernel that computes it.

A mask is a predicate `(b, h, q_idx, kv_idx) -> bool` on index tensors, the signature FlexAttention uses. The rule is
stated once; `make_mask` turns it into a block mask for FlexAttention (CUDA, compiled) or a dense one for PyTorch's
`F.scaled_dot_product_attention` (SDPA) and for `reference`, the textbook formula. `attend` runs any of them.

    python attention.py            # every backend x mask: error against an fp64 reference, milliseconds, TFLOP/s

Shapes: B batch, T queries, S keys, H heads, K key/value heads, D head width, L layers.
"""
import contextlib
import functools
import itertools
import math
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

# SDPA's kernels, in the order in which they are tried. The first three go through the scores in tiles and never hold
# (T, S) of them: flash is FlashAttention (Dao et al. 2022), cudnn NVIDIA's own, efficient xFormers', which takes any
# mask. math is the formula, operator by operator.
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
SDPA = {"auto", "sdpa", *KERNELS}  # backends that need no mask for causal attention, where T == S or T == 1


# ---- masks; flex_attention's `and_masks` and `or_masks` combine them, and any predicate of your own ----

def causal(b, h, q_idx, kv_idx):
    """Mask predicate: a query sees itself and the keys before it."""
    return q_idx >= kv_idx


def sliding_window(size):
    """A query sees no key older than the newest `size`, its own among them; combine it with `causal`."""
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size


def document(ids):
    """A query sees its own document; `ids` (B, S) is the number of the document that each position belongs to."""
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def prefix_lm(lengths):
    """All see the first `lengths` (B,) tokens of their sequence; those behind them also what came before."""
    return lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (q_idx >= kv_idx)


def make_mask(predicate, backend, queries, keys, device, batch=1, heads=1):
    """Predicate -> what `attend` takes as mask: for "flex" a BlockMask, else bool (1 or B, 1 or H, T, S), True if seen.

    The queries are the *last* T of the S positions. `batch`, `heads` may stay 1 where the predicate asks for neither.
    Every query must see some key: the softmax over none is NaN.
    """
    if backend == "flex" and queries == keys:
        return fused(create_block_mask, device)(predicate, batch, heads, queries, keys, device)
    b, h = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(heads, device=device).view(1, -1, 1, 1)
    kv_idx = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return predicate(b, h, kv_idx[..., keys - queries:].mT, kv_idx)


def document_starts(tokens, index, doc_start, past):
    """At which index the document of each token of `tokens` (B, T) began, (B, T); None where all are one document.

    `index` (1, T) numbers the tokens; the id `doc_start` begins a document (-1: none does). `past`, the KVCache, knows
    where the document under way began, even if that token is no longer kept. The filler in front of a batch's shorter
    prompts counts as a document of its own.
    """
    if doc_start < 0 and not torch.is_tensor(past.padding):
        return None
    # The newest beginning so far: a running maximum over the indices of those tokens that are one.
    origin = torch.where((tokens == doc_start) | (index == past.padding), index, past.origin).cummax(dim=1).values
    past.origin = origin[:, -1:]
    return origin


# Masks that follow from the shape alone are made once, and kept here. functools.cache would not do: torch.compile
# ignores it, and would have the mask made in its graph. What is compiled finds masks here but stores none: a dict that
# has changed would have it compiled again.
MASKS = {}


def model_mask(tokens, origin, config, backend, cache=None, rule=causal, heads=None):
    """The mask of one forward pass over `tokens` (B, T), one for all layers; None where SDPA needs none.

    `rule` says what a query may see, and the fields of `config` narrow it: to the newest `window` tokens (0: all), and
    to the query's own document, which began at index `origin` (see `document_starts`). The token that begins the next
    document is still this one's last target, as generation ends with it. `heads`: the range of heads that this process
    computes (None: all).
    """
    (batch, queries), device = tokens.shape, tokens.device
    keys = cache.advance(queries) if cache else queries
    window = min(keys, config.window or keys, cache.capacity if cache else keys)
    rules = [rule]  # append what all your runs share: it then holds with a cache and with filler, too
    heads = range(1) if rules == [causal] else heads or range(config.n_head)  # our own rules are one for all heads
    plain = rules == [causal] and origin is None
    # SDPA has the triangle of T == S by itself, and the newest token sees all that a cache keeps.
    if plain and window == keys and queries in (1, keys) and backend in SDPA and not config.softcap:
        return None
    # Only masks with values are kept: under a FakeTensorMode neither `tokens` nor what is made here has any.
    lasting = plain and cache is None and type(tokens) is type(torch.empty(0)) is torch.Tensor
    key = lasting and (backend == "flex", window, queries, keys, device)
    for known in MASKS:  # not MASKS[key], of which torch.compile makes a graph for each length
        if known == key:
            return MASKS[known]
    if window < keys:
        rules.append(sliding_window(window))
    if cache:
        rules = [cache.counted(and_masks(*rules), keys)]
    if origin is not None:  # equal where no token in between begins another document
        rules.append(document(cache.extend("origin", origin[..., None])[..., 0] if cache else origin))
    seen = and_masks(*rules)

    # A rule of your own may ask for row and head, so it is made for each: dense, a byte for each of (B, H, T, S).
    mask = make_mask(lambda b, h, q_idx, kv_idx: seen(b, h + heads.start, q_idx, kv_idx), backend, queries, keys,
                     device, 1 if plain else batch, len(heads))
    # Kept, unless made under inference_mode: autograd refuses such tensors in a later training step.
    if lasting and not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()) and len(MASKS) < 8:
        MASKS[key] = mask
    return mask


# ---- kernels ----

compiled = functools.cache(torch.compile)


def fused(function, device):
    """FlexAttention's functions are kernels only when compiled: by themselves, or within what is being compiled."""
    return compiled(function) if device.type == "cuda" and not torch.compiler.is_compiling() else function


def soft_cap(x, limit):
    """limit * tanh(x / limit): keeps a small x and never exceeds `limit` (Gemma 2, 2024); 0: x as it is."""
    return limit * torch.tanh(x / limit) if limit else x


def reference(q, k, v, mask, softcap=0.0):
    """softmax(q k^T / sqrt(D)) v with all scores in memory; shapes as for `attend`, but k and v have H heads."""
    scores = soft_cap(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), softcap)  # (B, H, T, S)
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(v.dtype) @ v  # (B, H, T, D)


def attend(q, k, v, mask=None, backend="auto", softcap=0.0):
    """Attention output (B, H, T, D) for q (B, H, T, D) and k, v (B, K, S, D); H must be a multiple of K.

    `mask` is `make_mask`'s for the same backend; None means causal, the queries being the last T of the S positions.
    Except with Flex it may also hold numbers, which are added to the scores, as ALiBi's are.
    `backend` is "sdpa", one of its KERNELS, "flex", "reference", or "auto": SDPA, and the reference for soft-capping.
    `softcap` is the scores' limit (0: none), which SDPA does not have: ValueError.
    """
    queries, keys, shared = q.size(2), k.size(2), q.size(1) != k.size(1)
    if backend == "auto" or backend == "flex" and queries < keys:  # Flex is for training
        backend = "reference" if softcap else "sdpa"
    # `is_causal` aligns its triangle to the top left: right for T == S alone. A cache has fewer queries than
    # keys, and the newest query would see only the first key; one query sees everything and needs no mask at all.
    if mask is None and (backend not in SDPA or 1 < queries < keys):
        mask = make_mask(causal, backend, queries, keys, q.device)
    # On CUDA the kernels that take a mask or fp32 cannot share heads: SDPA would fall back to math, which holds all
    # scores in fp32. So k and v are repeated.
    masked = backend == "efficient" or backend == "sdpa" and (mask is not None or q.dtype == torch.float32)
    if shared and (backend == "reference" or q.is_cuda and masked):
        # Grouped-query attention: so many neighbouring query heads share a key/value head.
        k, v, shared = *(x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v)), False  # (B, H, S, D)
    if backend == "reference":
        return reference(q, k, v, mask, softcap)
    if backend == "flex":
        return fused(flex_attention, q.device)(
            q, k, v, lambda score, b, h, q_idx, kv_idx: soft_cap(score, softcap), mask, enable_gqa=shared)
    if softcap or backend not in SDPA:
        raise ValueError("SDPA has no soft-capping" if softcap else f"there is no attention {backend}")
    triangle = True if mask is None and queries > 1 else False  # a bool, where torch.compile has a symbol for queries
    # cuDNN makes a plan for each length, and while generating each token has another: it is taken by its name alone.
    kernels = KERNELS.get(backend, [kernel for name, kernel in KERNELS.items() if name != "cudnn"])
    with sdpa_kernel(kernels) if backend in KERNELS or q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=triangle, enable_gqa=shared)


def gradients(q, k, v, mask, backend, softcap=0.0):
    """`attend`'s output, or the inputs' gradients if they require any; a tuple either way."""
    out = attend(q, k, v, mask, backend, softcap)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if out.requires_grad else (out,)


def attempt(run):
    """(seconds that a call of `run` takes once it is warm, ""), or (inf, why it cannot run)."""
    from torch.utils.benchmark import Timer
    with warnings.catch_warnings(record=True) as caught:  # SDPA says there what speaks against a kernel
        warnings.simplefilter("always")
        try:
            return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()).timeit(3).median, ""
        except (RuntimeError, ValueError) as error:
            reasons = [*(str(warning.message) for warning in caught), str(error)]
    # "because:" only announces the next warning, and "runtime disabled" are the kernels that `attend` has left out.
    reason = next(text for text in reasons if "because:" not in text and "runtime disabled" not in text)
    return math.inf, reason.splitlines()[0].split(" (Triggered")[0].split(". ")[0].rstrip(".")


def pick_backend(attention, sdpa, config, device, dtype, micro_batch=1):
    """(backend for `attend`, a note that says which and why not another), by trying what --attention and --sdpa allow.

    `config` has a model's sizes and masks. "auto" tries Flex on CUDA, if there is more than causal to do; the reference
    on a CPU, in bf16 and for short sequences; SDPA; and at last the reference anywhere. SDPA's kernel is on CUDA the
    faster one, forward and backward, of flash and the next that runs. Where SDPA refuses, it says why in warnings, and
    they become the reason. Raises ValueError with all if none runs.
    """
    cuda, found = device.type == "cuda", {}
    first = ["flex"] if cuda and (config.window or config.doc_start >= 0 or config.softcap) else []
    # On a CPU flash is no faster in bf16 than in fp32: forward and backward of 16 x 6 heads take 22 ms at 128 tokens
    # and 46 at 256, the reference 8 and 34. With longer sequences its scores take too much memory.
    first += ["reference"] if device.type == "cpu" and dtype == torch.bfloat16 and config.seq_len <= 256 else []
    names = {"auto": [*first, *KERNELS, "reference"], "sdpa": [*KERNELS]}.get(attention, [attention])
    B, T = (micro_batch, config.seq_len) if cuda else (1, 8)
    tokens = torch.zeros(B, T, dtype=torch.int64, device=device)
    start = tokens if config.doc_start >= 0 else None  # one document, which begins at 0
    q, k, v = (torch.zeros(B, heads, T, config.head_dim, device=device, dtype=dtype, requires_grad=True)
               for heads in (config.n_head, config.n_kv_head, config.n_kv_head))
    for name in names if sdpa == "auto" else {sdpa}.intersection(names):
        found[name] = attempt(lambda: gradients(q, k, v, model_mask(tokens, start, config, name), name, config.softcap))
        if found[name][0] < math.inf and (name != "flash" or not cuda):
            break
    refused = {reason: name for name, (_, reason) in reversed(found.items()) if reason}  # one reason of many, said once
    note = "".join(f", not {name}: {reason}" for reason, name in refused.items())
    note += ", faster than SDPA's in bf16 on a CPU" if first == [*found] == ["reference"] else ""
    # Another one has to be a tenth faster than flash: measured again, when a run goes on, it should win or lose again.
    best = min(found, key=lambda name: found[name][0] * (0.9 if name == "flash" else 1), default="")
    if not best or found[best][0] == math.inf:
        raise ValueError(f"--attention {attention} with --sdpa {sdpa} leaves no kernel{note.replace(',', ':', 1)}")
    return best, f"attention {best}{note}"


class KVCache:
    """What later tokens need of the earlier ones: the newest `capacity` of each layer's keys and values, oldest first.

    A token sees no more than `capacity`, itself among them, whether tokens come one at a time, in chunks, or in a
    longer prompt: the model's window loses nothing. `padding`, a tensor (B, 1), counts the filler tokens in front of
    each prompt of a batch of unequal lengths. For use under torch.no_grad.
    """

    def __init__(self, capacity, padding=0):
        self.kept, self.extended, self.capacity, self.padding = {}, {}, capacity, padding
        self.length = self.origin = 0

    def advance(self, queries):
        """`queries` more tokens come -> S, how many they may look at, themselves among them. Once a forward pass."""
        self.length += queries
        return min(self.length, self.capacity + queries - 1)

    def extend(self, name, new):
        """Keep `new` (..., T, D), after `advance`, under `name` -> what these T may look at (..., S, D)."""
        if self.extended.get(name) == self.length:
            raise ValueError(f"the cache has {name} already: a block that is used twice needs two layer numbers")
        self.extended[name] = self.length
        if name not in self.kept:
            # On a CPU bf16 becomes fp32, which SDPA reads 2 to 6 times as fast for a single query; autocast undoes it.
            slow = (new.device.type, new.dtype) == ("cpu", torch.bfloat16) and not torch.is_autocast_enabled("cpu")
            self.kept[name] = (new.float() if slow else new).new_empty(*new.shape[:-2], self.capacity, new.size(-1))
        kept, more, room = self.kept[name], new.size(-2), self.capacity
        past, new = min(self.length - more, room), new.to(kept.dtype)
        if self.length <= room:
            kept[..., past:self.length, :] = new
            return kept[..., :self.length, :]
        # The first of several still looks at what the last ones replace: room - 1 older ones, and itself.
        seen = torch.cat([kept[..., :past, :], new], dim=-2)[..., -(room - 1 + more):, :]
        kept.copy_(seen[..., -room:, :])
        return seen

    def counted(self, rule, keys):
        """`rule` for a mask of the newest `keys`: it is told positions that count from each row's first real token.

        The filler's are 0: a rule may look up a table, or ask for more than 0.
        """
        shift = self.length - keys - (self.padding[..., None, None] if torch.is_tensor(self.padding) else 0)
        return lambda b, h, q_idx, kv_idx: rule(b, h, (q_idx + shift).clamp(min=0), (kv_idx + shift).clamp(min=0))


def compare():
    """Print every backend's error, time and speed with every mask; on a CPU Flex is not compiled, and forward only."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, T, size = (torch.bfloat16, 4096, 8192) if device.type == "cuda" else (torch.float32, 512, 1024)
    matrix, ids = torch.randn(size, size, device=device, dtype=dtype), torch.arange(T, device=device)[None] * 4 // T
    peak = 2 * size ** 3 / attempt(lambda: matrix @ matrix)[0]
    print(f"{device.type}, {str(dtype)[6:]}, 8 heads x {T} x 64; a matrix product reaches {peak / 1e12:.2f} TFLOP/s\n"
          "mask      pass      kernel     max. error      time          speed of that peak")
    masks = {"causal": causal, "window": and_masks(causal, sliding_window(T // 8)),
             "document": and_masks(causal, document(ids)), "prefix": prefix_lm((ids == 0).sum(dim=1))}
    for (name, rule), backward in itertools.product(masks.items(), (False, True)):
        torch.compiler.reset()  # each kind is a compilation of Flex, of which torch allows eight
        inputs = torch.randn(3, 1, 8, T, 64, device=device, dtype=dtype, requires_grad=backward).unbind()
        allowed = make_mask(rule, "reference", T, T, device)
        # q k^T and weights v: 2 x 64 FLOPs each, for each pair seen, in 8 heads; the gradients need two such for each.
        work = 4 * 8 * 64 * allowed.sum().item() * (3 if backward else 1)
        truth = gradients(*(x.double() for x in inputs), allowed, "reference")
        for backend in "reference", *KERNELS, "flex":
            mask = None if name == "causal" and backend in KERNELS else make_mask(rule, backend, T, T, device)
            elapsed, result = attempt(lambda: gradients(*inputs, mask, backend))
            if not result:
                error = max((a - b).abs().max().item() for a, b in zip(gradients(*inputs, mask, backend), truth))
                speed = work / elapsed
                result = f"{error:8.1e} {1e3 * elapsed:9.2f} ms {speed / 1e12:8.3f} TFLOP/s {speed / peak:4.0%}"
            print(f"{name:9s} {'+backward' if backward else 'forward':9s} {backend:10s} {result}")


def main():
    from dataclasses import make_dataclass
    from train import command
    with command(make_dataclass("Table", [], namespace={"__doc__": compare.__doc__}), "attention.py"):
        compare()


if __name__ == "__main__":
    main()
