"""Attention with learned sinks, exact under every mask that training needs, in memory linear in the length.

A sink is one learned logit per head that joins the softmax but has no value: it only takes weight away. It
can be applied after a fused kernel that knows nothing of it, given the kernel's log-sum-exp:

    lse_s = logaddexp(lse, s)          out = o * exp(lse - lse_s)
    backward: the stock flash backward fed with out and lse_s;   dsink = -sum(exp(s - lse_s) * (dO . out))

Attention over a union of key sets is a merge of its parts by log-sum-exp, and the sink is one more part, of
value 0. So one small loop serves every mask: start from the sink, merge rectangles that the kernel can do. A
mask is a list of `SinkRun`: queries that see a block of earlier keys and, causally, their own. "Earlier" is
meant in position: windows count positions, not slots.

    causal          one run                          packed documents   one run each
    cached past     one run, earlier keys = cache    shared prefix      one for the prefix, one per response
    padding         a (B, S) bool key mask on top

Dimension key: B rows, H / Hk query / key heads, T queries, S keys, D head dimension, W window.
"""
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function

FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MASKED = -1e30  # logit of a hidden key; finite, so that a row without keys gets 0 by arithmetic, never NaN
NO_SINK = -1e20  # logit of an absent sink: far below any score, far above MASKED
FLEX_BLOCK = 128  # FlexAttention's block edge


@dataclass(frozen=True)
class SinkRun:
    """Queries [q0, q1) see keys [p0, p1), which end just before them in position, and their own from k0."""
    q0: int
    q1: int
    k0: int
    p0: int = 0
    p1: int = 0
    row: int | None = None  # batch row; None = every row


@dataclass(frozen=True)
class SinkMask:
    """Which keys each query of a batch sees; pass it as `model(..., sink_mask=layout, use_cache=False)`.

    position_ids: (rows, T) int64, to be passed to the model too. T equals the length of the input.
    """
    runs: tuple[SinkRun, ...]
    position_ids: Tensor


def pack_layout(groups: list[tuple[int, tuple[int, ...]]], device="cpu") -> SinkMask:
    """Many conversations in one row without padding; a prompt shared by G responses is computed once.

    Args:
        groups: (prefix length, (response length, ...)) in tokens; (n, ()) is a plain document of n tokens.
        device: where position_ids live.
    Returns:
        Layout of one row with slots [prefix, response 1, response 2, ..., next prefix, ...]: a response sees
        its group's prefix and itself. [(2, (2, 1))] has positions 0 1 2 3 2; slot 4 sees slots 0, 1 and 4.
    """
    runs, positions, slot = [], [], 0
    for prefix, responses in groups:
        if min(prefix, *responses, 0) < 0:
            raise ValueError(f"lengths must not be negative, got {(prefix, responses)}")
        start, slot = slot, slot + prefix
        runs.append(SinkRun(start, slot, start))
        positions.append(torch.arange(prefix))
        for length in responses:
            runs.append(SinkRun(slot, slot + length, slot, start, start + prefix))
            positions.append(torch.arange(prefix, prefix + length))
            slot += length
    return SinkMask(tuple(run for run in runs if run.q1 > run.q0), torch.cat(positions)[None].to(device))


@lru_cache(maxsize=4)  # every layer asks with the same tensor; `version` guards against changes in place
def packed_documents(position_ids: Tensor, version: int) -> SinkMask | None:
    """Layout of rows whose position_ids (B, T) start over: packed documents. None if no row does."""
    starts_over = F.pad(position_ids.diff(dim=-1) != 1, (1, 1), value=True)  # (B, T + 1), edges of documents
    runs = []
    for row, edges in enumerate(starts_over):
        cuts, row = edges.nonzero()[:, 0].tolist(), row if len(position_ids) > 1 else None
        runs += [SinkRun(a, b, a, row=row) for a, b in zip(cuts, cuts[1:])]
    return SinkMask(tuple(runs), position_ids) if len(runs) > len(position_ids) else None


