"""Attention: who may look at whom, and the kernel that computes it.

A mask is a predicate `(b, h, q_idx, kv_idx) -> bool` on index tensors, the signature FlexAttention uses, so the
rule is stated once and `dense` turns it into what a kernel wants. `attend` runs it on PyTorch's
`F.scaled_dot_product_attention` (SDPA), or as `reference`: the textbook formula with all scores in memory.

    python attention.py            # every backend x mask: error against an fp64 reference, and milliseconds

Shapes: B batch, T queries, S keys, H heads, K key/value heads, D head width, L layers.
"""
import math

import torch
import torch.nn.functional as F


def causal(b, h, q_idx, kv_idx):
    """Mask predicate: a query sees itself and the keys before it."""
    return q_idx >= kv_idx


def dense(predicate, queries, keys, device):
    """Predicate -> bool mask (1, 1, T, S), True where attention is allowed; the queries are the *last* T positions."""
    kv_idx = torch.arange(keys, device=device)
    q_idx = torch.arange(keys - queries, keys, device=device)[:, None]
    return predicate(0, 0, q_idx, kv_idx)[None, None]  # (1, 1, T, S)


def reference(q, k, v, mask, dropout=0.0):
    """softmax(q k^T / sqrt(D)) v with all scores in memory; shapes as for `attend`."""
    groups = q.size(1) // k.size(1)  # grouped-query attention: so many neighbouring query heads share a key/value head
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # (B, H, S, D)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, S)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return F.dropout(weights, dropout).to(v.dtype) @ v  # (B, H, T, D)


def attend(q, k, v, mask=None, backend="sdpa", dropout=0.0):
    """Attention output (B, H, T, D) for q (B, H, T, D) and k, v (B, K, S, D); H must be a multiple of K.

    `mask` is bool and broadcasts to (B, H, T, S); None means causal, the queries being the last T of the S positions.
    `backend` is "sdpa" or "reference"; `dropout` is the probability of dropping an attention weight.
    """
    queries, keys = q.size(2), k.size(2)
    if backend == "reference":
        mask = dense(causal, queries, keys, q.device) if mask is None else mask
        return reference(q, k, v, mask, dropout)
    # `is_causal` aligns its triangle to the top left: right for T == S alone. A cache has fewer queries than
    # keys, and the newest query would see only the first key; one query sees everything and needs no mask at all.
    if mask is None and 1 < queries < keys:
        mask = dense(causal, queries, keys, q.device)
    is_causal = mask is None and queries > 1
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=q.size(1) != k.size(1))


class KVCache:
    """Keys and values of the tokens seen so far: for each of `layers`, tensors (B, K, S, D), made with the first keys.

    When more than S = `capacity` tokens have come, the newest overwrites the oldest (a ring): attention does not mind
    the order of its keys, and RoPE has put the position into each of them. `padding` (B,) counts the filler tokens in
    front of each prompt of a batch of unequal lengths; nobody looks at those.
    """

    def __init__(self, layers, capacity, padding=None):
        self.keys, self.values = [None] * layers, [None] * layers
        self.capacity, self.length, self.padding = capacity, 0, padding

    def append(self, layer, k, v):
        """Store k and v (B, K, T, D) of one layer; return all that is stored, (B, K, S, D)."""
        start = self.length % self.capacity
        end = start + k.size(2)
        if end > self.capacity:
            raise ValueError(f"{k.size(2)} tokens do not fit at position {start} of a cache of {self.capacity}: "
                             "past its end, feed one token at a time")
        if self.keys[layer] is None:  # only now the number of heads (tensor parallel) and dtype (autocast) are known
            self.keys[layer], self.values[layer] = (x.new_zeros(*x.shape[:2], self.capacity, x.size(3)) for x in (k, v))
        self.keys[layer][:, :, start:end] = k
        self.values[layer][:, :, start:end] = v
        stored = min(self.length + k.size(2), self.capacity)
        return self.keys[layer][:, :, :stored], self.values[layer][:, :, :stored]

    def mask(self, queries):
        """Who may look at whom when `queries` more tokens come: bool (B, 1, T, S), or None where causal says it."""
        if self.padding is None:
            return None
        total = self.length + queries
        slot = torch.arange(min(total, self.capacity), device=self.padding.device)
        position = total - 1 - (total - 1 - slot) % self.capacity  # of the token that each slot holds
        query = torch.arange(self.length, total, device=slot.device)[:, None]  # (T, 1)
        # A filler token sees itself, or its softmax over nothing would be NaN and spread.
        seen = (position >= self.padding[:, None, None]) & (position <= query)  # (B, T, S)
        return (seen | (position == query))[:, None]


def main():
    """Print every backend's error and time for the causal mask: training, a decoding chunk, one new token."""
    import timeit
    print(f"{'backend':10s} {'dtype':9s} {'queries x keys':>14s} {'max error':>10s} {'ms':>8s}")
    for queries, keys in [(512, 512), (16, 512), (1, 512)]:
        q, k, v = (torch.randn(4, heads, n, 64) for heads, n in [(8, queries), (2, keys), (2, keys)])
        truth = attend(q.double(), k.double(), v.double(), backend="reference")
        for backend in "reference", "sdpa":
            for dtype in torch.float32, torch.bfloat16:
                inputs = [x.to(dtype) for x in (q, k, v)]
                error = (attend(*inputs, backend=backend).double() - truth).abs().max().item()
                elapsed = min(timeit.repeat(lambda: attend(*inputs, backend=backend), number=1, repeat=5))
                print(f"{backend:10s} {str(dtype)[6:]:9s} {queries:7d} x {keys:4d} {error:10.1e} {1000 * elapsed:8.2f}")


if __name__ == "__main__":
    main()
