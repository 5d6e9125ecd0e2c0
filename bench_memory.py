"""What attention sinks cost in memory and time, what the fused path saves, and what context fits on your card.

    python bench_memory.py --vram-cap 4            # measured, each cell in a process of its own, at most 4 GiB each
    python bench_memory.py --plan --model gpt-oss-20b --checkpointing --lengths 4096 8192 16384 32768 --vram 80

A cell is one fixed training step (forward, log-probs, backward, AdamW) on random tokens and weights; `full` builds
the logits (B, T, V), `chunked` is grpo.token_logps. Out of memory is a result. Modelled (`--plan`): the same step on
fake tensors, which have no data, while a meter adds up the living storages. On a CPU in float32 that equals the true
allocations (a test asks torch.profiler); of a GPU it knows neither the allocator's rounding nor kernel workspaces.
GiB are 2**30 bytes. Dimension key: B rows, T tokens, N = B * T, C hidden size, V vocabulary, K experts per token.
"""
import json
import os
import subprocess
import sys
import timeit
import weakref
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
import torch
import tyro
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, GptOssConfig

from attention import pack_layout, sink_block_mask, sink_flex, sink_logits, sinkflex_attention
from grpo import WideAdamW, token_logps
from machine import unseen_card
from model import SMALL_POLICY, enable_checkpointing, make_trainable


@dataclass(frozen=True)
class MemoryBench:
    """Every flag. A cell is the same object with a single value in each of lengths, attn and logprobs."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)  # context lengths, in tokens
    attn: tuple[str, ...] = ("eager", "sinkflex")  # also flex_attention, transformers' own, where it runs
    logprobs: tuple[str, ...] = ("full", "chunked")  # full: every logit at once; chunked: grpo.token_logps
    model: str = "tiny"  # tiny, gpt-oss-20b, or a hub name or folder that holds a config; weights are random
    layers: int | None = None  # keep only the first so many layers
    batch: int = 1  # rows
    device: str = "auto"  # cuda or cpu; auto plans for cuda (no GPU needed) unless the model is tiny
    dtype: str | None = None  # float32 or bfloat16; None: float32 for tiny, else bfloat16
    lora_rank: int | None = None  # 0 trains all weights; None: 0 for tiny, else 16
    checkpointing: bool = False  # recompute each layer in the backward pass
    vram_cap: float | None = None  # GiB a cell may use; None: the card, or 4/5 of the free main memory
    plan: bool = False  # model the peak under fake tensors instead of measuring it
    vram: float | None = None  # with --plan: GiB of a card, to find the longest context that fits
    moe_tile: int | None = None  # with --plan: experts take so many tokens at a time (modelled, not built)
    cell: str | None = None  # one cell as JSON: how the sweep starts its child processes


def bench_model(cfg: MemoryBench, attn: str, device: str):
    """The model with random weights (device "meta": with none), prepared as for training: LoRA, frozen router."""
    source = SMALL_POLICY if cfg.model == "tiny" else cfg.model
    config = (GptOssConfig(num_hidden_layers=24, num_local_experts=32) if source == "gpt-oss-20b"  # else its defaults
              else AutoConfig.from_pretrained(source))
    config.num_hidden_layers = cfg.layers or config.num_hidden_layers
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, cfg.dtype), attn_implementation=attn)
        if cfg.checkpointing:
            enable_checkpointing(model)
        return make_trainable(model.train(), cfg.lora_rank, False)


def bench_step(cfg: MemoryBench, model, optimizer, ids) -> None:
    """One training step on ids (B, T): the gradient of the next tokens' mean log-prob, and an update."""
    extra = {"sink_mask": pack_layout([(ids.shape[1], ())], ids.device)} if cfg.attn[0] == "sinkflex" else {}
    if cfg.logprobs[0] == "full":
        logits = model(input_ids=ids, use_cache=False, **extra).logits[:, :-1]  # (B, T-1, V)
        logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])  # (B, T-1, 1)
    else:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False, **extra).last_hidden_state  # (B, T, C)
        head = model.get_output_embeddings().weight  # (V, C)
        chunk = 2**25 // len(head) if cfg.device == "cuda" else None  # a plan for CUDA runs on fake CPU tensors
        logp, _ = token_logps(hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten(), chunk=chunk)
    (-logp.mean()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure_cell(cfg: MemoryBench) -> dict:
    """One cell in this process: peak above the weights (on a CPU: resident, above what the steps found there)."""
    cuda, model = cfg.device == "cuda", bench_model(cfg, cfg.attn[0], cfg.device)
    if not cuda and not Path("/proc/self/clear_refs").exists():
        raise NotImplementedError("peak main memory is measured on Linux only; --plan models it on any system")
    def resident(field: str) -> int:  # bytes; VmRSS: now; VmHWM: at most, since the last reset
        return int(Path("/proc/self/status").read_text("utf-8").split(field)[1].split()[1]) * 1024
    ids = torch.randint(0, model.config.vocab_size, (cfg.batch, cfg.lengths[0]), device=cfg.device)
    # A short step without an update first: it loads code lazily, which is no part of what is measured.
    bench_step(cfg, model, torch.optim.SGD(model.parameters(), lr=0.0), ids[:, :16])
    if cuda:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.vram_cap * 2**30 / torch.cuda.mem_get_info()[1]))
    else:
        import resource  # here, because Windows has none, and no /proc either
        resource.setrlimit(resource.RLIMIT_DATA, (int(cfg.vram_cap * 2**30), resource.RLIM_INFINITY))
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    base = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    optimizer = WideAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seconds = timeit.repeat(lambda: (bench_step(cfg, model, optimizer, ids), cuda and torch.cuda.synchronize()),
                            setup="import gc; gc.enable()", number=1, repeat=4)  # the first one warms up
    peak, step_s = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM"), sorted(seconds[1:])[1]
    return {"status": "ok", "total": peak / 2**30, "above": (peak - base) / 2**30, "step_s": step_s, "tokens_per_s":
            ids.numel() / step_s, "reserved": torch.cuda.max_memory_reserved() / 2**30 if cuda else None}


