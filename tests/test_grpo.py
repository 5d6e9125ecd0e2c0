"""grpo.py against TRL's loss, plain autograd, transformers' eager attention, and a bandit that it has to learn."""
import copy
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

from attention import pack_layout, use_sink_attention
from grpo import group_advantages, grpo_loss, make_packs, token_logps, update_policy
from report import METRICS

KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
PATHS = {"padded": {}, "packed": {"make_layout": pack_layout, "shared_prefix": False},
         "shared": {"make_layout": pack_layout}}


def small_gpt_oss(attention: str = "sinkflex", layers: int = 2, hidden: int = 32, window: int = 8) -> GptOssForCausalLM:
    """A GPT-OSS of a few ten thousand parameters with everything that matters: sinks, windows, GQA, experts."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=97, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers, head_dim=8,
        num_attention_heads=hidden // 8, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=window, max_position_embeddings=4096, pad_token_id=0, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"] * (layers // 2), attn_implementation="eager")
    model = GptOssForCausalLM(config)
    return use_sink_attention(model) if attention == "sinkflex" else model


def conversations(groups: int = 3, size: int = 4, seed: int = 0, longest: int = 40) -> dict:
    """A batch like rollout.to_batch's: siblings share a prompt, responses are ragged, tool tokens lie in between."""
    torch.manual_seed(seed)
    rows = groups * size
    ids, mask = torch.randint(1, 97, (rows, longest)), torch.zeros(rows, longest, dtype=torch.long)
    attended = torch.zeros(rows, longest, dtype=torch.long)
    for row in range(rows):
        prompt = 6 + row // size
        length = int(torch.randint(prompt + 6, longest + 1, ()))
        ids[row, :prompt], ids[row, length:] = ids[row // size * size, :prompt], 0
        attended[row, :length] = 1
        mask[row, prompt:length] = (torch.rand(length - prompt) > 0.3).long()
        mask[row, prompt] = 1
    return {"input_ids": ids, "attention_mask": attended, "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask, "rollout_log_probs": -5 + torch.randn(rows, longest),
            "uid": [f"0/{row // size}" for row in range(rows)]}


ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.5, -0.5, -0.5, -0.5, -1.0, 1.0, 2.0, -2.0])


def gradients(model, batch, advantages=ADVANTAGES, **settings) -> tuple[dict, dict]:
    """What update_policy hands to the optimizer in its last update: {parameter: gradient}, and the metrics."""
    seen = {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=settings.pop("lr", 0.0))
    optimizer.register_step_pre_hook(lambda *_: seen.update(
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    metrics = update_policy(model, optimizer, batch, advantages,
                            **{"max_grad_norm": None, "max_response_tokens": 40, "temperature": 0.9} | settings)
    assert all(p.grad is None for p in model.parameters())
    return seen, metrics


def worst_difference(ours: dict, theirs: dict) -> float:
    """Largest relative difference in norm over the parameters."""
    assert ours.keys() == theirs.keys() and ours
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-8)) for name in ours)


def snapshot(model) -> dict:
    return copy.deepcopy(model.state_dict())


def unchanged(model, before: dict) -> bool:
    return all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def random_loss_inputs(seed: int = 0, episodes: int = 6, width: int = 9) -> dict:
    """Log-probs in fp64 with ratios on both sides of every clip bound, ragged masks with holes, one short episode."""
    torch.manual_seed(seed)
    logp = (-2 + torch.randn(episodes, width, dtype=torch.double)).requires_grad_()
    mask = torch.rand(episodes, width) > 0.3
    mask[:, 0], mask[0, 1:] = True, False
    near = lambda spread: logp.detach() + spread * torch.randn(episodes, width, dtype=torch.double)
    return {"logp": logp, "old_logp": near(0.4), "ref_logp": near(0.5), "rollout_logp": near(0.7), "mask": mask,
            "advantages": torch.linspace(-1.5, 1.7, episodes, dtype=torch.double)}


