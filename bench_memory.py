"""What attention sinks cost in memory and time, what the fused path saves, and what context fits on your card.

    python bench_memory.py --vram-cap 4            # measured, each cell in a process of its own, at most 4 GiB each
    python bench_memory.py --plan --model gpt-oss-20b --checkpointing --lengths 4096 8192 16384 32768 --vram 80

A cell is one fixed training step (forward, log-probs, backward, AdamW) on random tokens and weights; `full` builds the
logits (B, T, V), `chunked` is grpo.token_logps. Out of memory is a result, not a crash. Modelled (`--plan`): the same
step on fake tensors, which have a shape and no data, while a meter adds up the living storages. On a CPU that equals
the true allocations (a test asks torch.profiler); of a GPU it knows neither the allocator's rounding nor a kernel's
workspace. GiB are 2**30 bytes, as the GB on a card. Dimension key: B rows, T tokens, C hidden size, V vocabulary.
"""
import json
import os
import resource
import subprocess
import sys
import time
import weakref
from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, GptOssConfig

from attention import pack_layout, sink_block_mask, sink_flex, sink_logits, sinkflex_attention
from grpo import token_logps
from model import SMALL_POLICY, make_trainable


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
    if cfg.model == "gpt-oss-20b":
        config = GptOssConfig(num_hidden_layers=24, num_local_experts=32)  # the other defaults are the 20b's already
    else:
        config = AutoConfig.from_pretrained(SMALL_POLICY if cfg.model == "tiny" else cfg.model)
    if cfg.layers:
        kinds = getattr(config, "layer_types", None)
        config.num_hidden_layers, config.layer_types = cfg.layers, kinds and kinds[:cfg.layers]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, cfg.dtype), attn_implementation=attn)
        if cfg.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
    """One cell in this process: peak above the weights (on a CPU: resident, above what was there before the steps)."""
    cuda = cfg.device == "cuda"

    def resident(field: str) -> int:  # bytes; VmRSS: now; VmHWM: at most, since the last reset
        return int(Path("/proc/self/status").read_text().split(field)[1].split()[1]) * 1024
    model = bench_model(cfg, cfg.attn[0], cfg.device)
    ids = torch.randint(0, model.config.vocab_size, (cfg.batch, cfg.lengths[0]), device=cfg.device)
    # A short step without an update first: it loads code lazily, which is no part of what is measured.
    bench_step(cfg, model, torch.optim.SGD(model.parameters(), lr=0.0), ids[:, :16])
    if cuda:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.vram_cap * 2**30 / torch.cuda.mem_get_info()[1]))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(cfg.vram_cap * 2**30), resource.RLIM_INFINITY))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    base = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    optimizer, seconds = torch.optim.AdamW(model.parameters(), foreach=cuda), []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        bench_step(cfg, model, optimizer, ids)
        torch.cuda.synchronize() if cuda else None
        seconds.append(time.perf_counter() - start)
    peak, step_s = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM"), sorted(seconds[1:])[1]
    reserved = torch.cuda.max_memory_reserved() if cuda else peak
    return {"status": "ok", "total": peak / 2**30, "above": (peak - base) / 2**30, "reserved": reserved / 2**30,
            "step_s": step_s, "tokens_per_s": ids.numel() / step_s}


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


class PeakMeter(TorchDispatchMode):
    """Adds up the storages that live after each operation, by (phase, shape), and keeps the moment of the largest sum."""
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.live, self.at_peak, self.now, self.peak, self.known, self.phase = Counter(), {}, 0, 0, set(), "weights"

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
        self.live[kind] += size
        self.now += size


def planned_flex(module, query, key, value, attention_mask, scaling=None, sliding_window=None, s_aux=None, **kwargs):
    """sinkflex as on CUDA, for fake tensors: the bare operator, and an epilogue that keeps no float32 copy either."""
    def attend(q, k, v, sink, mask, scale):
        out, lse, _ = torch.ops.higher_order.flex_attention(q, k, v, lambda score, *at: score, mask.as_tuple(), scale, {})
        return out * torch.sigmoid(lse - sink).to(out.dtype)[..., None]
    out = sink_flex(query, key, value, sink_logits(query, s_aux), runs=kwargs["sink_mask"].runs, key_mask=None,
                    window=sliding_window, scale=scaling, attend=attend)
    return out.transpose(1, 2), None


for name, function in {"sinkflex_planned_cuda": planned_flex, "sinkflex_planned_cpu": sinkflex_attention}.items():
    AttentionInterface.register(name, function)  # at import, as attention.py does
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)  # sinkflex's own looks at values


