"""Attention with learned sinks, exact under causal, sliding, padded, packed and shared-prefix masks, in linear memory.

A sink is one learned logit per head that takes part in the softmax and has no value: it only takes weight away.
Because it is the same for every query, it can be applied after a fused kernel that knows nothing of it:

    lse_s = logaddexp(lse, s)          out = o * exp(lse - lse_s)
    backward: the stock flash backward, fed with out and lse_s      dsink = -sum(exp(s - lse_s) * (dO . out))

Attention over a union of key sets is a merge of the parts by their log-sum-exp, and a sink is one more part, with
value 0. So one small loop serves every mask: start from the sink, merge rectangles that the kernel knows.

Every mask here is a list of `SinkRun`: queries that see a block of earlier keys (a cached past, or a shared prefix)
and, causally, their own keys; "earlier" in position, so that a window of W counts positions and not slots.

    causal          one run                        packed documents   one run each
    cached past     one run, past = the cache      shared prefix      one run for the prefix, one per response
    padding         a (B, S) bool key mask on top of the runs

Dimension key: B rows, H / Hk query / key heads, T queries, S keys, D head dimension, W window.

    sink_attention          the one entry; CPU (aten flash kernel), CUDA (FlexAttention), decode (T = 1)
    sink_attention_ref      dense reference, the oracle of the tests
    pack_layout             shared-prefix and packed rows, for model(..., sink_mask=layout, use_cache=False)
    use_sink_attention      switches a transformers model over; or attn_implementation="sinkflex"
"""
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function

FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MASKED = -1e30  # logit of a hidden key: finite, so that a fully masked row gives weight 0 by arithmetic and never NaN
NO_SINK = -1e20  # logit of an absent sink: far below any score, far above MASKED
FLEX_BLOCK = 128  # FlexAttention's block edge; CUDA lengths are padded to a few multiples of it


@dataclass(frozen=True)
class SinkRun:
    """Queries [q0, q1) see keys [p0, p1), which end right before them in position, and causally [k0, k0 + q1 - q0)."""
    q0: int
    q1: int
    k0: int
    p0: int = 0
    p1: int = 0
    row: int | None = None  # batch row; None = every row


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: that is what the BlockMask cache wants
class SinkMask:
    """Which key each query of a batch may see, as runs; pass it as `model(..., sink_mask=layout, use_cache=False)`.

    position_ids: (rows, T) int64; pass them to the model too. T must equal the length of the input.
    """
    runs: tuple[SinkRun, ...]
    position_ids: Tensor


def pack_layout(groups: list[tuple[int, tuple[int, ...]]], device="cpu") -> SinkMask:
    """Many conversations in ONE row without padding: a prompt shared by G responses is computed once.

    Args:
        groups: (prefix length, (response length, ...)) each, in tokens; (n, ()) is a plain document of n tokens.
        device: where position_ids live.
    Returns:
        Layout of one row with slots [prefix, response 1, response 2, ..., next prefix, ...]. A key is visible if it
        is in the query's own prefix or own response and not later. [(2, (2, 1))] has positions 0 1 2 3 2 and lets
        slot 4 see slots 0, 1 and 4.
    Raises: ValueError on a group with nothing in it or a negative length.
    """
    runs, positions, slot = [], [], 0
    for prefix, responses in groups:
        if prefix + sum(responses) < 1 or min(prefix, *responses, 0) < 0:
            raise ValueError(f"a group needs at least one token and no negative length, got {(prefix, responses)}")
        start, slot = slot, slot + prefix
        runs.append(SinkRun(start, slot, start))
        positions.append(torch.arange(prefix))
        for length in responses:
            runs.append(SinkRun(slot, slot + length, slot, start, start + prefix))
            positions.append(torch.arange(prefix, prefix + length))
            slot += length
    used = tuple(run for run in runs if run.q1 > run.q0)
    return SinkMask(used, torch.cat(positions)[None].to(device))