def trl_loss(kind: str, x: dict, clip_low: float, clip_high: float, kl_coef: float, tis_cap: float, longest: int):
    """GRPOTrainer._compute_loss, unbound, on a namespace that stands for the trainer: loss and its metrics."""
    metrics = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (x["logp"], torch.zeros_like(x["logp"]), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        importance_sampling_level="sequence" if kind == "gspo" else "token", beta=kl_coef,
        loss_type="grpo" if kind == "gspo" else kind, epsilon_low=clip_low, use_vllm=True,
        epsilon_high=1 + clip_high if kind == "cispo" else clip_high,  # TRL: an absolute cap for cispo
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        vllm_importance_sampling_correction=True, model=SimpleNamespace(training=True), _metrics=metrics,
        current_gradient_accumulation_steps=1, max_completion_length=longest,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t))
    ids = torch.zeros_like(x["mask"], dtype=torch.long)
    loss = GRPOTrainer._compute_loss(trainer, None, {
        "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids,
        "completion_mask": x["mask"].double(), "advantages": x["advantages"], "old_per_token_logps": x["old_logp"],
        "ref_per_token_logps": x["ref_logp"], "num_items_in_batch": x["mask"].sum(),
        "importance_sampling_ratio": (x["old_logp"] - x["rollout_logp"]).exp().clamp(max=tis_cap)})
    return loss, {name: values[0] for name, values in metrics["train"].items()}


# ---------------------------------------------------------------- 1. parity with outside implementations

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl_coef", [0.0, 0.07])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_trl(kind, kl_coef, seed):
    """Guards against a wrong sign, bound, denominator or detach in any variant: value, gradient and metrics."""
    x = random_loss_inputs(seed)
    theirs, numbers = trl_loss(kind, x, 0.2, 0.28, kl_coef, 2.0, longest=9)
    their_grad, = torch.autograd.grad(theirs, x["logp"])
    ours, sums = grpo_loss(**x, kind=kind, clip_low=0.2, clip_high=0.28, kl_coef=kl_coef, tis_cap=2.0,
                           max_response_tokens=9)
    our_grad, = torch.autograd.grad(ours, x["logp"])
    assert their_grad.norm() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-6, atol=1e-9)
    tokens = int(x["mask"].sum())
    if kl_coef:
        assert float(sums["kl_ref"]) / tokens == pytest.approx(numbers["kl"], rel=1e-6)
    if kind in ("grpo", "dr_grpo", "dapo"):
        assert float(sums["clipfrac_low"]) / tokens == pytest.approx(numbers["clip_ratio/low_mean"])
        assert float(sums["clipfrac_high"]) / tokens == pytest.approx(numbers["clip_ratio/high_mean"])
        assert sums["clipfrac_low"] > 0 and sums["clipfrac_high"] > 0
    weight = (x["old_logp"] - x["rollout_logp"]).exp()[x["mask"]]
    assert int(sums["tis_truncated"]) == int((weight > 2.0).sum()) > 0


def test_loss_by_hand():
    """Guards against both implementations sharing one misreading: two tokens, ratio 1.5, worked out on paper."""
    logp = torch.log(torch.tensor([[0.6, 0.5]])).requires_grad_()
    old = torch.log(torch.tensor([[0.4, 0.5]]))
    loss, sums = grpo_loss(logp, old, torch.tensor([2.0]), torch.ones(1, 2), clip_high=0.2)
    assert loss.item() == pytest.approx(-(1.2 * 2 + 1.0 * 2) / 2)  # the first token is clipped at 1.2
    loss.backward()
    assert logp.grad.tolist() == [[0.0, pytest.approx(-1.0)]]  # a clipped token has no gradient
    assert sums["clipfrac_high"] == 1 and sums["clipfrac_low"] == 0


def test_advantages_equal_trl_and_verl():
    """Guards against another standard deviation: TRL and verl divide by n - 1; TRL adds 1e-4, verl 1e-6."""
    torch.manual_seed(0)
    rewards, valid = torch.rand(5, 8, dtype=torch.double), torch.ones(5, 8, dtype=torch.bool)
    centred = rewards - rewards.mean(1, keepdim=True)
    trl = centred / (nanstd(rewards, dim=1).unsqueeze(1) + 1e-4)
    verl = centred / (torch.std(rewards, dim=1, keepdim=True) + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, valid), trl)
    torch.testing.assert_close(group_advantages(rewards, valid, eps=1e-6), verl)
    torch.testing.assert_close(group_advantages(rewards, valid, divide_by_std=False), centred)
    biased = centred / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    assert (group_advantages(rewards, valid) - biased).abs().max() > 0.05


def test_invalid_episodes_are_not_in_the_group():
    """Guards against a fault of the world counted as reward 0: siblings get what a smaller group would give."""
    rewards = torch.tensor([[1.0, 0.0, 0.5, float("nan")], [1.0, 7.0, 7.0, 7.0], [3.0, 3.0, 3.0, 9.0]])
    valid = torch.tensor([[True, True, True, False], [True, False, False, False], [True, True, True, False]])
    advantages = group_advantages(rewards, valid)
    torch.testing.assert_close(advantages[0, :3], group_advantages(rewards[:1, :3], valid[:1, :3])[0])
    assert advantages[0, 3] == 0 and advantages[1].eq(0).all() and advantages[2].eq(0).all()
    assert group_advantages(torch.tensor([[1.0, 0, 0, 0]]), torch.ones(1, 4, dtype=torch.bool))[0].tolist() == \
        pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=5e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [3, 6, 7])
