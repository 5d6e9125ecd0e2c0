"""In bfloat16 too a policy learns, and scores what it sampled: fp32 masters, gradient sums and logits."""
import copy

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM

from grpo import WideAdamW, group_advantages, token_logps, update_policy
from model import load_checkpoint, load_policy, save_checkpoint
from tests.test_grpo import Bandit, conversations
from tests.test_model import make_folder


def carried(lr: float, make_optimizer, steps: int = 24) -> float:
    """Share of the fp32 update that bfloat16 weights receive: <update, fp32 update> / <fp32 update, fp32 update>.

    Weights as in SmolLM2 (standard deviation 0.1), a constant gradient plus noise of its size.
    """
    torch.manual_seed(0)
    start = (0.1 * torch.randn(4096)).bfloat16()
    constant = torch.randn(4096)
    narrow = torch.nn.Parameter(start.clone())
    wide = torch.nn.Parameter(start.float())
    optimizer = make_optimizer([narrow], lr)
    truth = torch.optim.AdamW([wide], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        gradient = (constant + torch.randn(4096)).bfloat16()
        narrow.grad = gradient.to(narrow.grad_dtype or narrow.dtype)
        wide.grad = gradient.float()
        optimizer.step()
        truth.step()
    held = next(iter(getattr(optimizer, "rounded", {})), narrow)
    assert torch.equal(held.detach().bfloat16(), narrow.detach())
    wanted = wide.detach() - start.float()
    return float((held.detach() - start.float()) @ wanted / (wanted @ wanted))


@pytest.mark.parametrize("lr", [2e-5, 1e-6])
def test_the_whole_update_reaches_bfloat16_weights(lr):
    """Guards against updates that round away: AdamW on the bfloat16 weights themselves carries a few per cent."""
    plain = carried(lr, lambda weights, lr: torch.optim.AdamW(weights, lr=lr, weight_decay=0.0))
    assert plain < 0.2
    assert carried(lr, WideAdamW) == pytest.approx(1.0, abs=0.01)


def reward_of_bandit(make_optimizer, updates: int = 300) -> float:
    """4 levers, 1 right answer of 16 each, 8 pulls a lever; bfloat16 weights; mean reward of the last 20 updates.

    Weights near 1.5 lie on a grid of 2**-7, four times an update of 2e-3.
    """
    torch.manual_seed(0)
    model = Bandit().bfloat16()
    with torch.no_grad():
        model.table.weight.fill_(1.5)
        model.head.weight.add_(1.5)  # the same for every answer: no log-prob changes
    levers = torch.arange(4).repeat_interleave(8)
    answers = torch.tensor([7, 3, 11, 14])
    optimizer = make_optimizer(list(model.parameters()), 2e-3)
    means = []
    for _ in range(updates):
        with torch.no_grad():
            logps = (model.table(levers).float() @ model.head.weight.float().T).log_softmax(-1)
        pulls = torch.multinomial(logps.exp(), 1)[:, 0]
        rewards = (pulls == answers[levers]).float()
        means.append(rewards.mean().item())
        ids = torch.stack([levers, pulls], 1)
        recorded = torch.stack([torch.zeros(32), logps.gather(1, pulls[:, None])[:, 0]], 1)
        advantages = group_advantages(rewards.view(4, 8), torch.ones(4, 8, dtype=torch.bool))
        update_policy(model, optimizer, {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids * 0, "uid": levers.tolist(),
            "response_mask": torch.tensor([[0, 1]]).expand(32, 2), "rollout_log_probs": recorded},
            advantages.flatten(), updates_per_step=2)
    return sum(means[-20:]) / 20


def test_bfloat16_full_weights_learn_a_planted_reward():
    """Guards against a reward that stays flat with no word: 1/16 by chance, as before; learned with fp32 masters."""
    before = reward_of_bandit(lambda weights, lr: torch.optim.AdamW(weights, lr=lr, weight_decay=0.0))
    after = reward_of_bandit(WideAdamW)
    print(f"mean reward of the last 20 of 300 updates: {before:.3f} before, {after:.3f} with masters")
    assert before < 0.5 and after > 0.9


def test_float32_weights_are_left_to_torch():
    """Guards against a changed default run: in float32 there are no masters, and every bit is torch's AdamW's."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    optimizers = WideAdamW([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.0)
    for _ in range(5):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert not optimizers[0].rounded and torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "big")


@pytest.mark.parametrize("attn", ["sinkflex", "eager"])
@pytest.mark.parametrize("rank", [0, 4])
def test_sinks_move_as_in_float32(big, attn, rank):
    """Guards against sinks that stay bfloat16 beside fp32 adapters: 60 steps of lr 2e-5 moved them by exactly 0."""
    moved = {}
    for dtype in ("float32", "bfloat16"):
        model = load_policy(str(big), dtype=dtype, lora_rank=rank, attn=attn, train_sinks=True).model
        sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
        assert all(p.dtype == torch.float32 for p in sinks)
        ids = torch.arange(1, 21)[None] % 20
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in sinks), "this path does not pass a gradient to fp32 sinks"
        model.zero_grad()
        optimizer = WideAdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5)
        start = [p.detach().clone() for p in sinks]
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            optimizer.zero_grad()
            for p in sinks:
                p.grad = 1.7e-3 * (1 + torch.randn(p.shape, generator=generator))
            optimizer.step()
        moved[dtype] = torch.cat([p.detach() - s for p, s in zip(sinks, start)])
    assert moved["float32"].abs().mean() > 1e-4
    assert (moved["bfloat16"] - moved["float32"]).norm() <= 0.01 * moved["float32"].norm()


def batch_gradient(model, batch, advantages, budget: int) -> dict:
    """Gradients, as float64, of one update in micro-batches of at most `budget` slots."""
    seen = {}
    optimizer = WideAdamW(list(model.parameters()), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.update(
        {name: p.grad.double() for name, p in model.named_parameters()}))
    metrics = update_policy(model, optimizer, batch, advantages, max_grad_norm=None, tis_cap=None,
                            max_tokens_per_micro_batch=budget)
    return seen | {"micro_batches": metrics["micro_batches"]}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_micro_batches_add_up_in_float32(tied):
    """Guards against 64 micro-batches summed in bfloat16: at most twice the error of a single bfloat16 pass."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).bfloat16()
    batch = conversations(groups=16, size=4)
    advantages = torch.randn(64)
    truth = batch_gradient(copy.deepcopy(model).double(), batch, advantages, 10**6)
    error = {}
    for budget in (1, 10**6):
        found = batch_gradient(model, batch, advantages, budget)
        assert found.pop("micro_batches") == (64 if budget == 1 else 1)
        error[budget] = sum((found[name] - truth[name]).square().sum() for name in found).sqrt()
        error[budget] = float(error[budget] / sum(truth[name].square().sum() for name in found).sqrt())
    print(f"relative error of the gradient: 64 micro-batches {error[1]:.2e}, one pass {error[10**6]:.2e}")
    assert error[1] <= 2 * error[10**6]


def test_a_resumed_bfloat16_run_goes_on_identically(big, tmp_path):
    """Guards against masters that a checkpoint forgets: the third step after a resume equals the uninterrupted one."""
    ids = torch.arange(1, 21)[None] % 20

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

    runs = []
    for _ in range(2):
        model = load_policy(str(big), dtype="bfloat16", lora_rank=0).model
        runs.append((model, WideAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)))
    steps(*runs[0], 2)
    save_checkpoint(tmp_path / "ckpt_000002", *runs[0], {"step": 2})
    steps(*runs[1], 1)  # dirt that must vanish
    load_checkpoint(tmp_path / "ckpt_000002", *runs[1])
    for run in runs:
        steps(*run, 1)
    masters = [list(optimizer.rounded) for _, optimizer in runs]
    assert len(masters[0]) > 10 and all(torch.equal(a, b) for a, b in zip(*masters))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters()))
    assert any(not torch.equal(master, p.float()) for master, p in runs[0][1].rounded.items())


@pytest.mark.parametrize("tied", [False, True])
def test_sampling_and_scoring_share_float32_logits(tmp_path, tied):
    """Guards against logits rounded to bfloat16 on one side, and a tied embedding that is widened with the head."""
    config = GptOssConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
                          num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                          sliding_window=8, tie_word_embeddings=tied)
    model = load_policy(str(make_folder(tmp_path / "m", config)), dtype="bfloat16", lora_rank=0).model
    model = copy.deepcopy(model)  # a copy's head must use its own weight
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        ids = torch.arange(1, 21)[None]
        logits = model(input_ids=ids).logits[0]
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
        scored, _ = token_logps(hidden, model.lm_head.weight, ids[0], chunk=7)
    truth = hidden.double() @ model.lm_head.weight.double().T
    assert logits.dtype == torch.float32 and hidden.dtype == torch.bfloat16
    torch.testing.assert_close(logits.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored.double(), truth.log_softmax(-1)[range(20), ids[0]], rtol=1e-5, atol=1e-5)
    assert (logits.bfloat16().float() - logits).abs().max() > 1e-3, "nothing here is rounded by bfloat16"
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
