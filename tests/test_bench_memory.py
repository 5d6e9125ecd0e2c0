"""Tests of bench_memory.py: the planner against torch.profiler, out of memory as a result, equal work in every cell.

`python -m tests.test_bench_memory CELL` prints the allocation peak of one cell as torch.profiler saw it.
"""
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench_memory import MemoryBench, PeakMeter, bench_memory, bench_model, bench_step, plan_cell, planned_flex, run_cell

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
             vocab_size=1000, intermediate_size=96, max_position_embeddings=8192)


def cell_of(tmp_path, family, attn, length, logprobs="full", **flags):
    """A cell on the CPU path with a small model of one of two architectures."""
    from transformers import GptOssConfig, LlamaConfig
    if family == "gpt_oss":
        config = GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
    else:
        config = LlamaConfig(**SMALL)
    config.save_pretrained(tmp_path / family)
    return replace(MemoryBench(lengths=(length,), attn=(attn,), logprobs=(logprobs,), model=str(tmp_path / family),
                               device="cpu", dtype="float32", lora_rank=0, vram_cap=8.0), **flags)


def profiled_peak(cfg: MemoryBench) -> int:
    """Largest sum of torch.profiler's allocation events, in bytes, over a model's making and two real steps."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = bench_model(cfg, cfg.attn[0], "cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, model.config.vocab_size, (cfg.batch, cfg.lengths[0]))
        for _ in range(2):
            bench_step(cfg, model, optimizer, ids)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def check_plan(cell: MemoryBench, tolerance=0.03):
    """Planner in this process, truth in a fresh one."""
    command = [sys.executable, "-m", "tests.test_bench_memory", json.dumps(asdict(cell))]
    truth = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    modelled = plan_cell(cell)["total"] * 2**30
    print(f"{Path(cell.model).name} {cell.attn[0]} {cell.logprobs[0]} {cell.lengths[0]}: modelled {modelled / 2**20:.2f} "
          f"MiB, profiler {truth / 2**20:.2f} MiB, {100 * (modelled / truth - 1):+.2f} %")
    assert abs(modelled / truth - 1) <= tolerance


GRID = [(family, attn, length, logprobs)
        for family in ("gpt_oss", "llama") for attn, logprobs in (("eager", "full"), ("sinkflex", "chunked"))
        for length in (512, 1024)]


@pytest.mark.slow
@pytest.mark.parametrize("family, attn, length, logprobs", GRID)
def test_the_planner_is_right_where_it_can_be_checked(tmp_path, family, attn, length, logprobs):
    """A model of memory that nobody compared with memory is a guess: eight configurations against the profiler."""
    check_plan(cell_of(tmp_path, family, attn, length, logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"checkpointing": True}, {"lora_rank": 8}, {"batch": 3}, {"dtype": "bfloat16"}], ids=str)
def test_the_planner_is_right_with_other_flags(tmp_path, flags):
    """Guards against a planner that is right only for the settings it was tuned on."""
    check_plan(cell_of(tmp_path, "gpt_oss", "sinkflex", 512, "chunked", **flags))
    check_plan(cell_of(tmp_path, "gpt_oss", "eager", 512, "full", **flags))


def test_the_planner_equals_the_profiler(tmp_path):
    """The short form of the grid, in the default run."""
    check_plan(cell_of(tmp_path, "gpt_oss", "sinkflex", 512, "chunked"))


if __name__ == "__main__":
    print(profiled_peak(MemoryBench(**json.loads(sys.argv[1]))))