def test_equal_rewards_are_exactly_zero(reward, size):
    """Guards against a rounded mean that makes 'equal' rewards a tiny advantage: such a group would not be dropped."""
    assert group_advantages(torch.full((1, size), reward), torch.ones(1, size, dtype=torch.bool)).eq(0).all()


# ---------------------------------------------------------------- 2. adding up

def oracle_gradients(model, batch, kind, temperature, tis_cap=2.0) -> dict:
    """The first update of a step by plain means: eager attention, one unpadded episode at a time, all logits."""
    eager = small_gpt_oss("eager")
    eager.load_state_dict(model.state_dict())
    own = batch["response_mask"].sum(1)
    total = 0.0
    for row, ids in enumerate(batch["input_ids"]):
        length = int(batch["attention_mask"][row].sum())
        logits = eager(ids[None, :length]).logits[0, :-1] / temperature
        logp = logits.log_softmax(-1).gather(1, ids[1:length, None])[:, 0]
        where = batch["response_mask"][row, 1:length].bool()
        weight = (logp.detach() - batch["rollout_log_probs"][row, 1:length]).exp().clamp(max=tis_cap)
        scale = {"grpo": len(own) * own[row], "gspo": len(own) * own[row], "dr_grpo": len(own) * 40}
        ratio = (logp - logp.detach()).exp()
        if kind == "gspo":
            ratio = (logp - logp.detach())[where].mean().exp()
        surrogate = weight * ADVANTAGES[row] * (logp if kind == "cispo" else ratio)
        total = total - surrogate[where].sum() / scale.get(kind, own.sum())
    total.backward()
    return {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_packing_and_prefixes_add_up(kind):
    """Guards against a denominator per micro-batch, a neighbour's tokens seen in a pack, an off-by-one in the slots."""
    model, batch = small_gpt_oss(), conversations()
    expected = oracle_gradients(model, batch, kind, 0.9)
    numbers = []
    for settings in PATHS.values():
        for budget in (30, 90, 10**6):
            seen, metrics = gradients(model, batch, loss=kind, max_tokens_per_micro_batch=budget, **settings)
            assert worst_difference(seen, expected) < 1e-5, (settings, budget)
            numbers.append(metrics)
    assert len({metrics["micro_batches"] for metrics in numbers}) > 3
    assert numbers[0]["skipped"] is None and numbers[0]["kl_ref"] is None
    for name in set(numbers[0]) - {"micro_batches", "skipped", "kl_ref"}:  # the step's, not the last micro-batch's
        assert [m[name] for m in numbers] == pytest.approx([numbers[0][name]] * len(numbers), rel=1e-4, abs=1e-6)


def test_packs_hold_every_sampled_token_once_within_the_budget():
    """Guards against lost or doubled episodes when a group is cut in two, and against packs over the budget."""
    for seed in range(30):
        batch = conversations(groups=4, size=5, seed=seed)
        rows = [row for row in range(20) if row % 7]
        wanted = sorted((row, int(t)) for row in rows for t in batch["input_ids"][row][batch["response_mask"][row] == 1])
        for settings in ((None, True), (pack_layout, False), (pack_layout, True)):
            for budget in (1, 45, 100, 1000):
                packs = make_packs(batch, rows, *settings, budget, "cpu")
                got = []
                for pack in packs:
                    slots = pack.inputs["input_ids"]
                    assert slots.numel() <= budget or len(pack.rows) == 1
                    got += zip(pack.rows.repeat_interleave(pack.mask.sum(1)).tolist(), pack.targets.tolist())
                    positions = pack.inputs["position_ids"].flatten()[pack.source]
                    places = torch.cat([batch["response_mask"][row].nonzero().flatten() for row in pack.rows.tolist()])
                    assert torch.equal(positions, places - 1)  # each token is predicted by the one before it
                assert sorted(got) == wanted


def test_a_masked_place_cannot_change_the_loss():
    """Guards against 0 * NaN and 0 * inf: tool tokens and pads may hold anything, the gradient there is exactly 0."""
    for kind in KINDS:
        x = random_loss_inputs()
        clean, _ = grpo_loss(**x, kind=kind, kl_coef=0.1, tis_cap=2.0, max_response_tokens=9)
        clean_grad, = torch.autograd.grad(clean, x["logp"])
        for rubbish in (float("nan"), float("inf"), -float("inf"), 1e30):
            dirty = {k: v.detach().where(x["mask"], rubbish) if k.endswith("logp") else v for k, v in x.items()}
            dirty["logp"].requires_grad_()
            loss, sums = grpo_loss(**dirty, kind=kind, kl_coef=0.1, tis_cap=2.0, max_response_tokens=9)
            loss.backward()
            assert torch.equal(loss, clean) and torch.equal(dirty["logp"].grad, clean_grad)
            assert all(torch.isfinite(v) for v in sums.values())


def test_equal_rewards_teach_nothing_and_are_counted():
    """Guards against an unbound loss on an empty batch, and against weight decay moving weights without a gradient."""
    model, batch = small_gpt_oss(), conversations()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = snapshot(model)
    metrics = update_policy(model, optimizer, batch, torch.zeros(12), make_layout=pack_layout)
    assert unchanged(model, before) and not optimizer.state
    assert metrics["zero_variance_groups"] == 3 and metrics["loss"] is None and metrics["grad_norm"] is None
    assert metrics["skipped"] == "no group had anything to teach" and metrics["skipped_updates"] == 0
    mixed = ADVANTAGES.clone()
    mixed[4:8] = 0
    _, metrics = gradients(model, batch, mixed)
    assert metrics["zero_variance_groups"] == 1 and metrics["trained_episodes"] == 8 and metrics["skipped"] is None
    assert set(metrics) <= set(METRICS)


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_groups_and_invalid_episodes_change_nothing_for_the_rest(kind):
    """Guards against denominators that count what was dropped: the gradient is that of a batch without those rows."""
    model, batch = small_gpt_oss(), conversations()
    advantages, valid = ADVANTAGES.clone(), torch.ones(12, dtype=torch.bool)
    advantages[4:8], valid[1], advantages[1] = 0, False, 0
    rest = [0, 2, 3, 8, 9, 10, 11]
    smaller = {k: [v[i] for i in rest] if k == "uid" else v[rest] for k, v in batch.items()}
    expected, _ = gradients(model, smaller, advantages[rest], loss=kind)
    for token in (1, 96):  # whatever the faulty episode said
        other = batch | {"input_ids": batch["input_ids"].clone()}
        other["input_ids"][1, 6:] = token
        for settings in PATHS.values():
            seen, metrics = gradients(model, other, advantages, loss=kind, valid=valid, **settings)
            assert worst_difference(seen, expected) < 1e-5 and metrics["trained_episodes"] == 7


def test_episode_without_a_sampled_token_is_left_out():
    """Guards against a crash or a 0 / 0 when the customer hangs up before the policy has said a word."""
    model, batch = small_gpt_oss(), conversations()
    batch["response_mask"][2] = 0
    for settings in PATHS.values():
        _, metrics = gradients(model, batch, **settings)
        assert metrics["trained_episodes"] == 11 and metrics["skipped"] is None


def test_several_updates_on_one_batch():
    """Guards against old log-probs that move along: the second update is clipped against the policy that sampled."""
    model, batch = small_gpt_oss(), conversations()
    twin = copy.deepcopy(model)
    seen, metrics = gradients(model, batch, updates_per_step=2, lr=0.5, make_layout=pack_layout,
                              max_tokens_per_micro_batch=90)
    parameters = [p for p in twin.parameters() if p.requires_grad]
    mask, ids, olds, numbers = batch["response_mask"][:, 1:].bool(), batch["input_ids"], None, []
    for _ in range(2):
        logits = twin(ids, attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]).logits / 0.9
        logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        olds = logp.detach() if olds is None else olds
        x = {"logp": logp, "old_logp": olds, "ref_logp": olds, "rollout_logp": batch["rollout_log_probs"][:, 1:],
             "mask": mask, "advantages": ADVANTAGES}
        loss, of_trl = trl_loss("grpo", x, 0.2, 0.2, 0.0, 2.0, longest=40)
        numbers.append(of_trl | {"loss": loss.item(), "k3": ((logp - olds).exp() - 1 - (logp - olds))[mask].mean().item()})
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, grad in zip(parameters, grads):
                p -= 0.5 * grad
    expected = dict(zip([name for name, p in twin.named_parameters() if p.requires_grad], grads))
    assert worst_difference(seen, {name: expected[name] for name in seen}) < 1e-4
    assert metrics["updates"] == 2 and metrics["approx_kl"] == pytest.approx(numbers[1]["k3"] / 2, rel=1e-3)
    for ours, theirs in (("loss", "loss"), ("clipfrac_low", "clip_ratio/low_mean"),
                         ("clipfrac_high", "clip_ratio/high_mean")):
        assert metrics[ours] == pytest.approx(sum(n[theirs] for n in numbers) / 2, rel=1e-3)
    assert metrics["clipfrac_low"] > 0 and metrics["clipfrac_high"] > 0