def run_cell(cfg: MemoryBench) -> dict:
    """measure_cell in a process of its own: a fresh allocator, and a death by memory that kills only the child."""
    command = [sys.executable, globals().get("__file__", "bench_memory.py"), "--cell", json.dumps(asdict(cfg))]
    done = subprocess.run(command, env=os.environ | {"MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    signs = {"oom": ("MemoryError", "OutOfMemory", "allocate memory", "bad_alloc", "memory object", "out of memory"),
             "unsupported": ("NotImplementedError", "cannot be run on CPU"), "failed": ("",)}
    status = next(status for status, texts in signs.items() if any(text in done.stderr for text in texts))
    return {"status": "oom" if done.returncode == -9 else status, "reason": done.stderr.strip()[-300:]}


class PeakMeter(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds up the storages that live after each operation, by (phase, shape); keeps the moment of the largest sum."""
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.live, self.at_peak, self.known, self.phase, self.now, self.peak = {}, {}, set(), "weights", 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        narrow = func is torch.ops.aten._grouped_mm.default  # its shape rule knows bfloat16 only, its CPU kernel more
        out = func(*(x.bfloat16() if narrow else x for x in args[:2]), *args[2:], **(kwargs or {}))
        out = out.to(args[0].dtype) if narrow else out
        for tensor in (x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                key, kind, size = storage._cdata, (self.phase, tuple(tensor.shape)), storage.nbytes()
                self.count(key, kind, size)
                weakref.finalize(storage, self.count, key, kind, -size)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.live)
        return out

    def count(self, key: int, kind: tuple, size: int) -> None:
        """A storage came, or (negative size) the last tensor on it went."""
        self.known ^= {key}
        self.live[kind] = self.live.get(kind, 0) + size
        self.now += size


def planned_flex(module, query, key, value, attention_mask, scaling=None, sliding_window=None, s_aux=None, **kwargs):
    """sinkflex as on CUDA, for fake tensors: the bare operator, and an epilogue that keeps no float32 copy either."""
    def attend(q, k, v, sink, mask, scale):
        flex = torch.ops.higher_order.flex_attention
        out, lse, _ = flex(q, k, v, lambda score, *at: score, mask.as_tuple(), scale, {})
        return out * torch.sigmoid(lse - sink).to(out.dtype)[..., None]
    out = sink_flex(query, key, value, sink_logits(query, s_aux), runs=kwargs["sink_mask"].runs, key_mask=None,
                    window=sliding_window, scale=scaling, attend=attend)
    return out.transpose(1, 2), None


for name, function in {"sinkflex_planned_cuda": planned_flex, "sinkflex_planned_cpu": sinkflex_attention}.items():
    AttentionInterface.register(name, function)  # at import, as attention.py does
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)  # sinkflex's own looks at values


def plan_cell(cfg: MemoryBench) -> dict:
    """Modelled peak of one step, GiB by kind; the optimizer's state is there beforehand, as in every later step."""
    attn = f"sinkflex_planned_{cfg.device}" if cfg.attn[0] == "sinkflex" else cfg.attn[0]
    model, T, N = bench_model(cfg, attn, "meta"), cfg.lengths[0], cfg.batch * cfg.lengths[0]
    sink_block_mask.cache_clear()  # a fake mask must not outlive its mode
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), PeakMeter() as meter:
        model.to_empty(device="cpu").tie_weights()
        for experts in [m.experts for m in model.modules() if hasattr(m, "experts") and cfg.moe_tile]:
            experts.forward = lambda *xs, inner=experts.forward: torch.cat([
                checkpoint(inner, *tile, use_reentrant=False) for tile in zip(*(x.split(cfg.moe_tile) for x in xs))])
        meter.phase, trained = "optimizer", [p for p in model.parameters() if p.requires_grad]
        optimizer = WideAdamW(trained, lr=1e-3)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        before, meter.phase, meter.peak = meter.now / 2**30, "step", 0
        bench_step(cfg, model, optimizer, torch.zeros(cfg.batch, T, dtype=torch.int64))
    parts, k = {}, getattr(model.config, "num_experts_per_tok", 1)
    for (phase, shape), size in meter.at_peak.items():
        kinds = {phase: phase != "step", "logits": model.config.vocab_size in shape,
                 "scores": len(shape) == 4 and min(shape[-2:]) >= T,
                 "experts": {*shape[:1]} & {N * k, (cfg.moe_tile or N) * k} or shape[:2] == (N, k), "rest": True}
        part = next(kind for kind, fits in kinds.items() if fits)
        parts[part] = parts.get(part, 0.0) + size / 2**30
    return {"status": "modelled", "total": meter.peak / 2**30, "above": meter.peak / 2**30 - before, **parts}


def bench_memory(cfg: MemoryBench) -> dict:
    """Sweep or plan: a table as it goes, bench.png, and what the last line of output shows as JSON."""
    tiny, cuda = cfg.model == "tiny", torch.cuda.is_available()
    device = cfg.device if cfg.device != "auto" else "cuda" if cuda or cfg.plan and not tiny else "cpu"
    free = torch.cuda.mem_get_info()[1] if cuda else 0.8 * psutil.virtual_memory().available
    if device == "cuda" and not cuda and not cfg.plan:
        print(f"bench_memory.py: {unseen_card() or 'there is no CUDA device'}", file=sys.stderr)
        sys.exit(2)
    cfg = replace(cfg, device=device, vram_cap=cfg.vram_cap or free / 2**30,
                  dtype=cfg.dtype or ("float32" if tiny else "bfloat16"),
                  lora_rank=(0 if tiny else 16) if cfg.lora_rank is None else cfg.lora_rank)
    special = "weights optimizer logits scores experts rest" if cfg.plan else "reserved step_s tokens_per_s"
    rows, columns = [], f"length status total above less {special} series".split()
    cells = {f"{a} {p}": replace(cfg, attn=(a,), logprobs=(p,), moe_tile=None)
             for a in cfg.attn for p in cfg.logprobs}
    if cfg.moe_tile:  # for the last series only
        cells[f"{[*cells][-1]} tile {cfg.moe_tile}"] = replace(cfg, attn=cfg.attn[-1:], logprobs=cfg.logprobs[-1:])
    print(*(f"{name:>12}" for name in columns))
    for length, series in ((length, series) for length in cfg.lengths for series in cells):
        cell = replace(cells[series], lengths=(length,))
        row = {"length": length, "series": series} | (plan_cell if cfg.plan else run_cell)(cell)
        first = next((other["above"] for other in rows if other["length"] == length and "above" in other), None)
        rows.append(row | {"less": first / row["above"] if first and "above" in row else None})
        shown = map(rows[-1].get, columns)
        print(*(f"{x:>12.4g}" if isinstance(x, float) else f"{x or '':>12}" for x in shown), flush=True)
    (figure, axes), cap = plt.subplots(1, 2, figsize=(11, 4), layout="constrained"), cfg.vram or cfg.vram_cap
    for axis, key, label in zip(axes, ("above", "step_s"), ("peak above the weights, GiB", "seconds per step")):
        for series in cells:
            mine = [row for row in rows if row["series"] == series]
            line, = axis.plot(cfg.lengths, [row.get(key, float("nan")) for row in mine], "o-", label=series)
            dead = [row["length"] for row in mine if row["status"] == "oom"]
            axes[0].plot(dead, [cap] * len(dead), "x", markersize=10, color=line.get_color())
        axis.set(xlabel="context length, tokens", ylabel=label, yscale="log" if key == "above" else "linear")
    axes[0].axhline(cap, linestyle="--", color="grey", label="cap (x: out of memory)")
    axes[0].legend()
    figure.savefig("bench.png", dpi=110)
    longest = {series: 1024 * bisect_right(range(1, 128), cfg.vram, key=lambda n: plan_cell(replace(
        cells[series], lengths=(1024 * n,)))["total"]) for series in cells if cfg.vram}
    print("longest context, modelled, in steps of 1,024 below 131,072 tokens:", longest) if longest else None
    return {"config": asdict(cfg), "torch": torch.__version__, "longest": longest, "rows": rows}


if __name__ == "__main__" and "__file__" in globals():
    chosen = tyro.cli(MemoryBench)
    print(json.dumps(measure_cell(MemoryBench(**json.loads(chosen.cell))) if chosen.cell else bench_memory(chosen)))