@lru_cache(maxsize=4)  # asked by every layer with the same tensor; `version` guards against changes in place
def packed_documents(position_ids: Tensor, version: int) -> SinkMask | None:
    """Layout of rows whose position_ids (B, T) start over: packed documents. None where no row does."""
    starts_over = position_ids.diff(dim=-1) != 1  # (B, T-1)
    if not starts_over.any():
        return None
    runs, length = [], position_ids.shape[1]
    for row, jumps in enumerate(starts_over.tolist()):
        cuts = [0, *(i + 1 for i, jump in enumerate(jumps) if jump), length]
        runs += [SinkRun(a, b, a, row=row) for a, b in zip(cuts, cuts[1:])]
    return SinkMask(tuple(runs), position_ids)


def causal_runs(T: int, S: int) -> tuple[SinkRun, ...]:
    """Plain causal attention of T queries, the last T of S keys: what comes before is the cached past."""
    return (SinkRun(0, T, S - T, 0, S - T),)


# ---------------------------------------------------------------------------------------------------- reference

def sink_attention_ref(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """Dense attention with the sink as one more column that is dropped after the softmax: slow and obviously right.

    Args:
        q: (B, H, T, D). k, v: (B, Hk, S, D). sinks: (H,) logits or None. mask: bool, broadcasts to (B, H, T, S),
        True = visible. scale: factor on the scores.
    Returns: (B, H, T, D) in q's dtype, computed in float32 (float64 for float64 input); rows that see nothing are 0.
    Source: gpt-oss model card, arXiv:2508.10925, section 2.2; gpt-oss torch/model.py::sdpa.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(groups, dim=1) for x in (k, v))  # (B, H, S, D)
    scores = (q.to(wide) @ k.mT * scale).masked_fill(~mask, -torch.inf)  # (B, H, T, S)
    column = sink_logits(q, sinks)[..., None].expand(*scores.shape[:-1], 1)  # (B, H, T, 1)
    return (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v).to(q.dtype)


def sink_logits(q: Tensor, sinks: Tensor | None) -> Tensor:
    """(1, H, 1) sink logits in the accumulation dtype; absent or -inf sinks become NO_SINK, with gradient 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        return q.new_full((1, q.shape[1], 1), NO_SINK, dtype=wide)
    return sinks.to(wide).clamp(min=NO_SINK).view(1, -1, 1)


# ---------------------------------------------------------------------------------------------------- CPU

@dataclass(frozen=True)
class SinkPiece:
    """One kernel call: queries [q0, q1) on keys [k0, k1) of some rows; `ahead` = position of q0 minus position of k0."""
    rows: slice
    q0: int
    q1: int
    k0: int
    k1: int
    ahead: int
    window: int


def cpu_pieces(runs: tuple[SinkRun, ...], window: int | None) -> list[SinkPiece]:
    """Cuts runs into rectangles that the kernel handles in memory and time linear in the length when there is a window.

    With a window, queries go in bands of W (at least 64, at most 512) and each band sees the W - 1 keys before it. A
    query always sees one key of its piece at least. Example, W = 64, one run of 128: queries 0-63 on keys 0-63 and
    queries 64-127 on keys 1-127.
    """
    pieces = []
    for run in runs:
        rows = slice(None) if run.row is None else slice(run.row, run.row + 1)
        n, past = run.q1 - run.q0, run.p1 - run.p0
        W = n + past if window is None else min(window, n + past)
        band = n if W == n + past else min(max(W, 64), 512)
        for a in range(0, n, band):
            b = min(a + band, n)
            seen = min(past, W - 1 - a)  # keys of the past that query a sees; query b - 1 may see none
            if seen > 0:
                last = min(b, W - 1)
                pieces.append(SinkPiece(rows, run.q0 + a, run.q0 + last, run.p1 - seen, run.p1, a + seen, W))
            first = max(0, a - W + 1)
            pieces.append(SinkPiece(rows, run.q0 + a, run.q0 + b, run.k0 + first, run.k0 + b, a - first, W))
    return pieces


def piece_mask(piece: SinkPiece, key_bias: Tensor | None, like: Tensor) -> dict:
    """The kernel's mask arguments for one piece: its own causal mode where that is all there is, else additive floats.

    The kernel's `is_causal` is aligned top-left (query i sees keys 0..i), right only where piece.ahead == 0.
    key_bias: (B, 1, 1, S), 0 or MASKED. like: gives device and dtype, float32 or float64 (the kernel reads a float32
    mask beside float64 queries as garbage). The mask returned is at most (B, 1, band, band + W).
    """
    nq, nk = piece.q1 - piece.q0, piece.k1 - piece.k0
    bias = None if key_bias is None else key_bias[piece.rows, :, :, piece.k0:piece.k1]
    windowed = piece.ahead + nq - 1 >= piece.window
    diagonal = piece.ahead < nk - 1
    if not windowed and (piece.ahead == 0 or not diagonal):
        return {"is_causal": diagonal, "attn_mask": bias}
    distance = torch.arange(piece.ahead, piece.ahead + nq)[:, None] - torch.arange(nk)
    band = like.new_zeros(nq, nk).masked_fill_((distance < 0) | (distance >= piece.window), MASKED)
    return {"is_causal": False, "attn_mask": band[None, None] if bias is None else torch.minimum(band, bias)}


class SinkFlashCPU(torch.autograd.Function):
    """Sum over pieces by log-sum-exp, starting from the sink. Both directions call the stock CPU flash kernels."""

    @staticmethod
    def forward(ctx, q, k, v, sink, key_bias, pieces, scale):
        """q (B, H, T, D), k and v (B, Hk, S, D), sink (1, H, 1) -> out (B, H, T, D) in q's dtype."""
        B, H, T, D = q.shape
        # Stored as (B, T, H, D), which is what transformers wants back.
        out = q.new_zeros(B, T, H, D, dtype=sink.dtype).transpose(1, 2)
        lse = sink.expand(B, H, T).clone()  # (B, H, T)
        for p in pieces:
            here = (p.rows, slice(None), slice(p.q0, p.q1))
            keys = (p.rows, slice(None), slice(p.k0, p.k1))
            o, part = FLASH_CPU(q[here], k[keys], v[keys], scale=scale, **piece_mask(p, key_bias, sink))
            total = torch.logaddexp(lse[here], part)
            out[here].mul_((lse[here] - total).exp_()[..., None])
            out[here].add_(o * (part - total).exp_()[..., None])  # float32 weights: a bfloat16 part is widened here
            lse[here] = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, key_bias, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The sink's share is in lse already, so each piece's stock backward returns its exact part of dQ, dK, dV."""
        q, k, v, sink, key_bias, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=sink.dtype) for x in (q, k, v))
        for p in ctx.pieces:
            here = (p.rows, slice(None), slice(p.q0, p.q1))
            keys = (p.rows, slice(None), slice(p.k0, p.k1))
            parts = FLASH_CPU_BACKWARD(grad[here], q[here], k[keys], v[keys], out[here], lse[here], 0.0,
                                       scale=ctx.scale, **piece_mask(p, key_bias, sink))
            for whole, where, part in zip((dq, dk, dv), (here, keys, keys), parts):
                whole[where].add_(part)
        dsink = None
        if ctx.needs_input_grad[3]:
            share = (sink - lse).exp_()  # (B, H, T), the weight that the sink took
            dsink = -(share * (grad.to(sink.dtype) * out).sum(-1)).sum((0, 2), dtype=torch.float64)
            dsink = dsink.to(sink.dtype).view(1, -1, 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None


# ---------------------------------------------------------------------------------------------------- decode

def sink_decode(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """One query per row: two grouped matrix products in float32, keys and values never repeated per head.

    Args: q (B, H, 1, D), k and v (B, Hk, S, D), sink (1, H, 1), key_mask (B, S) bool or None. Returns (B, H, 1, D).
    """
    B, H, _, D = q.shape
    Hk, S = k.shape[1:3]
    grouped = q.to(sink.dtype).reshape(B, Hk, H // Hk, D) * scale
    scores = grouped @ k.to(sink.dtype).mT  # (B, Hk, H/Hk, S)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], MASKED)
    sink = sink.view(1, Hk, H // Hk, 1).expand(B, -1, -1, -1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :S]
    return (weights @ v.to(sink.dtype)).to(q.dtype).view(B, H, 1, D)


# ---------------------------------------------------------------------------------------------------- CUDA

def flex_bucket(length: int) -> int:
    """Smallest of 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, ... that holds `length`: few graphs compile."""
    size = FLEX_BLOCK
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > FLEX_BLOCK else -(-size * 4 // 3 // 128) * 128
    return size


def visible_ranges(runs: tuple[SinkRun, ...], B: int, T: int, S: int, window: int | None) -> Tensor:
    """(4, B * T) int32: each query sees keys [0th, 1st) of its past and [2nd, 3rd) of its own run, rows end to end."""
    ranges = torch.zeros(4, B, T, dtype=torch.int32)
    offset = torch.arange(B, dtype=torch.int32)[:, None] * S  # (B, 1), first key slot of a row
    for run in runs:
        rows = slice(None) if run.row is None else slice(run.row, run.row + 1)
        i = torch.arange(run.q1 - run.q0, dtype=torch.int32)  # place in the run
        W = T + S if window is None else window
        seen = (W - 1 - i).clamp(0, run.p1 - run.p0)  # keys of the past inside the window
        own = run.k0 + torch.stack([(i - W + 1).clamp(min=0), i + 1])
        past = torch.stack([run.p1 - seen, torch.full_like(i, run.p1)])
        ranges[:, rows, run.q0:run.q1] = torch.cat([past, own])[:, None] + offset[rows]
    return ranges.flatten(1)


@lru_cache(maxsize=4)  # two masks a batch (full, sliding), asked by every layer and by the recomputation of checkpoints
def sink_block_mask(layout: SinkMask | None, key_mask: Tensor | None, version: int | None, shape: tuple[int, int, int],
                    window: int | None, device: torch.device) -> BlockMask:
    """FlexAttention's block-sparse mask for a batch laid out as one long row of B * T queries and B * S keys.

    Counts, by arithmetic on each query's two key ranges, the visible pairs of every 128 x 128 block: (T / 128 x S / 128)
    numbers, never (T, S). Blocks that are wholly visible skip the mask function in the kernel.
    Args: shape (B, T, S); key_mask (B, S) bool with its `_version`; window in positions.
    """
    B, T, S = shape
    Tb, Sb = flex_bucket(B * T), flex_bucket(B * S)
    runs = causal_runs(T, S) if layout is None else layout.runs
    ranges = F.pad(visible_ranges(runs, B, T, S, window), (0, Tb - B * T)).to(device)  # (4, Tb); padding sees nothing
    live = torch.ones(B * S, dtype=torch.bool, device=device) if key_mask is None else key_mask.flatten().to(device)
    live = F.pad(live, (0, Sb - B * S))  # (Sb,)
    before = F.pad(live.cumsum(0), (1, 0))  # (Sb + 1,), live keys before a slot
    edges = torch.arange(0, Sb + 1, FLEX_BLOCK, device=device, dtype=torch.int32)  # (Sb / 128 + 1,)
    counts = []
    for rows in ranges.split(32 * FLEX_BLOCK, dim=1):  # bounds the temporary to (4096, S / 128)
        inside = [before[edges[:, None].clamp(lo, hi)].diff(dim=0) for lo, hi in (rows[:2], rows[2:])]
        counts.append(sum(inside).unflatten(1, (-1, FLEX_BLOCK)).sum(-1).T)  # (rows / 128, Sb / 128)
    counts = torch.cat(counts)[None, None]  # (1, 1, Tb / 128, Sb / 128): one head stands for all
    full = counts == FLEX_BLOCK * FLEX_BLOCK
    partial = (counts > 0) & ~full
    p0, p1, k0, k1 = ranges

    def mask_mod(b, h, i, j):
        return live[j] & (((p0[i] <= j) & (j < p1[i])) | ((k0[i] <= j) & (j < k1[i])))

    order = [x for kind in (partial, full) for x in (kind.sum(-1), kind.to(torch.int8).argsort(-1, True, stable=True))]
    return BlockMask.from_kv_blocks(*(x.to(torch.int32).contiguous() for x in order), BLOCK_SIZE=FLEX_BLOCK,
                                    mask_mod=mask_mod, seq_lengths=(Tb, Sb))


def flex_with_sink(q, k, v, sink, block_mask, scale, kernel=flex_attention):
    """FlexAttention and the sink's share in one function, so that the compiler fuses the epilogue (float32, one cast).

    lse is clamped because -inf - (-inf) would be NaN where a row sees nothing; autograd carries dlse back to dQ, dK.
    """
    out, aux = kernel(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return (out.float() * torch.sigmoid(aux.lse.clamp(min=MASKED) - sink)[..., None]).to(q.dtype)


@lru_cache(maxsize=1)
def compiled_flex():
    """Compiled once. `fullgraph=True` makes the recompile limit an error: dense attention never takes over quietly."""
    return torch.compile(flex_with_sink, fullgraph=True, dynamic=False)


def sink_flex(q, k, v, sink, key_mask, layout, scale, window, attend=None) -> Tensor:
    """CUDA training and prefill: the batch becomes one long row, padded to a bucket, with a shared BlockMask.

    Args as in `sink_attention`; attend: stands in for the compiled function (tests hand in the bare operator).
    """
    B, H, T, D = q.shape
    S = k.shape[2]
    version = None if key_mask is None else key_mask._version
    block_mask = sink_block_mask(layout, key_mask, version, (B, T, S), window, q.device)

    def one_row(x, bucket):  # (B, h, L, D) -> (1, h, bucket, D)
        flat = x.transpose(1, 2).reshape(1, -1, x.shape[1], D).transpose(1, 2)
        return F.pad(flat, (0, 0, 0, bucket - flat.shape[2]))

    lengths = block_mask.seq_lengths
    q, k, v = one_row(q, lengths[0]), one_row(k, lengths[1]), one_row(v, lengths[1])
    with torch._dynamo.config.patch(recompile_limit=64):  # buckets x (training, no_grad) x dtypes; 8 is the default
        out = (attend or compiled_flex())(q, k, v, sink, block_mask, scale)
    return out[:, :, :B * T].transpose(1, 2).reshape(B, T, H, D).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------- the entry

def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float | None = None,
                   window: int | None = None, key_mask: Tensor | None = None, layout: SinkMask | None = None,
                   is_causal: bool = True) -> Tensor:
    """Causal attention with sinks, forward and backward, without an (S, S) tensor on any device.

    Args:
        q: (B, H, T, D); the T queries are the last T of the S keys. k, v: (B, Hk, S, D), H a multiple of Hk.
        sinks: (H,) logits, any float dtype (used in float32), or None.
        scale: factor on the scores; D ** -0.5 if None.
        window: query at position i sees positions i - window < j <= i; None = all.
        key_mask: (B, S) bool, True = a real token; padding on either side, or holes.
        layout: packed or shared-prefix batch instead of a key_mask.
    Returns: (B, H, T, D) in q's dtype, a view of a (B, T, H, D) tensor. Rows that see no key are 0.
    Raises: ValueError on what it would not compute exactly.
    """
    B, H, T, D = q.shape
    S = k.shape[2]
    if not is_causal:
        raise ValueError("sink attention is causal; is_causal=False is not supported")
    if S < T or H % k.shape[1]:
        raise ValueError(f"need at least as many keys as queries and H a multiple of Hk, got q {tuple(q.shape)}, "
                         f"k {tuple(k.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if layout is not None:
        rows = layout.position_ids.shape[0]
        if key_mask is not None or S != T or layout.position_ids.shape[1] != T or rows not in (1, B):
            raise ValueError(f"a layout of shape {tuple(layout.position_ids.shape)} goes with as many tokens, no key "
                             f"mask and no cache; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    scale = D ** -0.5 if scale is None else scale
    sink = sink_logits(q, sinks)  # (1, H, 1)
    if T == 1 and layout is None:
        first = 0 if window is None else max(0, S - window)
        key_mask = None if key_mask is None else key_mask[:, first:]
        return sink_decode(q, k[:, :, first:], v[:, :, first:], sink, key_mask, scale)
    if q.device.type == "cuda":
        return sink_flex(q, k, v, sink, key_mask, layout, scale, window)
    if q.device.type != "cpu":
        raise ValueError(f"sink attention runs on cpu and cuda, not on {q.device.type}")
    bias = None
    if key_mask is not None:
        bias = torch.zeros(B, 1, 1, S).masked_fill_(~key_mask[:, None, None], MASKED).to(sink.dtype)
    pieces = cpu_pieces(causal_runs(T, S) if layout is None else layout.runs, window)
    return SinkFlashCPU.apply(q, k, v, sink, bias, pieces, scale)


# ---------------------------------------------------------------------------------------------------- transformers

def sinkflex_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
                  use_vmap=False, device="cpu", config=None, **kwargs) -> Tensor | None:
    """What transformers calls to build a mask: None for plain causal, else the (B, S) bool mask of real keys.

    Its width is the number of keys written so far: a static cache holds more slots than that.
    """
    unknown = use_vmap or mask_function is bidirectional_mask_function
    if unknown or getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError("sinkflex knows causal and sliding masks; this model asks for another kind "
                         "(bidirectional, chunked, or an added mask function)")
    written = int(q_offset) + q_length - kv_offset  # keys that exist, of the kv_length slots
    if attention_mask is None:
        return None if written == kv_length else torch.ones(batch_size, written, dtype=torch.bool, device=device)
    live = attention_mask[:, kv_offset:kv_offset + written].to(device=device, dtype=torch.bool)
    return None if written == kv_length and live.all() else live


def padding_of(mask: Tensor, T: int, window: int | None) -> Tensor:
    """(B, S) bool key mask of a 4-D mask that somebody built by hand; ValueError if it is not causal plus padding."""
    visible = mask if mask.dtype == torch.bool else mask == 0  # (B, 1, T, S)
    if mask.dtype != torch.bool and (mask[~visible] > -1e4).any():
        raise ValueError("sinkflex takes no additive bias: a float mask may hold 0 and the dtype's minimum only")
    live, S = visible.any(dim=-2)[:, 0], visible.shape[-1]  # (B, S)
    distance = torch.arange(S - T, S, device=mask.device)[:, None] - torch.arange(S, device=mask.device)
    causal = (distance >= 0) & (distance < (window or S + 1))
    if mask.shape[1] != 1 or not torch.equal(causal & live[:, None, None], visible):
        raise ValueError("sinkflex takes a 4-D mask only if it is plain causal or sliding plus padding; "
                         "packed rows go in as sink_mask=pack_layout(...)")
    return live


def sinkflex_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                       s_aux=None, sink_mask=None, position_ids=None, softcap=None, is_causal=None, **kwargs):
    """The attention function that transformers calls in each layer; extra arguments come from its model code.

    query (B, H, T, D), key and value (B, Hk, slots, D); returns ((B, T, H, D), None): no weights exist to return.
    """
    if dropout:
        raise ValueError(f"sinkflex has no attention dropout, got {dropout}; set config.attention_dropout = 0")
    if softcap is not None:
        raise ValueError(f"sinkflex has no soft-capping of scores, got {softcap}")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"{type(module).__name__} has sinks but does not pass them on; they would be ignored")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    T = query.shape[2]
    if attention_mask is not None and attention_mask.ndim == 4:
        attention_mask = padding_of(attention_mask, T, sliding_window)
    if attention_mask is not None:
        key, value = (x[:, :, :attention_mask.shape[1]] for x in (key, value))
    elif sink_mask is None and key.shape[2] == T > 1 and position_ids is not None and position_ids.ndim == 2:
        sink_mask = packed_documents(position_ids, position_ids._version)
    out = sink_attention(query, key, value, s_aux, scale=scaling, window=sliding_window, key_mask=attention_mask,
                         layout=sink_mask, is_causal=causal)
    return out.transpose(1, 2), None


# Done at import, so that attn_implementation="sinkflex" works in Trainer and TRL too. A name with "flash" in it would
# make transformers load a kernel of its own.
AttentionInterface.register("sinkflex", sinkflex_attention)
AttentionMaskInterface.register("sinkflex", sinkflex_mask)


def use_sink_attention(model):
    """Switches a transformers model (PEFT-wrapped or not) to sink attention, in place, and returns it.

    Raises: ValueError where the model's attention would not go through it.
    """
    model.set_attn_implementation("sinkflex")
    if model.config._attn_implementation != "sinkflex":
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced")
    return model