# ---------------------------------------------------------------- 3. log-probs: exact, small, fast

def plain_logps(hidden, head, targets, temperature=1.0):
    """What token_logps replaces: all logits at once, log-probs with a gradient, entropies without."""
    logps = torch.log_softmax(hidden @ head.T / temperature, -1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logps_equal_the_plain_computation(temperature, frozen):
    """Guards against a wrong chunk edge, temperature or scale, in value and both gradients; fp64 also by gradcheck."""
    torch.manual_seed(0)
    for tokens, chunk in ((1, 5), (5, 5), (23, 5), (23, None)):
        hidden, head = torch.randn(tokens, 16), torch.randn(301, 16)
        targets, outer = torch.randint(301, (tokens,)), torch.randn(tokens)
        results = []
        for function in (plain_logps, lambda *a: token_logps(*a[:3], temperature=a[3], chunk=chunk)):
            h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
            logps, entropy = function(h, w, targets, temperature)
            assert not entropy.requires_grad
            (logps * outer).sum().backward()
            results.append((logps.detach(), entropy, h.grad, *([] if frozen else [w.grad])))
        for ours, theirs in zip(results[1], results[0]):
            assert (ours - theirs).norm() / theirs.norm() < 1e-6
    h, w = hidden[:7].double().requires_grad_(), head[:40].double().requires_grad_(not frozen)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logps(h, w, targets[:7] % 40, temperature=temperature, chunk=3)[0], (h, w))


