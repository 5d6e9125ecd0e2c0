"""What attention sinks cost in memory and time, what the fused path saves, and what context fits on your card.

    python bench_memory.py --vram-cap 4            # measured, each cell in a process of its own, at most 4 GiB each
    python bench_memory.py --plan --model gpt-oss-20b --checkpointing --lengths 4096 8192 16384 32768 --vram 80

One cell is one fixed training step (forward, log-probs, backward, AdamW) on random tokens and weights. `full` builds
the logits (B, T, V) as most trainers do, `chunked` is grpo.token_logps. Out of memory is a result, not a crash.
Modelled (`--plan`): the same step under fake tensors, which have a shape and no data, while a meter adds up the living
storages: no weights, no GPU. On a CPU that equals the true allocations (a test asks torch.profiler); of a GPU it knows
neither the allocator's rounding and fragmentation nor a kernel's workspace. GiB are 2**30 bytes, as the GB on a card.
Dimension key: B rows, T tokens, C hidden size, V vocabulary, K experts per token.
"""
import json
import os
import resource
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import matplotlib.pyplot as plt
import torch
import tyro
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
        config.num_hidden_layers = cfg.layers
        config.layer_types = (getattr(config, "layer_types", None) or [])[:cfg.layers] or None
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, cfg.dtype), attn_implementation=attn)
        if cfg.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return make_trainable(model.train(), cfg.lora_rank, False)