def plan_cell(cfg: MemoryBench) -> dict:
    """Modelled peak of one step, in GiB by kind; the optimizer's state is there beforehand, as in every later step."""
    attn = f"sinkflex_planned_{cfg.device}" if cfg.attn[0] == "sinkflex" else cfg.attn[0]
    model, T, N = bench_model(cfg, attn, "meta"), cfg.lengths[0], cfg.batch * cfg.lengths[0]
    sink_block_mask.cache_clear()  # a fake mask must not outlive its mode
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), PeakMeter() as meter:
        model.to_empty(device="cpu").tie_weights()
        for experts in [m.experts for m in model.modules() if hasattr(m, "experts") and cfg.moe_tile]:
            experts.forward = lambda *inputs, inner=experts.forward: torch.cat([  # hidden (N, C), routing (N, K) twice
                checkpoint(inner, *tile, use_reentrant=False) for tile in zip(*(x.split(cfg.moe_tile) for x in inputs))])
        meter.phase, optimizer = "optimizer", torch.optim.AdamW(model.parameters(), foreach=cfg.device == "cuda")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        before, meter.phase, meter.peak = meter.now / 2**30, "step", 0
        bench_step(cfg, model, optimizer, torch.zeros(cfg.batch, T, dtype=torch.int64))
    parts, k = Counter(), getattr(model.config, "num_experts_per_tok", 1)
    for (phase, shape), size in meter.at_peak.items():
        kinds = {phase: phase != "step", "logits": model.config.vocab_size in shape,
                 "scores": len(shape) == 4 and min(shape[-2:]) >= T,
                 "experts": {N * k, (cfg.moe_tile or N) * k} & {*shape} or shape[:2] == (N, k), "rest": True}
        parts[next(kind for kind, fits in kinds.items() if fits)] += size / 2**30
    return {"status": "modelled", "total": meter.peak / 2**30, "above": meter.peak / 2**30 - before, **parts}


def bench_plot(rows: list[dict], cap: float) -> None:
    """bench.png: memory by length, with the cap and a cross where it was hit, and time by length."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for series in dict.fromkeys(row["series"] for row in rows):
        mine = [row for row in rows if row["series"] == series]
        for axis, name in zip(axes, ("step_s", "above")):
            line, = axis.plot([r["length"] for r in mine], [r.get(name, float("nan")) for r in mine], "o-", label=series)
        dead = [row["length"] for row in mine if row["status"] == "oom"]
        axes[1].plot(dead, [cap] * len(dead), "x", markersize=10, color=line.get_color())
    axes[0].set(xlabel="context length, tokens", ylabel="seconds per step")
    axes[1].set(xlabel="context length, tokens", ylabel="peak above the weights, GiB", yscale="log")
    axes[1].axhline(cap, linestyle="--", color="grey", label="cap (x: out of memory)")
    axes[1].legend()
    figure.savefig("bench.png", dpi=110)


def bench_memory(cfg: MemoryBench) -> dict:
    """Sweep or plan: prints a table as it goes, writes bench.png, returns what the last line of output shows as JSON."""
    tiny, cuda = cfg.model == "tiny", torch.cuda.is_available()
    device = cfg.device if cfg.device != "auto" else "cuda" if cuda or cfg.plan and not tiny else "cpu"
    free = torch.cuda.mem_get_info()[1] if cuda else 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cfg = replace(cfg, device=device, vram_cap=cfg.vram_cap or free / 2**30,
                  dtype=cfg.dtype or ("float32" if tiny else "bfloat16"),
                  lora_rank=(0 if tiny else 16) if cfg.lora_rank is None else cfg.lora_rank)
    columns = ("length status total above less " + ("weights optimizer logits scores experts rest series" if cfg.plan else
                                                    "reserved step_s tokens_per_s faster series")).split()
    cells, rows, result = {}, [], {"config": asdict(cfg), "torch": torch.__version__, "longest": {}}
    for attn, logprobs in product(cfg.attn, cfg.logprobs):
        cells[f"{attn} {logprobs}"] = replace(cfg, attn=(attn,), logprobs=(logprobs,), moe_tile=None)
    if cfg.moe_tile:  # for the last series only
        cells[f"{attn} {logprobs} tile {cfg.moe_tile}"] = replace(cfg, attn=(attn,), logprobs=(logprobs,))
    print(*(f"{name:>12}" for name in columns))
    for length, (series, cell) in product(cfg.lengths, cells.items()):
        row = {"length": length, "series": series} | (plan_cell if cfg.plan else run_cell)(replace(cell, lengths=(length,)))
        first = next((other for other in rows if other["length"] == length), row)
        if "above" in row and "above" in first:
            row |= {"less": first["above"] / row["above"],
                    "faster": row.get("tokens_per_s", 0.0) / first.get("tokens_per_s", 1.0)}
        rows.append(row)
        print(*(f"{row[c]:>12.4g}" if isinstance(row.get(c), float) else f"{row.get(c, ''):>12}" for c in columns), flush=True)
    for series, cell in cells.items() if cfg.vram else ():  # in steps of 1,024 tokens, below 131,072
        total = lambda n: plan_cell(replace(cell, lengths=(1024 * n,)))["total"]
        result["longest"][series] = 1024 * bisect_right(range(1, 128), cfg.vram, key=total)
        print(f"longest context in {cfg.vram:g} GiB, {series}: {result['longest'][series]} tokens (modelled)", flush=True)
    bench_plot(rows, cfg.vram or cfg.vram_cap)
    return result | {"rows": rows}


if __name__ == "__main__" and "__file__" in globals():
    chosen = tyro.cli(MemoryBench)
    print(json.dumps(measure_cell(MemoryBench(**json.loads(chosen.cell))) if chosen.cell else bench_memory(chosen)))