def test_token_logps_extremes():
    """Guards against overflow and cancellation: logits of 1e4, and a token whose probability is 1 to the last bit."""
    hidden = torch.tensor([[1e4], [-1e4], [50.0]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [-1.0]])
    logps, entropy = token_logps(hidden, head, torch.tensor([0, 2, 1]), chunk=2)
    logps.sum().backward()
    assert logps.tolist() == [0.0, 0.0, -50.0] and entropy.abs().max() < 1e-6
    assert hidden.grad.flatten().tolist() == [0.0, 0.0, -1.0]


def test_token_logps_in_bf16_take_an_fp32_softmax():
    """Guards against bf16 logits and a bf16 log-softmax: log-probs are those of exact products of bf16 operands."""
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 64).bfloat16().requires_grad_(), torch.randn(500, 64).bfloat16() / 4
    targets = torch.randint(500, (40,))
    logps, entropy = token_logps(hidden, head, targets, chunk=7)
    logits = hidden.float() @ head.float().T
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    ours, = torch.autograd.grad(logps.sum(), hidden)
    theirs, = torch.autograd.grad(expected.sum(), hidden)
    assert (ours - theirs).float().norm() / theirs.float().norm() < 1e-2


def peak_allocated(function) -> tuple[int, set]:
    """Bytes allocated above the start at the worst moment, and the sizes of all allocations, as the profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, {event.nbytes() for event in events if event.nbytes() > 0}


def check_memory(tokens: int, words: int, width: int, frozen: bool) -> None:
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(words, width).mul_(0.1).requires_grad_(not frozen)
    targets = torch.randint(words, (tokens,))
    peak, sizes = peak_allocated(lambda: token_logps(hidden, head, targets)[0].sum().backward())
    full = tokens * words * 4
    print(f"{tokens} x {words}, head {'frozen' if frozen else 'trained'}: peak {peak / 2**20:.0f} MiB, "
          f"1/{full / peak:.1f} of the full logits")
    assert 0 < peak <= full / 16
    assert (head.numel() * 4 in sizes) != frozen and (head.grad is None) == frozen


def test_the_measurement_of_memory_sees_full_logits():
    """Guards against a memory test that can't fail: the plain computation is seen to hold the logits and more."""
    hidden, head = torch.randn(256, 8, requires_grad=True), torch.randn(5000, 8)
    peak, _ = peak_allocated(lambda: plain_logps(hidden, head, torch.zeros(256).long())[0].sum().backward())
    assert peak >= 2 * 256 * 5000 * 4


def test_memory_is_a_sixteenth_of_the_logits():
    """Guards against a (tokens, vocabulary) matrix, forward or backward, and against a gradient of a frozen head."""
    check_memory(4096, 201_088, 16, frozen=True)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_memory_at_8192_tokens(frozen):
    """The same at full size, also with a trained head: its gradient is then the one thing of its size."""
    check_memory(8192, 201_088, 64, frozen)