def sink_logits(q: Tensor, sinks: Tensor | None) -> Tensor:
    """(1, H, 1) float32 (float64 for float64 q); absent and -inf sinks become NO_SINK, with gradient 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        return q.new_full((1, q.shape[1], 1), NO_SINK, dtype=wide)
    return sinks.to(wide).clamp(min=NO_SINK).view(1, -1, 1)


def sink_attention_ref(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor, scale: float):
    """Dense attention, the sink as one more column dropped after the softmax: slow and obviously right.

    q: (B, H, T, D). k, v: (B, Hk, S, D). sinks: (H,) logits or None. scale: factor on the scores.
    mask: bool, broadcasts to (B, H, T, S), True = visible.
    Returns: (B, H, T, D) in q's dtype, computed in float32 at least; a row that sees nothing is 0.
    Source: gpt-oss model card, arXiv:2508.10925, section 2.2.
    """
    sink = sink_logits(q, sinks)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(sink.dtype).repeat_interleave(groups, dim=1) for x in (k, v))  # (B, H, S, D)
    scores = (q.to(sink.dtype) @ k.mT * scale).masked_fill(~mask, -torch.inf)  # (B, H, T, S)
    column = sink[..., None].expand(*scores.shape[:-1], 1)  # (B, H, T, 1)
    return (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v).to(q.dtype)


# ---------------------------------------------------------------------------------------- CPU

class SinkPiece(NamedTuple):
    """One kernel call: indices of its queries and keys, position of the first query minus the first key."""
    q: tuple[slice, slice, slice]
    k: tuple[slice, slice, slice]
    ahead: int
    window: int


def cpu_pieces(runs: tuple[SinkRun, ...], window: int | None) -> list[SinkPiece]:
    """Cuts runs into rectangles; with a window, into bands of W / 2 queries and the W - 1 keys before them.

    So a sliding layer's time and memory are linear in the length. W = 64 and one run of 96 give queries 0-31
    on keys 0-31, 32-63 on 0-63, 64-95 on 1-95. Each query of a piece sees at least one of its keys.
    """
    pieces = []
    for run in runs:
        rows = slice(None) if run.row is None else slice(run.row, run.row + 1)
        n, past = run.q1 - run.q0, run.p1 - run.p0
        W = n + past if window is None else min(window, n + past)
        band = n if W == n + past else min(max(W // 2, 32), 256)  # fastest of those measured, W = 16 to 1024

        def add(q0, q1, k0, k1, ahead):
            queries, keys = slice(run.q0 + q0, run.q0 + q1), slice(k0, k1)
            pieces.append(SinkPiece((rows, slice(None), queries), (rows, slice(None), keys), ahead, W))

        for a in range(0, n, band):
            b = min(a + band, n)
            seen = min(past, W - 1 - a)  # earlier keys that query a sees; query W - 1 sees none
            if seen > 0:
                add(a, min(b, W - 1), run.p1 - seen, run.p1, a + seen)
            first = max(0, a - W + 1)
            add(a, b, run.k0 + first, run.k0 + b, a - first)
    return pieces


def piece_mask(piece: SinkPiece, key_bias: Tensor | None, like: Tensor) -> dict:
    """A kernel call's mask arguments: its own causal mode where that is all, else floats (rows, 1, nq, nk).

    The kernel's `is_causal` is aligned top-left (query i sees keys 0..i): right only where piece.ahead is 0.
    key_bias: (B, 1, 1, S), 0 or MASKED. like: has the mask's dtype (float32 beside float64 q is misread).
    """
    nq, nk = (index[2].stop - index[2].start for index in piece[:2])
    bias = None if key_bias is None else key_bias[piece.k[0], :, :, piece.k[2]]
    diagonal = piece.ahead < nk - 1  # some key is later than the first query
    if piece.ahead + nq <= piece.window and (piece.ahead == 0 or not diagonal):
        return {"is_causal": diagonal, "attn_mask": bias}
    distance = torch.arange(piece.ahead, piece.ahead + nq)[:, None] - torch.arange(nk)
    band = like.new_zeros(1, 1, nq, nk).masked_fill_((distance < 0) | (distance >= piece.window), MASKED)
    return {"is_causal": False, "attn_mask": band if bias is None else torch.minimum(band, bias)}


class SinkFlashCPU(torch.autograd.Function):
    """Merges pieces by log-sum-exp, starting from the sink; both directions call stock CPU flash kernels."""

    @staticmethod
    def forward(ctx, q, k, v, sink, key_bias, pieces, scale):
        """q (B, H, T, D), k and v (B, Hk, S, D), sink (1, H, 1) -> (B, H, T, D) in q's dtype."""
        B, H, T, D = q.shape
        out = sink.new_zeros(B, T, H, D).transpose(1, 2)  # stored the way transformers wants it back
        lse = sink.double().expand(B, H, T).clone()  # (B, H, T); float32 near 20 would cost weights a digit
        for piece in pieces:
            mask = piece_mask(piece, key_bias, sink)
            o, part = FLASH_CPU(q[piece.q], k[piece.k], v[piece.k], scale=scale, **mask)
            total = torch.logaddexp(lse[piece.q], part.double())
            old, new = ((x - total).exp_().to(sink.dtype)[..., None] for x in (lse[piece.q], part))
            out[piece.q].mul_(old).add_(o.mul_(new) if o.dtype == new.dtype else o * new)
            lse[piece.q] = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, key_bias, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """lse holds the sink's share, so a piece's stock backward is its exact part of dQ, dK and dV."""
        q, k, v, sink, key_bias, out, lse = ctx.saved_tensors
        share = (sink - lse).exp_() * (grad.to(sink.dtype) * out).sum(-1)  # (B, H, T)
        dsink = -share.sum((0, 2)).to(sink.dtype).view(1, -1, 1)
        sums = None
        for piece in ctx.pieces:
            mask = piece_mask(piece, key_bias, sink)
            parts = FLASH_CPU_BACKWARD(grad[piece.q], q[piece.q], k[piece.k], v[piece.k], out[piece.q],
                                       lse[piece.q].to(sink.dtype), 0.0, scale=ctx.scale, **mask)
            if len(ctx.pieces) == 1 and q.shape[2] == k.shape[2]:
                return *parts, dsink, None, None, None  # one call for everything: no second copy
            sums = sums or [torch.zeros_like(x, dtype=sink.dtype) for x in (q, k, v)]
            for whole, index, part in zip(sums, (piece.q, piece.k, piece.k), parts):
                whole[index].add_(part)
        return *(x.to(q.dtype) for x in sums), dsink, None, None, None


