"""attention.py's CUDA path. The first part needs no GPU: its arithmetic (FlexAttention's bare operator, which runs on a
CPU too), its block masks, its number of graphs and, under fake tensors, its memory. The second part needs one.
"""
import math
import random
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as bare_flex
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, flex_attention

from attention import (SinkRun, compiled_flex, flex_bucket, flex_with_sink, pack_layout, sink_attention,
                       sink_block_mask, sink_flex, sink_logits, use_sink_attention)
from key_cache import Held, prefill
from rollout import Row
from tests.test_attention import (GROUPS, causal, eager, errors, formula, gpt_oss, owners, padded,
                                  tensors, tokens, visible, with_grads)


def bare_kernel(q, k, v, score_mod, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention's higher-order operator itself: the CUDA path's maths, also on CPU and under fake tensors."""
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "BACKEND": "AUTO"}
    out, lse, _ = bare_flex(q, k, v, lambda score, b, h, i, j: score, block_mask.as_tuple(), scale, options)
    return out, AuxOutput(lse=lse * math.log(2.0))


def flex_on_cpu(q, k, v, sinks, runs=None, window=None, key_mask=None, scale=None):
    T, S = q.shape[2], k.shape[2]
    return sink_flex(q, k, v, sink_logits(q, sinks), runs or (SinkRun(0, T, S - T, 0, S - T),), window, key_mask,
                     scale or q.shape[3] ** -0.5, attend=partial(flex_with_sink, kernel=bare_kernel))


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
    q, k, v, _, _ = tensors(300, 4, 2)
    block = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 70), 1, 1, 300, 300, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = flex_attention(q, k, v, block_mask=block, enable_gqa=True)
    torch.testing.assert_close(sink_attention(q, k, v, None, window=70), theirs, atol=2e-6, rtol=0)


CASES = [(None, 1, 300, 300, None), (None, 2, 512, 512, None),
         (None, 2, 300, 300, 128), (None, 2, 100, 300, 50), (None, 1, 512, 512, 129),
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


def test_masks_built_in_inference_mode_serve_training():
    """A rollout in inference_mode leaves masks in the cache that a backward then refuses to save."""
    sink_block_mask.cache_clear()
    x = tensors(70, 4, 2)
    with torch.inference_mode():
        real = torch.ones(1, 70, dtype=torch.bool)
        first = [flex_on_cpu(*x[:4]), sink_attention(*x[:4], key_mask=real), flex_on_cpu(*x[:4], key_mask=real)]
        model = use_sink_attention(gpt_oss())
        model(tokens(1, 20), position_ids=torch.arange(20)[None])
    got = with_grads(flex_on_cpu, *x)
    assert sink_block_mask.cache_info().hits >= 1
    assert all(torch.allclose(got[0], y, atol=2e-6) for y in first)


def test_few_graphs_over_many_lengths():
    """Recompile limit reached, then dense attention: 50 random lengths, batches, windows and pads, a graph a bucket."""
    from torch._dynamo.testing import CompileCounter
    counter, rng = CompileCounter(), random.Random(0)
    compiled = compiled_flex(counter)
    buckets = set()
    with torch.no_grad():
        for _ in range(50):
            B, T, window = rng.choice([1, 1, 2]), rng.randint(2, 500), rng.choice([None, 64])
            q, k, v, sinks, _ = tensors(T, 2, 1, B=B)
            real = torch.ones(B, T, dtype=torch.bool)
            real[0, :rng.randint(0, T - 1)] = False
            out = sink_flex(q, k, v, sink_logits(q, sinks), (SinkRun(0, T, 0),), window, real, 0.25, attend=compiled)
            torch.testing.assert_close(out, sink_attention(q, k, v, sinks, window=window, key_mask=real),
                                       atol=3e-6, rtol=0)
            buckets.add(flex_bucket(B * T))
    assert counter.frame_count <= 4  # 24 at 21e4561, one for each bucket
    assert all(n <= flex_bucket(n) < n + max(128, n / 2) and flex_bucket(n) % 128 == 0 for n in range(1, 5000))


class AskedShapes(torch.nn.Module):
    """In place of a decoder: fills the cache and notes (rows, new tokens, key slots) of each forward."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.seen = set()

    def forward(self, input_ids, attention_mask, past_key_values, **others):
        new = torch.zeros(*input_ids.shape, 1).unsqueeze(1)  # (B, 1, T, 1)
        past_key_values.update(new, new.clone(), 0)
        self.seen.add((*input_ids.shape, attention_mask.shape[1]))


def play_shapes(groups, siblings, rng, decoder):
    """The forwards of one rollout: prompts of 4k tokens, then turns as retail has them, up to 16k."""
    rows = []
    for group in range(groups):
        prompt = list(range(4000)) + [10_000 + group] * rng.randint(30, 300)
        rows += [Row(list(prompt)) for _ in range(siblings)]
    turns = [rng.randint(8, 25) for _ in rows]
    held = {}
    for turn in range(max(turns)):
        alive = [row for row, n in zip(rows, turns) if n > turn and len(row.ids) < 16000]
        if not alive:
            return
        pieces = prefill(decoder, alive, 0, held, Counter())
        for row, piece in zip(alive, pieces):
            held[id(row)] = Held(piece, row)
            row.ids = row.ids + [1] * min(int(rng.expovariate(1 / 60)) + 10, 400)
            row.ids = row.ids + [2] * rng.choice([rng.randint(15, 60), rng.randint(60, 200), rng.randint(200, 900)])


def test_few_graphs_in_ten_steps_of_the_real_preset():
    """A graph for each pair of query and key lengths: the 65th ended a run on a card in its first step."""
    rng = random.Random(0)
    decoder = AskedShapes()
    for step in range(10):
        play_shapes(8, 8, rng, decoder)
        if step == 0:
            play_shapes(160, 1, rng, decoder)
    pairs = {(flex_bucket(B * T), flex_bucket(B * S)): (B, T, S) for B, T, S in decoder.seen if T > 1}
    assert len(pairs) > 64  # or this simulation could not have found it
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros_like(next(x for x in args if getattr(x, "ndim", 0) == 4)),)

    with torch.no_grad():
        for B, T, S in pairs.values():
            q = torch.zeros(B, 2, T, 2)
            k = torch.zeros(B, 1, S, 2)
            sink_flex(q, k, k, sink_logits(q, None), (SinkRun(0, T, S - T, 0, S - T),), None, None, 0.5,
                      attend=compiled_flex(compiler))
    print(f"{len(decoder.seen)} shapes, {len(pairs)} pairs of buckets, {len(graphs)} graphs")
    assert len(graphs) <= 12