@pytest.mark.slow
@pytest.mark.parametrize("frozen, width", [(True, 64), (True, 512), (False, 64), (False, 128)])
def test_at_least_as_fast_as_the_plain_computation(frozen, width):
    """Guards against a memory saving paid for in time: 2,048 tokens x 32k words, same outputs, processor time."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2048, width, requires_grad=True), torch.randn(32_000, width).mul_(0.1)
    head.requires_grad_(not frozen)
    targets, best = torch.randint(32_000, (2048,)), {}
    for _ in range(3):
        for function in (plain_logps, token_logps):
            start = time.process_time()
            function(hidden, head, targets)[0].sum().backward()
            best[function] = min(best.get(function, 1e9), time.process_time() - start)
    print(f"width {width}, frozen {frozen}: plain {best[plain_logps]:.2f} s, ours {best[token_logps]:.2f} s")
    assert best[token_logps] <= best[plain_logps]


# ---------------------------------------------------------------- 4. shared prefix

@pytest.mark.slow
def test_shared_prefix_computes_less_and_is_faster():
    """Guards against a prompt computed G times: 8 siblings, prompt 2,000, responses 500, one update of a small model."""
    torch.manual_seed(0)
    ids = torch.randint(1, 97, (8, 2500))
    ids[:, :2000] = ids[0, :2000]
    mask = torch.zeros(8, 2500, dtype=torch.long)
    mask[:, 2000:] = 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask, "uid": ["0/0"] * 8,
             "position_ids": torch.arange(2500).expand(8, -1), "rollout_log_probs": torch.full((8, 2500), -4.6)}
    model = small_gpt_oss(layers=4, hidden=128, window=128)
    with torch.no_grad():  # initializer_range 0.2 is for 32 units: at 128 it makes sharp softmaxes and large round-off
        for p in model.parameters():
            p.mul_(0.5)
    slots, seconds, seen = defaultdict(int), defaultdict(lambda: 1e9), {}
    for name in ("packed", "shared", "packed", "shared"):
        hook = model.model.embed_tokens.register_forward_hook(
            lambda module, args, out: slots.__setitem__(name, slots[name] + args[0].numel()))
        slots[name], start = 0, time.process_time()
        seen[name], _ = gradients(model, batch, ADVANTAGES[:8], max_tokens_per_micro_batch=8192, **PATHS[name])
        seconds[name] = min(seconds[name], time.process_time() - start)
        hook.remove()
    print(f"slots {dict(slots)}, seconds {dict(seconds)}, ratio {seconds['packed'] / seconds['shared']:.2f}, "
          f"gradient {worst_difference(seen['shared'], seen['packed']):.1e}")
    assert slots["shared"] <= 0.4 * slots["packed"]
    assert worst_difference(seen["shared"], seen["packed"]) < 1e-5
    assert seconds["packed"] >= 1.8 * seconds["shared"]


# ---------------------------------------------------------------- 5. it learns

class Bandit(torch.nn.Module):
    """A policy of one table: the logits of the next token depend on the last one only."""
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(16, 16), torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(self.table.weight)
        torch.nn.init.eye_(self.head.weight)
        self.device = torch.device("cpu")

    def get_decoder(self):
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.table(input_ids))

    def get_output_embeddings(self):
        return self.head


def play_bandit(kind: str, sign: float, updates: int = 100) -> list[float]:
    """4 levers, each with one right answer out of 16; 8 pulls each; the mean reward before every update."""
    torch.manual_seed(0)
    model, levers, answers = Bandit(), torch.arange(4).repeat_interleave(8), torch.tensor([7, 3, 11, 14])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    means = []
    for _ in range(updates):
        with torch.no_grad():
            logps = model.head(model.table(levers)).log_softmax(-1)
        pulls = torch.multinomial(logps.exp(), 1)[:, 0]
        rewards = (pulls == answers[levers]).float()
        means.append(rewards.mean().item())
        advantages = group_advantages(rewards.view(4, 8), torch.ones(4, 8, dtype=torch.bool), kind != "dr_grpo")
        ids = torch.stack([levers, pulls], 1)
        recorded = torch.stack([torch.zeros(32), logps.gather(1, pulls[:, None])[:, 0]], 1)
        update_policy(model, optimizer, {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids * 0, "uid": levers.tolist(),
            "response_mask": torch.tensor([[0, 1]]).expand(32, 2), "rollout_log_probs": recorded},
            sign * advantages.flatten(), loss=kind, max_response_tokens=1, updates_per_step=2)
    return means


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_learns_a_bandit_and_unlearns_it_with_the_sign_flipped(kind):
    """Guards against a loss whose gradient points nowhere or the wrong way: 1/16 by chance, above 0.9 when learned."""
    learned, unlearned = play_bandit(kind, 1.0), play_bandit(kind, -1.0)
    assert sum(learned[:3]) / 3 < 0.25 and sum(learned[-5:]) / 5 > 0.9
    assert sum(unlearned[-20:]) / 20 < 0.05


# ---------------------------------------------------------------- 6. what must not poison a run

@pytest.mark.parametrize("where", ["loss", "inf", "nan"])
def test_non_finite_updates_are_skipped_and_counted(where):
    """Guards against one NaN that poisons weights and optimizer: three in a row change nothing and say so each time."""
    model, batch = small_gpt_oss(), conversations()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert update_policy(model, optimizer, batch, ADVANTAGES, make_layout=pack_layout)["skipped_updates"] == 0
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])
    bad, row = batch, 0
    if where == "loss":
        bad = batch | {"rollout_log_probs": torch.full((12, 40), float("nan"))}
    else:
        hook = model.lm_head.weight.register_hook(lambda grad: grad * float(where))
    for _ in range(3):  # train.py stops the run after three such steps
        metrics = update_policy(model, optimizer, bad, ADVANTAGES, make_layout=pack_layout, updates_per_step=2)
        row = row + 1 if metrics["skipped_updates"] else 0
        assert metrics["skipped"] == f"{'loss' if where == 'loss' else 'grad_norm'} is not finite"
        assert metrics["loss"] is None and metrics["updates"] == 0 and metrics["skipped_updates"] == 2
    assert row == 3 and unchanged(model, before) and all(p.grad is None for p in model.parameters())
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], state[number][name]) for name in values)
    if where != "loss":
        hook.remove()
    metrics = update_policy(model, optimizer, batch, ADVANTAGES, make_layout=pack_layout)
    assert metrics["skipped"] is None and metrics["grad_norm"] > 0 and not unchanged(model, before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_leaves_nothing_behind(error):
    """Guards against a half-summed gradient: the step can be redone with half the tokens and gives the same update."""
    model, batch = small_gpt_oss(), conversations()
    expected, _ = gradients(model, batch, make_layout=pack_layout)
    before, calls = snapshot(model), []

    def full(module, args):
        calls.append(args)
        if len(calls) == 3:
            raise error("no memory left")
    hook = model.model.embed_tokens.register_forward_pre_hook(full)
    with pytest.raises(error):
        gradients(model, batch, make_layout=pack_layout, max_tokens_per_micro_batch=60, lr=0.1)
    assert len(calls) == 3 and unchanged(model, before) and all(p.grad is None for p in model.parameters())
    hook.remove()
    seen, _ = gradients(model, batch, make_layout=pack_layout, max_tokens_per_micro_batch=30)
    assert worst_difference(seen, expected) < 1e-5


def test_out_of_memory_after_the_first_update_keeps_it():
    """Guards against redoing a step that has already moved the weights: the later update is skipped and said to be."""
    model, batch, calls = small_gpt_oss(), conversations(), []

    def full(module, args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory left")
    model.model.embed_tokens.register_forward_pre_hook(full)
    _, metrics = gradients(model, batch, make_layout=pack_layout, updates_per_step=2)
    assert metrics["updates"] == 1 and metrics["skipped_updates"] == 1 and metrics["skipped"] == "out of memory"
    assert metrics["loss"] is not None


# ---------------------------------------------------------------- 7. metrics, reference, adapters

def test_metrics_against_plain_numbers():
    """Guards against an 'entropy' that is something else and a gap over the wrong tokens: all from full logits."""
    model, batch = small_gpt_oss(), conversations()
    reference = small_gpt_oss()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.05 * torch.randn_like(p))
    _, metrics = gradients(model, batch, make_layout=pack_layout, kl_coef=0.1, ref_model=reference, tis_cap=1.5,
                           max_tokens_per_micro_batch=60)
    mask, ids = batch["response_mask"][:, 1:].bool(), batch["input_ids"][:, 1:, None]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        full = (model(**inputs).logits[:, :-1] / 0.9).log_softmax(-1)
        base = (reference(**inputs).logits[:, :-1] / 0.9).log_softmax(-1).gather(2, ids)[..., 0]
    logp = full.gather(2, ids)[..., 0]
    entropy, gap = -(full.exp() * full).sum(-1)[mask], (logp - batch["rollout_log_probs"][:, 1:])[mask]
    k3 = ((base - logp).exp() - 1 - (base - logp))[mask]
    for name, value in {"entropy": entropy.mean(), "logp_gap_mean": gap.abs().mean(), "logp_gap_max": gap.abs().max(),
                        "kl_ref": k3.mean(), "tis_truncated": (gap.exp() > 1.5).float().mean(),
                        "trained_tokens": mask.sum(), "trained_episodes": 12, "approx_kl": 0.0}.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
    assert set(metrics) <= set(METRICS)
    assert not {"loss", "approx_kl", "kl_ref", "clipfrac_low", "clipfrac_high", "tis_truncated", "entropy", "grad_norm",
                "logp_gap_mean", "logp_gap_max", "zero_variance_groups"} - set(metrics)


def test_gradient_is_clipped_and_its_norm_is_from_before():
    """Guards against a max_grad_norm that nothing reads, and a metric that only ever shows the bound."""
    model, batch = small_gpt_oss(), conversations()
    free, loose = gradients(model, batch)
    seen, tight = gradients(model, batch, max_grad_norm=loose["grad_norm"] / 4)
    assert tight["grad_norm"] == pytest.approx(loose["grad_norm"], rel=1e-5)
    assert worst_difference({k: v * 4 for k, v in seen.items()}, free) < 1e-3


def with_adapter(model):
    """LoRA on the attention projections, away from its zero start."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