def sink_decode(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, key_mask: Tensor | None, scale: float):
    """One query per row: two grouped float32 matrix products, keys and values never repeated per head.

    q (B, H, 1, D), k and v (B, Hk, S, D), sink (1, H, 1), key_mask (B, S) bool or None -> (B, H, 1, D).
    """
    grouped = q.to(sink.dtype).reshape(q.shape[0], k.shape[1], -1, q.shape[3]) * scale  # (B, Hk, H/Hk, D)
    scores = grouped @ k.to(sink.dtype).mT  # (B, Hk, H/Hk, S)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], MASKED)
    column = sink.view(1, *scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.to(sink.dtype)).to(q.dtype).view(q.shape)


# ---------------------------------------------------------------------------------------- CUDA

def flex_bucket(length: int) -> int:
    """The smallest of 128, 256, 384, 512, 768, 1024, 1536, ... that holds `length`: few graphs compile."""
    power = max(FLEX_BLOCK, 1 << (length - 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > 2 * FLEX_BLOCK else power


def visible_ranges(runs: tuple[SinkRun, ...], B: int, T: int, S: int, window: int | None) -> Tensor:
    """(4, B * T) int32, rows end to end: a query sees keys [0th, 1st) before and [2nd, 3rd) of its run."""
    ranges = torch.zeros(4, B, T, dtype=torch.int32)
    offset = torch.arange(B, dtype=torch.int32)[:, None] * S  # (B, 1), first key of a row
    W = T + S if window is None else window
    for run in runs:
        rows = slice(None) if run.row is None else slice(run.row, run.row + 1)
        i = torch.arange(run.q1 - run.q0, dtype=torch.int32)  # place in the run
        seen = (W - 1 - i).clamp(0, run.p1 - run.p0)  # earlier keys inside the window
        ends = (run.p1 - seen, torch.full_like(i, run.p1), run.k0 + (i - W + 1).clamp(min=0), run.k0 + i + 1)
        ranges[:, rows, run.q0:run.q1] = torch.stack(ends)[:, None] + offset[rows]
    return ranges.flatten(1)


@lru_cache(maxsize=4)  # two masks a batch (full, sliding), for all layers and for recomputing checkpoints
@torch.inference_mode(False)  # a mask first built in inference mode could not be saved for a backward
def sink_block_mask(runs: tuple[SinkRun, ...], B: int, T: int, S: int, window: int | None,
                    key_mask: Tensor | None, version: int, device: torch.device) -> BlockMask:
    """FlexAttention's block mask of a batch laid end to end as one row of B * T queries and B * S keys.

    Counts the visible pairs of each 128 x 128 block from its queries' two key ranges: no (T, S) tensor. One
    head stands for all. key_mask: (B, S) bool, with its `_version` so that a change in place is seen.
    """
    Tb, Sb = flex_bucket(B * T), flex_bucket(B * S)
    ranges = F.pad(visible_ranges(runs, B, T, S, window), (0, Tb - B * T)).to(device)  # padding sees nothing
    live = torch.ones(B * S, dtype=torch.bool) if key_mask is None else key_mask.flatten()
    live = F.pad(live.to(device), (0, Sb - B * S))  # (Sb,)
    before = F.pad(live.cumsum(0), (1, 0))  # (Sb + 1,), live keys before a slot
    edges = torch.arange(0, Sb + 1, FLEX_BLOCK, device=device)[:, None]  # (Sb / 128 + 1, 1)
    counts = []
    for some in ranges.long().split(32 * FLEX_BLOCK, dim=1):  # at most (Sb / 128 + 1, 4096) at a time
        inside = [before[edges.maximum(lo).minimum(hi)].diff(dim=0) for lo, hi in (some[:2], some[2:])]
        counts.append(sum(inside).unflatten(1, (-1, FLEX_BLOCK)).sum(-1).T)
    counts = torch.cat(counts)[None, None]  # (1, 1, Tb / 128, Sb / 128)
    full = counts == FLEX_BLOCK * FLEX_BLOCK  # these skip mask_mod in the kernel
    p0, p1, k0, k1 = ranges

    def mask_mod(b, h, i, j):
        return live[j] & (((p0[i] <= j) & (j < p1[i])) | ((k0[i] <= j) & (j < k1[i])))

    order = []
    for kind in ((counts > 0) & ~full, full):  # wanted: how many, and which first
        order += [kind.sum(-1).int(), kind.int().argsort(dim=-1, descending=True, stable=True).int()]
    return BlockMask.from_kv_blocks(*order, BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=(Tb, Sb))


def flex_kernel(q, k, v, score_mod, blocks, scale, gqa, return_aux):
    """FlexAttention with eight warps a block, where its own defaults leave too few registers.

    By ptxas, bfloat16, symbolic lengths, bytes of spills: forward at D = 64 on sm_90 9,388 -> 80;
    backward at D = 128 on sm_80 1,264 -> 68. The whole table is in docs/cuda.md.
    """
    options = {"fwd_num_warps": 8, "bwd_num_warps": 8}
    return flex_attention(q, k, v, score_mod, blocks, scale, gqa, return_aux=return_aux,
                          kernel_options=options)


def flex_with_sink(q, k, v, sink, blocks, scale, kernel=flex_kernel):
    """FlexAttention and the sink's share, one function that the compiler fuses; float32 until the last cast.

    sigmoid(lse - s) = exp(lse - lse_s); lse is clamped, as -inf + inf would be NaN where a row sees nothing.
    """
    out, aux = kernel(q, k, v, None, blocks, scale, True, return_aux=AuxRequest(lse=True))  # True: GQA
    return (out.float() * torch.sigmoid(aux.lse.clamp(min=MASKED) - sink)[..., None]).to(q.dtype)


@lru_cache(maxsize=1)
def compiled_flex(backend="inductor"):
    """Compiled once; fullgraph makes the recompile limit an error: dense attention never steps in.

    dynamic: a rollout asks for more pairs of (query, key) lengths than one could wait for, one graph
    each; with symbolic lengths a handful of graphs serves them all.
    """
    return torch.compile(flex_with_sink, backend=backend, fullgraph=True, dynamic=True)


def sink_flex(q, k, v, sink, runs, window, key_mask, scale, attend=None) -> Tensor:
    """CUDA training and prefill; arguments as above. attend: what tests put in place of compiled_flex()."""
    B, H, T, D = q.shape
    version = key_mask is None or key_mask.is_inference() or key_mask._version
    block_mask = sink_block_mask(runs, B, T, k.shape[2], window, key_mask, version, q.device)

    def one_row(x, bucket):  # (B, h, L, D) -> (1, h, bucket, D), same strides always: a graph a bucket
        flat = x.transpose(1, 2).reshape(1, -1, x.shape[1], D)
        short = bucket - flat.shape[1]
        return (F.pad(flat, (0, 0, 0, 0, 0, short)) if short else flat.contiguous()).transpose(1, 2)

    q, k, v = (one_row(x, block_mask.seq_lengths[x is not q]) for x in (q, k, v))
    with torch._dynamo.config.patch(recompile_limit=64):  # (grad, no grad) x dtypes x head shapes; default 8
        out = (attend or compiled_flex())(q, k, v, sink, block_mask, scale)
    return out[:, :, :B * T].transpose(1, 2).reshape(B, T, H, D).transpose(1, 2)


# ---------------------------------------------------------------------------------------- the entry

def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float | None = None,
                   window: int | None = None, key_mask: Tensor | None = None, layout: SinkMask | None = None,
                   is_causal: bool = True) -> Tensor:
    """Causal attention with sinks, forward and backward, without an (S, S) tensor on any device.

    Args:
        q: (B, H, T, D), the last T of the S positions. k, v: (B, Hk, S, D), H a multiple of Hk.
        sinks: (H,) logits of any float dtype, used in float32; or None.
        scale: factor on the scores; None = D ** -0.5.
        window: position i sees j with i - window < j <= i; None = all before it.
        key_mask: (B, S) bool, True = a real token; padding on either side, or holes.
        layout: a packed or shared-prefix batch, instead of key_mask and without a cache (S = T).
    Returns: (B, H, T, D) in q's dtype; a query that sees no key gets 0.
    Raises: ValueError on what it would not compute exactly.
    """
    B, H, T, D = q.shape
    S = k.shape[2]
    if not is_causal or S < T or H % k.shape[1] or (window is not None and window < 1):
        raise ValueError(f"need a causal mask, S >= T, Hk dividing H, window >= 1; got {is_causal=}, "
                         f"{window=}, q {q.shape}, k {k.shape}")
    runs = (SinkRun(0, T, S - T, 0, S - T),)  # the cached past is what comes before
    if layout is not None:
        runs = layout.runs
        if key_mask is not None or S != T or layout.position_ids.shape not in ((1, T), (B, T)):
            raise ValueError(f"a layout goes with its own number of tokens, no key mask and no cache; got "
                             f"layout {layout.position_ids.shape}, q {q.shape}, k {k.shape}")
    scale, sink = D ** -0.5 if scale is None else scale, sink_logits(q, sinks)
    if T == 1:
        first = max(0, S - (window or S))
        live = None if key_mask is None else key_mask[:, first:]
        return sink_decode(q, k[:, :, first:], v[:, :, first:], sink, live, scale)
    if q.device.type == "cuda":
        return sink_flex(q, k, v, sink, runs, window, key_mask, scale)
    if q.device.type != "cpu":
        raise ValueError(f"sink attention runs on cpu and cuda, not on {q.device.type}")
    bias = None if key_mask is None else torch.where(key_mask, 0.0, MASKED).to(sink.dtype)[:, None, None]
    if q.dtype == sink.dtype:  # forward and backward kernels round score * scale differently: 3x the error
        q, scale = q * scale, 1.0
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # others are misread
    return SinkFlashCPU.apply(q, k, v, sink, bias, cpu_pieces(runs, window), scale)


# ---------------------------------------------------------------------------------------- transformers

def sinkflex_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
                  attention_mask=None, use_vmap=False, device="cpu", config=None, **kwargs) -> Tensor | None:
    """What transformers calls for a mask: None for plain causal, else the (B, S) bool mask of real keys.

    Its width is the number of keys written so far; a static cache has more slots.
    """
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if use_vmap or chunked or mask_function is bidirectional_mask_function:
        raise ValueError("sinkflex does causal and sliding masks, not bidirectional, chunked or added ones")
    written = int(q_offset) + q_length - kv_offset
    mask = torch.ones(batch_size, kv_offset + written) if attention_mask is None else attention_mask
    live = mask[:, kv_offset:kv_offset + written].to(device=device, dtype=torch.bool)
    return None if written == kv_length and live.all() else live


