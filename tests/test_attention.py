"""attention.py against three independent oracles: the formula in float64, transformers' eager attention, FlexAttention.

`formula` is written here from the definition (a sum of exponentials); masks come from `visible`, a comparison of
positions and owners that shares no code with attention.py. The CUDA path's arithmetic runs here too, through
FlexAttention's bare operator; what needs a GPU is in test_attention_cuda.py.
"""
import math
import random
import statistics
import time
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.flex_attention import flex_attention as bare_flex
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask
from transformers import (DynamicCache, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import attention
from attention import (SinkFlashCPU, SinkRun, flex_bucket, flex_with_sink, pack_layout, sink_attention,
                       sink_attention_ref, sink_block_mask, sink_flex, sink_logits, use_sink_attention)

NAMES = ("out", "dq", "dk", "dv", "dsink")


# ------------------------------------------------------------------------------------------ oracles

def formula(q, k, v, sinks, mask, scale):
    """out_i = sum_j e^(x_ij - m) v_j / (sum_j e^(x_ij - m) + e^(s - m)), in the inputs' dtype. A dead row is 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    x = (torch.einsum("bhtd,bhsd->bhts", q, k) * scale).masked_fill(~mask, -torch.inf)
    s = torch.full((q.shape[1],), -torch.inf, dtype=q.dtype) if sinks is None else sinks
    s = s.view(1, -1, 1, 1)
    m = torch.maximum(x.amax(-1, keepdim=True), s).detach().clamp(min=-1e9)
    e = torch.exp(x - m)
    total = e.sum(-1, keepdim=True) + torch.exp(s - m)
    return torch.where(mask.any(-1, keepdim=True), e / total.clamp(min=1e-300), torch.zeros_like(e)) @ v


def visible(position_q, position_k, owner_q, owner_k, window=None, real=None):
    """(B, 1, T, S) bool from the definition: not later, inside the window, in a sequence that the query belongs to.

    owner: (group, part) per token; part 0 is the prefix, which every part of the group sees.
    """
    age = position_q[:, None] - position_k[None, :]
    same = (owner_q[:, None, 0] == owner_k[None, :, 0])
    same &= (owner_k[None, :, 1] == 0) | (owner_q[:, None, 1] == owner_k[None, :, 1])
    mask = ((age >= 0) & (age < (window or 10**9)) & same)[None, None]
    return mask if real is None else mask & real[:, None, None]


def causal(T, S=None, window=None, real=None):
    S = S or T
    nobody = torch.zeros(S, 2, dtype=torch.long)
    return visible(torch.arange(S - T, S), torch.arange(S), nobody[S - T:], nobody, window, real)


def owners(groups):
    """Positions and owners of a packed row, token by token, straight from the description of a layout."""
    position, owner = [], []
    for g, (prefix, responses) in enumerate(groups):
        for part, (start, length) in enumerate([(0, prefix)] + [(prefix, r) for r in responses]):
            position += list(range(start, start + length))
            owner += [(g, part)] * length
    return torch.tensor(position), torch.tensor(owner).view(-1, 2)


def tensors(T, H, Hk, D=16, B=1, S=None, dtype=torch.float32, sink="normal", q_scale=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, T, D, generator=gen) * q_scale
    k, v = torch.randn(2, B, Hk, S or T, D, generator=gen)
    drawn = torch.randn(H, generator=gen).clamp(-5, 5)
    sinks = {"normal": drawn, None: None}.get(sink, torch.full((H,), float(sink or 0) if sink != "normal" else 0.0))
    grad = torch.randn(B, H, T, D, generator=gen)
    return [None if x is None else x.to(dtype) for x in (q, k, v, sinks, grad)]


def with_grads(function, q, k, v, sinks, grad, dtype=None):
    """[out, dq, dk, dv, dsink]; dsink missing without sinks."""
    inputs = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v, sinks)]
    out = function(*inputs)
    wanted = [x for x in inputs if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def errors(ours, truth):
    """Norm-relative error of each of out, dq, dk, dv, dsink; 0 / 0 is 0."""
    pairs = zip(NAMES, ours, truth)
    return {n: float((a.double() - b).norm() / b.norm().clamp(min=1e-300)) for n, a, b in pairs}


def eager(q, k, v, sinks, mask, scale):
    """transformers' own GPT-OSS attention in the inputs' dtype."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=True)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return eager_attention_forward(module, q, k, v, bias, scale)[0].transpose(1, 2)


def bare_kernel(q, k, v, *, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention's higher-order operator itself: the CUDA path's maths, also on CPU and under fake tensors."""
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "BACKEND": "AUTO"}
    out, lse, _ = bare_flex(q, k, v, lambda score, b, h, i, j: score, block_mask.as_tuple(), scale, options)
    return out, AuxOutput(lse=lse * math.log(2.0))


def flex_on_cpu(q, k, v, sinks, runs=None, window=None, key_mask=None, scale=None):
    T, S = q.shape[2], k.shape[2]
    return sink_flex(q, k, v, sink_logits(q, sinks), runs or (SinkRun(0, T, S - T, 0, S - T),), window, key_mask,
                     scale or q.shape[3] ** -0.5, attend=partial(flex_with_sink, kernel=bare_kernel))


# ------------------------------------------------------------------------------------------ exactness

def test_reference_on_paper():
    """A sink given a value, or a gradient lost through the log-sum-exp: one key, q=k=1, v=2, s=0 by hand.

    out = 2 sigmoid(1) = 1.46212; dQ = dK = 2 sigmoid'(1) = 0.39322; dV = 0.73106; dsink = -0.39322.
    """
    one = torch.ones(1, 1, 1, 1)
    expected = [1.46212, 0.39322, 0.39322, 0.73106, -0.39322]
    see = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    flash = lambda q, k, v, s: SinkFlashCPU.apply(  # noqa: E731
        q, k, v, s.view(1, 1, 1), None, attention.cpu_pieces((SinkRun(0, 1, 0),), None), 1.0)
    for function in (lambda *x: sink_attention_ref(*x, see, 1.0), lambda *x: sink_attention(*x, scale=1.0), flash,
                     lambda *x: flex_on_cpu(*x, scale=1.0)):
        got = with_grads(function, one, one, 2 * one, torch.zeros(1), one)
        assert [float(x.sum()) for x in got] == pytest.approx(expected, abs=2e-5)


def test_gradcheck_reference_and_path():
    """The oracle itself has a wrong derivative, which would hide the same mistake in the path (float64)."""
    q, k, v, sinks, _ = (x.double().requires_grad_() for x in tensors(5, 4, 2, D=4, S=7))
    mask = causal(5, 7, window=3, real=torch.tensor([[False] * 3 + [True] * 4]))
    assert torch.autograd.gradcheck(lambda *x: sink_attention_ref(*x, mask, 0.5), (q, k, v, sinks))
    real = torch.tensor([[False] * 3 + [True] * 4])
    path = lambda *x: sink_attention(*x, scale=0.5, window=3, key_mask=real)  # noqa: E731
    assert torch.autograd.gradcheck(path, (q, k, v, sinks))


SHAPES = [(1, 4, 4), (2, 16, 2), (127, 12, 2), (128, 4, 1), (129, 64, 8), (200, 16, 2), (200, 12, 2), (1000, 4, 4)]


@pytest.mark.parametrize("T,H,Hk", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 5000])
def test_fp32_close_to_float64(T, H, Hk, window):
    """LSE in low precision, a wrong window edge, head grouping, a length that is no multiple of a block.

    Bounds on out, dq, dk, dv and dsink each: 1e-6, and 4e-6 for sinks of +-20 or four times larger queries.
    """
    D = 64 if H == 64 else 32
    mask = causal(T, window=window)
    kinds = [("normal", 1, 1e-6), (20, 1, 4e-6), (-20, 1, 4e-6), ("normal", 4, 4e-6), (0, 1, 1e-6), (None, 1, 1e-6)]
    for sink, q_scale, bound in kinds[:2] if T == 1000 else kinds:
        x = tensors(T, H, Hk, D, sink=sink, q_scale=q_scale)
        truth = with_grads(lambda *y: formula(*y, mask, D ** -0.5), *x, dtype=torch.float64)
        ours = with_grads(lambda *y: sink_attention(*y, window=window), *x)
        keys = 1 if T == 1 or window == 1 else 2
        for name, error in errors(ours, truth).items():
            vanishing = keys == 1 and sink in (None, -20) and name in ("dq", "dk", "dsink")
            if vanishing:  # one key and no sink to speak of: the weight is 1, so the true gradient is about e^-20
                index = NAMES.index(name)
                assert (ours[index].double() - truth[index]).norm() < 1e-6 * ours[3].norm(), (name, sink)
            else:
                assert error <= bound, (name, error, sink, q_scale)


@pytest.mark.parametrize("sink,q_scale", [("normal", 1), (0, 1), (20, 1), (-20, 1), ("normal", 4)])
def test_fp32_error_within_twice_eagers(sink, q_scale):
    """A gradient that is merely close: dQ and dK each, and the rest, at most twice transformers' own fp32 error.

    Root mean square over lengths, windows and heads: a single dsink of 4 numbers is luck, for eager as for us.
    """
    ours, theirs = {n: [] for n in NAMES}, {n: [] for n in NAMES}
    for seed, (T, H, Hk, window) in enumerate([(127, 4, 1, None), (200, 12, 2, 127), (400, 4, 4, None),
                                               (128, 16, 2, None), (300, 8, 2, 129), (256, 4, 2, 128)]):
        for D in (32, 64):
            x = tensors(T, H, Hk, D, sink=sink, q_scale=q_scale, seed=seed)
            mask, scale = causal(T, window=window), D ** -0.5
            truth = with_grads(lambda *y: formula(*y, mask, scale), *x, dtype=torch.float64)
            a = errors(with_grads(lambda *y: sink_attention(*y, window=window), *x), truth)
            b = errors(with_grads(lambda *y: eager(*y, mask, scale), *x), truth)
            for name in NAMES:
                ours[name].append(a[name] ** 2)
                theirs[name].append(b[name] ** 2)
                assert name == "dsink" or a[name] <= 2 * b[name], (name, T, window, D, a[name], b[name])
    for name in NAMES:
        assert sum(ours[name]) <= 4 * sum(theirs[name]), name


@pytest.mark.parametrize("T,H,Hk,window", [(200, 16, 2, None), (300, 12, 2, 128), (1, 64, 8, None), (129, 4, 1, 127)])
def test_bf16_output_close_and_no_worse_than_eager(T, H, Hk, window):
    """LSE rounded to bfloat16 before the sink is applied (transformers' flex path): 2 to 6 times the error."""
    q, k, v, sinks, grad = tensors(T, H, Hk, 64, S=max(T, 256), dtype=torch.bfloat16)
    mask = causal(T, max(T, 256), window=window)
    truth = with_grads(lambda *y: formula(*y, mask, 0.125), q, k, v, sinks, grad, dtype=torch.float64)
    ours = with_grads(lambda *y: sink_attention(*y, window=window), q, k, v, sinks, grad)
    theirs = errors(with_grads(lambda *y: eager(*y, mask, 0.125), q, k, v, sinks, grad), truth)
    got = errors(ours, truth)
    assert ours[0].dtype == torch.bfloat16 and got["out"] <= 4e-3 and got["out"] <= theirs["out"]
    for name in ("dq", "dk", "dv"):
        assert got[name] <= 2 * theirs[name], (name, got[name], theirs[name])


def test_sinks_absent_minus_infinite_and_huge():
    """NaN from -inf - (-inf), or a gradient into a sink that takes no part: -inf equals no sink, dsink exactly 0."""
    for T, window in ((1, None), (40, None), (40, 8)):
        q, k, v, _, grad = tensors(T, 4, 2, S=40)
        real = torch.ones(1, 40, dtype=torch.bool)
        real[:, :5] = False
        path = partial(sink_attention, window=window, key_mask=real)
        none = with_grads(path, q, k, v, None, grad)
        gone = with_grads(path, q, k, v, torch.full((4,), -torch.inf), grad)
        for a, b in zip(none, gone):
            assert torch.equal(a, b)
        assert torch.equal(gone[4], torch.zeros(4))
        huge = with_grads(path, q, k, v, torch.full((4,), 1e4), grad)
        assert all(x.isfinite().all() for x in huge) and huge[0].abs().max() == 0


@pytest.mark.parametrize("window", [1, 127, 128, 129, 300, None])
def test_exact_visible_set(window):
    """Window `<=` for `<`, or `is_causal` aligned to the wrong corner: with v = identity the output is the weights."""
    T = S = 300
    for T in (300, 90):  # the whole sequence, and the last 90 queries of it
        q, k, _, sinks, _ = tensors(T, 2, 2, D=S, S=S)
        weights = sink_attention(q * 0.1, k, torch.eye(S).expand(1, 2, S, S), sinks, window=window)
        assert torch.equal(weights > 0, causal(T, S, window).expand(1, 2, T, S))


@pytest.mark.parametrize("window", [None, 1, 8, 128])
def test_padding_left_right_and_holes(window):
    """Pads attended, or real tokens shifted: outputs and gradients equal the unpadded rows; S - 1 pads included."""
    T = 150
    real = torch.ones(4, T, dtype=torch.bool)
    real[0, :T - 1] = False
    real[1, :37] = False
    real[2, -50:] = False
    real[3, 60:80] = False  # a hole: no unpadded run equals it under a window, the formula does
    x = tensors(T, 4, 2, B=4)
    x[4] = x[4] * real[:, None, :, None]
    ours = with_grads(partial(sink_attention, window=window, key_mask=real), *x)
    mask = causal(T, window=window, real=real)
    truth = with_grads(lambda *y: formula(*y, mask, 0.25), *x, dtype=torch.float64)
    for name, error in errors(ours, truth).items():
        assert error < 1e-6, (name, error)
    for row in range(3):
        keep = real[row]
        alone = with_grads(partial(sink_attention, window=window), *(y[row:row + 1, :, keep] for y in x[:3]), x[3],
                           x[4][row:row + 1, :, keep])
        for a, b in zip(ours[:4], alone[:4]):
            torch.testing.assert_close(a[row:row + 1, :, keep], b, atol=2e-6, rtol=0)
    assert ours[0][1, :, :37].abs().max() == 0 and ours[0].isfinite().all()
    dead = with_grads(partial(sink_attention, window=window, key_mask=torch.zeros_like(real)), *x)
    assert all(y.isfinite().all() for y in dead) and dead[0].abs().max() == 0


GROUPS = [(40, (30, 1, 70)), (25, ()), (1, (200, 3)), (0, (5, 9)), (130, (20,))]


@pytest.mark.parametrize("window", [None, 1, 8, 50, 128])
def test_shared_prefix_equals_full_sequences(window):
    """A response that sees its sibling, a window counted in slots: G responses = G full sequences, gradients too."""
    layout = pack_layout(GROUPS)
    position, owner = owners(GROUPS)
    T = len(position)
    assert layout.position_ids.tolist() == [position.tolist()]
    q, k, v, sinks, grad = tensors(T, 4, 2)
    packed = with_grads(partial(sink_attention, window=window, layout=layout), q, k, v, sinks, grad)
    mask = visible(position, position, owner, owner, window)
    truth = with_grads(lambda *y: formula(*y, mask, 0.25), q, k, v, sinks, grad, dtype=torch.float64)
    for name, error in errors(packed, truth).items():
        assert error < 1e-6, (name, error)
    whole = [torch.zeros_like(x) for x in packed]
    for g, (prefix, responses) in enumerate(GROUPS):
        for part in range(1, len(responses) + 1) if responses else [0]:
            take = torch.where((owner[:, 0] == g) & ((owner[:, 1] == 0) | (owner[:, 1] == part)))[0]
            weight = ((owner[take, 1] == part) | (part <= 1)).float()[:, None]  # prefix outputs count once
            alone = with_grads(partial(sink_attention, window=window), *(y[:, :, take] for y in (q, k, v)), sinks,
                               grad[:, :, take] * weight)
            whole[0][:, :, take] = alone[0]
            for i in (1, 2, 3):
                whole[i][:, :, take] += alone[i]
            whole[4] += alone[4]
    for name, a, b in zip(NAMES, packed, whole):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_one_more_key_layouts():
    """Documents leak into each other, or a different layout per row is applied to every row."""
    rows = [[50, 70, 3], [1, 122], [123]]
    ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    layout = attention.packed_documents(ids, 0)
    x = tensors(123, 4, 2, B=3)
    for window in (None, 20):
        got = with_grads(partial(sink_attention, layout=layout, window=window), *x)
        mask = torch.cat([visible(*owners([(n, ()) for n in row])[:1] * 2, *owners([(n, ()) for n in row])[1:] * 2,
                                  window) for row in rows])
        truth = with_grads(lambda *y: formula(*y, mask, 0.25), *x, dtype=torch.float64)
        assert max(errors(got, truth).values()) < 1e-6
    assert attention.packed_documents(torch.arange(9).expand(2, 9), 0) is None


def test_strides_and_expanded_gradients():
    """The aten kernel reads a tensor whose last stride is not 1 as garbage, without an error."""
    q, k, v, sinks, grad = tensors(60, 4, 2)
    want = with_grads(sink_attention, q, k, v, sinks, grad)
    odd = [x.mT.contiguous().mT for x in (q, k, v)]
    for a, b in zip(with_grads(sink_attention, *odd, sinks, grad.mT.contiguous().mT), want):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    one = torch.ones(())
    for a, b in zip(with_grads(sink_attention, q, k, v, sinks, one.expand(q.shape)),
                    with_grads(sink_attention, q, k, v, sinks, one.expand(q.shape).contiguous())):
        assert torch.equal(a, b)


@settings(max_examples=320, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_cases_match_reference(data):
    """Any corner the tables above miss: shapes, windows, pads, caches, documents and groups, against the reference.

    Two cases in five have S > 256 and W < S.
    """
    draw = data.draw
    heads, per = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4), (3, 2)]))
    long = draw(st.sampled_from([True, True, False, False, False]))
    S = draw(st.integers(257, 420) if long else st.integers(1, 256))
    window = draw(st.integers(1, S - 1) if long else st.one_of(st.none(), st.integers(1, S + 5)))
    kind = draw(st.sampled_from(["pads", "cache", "documents", "groups"]))
    B, T, layout, real, mask = 1, S, None, None, None
    if kind in ("pads", "cache"):
        B = draw(st.integers(1, 2))
        T = draw(st.integers(1, S)) if kind == "cache" else S
        real = torch.ones(B, S, dtype=torch.bool)
        real[0, :draw(st.integers(0, S - 1))] = False
        real[-1, S - draw(st.integers(0, S - 1)):] = False if draw(st.booleans()) else True
        mask = causal(T, S, window, real)
    else:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, S - 1)), max_size=6)) - {S}) if S > 1 else []
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, S])]
        groups = [(n, ()) for n in sizes] if kind == "documents" else [(sizes[0], tuple(sizes[1:]))]
        layout = pack_layout(groups)
        position, owner = owners(groups)
        mask = visible(position, position, owner, owner, window)
    sink = draw(st.sampled_from(["normal", None, 20, -20]))
    x = tensors(T, heads * per, heads, 8, B=B, S=S, sink=sink, seed=draw(st.integers(0, 999)))
    ours = with_grads(partial(sink_attention, window=window, key_mask=real, layout=layout), *x)
    truth = with_grads(lambda *y: sink_attention_ref(*y, mask, 8 ** -0.5), *x, dtype=torch.float64)
    unit = max(float(y.abs().max()) for y in truth[:4])
    for name, a, b in zip(NAMES, ours, truth):
        loose = 20 if name == "dsink" else 1
        torch.testing.assert_close(a.double(), b, atol=4e-6 * max(unit, 1) * loose, rtol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------ the CUDA path, on CPU

@pytest.mark.parametrize("window", [None, 50])
def test_flex_arithmetic_matches_formula(window):
    """The FlexAttention path drops dQ and dK through the LSE, or misplaces rows when the batch becomes one row."""
    real = torch.ones(2, 200, dtype=torch.bool)
    real[0, :60] = False
    x = tensors(200, 6, 2, B=2)
    x[4] = x[4] * real[:, None, :, None]
    got = with_grads(lambda *y: flex_on_cpu(*y, window=window, key_mask=real), *x)
    truth = with_grads(lambda *y: formula(*y, causal(200, window=window, real=real), 0.25), *x, dtype=torch.float64)
    assert max(errors(got, truth).values()) < 1e-6
    dead = with_grads(lambda *y: flex_on_cpu(*y, window=window, key_mask=torch.zeros_like(real)), *x[:3], None, x[4])
    assert all(y.isfinite().all() for y in dead) and dead[0].abs().max() == 0
    groups = [(40, (30, 50)), (9, ())]
    position, owner = owners(groups)
    x = tensors(129, 4, 4)
    got = with_grads(lambda *y: flex_on_cpu(*y, window=window, runs=pack_layout(groups).runs), *x)
    mask = visible(position, position, owner, owner, window)
    truth = with_grads(lambda *y: formula(*y, mask, 0.25), *x, dtype=torch.float64)
    assert max(errors(got, truth).values()) < 1e-6


def test_flex_forward_is_an_oracle_for_the_cpu_path():
    """FlexAttention's own forward with its own mask builder agrees with the aten path where there is no sink."""
    from torch.nn.attention.flex_attention import flex_attention
    q, k, v, _, _ = tensors(300, 4, 2)
    block = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 70), 1, 1, 300, 300, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = flex_attention(q, k, v, block_mask=block, enable_gqa=True)
    torch.testing.assert_close(sink_attention(q, k, v, None, window=70), theirs, atol=2e-6, rtol=0)