@pytest.mark.parametrize("settings", list(PATHS.values()), ids=list(PATHS))
def test_adapter_off_is_the_reference(settings):
    """Guards against a KL to the policy itself (always 0), and an adapter left off, or frozen, after the reference."""
    batch, adapted = conversations(), with_adapter(small_gpt_oss())
    expected, with_copy = gradients(adapted, batch, kl_coef=0.3, ref_model=small_gpt_oss(), **settings)
    seen, metrics = gradients(adapted, batch, kl_coef=0.3, **settings)
    assert metrics["kl_ref"] == pytest.approx(with_copy["kl_ref"], rel=1e-5) and metrics["kl_ref"] > 0.01
    assert all("lora_" in name for name in seen) and worst_difference(seen, expected) < 1e-5
    without, _ = gradients(adapted, batch, **settings)
    assert worst_difference(seen, without) > 0.01


@pytest.mark.parametrize("adapter", [False, True])
def test_gradient_checkpointing_changes_nothing(adapter):
    """Guards against checkpointing that drops the layout or the gradient, with full weights and with an adapter."""
    model, batch = small_gpt_oss(), conversations()
    model = with_adapter(model) if adapter else model
    plain, _ = gradients(model, batch, make_layout=pack_layout)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls, norm = [], (model.base_model.model if adapter else model).model.layers[0].input_layernorm
    norm.register_forward_hook(lambda *_: calls.append(1))
    seen, metrics = gradients(model.train(), batch, make_layout=pack_layout)
    assert len(calls) == 2 * metrics["micro_batches"]  # once forward, once more in the backward pass
    assert worst_difference(seen, plain) < 1e-6