def test_flex_memory_is_linear_under_fake_tensors():
    """The CUDA path's forward + backward holds an (S, S) tensor: none as large as S * S / 2, and the peak doubles."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        supports_higher_order_operators = True

        def __init__(self):
            super().__init__()
            self.sizes, self.peak, self.largest = {}, 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    self.sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.largest = max(self.largest, x.numel())
            self.sizes = {key: pair for key, pair in self.sizes.items() if not pair[0].expired()}
            self.peak = max(self.peak, sum(n for _, n in self.sizes.values()))
            return out

    for window in (None, 128):
        peaks = []
        for T in (4096, 8192):
            sink_block_mask.cache_clear()
            with FakeTensorMode(), Live() as live:
                q, k, v = (torch.empty(1, T, h, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                           for h in (16, 2, 2))
                sinks = torch.empty(16, requires_grad=True)
                flex_on_cpu(q, k, v, sinks, window=window).sum().backward()
                assert q.grad.shape == q.shape and sinks.grad.shape == (16,)
            assert live.largest < T * T / 2
            peaks.append(live.peak)
        sink_block_mask.cache_clear()
        assert 1.8 < peaks[1] / peaks[0] < 2.2, peaks


# ------------------------------------------------------------------------------------------ with a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU: FlexAttention's kernels cannot run")
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}


def on_gpu(x, dtype):
    """sinks (third) stay float32."""
    return [y if y is None else y.cuda().to(torch.float32 if i == 3 else dtype) for i, y in enumerate(x)]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H,Hk,D", [(64, 8, 64), (16, 2, 64), (12, 2, 32), (4, 4, 64), (4, 1, 128)])
@pytest.mark.parametrize("T,window", [(2, None), (127, None), (128, 128), (129, 127), (200, 1), (1000, 128), (1000, None)])
def test_gpu_parity(dtype, H, Hk, D, T, window):
    """dQ and dK lose the gradient through the LSE, or a partial block is wrong: against the formula in float64."""
    x = tensors(T, H, Hk, D)
    low = on_gpu(x, dtype)
    got = with_grads(partial(sink_attention, window=window), *low)
    mask = causal(T, window=window).cuda()
    exact = [y.double() for y in low]
    truth = with_grads(lambda *y: formula(*y, mask, D ** -0.5), *exact)
    if dtype == torch.bfloat16:
        theirs = errors(with_grads(lambda *y: eager(*y, mask, D ** -0.5), *low[:3], low[3].bfloat16(), low[4]), truth)
        assert errors(got, truth)["out"] <= min(4e-3, theirs["out"])
    for name, error in errors(got, truth).items():
        assert error < BOUNDS[dtype] or window == 1 and name in ("dq", "dk"), (name, error)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_padding_layouts_and_dead_rows(dtype, window):
    """Pads attended, siblings visible, NaN from rows that see nothing."""
    real = torch.ones(2, 200, dtype=torch.bool, device="cuda")
    real[0, :199] = False
    x = on_gpu(tensors(200, 16, 2, 64, B=2), dtype)
    x[4] = x[4] * real[:, None, :, None]
    got = with_grads(partial(sink_attention, window=window, key_mask=real), *x)
    mask = causal(200, window=window).cuda() & real[:, None, None]
    truth = with_grads(lambda *y: formula(*y, mask, 0.125), *[y.double() for y in x])
    assert max(errors(got, truth).values()) < BOUNDS[dtype]
    dead = with_grads(partial(sink_attention, window=window, key_mask=torch.zeros_like(real)), *x[:3], None, x[4])
    assert all(y.isfinite().all() for y in dead) and dead[0].abs().max() == 0
    layout, (position, owner) = pack_layout(GROUPS, "cuda"), owners(GROUPS)
    x = on_gpu(tensors(len(position), 16, 2, 64), dtype)
    got = with_grads(partial(sink_attention, window=window, layout=layout), *x)
    mask = visible(position, position, owner, owner, window).cuda()
    truth = with_grads(lambda *y: formula(*y, mask, 0.125), *[y.double() for y in x])
    assert max(errors(got, truth).values()) < BOUNDS[dtype]


@needs_gpu
def test_gpu_model_equals_eager_and_generates():
    """The whole model on a GPU in float32: logits, gradients, and generate with left padding, as on a CPU."""
    ids, inputs = tokens(3, 60).cuda(), {k: v.cuda() for k, v in padded([60, 41, 1], 60, left=True).items()}
    real = inputs["attention_mask"].bool()
    ramp = torch.linspace(-1, 1, 97, device="cuda")
    runs = []
    for model in (gpt_oss().cuda(), use_sink_attention(gpt_oss()).cuda()):
        logits = model(ids, **inputs).logits[real]
        (logits.log_softmax(-1) * ramp).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        made = model.eval().generate(ids, attention_mask=inputs["attention_mask"], max_new_tokens=20, do_sample=False)
        runs.append((logits.detach(), grads, made))
    torch.testing.assert_close(runs[1][0], runs[0][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(runs[0][2], runs[1][2])
    for name, want in runs[0][1].items():
        assert (runs[1][1][name] - want).norm() <= 1e-4 * want.norm().clamp(min=1e-5), name


@needs_gpu
def test_gpu_recompiles_stay_within_buckets():
    """Recompile limit reached, then dense attention: 50 random lengths, forward and backward, few graphs."""
    torch._dynamo.reset()
    compiled_flex.cache_clear()
    rng, buckets = random.Random(0), set()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(50):
        T, window = rng.randint(2, 2000), rng.choice([None, 128])
        with_grads(partial(sink_attention, window=window), *on_gpu(tensors(T, 16, 2, 64), torch.bfloat16))
        buckets.add(flex_bucket(T))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= len(buckets)


@needs_gpu
def test_gpu_memory_is_linear(capsys):
    """(S, S) on the GPU after all: peak at 8192 about twice that at 4096, and far below eager's at 4096."""
    peaks = {}
    for T in (4096, 8192):
        x = on_gpu(tensors(T, 16, 2, 64), torch.bfloat16)
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            with_grads(sink_attention, *x)
            peaks[T] = torch.cuda.max_memory_allocated() - start
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}: extra peak bytes {peaks}")
    assert peaks[8192] < 2.2 * peaks[4096] and peaks[4096] < 4096 * 4096 * 2 * 16 / 4