CASES = [(None, 1, 300, 300, None), (None, 2, 300, 300, 128), (None, 2, 100, 300, 50), (None, 1, 512, 512, 129),
         ([(400, (100, 300)), (200, ()), (13, (4, 4, 100))], 1, 1121, 1121, None),
         ([(400, (100, 300)), (200, ()), (13, (4, 4, 100))], 1, 1121, 1121, 130)]


@pytest.mark.parametrize("groups,B,T,S,window", CASES)
def test_analytic_block_mask_equals_create_block_mask(groups, B, T, S, window):
    """A visible block that the arithmetic forgets, or a partial one called full, is wrong only on a GPU."""
    real = None
    dense = causal(T, S, window).expand(B, 1, T, S)
    if groups is not None:
        position, owner = owners(groups)
        dense = visible(position, position, owner, owner, window)
    elif B == 2:
        real = torch.ones(B, S, dtype=torch.bool)
        real[0, :200] = False
        real[1, 50:60] = False
        dense = causal(T, S, window, real)
    runs = (SinkRun(0, T, S - T, 0, S - T),) if groups is None else pack_layout(groups).runs
    got = sink_block_mask(runs, B, T, S, window, real, 0, torch.device("cpu"))
    Tb, Sb = got.seq_lengths
    table = torch.zeros(Tb, Sb, dtype=torch.bool)
    for row in range(B):
        table[row * T:(row + 1) * T, row * S:(row + 1) * S] = dense[row, 0]
    want = create_block_mask(lambda b, h, i, j: table[i, j], 1, 1, Tb, Sb, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    i, j = torch.meshgrid(torch.arange(Tb), torch.arange(Sb), indexing="ij")
    assert torch.equal(got.mask_mod(0, 0, i, j), table)
    assert got.kv_num_blocks.shape[:2] == (1, 1)


def test_block_mask_is_built_once_per_batch():
    """BlockMask rebuilt in each layer costs more than the attention; a mask changed in place must be seen."""
    runs, real = (SinkRun(0, 64, 0),), torch.ones(1, 64, dtype=torch.bool)
    build = lambda: sink_block_mask(runs, 1, 64, 64, None, real, real._version, torch.device("cpu"))  # noqa: E731
    first = build()
    assert build() is first
    real[0, :8] = False
    assert build() is not first


def test_few_graphs_over_many_lengths():
    """Recompile limit reached, then dense attention: 50 random lengths, batches, windows and pads, a graph a bucket."""
    from torch._dynamo.testing import CompileCounter
    counter, rng = CompileCounter(), random.Random(0)
    compiled = torch.compile(flex_with_sink, backend=counter, fullgraph=True, dynamic=False)
    buckets = set()
    with torch.no_grad():
        for _ in range(50):
            B, T, window = rng.choice([1, 1, 2]), rng.randint(2, 1000), rng.choice([None, 64])
            q, k, v, sinks, _ = tensors(T, 2, 1, B=B)
            real = torch.ones(B, T, dtype=torch.bool)
            real[0, :rng.randint(0, T - 1)] = False
            out = sink_flex(q, k, v, sink_logits(q, sinks), (SinkRun(0, T, 0),), window, real, 0.25, attend=compiled)
            torch.testing.assert_close(out, sink_attention(q, k, v, sinks, window=window, key_mask=real),
                                       atol=3e-6, rtol=0)
            buckets.add(flex_bucket(B * T))
    assert counter.frame_count <= len(buckets)
    assert all(n <= flex_bucket(n) < n + max(128, n / 2) and flex_bucket(n) % 128 == 0 for n in range(1, 5000))