def bench_step(cfg: MemoryBench, model, optimizer, ids) -> None:
    """One training step on ids (B, T): the gradient of the next tokens' mean log-prob, and an update."""
    extra = {"use_cache": False}
    if cfg.attn[0] == "sinkflex":
        extra["sink_mask"] = pack_layout([(ids.shape[1], ())], ids.device)
    if cfg.logprobs[0] == "full":
        logits = model(input_ids=ids, **extra).logits[:, :-1]  # (B, T-1, V)
        logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])  # (B, T-1, 1)
    else:
        hidden = model.get_decoder()(input_ids=ids, **extra).last_hidden_state[:, :-1].flatten(0, 1)  # (B * (T-1), C)
        head = model.get_output_embeddings().weight  # (V, C)
        chunk = 2**25 // len(head) if cfg.device == "cuda" else None  # a plan for CUDA runs on fake CPU tensors
        logp, _ = token_logps(hidden, head, ids[:, 1:].flatten(), chunk=chunk)
    (-logp.mean()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def bench_adamw(cfg: MemoryBench, model):
    """AdamW over what is trained; `foreach` as torch itself chooses on that device."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=cfg.device == "cuda")


def measure_cell(cfg: MemoryBench) -> dict:
    """One cell in this process: peak above the weights (on a CPU: resident, above what was there before the steps)."""
    cuda = cfg.device == "cuda"

    def resident(field: str) -> int:  # bytes; VmRSS: now, VmHWM: at most, since the last reset
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    model = bench_model(cfg, cfg.attn[0], cfg.device)
    ids = torch.randint(0, model.config.vocab_size, (cfg.batch, cfg.lengths[0]), device=cfg.device)
    # A short step without an update first: it loads code lazily, which is no part of what is measured.
    bench_step(cfg, model, torch.optim.SGD(model.parameters(), lr=0.0), ids[:, :16])
    if cuda:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.vram_cap * 2**30 / torch.cuda.mem_get_info()[1]))
        torch.cuda.reset_peak_memory_stats()
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(cfg.vram_cap * 2**30), resource.RLIM_INFINITY))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM
    base = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    optimizer, seconds = bench_adamw(cfg, model), []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        bench_step(cfg, model, optimizer, ids)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak, step_s = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM"), sorted(seconds[1:])[1]
    reserved = torch.cuda.max_memory_reserved() if cuda else resident("VmHWM")
    return {"status": "ok", "total": peak / 2**30, "above": (peak - base) / 2**30, "reserved": reserved / 2**30,
            "step_s": step_s, "tokens_per_s": ids.numel() / step_s}


def run_cell(cfg: MemoryBench) -> dict:
    """measure_cell in a process of its own: a fresh allocator, and a death by memory that kills only the child."""
    command = [sys.executable, globals().get("__file__", "bench_memory.py"), "--cell", json.dumps(asdict(cfg))]
    done = subprocess.run(command, env=os.environ | {"MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    signs = ("MemoryError", "OutOfMemory", "allocate memory", "bad_alloc", "memory object", "out of memory")
    oom = done.returncode == -9 or any(sign in done.stderr for sign in signs)
    status = "oom" if oom else "unsupported" if "NotImplementedError" in done.stderr else "failed"
    return {"status": status, "reason": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}


class PeakMeter(TorchDispatchMode):
    """Adds up the storages that live after each operation, by (phase, shape), and keeps the moment of the largest sum."""
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.live, self.at_peak, self.known, self.phase = Counter(), Counter(), set(), "weights"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Its shape rule knows bfloat16 only; its CPU kernel takes float32 too.
            out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
            if key not in self.known:
                self.known.add(key)
                self.live[self.phase, tuple(tensor.shape)] += size
                weakref.finalize(tensor.untyped_storage(), self.farewell, key, (self.phase, tuple(tensor.shape)), size)
        if self.live.total() > self.at_peak.total():
            self.at_peak = self.live.copy()
        return out

    def farewell(self, key: int, kind: tuple, size: int) -> None:
        """The last tensor on a storage is gone."""
        self.known.discard(key)
        self.live[kind] -= size


def planned_flex(module, query, key, value, attention_mask, scaling=None, sliding_window=None, s_aux=None, **kwargs):
    """sinkflex as on CUDA, for fake tensors: the bare operator, and an epilogue that keeps no float32 copy either."""
    def attend(q, k, v, sink, block_mask, scale):
        out, lse, _ = flex_operator(q, k, v, lambda score, *at: score, block_mask.as_tuple(), scale,
                                    {"OUTPUT_LOGSUMEXP": True}, (), ())
        return out * torch.sigmoid(lse - sink).to(out.dtype)[..., None]
    out = sink_flex(query, key, value, sink_logits(query, s_aux), runs=kwargs["sink_mask"].runs, window=sliding_window,
                    key_mask=None, scale=scaling, attend=attend)
    return out.transpose(1, 2), None


for name, function in {"sinkflex_planned_cuda": planned_flex, "sinkflex_planned_cpu": sinkflex_attention}.items():
    AttentionInterface.register(name, function)  # at import, as attention.py does
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)  # sinkflex's own looks at values


def plan_cell(cfg: MemoryBench) -> dict:
    """Modelled peak of one step, in GiB by kind; the optimizer's state is there beforehand, as in every later step."""
    attn = f"sinkflex_planned_{cfg.device}" if cfg.attn[0] == "sinkflex" else cfg.attn[0]
    model = bench_model(cfg, attn, "meta")
    sink_block_mask.cache_clear()  # a fake mask must not outlive its mode
    T, tokens = cfg.lengths[0], cfg.batch * cfg.lengths[0]

    def tiled(experts, x, *routing):  # x (B * T, C), routing (B * T, K) each
        tiles = zip(*(t.split(cfg.moe_tile) for t in (x, *routing)))
        return torch.cat([checkpoint(experts, *tile, use_reentrant=False) for tile in tiles])
    with FakeTensorMode(allow_non_fake_inputs=True), PeakMeter() as meter:
        model.to_empty(device="cpu").tie_weights()
        for module in [m for m in model.modules() if hasattr(m, "experts") and cfg.moe_tile]:
            module.experts.forward = partial(tiled, module.experts.forward)
        meter.phase, optimizer = "optimizer", bench_adamw(cfg, model)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        before = meter.live.total()
        meter.phase, meter.at_peak = "step", Counter()
        bench_step(cfg, model, optimizer, torch.zeros(cfg.batch, T, dtype=torch.int64))
    row, k = Counter(), getattr(model.config, "num_experts_per_tok", 1)
    for (phase, shape), size in meter.at_peak.items():
        kinds = {"logits": model.config.vocab_size in shape, "scores": len(shape) > 2 and min(shape[-2:]) >= T,
                 "experts": tokens * k in shape or shape[:2] == (tokens, k), "rest": True}
        row[phase if phase != "step" else next(kind for kind, fits in kinds.items() if fits)] += size / 2**30
    return {"status": "modelled", "total": row.total(), "above": row.total() - before / 2**30, **row}


def longest_context(cfg: MemoryBench, known: dict[int, float]) -> int:
    """Longest context, in steps of 1024 tokens, whose modelled peak fits in cfg.vram GiB; known: {length: GiB}."""
    known = {0: 0.0} | known
    while True:
        low = max(n for n, gib in known.items() if gib <= cfg.vram)
        high = min((n for n, gib in known.items() if gib > cfg.vram), default=2 * max(known))
        if high - low <= 1024 and high in known or low >= 2**18:
            return low
        share = (cfg.vram - known[low]) / (known[high] - known[low]) if high in known else 1.0
        n = min(max(int(low + share * (high - low)) // 1024 * 1024, low + 1024), high - 1024 * (high in known))
        known[n] = plan_cell(replace(cfg, lengths=(n,)))["total"]


def bench_plot(rows: list[dict], cap: float | None, path: str = "bench.png") -> None:
    """Memory by length with the cap and a cross where it ran out, and time by length."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, name, label in zip(axes, ("above", "step_s"), ("peak above the weights, GiB", "seconds per step")):
        for series in dict.fromkeys(row["series"] for row in rows):
            mine = [row for row in rows if row["series"] == series]
            points = [(row["length"], row[name]) for row in mine if row.get(name)]
            line, = axis.plot(*zip(*points) if points else ([], []), "o-", label=series)
            dead = [row["length"] for row in mine if row["status"] == "oom"]
            axis.plot(dead, [cap] * len(dead), "x", markersize=10, color=line.get_color())
        axis.set(xscale="log", yscale="log" if points else "linear", xlabel="context length, tokens", ylabel=label)
    if cap:
        axes[0].axhline(cap, linestyle="--", color="grey", label="cap (x: out of memory)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bench_memory(cfg: MemoryBench) -> dict:
    """Sweep or plan: prints a table, writes bench.png; the last line of standard output is the result as JSON."""
    tiny, cuda, free = cfg.model == "tiny", torch.cuda.is_available(), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = cfg.device if cfg.device != "auto" else "cuda" if cuda or cfg.plan and not tiny else "cpu"
    cap = cfg.vram_cap or (torch.cuda.mem_get_info()[1] if device == "cuda" and cuda else 0.8 * free) / 2**30
    cfg = replace(cfg, device=device, vram_cap=cap, dtype=cfg.dtype or ("float32" if tiny else "bfloat16"),
                  lora_rank=cfg.lora_rank if cfg.lora_rank is not None else 0 if tiny else 16)
    columns = ["length", "series", "status", "total", "above", "less"]
    columns += ["weights", "optimizer", "logits", "scores", "experts", "rest"] if cfg.plan else ["step_s", "tokens_per_s", "faster"]
    print(*(f"{name:>{24 if name == 'series' else 12}}" for name in columns))
    rows = []
    for length, attn, logprobs, tile in product(cfg.lengths, cfg.attn, cfg.logprobs, sorted({0, cfg.moe_tile or 0})):
        cell = replace(cfg, lengths=(length,), attn=(attn,), logprobs=(logprobs,), moe_tile=tile or None, vram=None)
        row = {"length": length, "series": f"{attn} {logprobs}" + (f" tile {tile}" if tile else "")}
        row |= plan_cell(cell) if cfg.plan else run_cell(cell)
        first = next((other for other in rows if other["length"] == length), row)
        if "above" in row and "above" in first:
            row["less"] = first["above"] / row["above"]
            row["faster"] = row["tokens_per_s"] / first["tokens_per_s"] if not cfg.plan else None
        rows.append(row)
        print(*(f"{value:>{24 if name == 'series' else 12}{'.3f' if isinstance(value, float) else ''}}" for name, value in ((n, row.get(n, "")) for n in columns)), flush=True)
    bench_plot(rows, cfg.vram if cfg.plan else cap)
    return {"config": asdict(cfg), "rows": rows}


if __name__ == "__main__" and "__file__" in globals():
    chosen = tyro.cli(MemoryBench)
    if chosen.cell:
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(chosen.cell).items()}
        print(json.dumps(measure_cell(MemoryBench(**fields))))
    else:
        print(json.dumps(bench_memory(chosen)))