def test_bf16_weights_learn():
    """Guards against a dtype mismatch anywhere on the way with bf16 weights; the loss stays near the fp32 one."""
    batch = conversations()
    _, exact = gradients(small_gpt_oss(), batch, make_layout=pack_layout)
    seen, metrics = gradients(small_gpt_oss().bfloat16(), batch, make_layout=pack_layout)
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=0.05) and metrics["skipped"] is None
    assert metrics["entropy"] == pytest.approx(exact["entropy"], rel=0.05)
    assert all(grad.isfinite().all() for grad in seen.values())


def test_what_would_be_ignored_is_refused():
    """Guards against flags read nowhere: an unknown loss, a KL without a reference, a head that logits need more of."""
    model, batch = small_gpt_oss(), conversations()
    with pytest.raises(ValueError, match="'ppo'.*grpo, dr_grpo, dapo, gspo, cispo"):
        gradients(model, batch, loss="ppo")
    with pytest.raises(ValueError, match="kl_coef 0.1.*--ref-copy"):
        gradients(model, batch, kl_coef=0.1)
    with pytest.raises(ValueError, match="max_response_tokens"):
        gradients(model, batch, loss="dr_grpo", max_response_tokens=None)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(97))
    with pytest.raises(ValueError, match="bias"):
        gradients(model, batch)


def test_the_algorithm_is_on_the_first_two_screens():
    """Guards against growth: the table, advantages, loss and update in 120 lines, the file in what one can hold in mind."""
    lines = (Path(__file__).resolve().parent.parent / "grpo.py").read_text().splitlines()
    first = "\n".join(lines[:120])
    assert len(lines) <= 450 and all(len(line) <= 110 for line in lines)
    assert "| pi_theta" in first and "return metrics | averages" in first
    for name in ("group_advantages", "grpo_loss", "update_policy"):
        assert f"def {name}(" in first