def padding_of(mask: Tensor, T: int, window: int | None) -> Tensor:
    """(B, S) bool key mask behind a hand-made 4-D mask; ValueError unless that is causal plus padding."""
    visible = mask if mask.dtype == torch.bool else mask == 0  # (B, 1, T, S)
    live, S = visible.any(dim=-2)[:, 0], mask.shape[-1]  # (B, S)
    distance = torch.arange(S - T, S, device=mask.device)[:, None] - torch.arange(S, device=mask.device)
    causal = (distance >= 0) & (distance < (window or S))
    biased = mask.dtype != torch.bool and (mask[~visible] > -1e4).any()
    if biased or mask.shape[1] != 1 or not torch.equal(causal & live[:, None, None], visible):
        raise ValueError("sinkflex takes a 4-D mask only if it is causal or sliding plus padding, no bias")
    return live


def sinkflex_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None,
                       sliding_window=None, s_aux=None, sink_mask=None, position_ids=None, **kwargs):
    """The attention function of each layer, as transformers calls it (its interface demands the **kwargs).

    query (B, H, T, D), key and value (B, Hk, slots, D) -> ((B, T, H, D), None): no weights ever exist.
    """
    if dropout or softcap is not None:
        raise ValueError(f"sinkflex has no dropout and no soft-capping, got {dropout=}, {softcap=}")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"{type(module).__name__} keeps its sinks to itself: they would be ignored")
    T = query.shape[2]
    if attention_mask is not None:
        if attention_mask.ndim == 4:
            attention_mask = padding_of(attention_mask, T, sliding_window)
        key, value = (x[:, :, :attention_mask.shape[1]] for x in (key, value))
    elif sink_mask is None and key.shape[2] == T > 1 and position_ids is not None and position_ids.ndim == 2:
        sink_mask = packed_documents(position_ids, position_ids.is_inference() or position_ids._version)
    causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
    out = sink_attention(query, key, value, s_aux, scale=scaling, window=sliding_window,
                         key_mask=attention_mask, layout=sink_mask, is_causal=causal)
    return out.transpose(1, 2), None


# At import, so that attn_implementation="sinkflex" also works in Trainer and TRL. With "flash" in its name
# transformers would load a kernel of its own.
AttentionInterface.register("sinkflex", sinkflex_attention)
AttentionMaskInterface.register("sinkflex", sinkflex_mask)


def use_sink_attention(model):
    """Switches a transformers model, PEFT-wrapped or not, in place; ValueError where that has no effect."""
    model.set_attn_implementation("sinkflex")
    if model.config._attn_implementation != "sinkflex":
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced")
    return model
