"""GRPO: act several times on the same task, compare the siblings, make what did better likelier.
Deleted from PPO: the value function, GAE, the discount. The siblings of a group are the baseline.

| symbol (arXiv:2402.03300) | here | what it is |
|---|---|---|
| o_i, G | `Episode`, `group_size` | one of G conversations about a task |
| r_i, A-hat_i | `rewards` (P, G), `advantages` (B,) | its reward; the same against its siblings' |
| pi_theta, pi_old, pi_ref | `logp`, `old_logp`, `ref_logp` | now, before the step, the frozen base |
| epsilon, beta, mu | `clip_low/_high`, `kl_coef`, `updates_per_step` | trust region, KL weight, updates |

Shapes: P tasks, G group, B episodes, b of them in a micro-batch, W sampled tokens of its longest, N of all,
T slots, C hidden size, V vocabulary. Only sampled tokens (`response_mask` 1) enter the loss and the metrics.
"""
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm


def group_advantages(rewards: Tensor, valid: Tensor, divide_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """How much better an episode did than its siblings on the task: this replaces a critic (section 4.1.2).

    Args: rewards (P, G) float; valid (P, G) bool, False where the world failed, not the policy; divide_by_std
        False: Dr. GRPO's centred reward; eps in units of the reward (TRL 1e-4, verl 1e-6; both take n - 1).
    Returns: (P, G). Invalid entries get 0 and touch neither mean nor deviation. A row of equal rewards, or of
        fewer than two valid ones, is exactly 0. [1, 0, 0, 0] -> [1.4997, -0.4999, -0.4999, -0.4999].
    """
    valid = valid.bool()
    count = valid.sum(1, keepdim=True)  # (P, 1)
    mean = rewards.where(valid, 0.0).sum(1, keepdim=True) / count.clamp(min=1)  # (P, 1)
    # Equal rewards are found by comparing: a rounded mean may miss them by a bit, which eps would amplify.
    differ = rewards.where(valid, -math.inf).amax(1) > rewards.where(valid, math.inf).amin(1)  # (P,)
    centred = (rewards - mean).where(valid & differ.unsqueeze(1), 0.0)  # (P, G)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # (P, 1)
    return centred / (std + eps) if divide_by_std else centred


def grpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, kind: str = "grpo",
              clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0., episodes: int | None = None,
              tokens: int | None = None, max_response_tokens: int | None = None, tis_cap: float | None = None,
              ref_logp: Tensor | None = None, rollout_logp: Tensor | None = None) -> tuple[Tensor, dict]:
    """The clipped policy gradient of a micro-batch, as its share of the step's loss: shares add up exactly.

    Args: mask and all log-probs (b, W); advantages (b,). episodes, tokens: of the whole step after dropped
        groups (None: of this call). tis_cap: the policy term times min(pi_old / pi_rollout, tis_cap). kind:
        grpo; dr_grpo (arXiv:2503.20783); dapo (2503.14476: token mean, clip-higher; no dynamic sampling or
        overlong shaping); gspo (2507.18071: one ratio an episode); cispo (2506.13585: the ratio is a mere
        weight, at most 1 + clip_high, so that no token loses its gradient).
    Returns: loss; sums over tokens: approx_kl, clipfrac_low, clipfrac_high, if asked kl_ref, tis_truncated.
    """
    mask, advantage = mask.bool(), advantages.unsqueeze(1)  # (b, W), (b, 1)
    own = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    episodes, tokens = episodes or len(mask), tokens or int(mask.sum())
    logp = logp.where(mask, 0.0)  # where, not a product: not even a NaN in a masked place can leak
    logratio = logp - old_logp.where(mask, 0.0)  # (b, W)
    ratio = (logratio.sum(1, keepdim=True) / own if kind == "gspo" else logratio).exp()  # (b, 1) or (b, W)
    if kind == "cispo":
        per_token = -ratio.clamp(max=1 + clip_high).detach() * advantage * logp
    else:
        per_token = -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    low, high = (ratio < 1 - clip_low) & (advantage < 0), (ratio > 1 + clip_high) & (advantage > 0)
    sums = {"approx_kl": logratio.exp() - 1 - logratio,  # k3: unbiased, never negative
            "clipfrac_low": low & (kind != "cispo"), "clipfrac_high": high}
    if tis_cap is not None and rollout_logp is not None:  # truncated importance sampling
        weight = (old_logp - rollout_logp).where(mask, 0.0).exp().detach()
        per_token, sums["tis_truncated"] = per_token * weight.clamp(max=tis_cap), weight > tis_cap
    if kl_coef:
        gap = (ref_logp - logp).where(mask, 0.0)
        sums["kl_ref"] = gap.exp() - 1 - gap  # k3 again
        per_token = per_token + kl_coef * sums["kl_ref"]
    scale = {"grpo": 1 / (episodes * own), "gspo": 1 / (episodes * own), "dapo": 1 / tokens,
             "cispo": 1 / tokens, "dr_grpo": 1 / (episodes * (max_response_tokens or mask.shape[1]))}[kind]
    return (per_token * mask * scale).sum(), {k: (v.detach() * mask).sum() for k, v in sums.items()}


def update_policy(model, optimizer, batch: dict, advantages: Tensor, *, make_layout=None, loss: str = "grpo",
                  clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, ref_model=None,
                  temperature: float = 1.0, updates_per_step: int = 1, valid: Tensor | None = None,
                  max_tokens_per_micro_batch: int = 16384, max_response_tokens: int | None = None,
                  max_grad_norm: float | None = 1.0, tis_cap: float | None = 2.0, shared_prefix: bool = True,
                  progress: str | None = None) -> dict:
    """Learn from one batch: mu optimizer steps over all of it, each gradient summed over micro-batches.

    Args: model in train mode if it is to checkpoint; batch of `rollout.to_batch`; advantages, valid (B,);
        make_layout `attention.pack_layout`, None: padded rows; ref_model None: the base under the adapter.
    Returns: metrics, named as in report.METRICS. `skipped` says why an update was not taken.
    Raises: out of memory, with nothing stepped and no gradient left: call again with half the tokens.
    """
    check_update(model, loss, kl_coef, ref_model, max_response_tokens)
    rows, metrics = teaching_rows(batch, advantages, valid)
    packs = make_packs(batch, rows, make_layout, shared_prefix, max_tokens_per_micro_batch, model.device)
    share = partial(grpo_loss, kind=loss, clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef,
                    tis_cap=tis_cap, max_response_tokens=max_response_tokens, episodes=len(rows),
                    tokens=metrics["trained_tokens"])
    updates, parameters = [], [p for p in model.parameters() if p.requires_grad]
    try:
        add_reference(packs if kl_coef else [], model, ref_model, temperature)
        for _ in range(updates_per_step if packs else 0):
            optimizer.zero_grad(set_to_none=True)
            sums = Counter()
            for pack in tqdm(packs, desc=progress, leave=False, disable=progress is None):
                sums.update(learn_from(model, pack, advantages, temperature, share))
            sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
            if broken := [name for name in ("loss", "grad_norm") if not sums[name].isfinite()]:
                metrics["skipped"] = f"{broken[0]} is not finite"  # one NaN would poison every weight
                break
            optimizer.step()
            updates.append(sums)
    except (torch.OutOfMemoryError, MemoryError):
        if not updates:
            raise
        metrics["skipped"] = "out of memory"
    finally:
        optimizer.zero_grad(set_to_none=True)
    return metrics | averages(packs, updates, updates_per_step)


# ---- Below: which episodes teach, micro-batches, log-probs in chunks ----------------------------------

def check_update(model, kind: str, kl_coef: float, ref_model, max_response_tokens: int | None) -> None:
    """Refuse by name, before any token is computed, what would be ignored or wrong without a word."""
    if kind not in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        raise ValueError(f"loss {kind!r} is not one of grpo, dr_grpo, dapo, gspo, cispo")
    if kind == "dr_grpo" and not max_response_tokens:
        raise ValueError("loss 'dr_grpo' divides by max_response_tokens: give it, the same in every step")
    if kl_coef and ref_model is None and not hasattr(model, "disable_adapter"):
        raise ValueError(f"kl_coef {kl_coef} needs a reference: an adapter's base, or --ref-copy")
    head = model.get_output_embeddings()
    if any(getattr(head, name, None) is not None for name in ("bias", "lora_A", "modules_to_save")):
        raise ValueError("log-probs use the output head's weight alone; this head has a bias or an adapter")


def teaching_rows(batch: dict, advantages: Tensor, valid: Tensor | None) -> tuple[list[int], dict]:
    """Rows that teach (valid, with sampled tokens, group not all of advantage 0); metrics to fill in."""
    own = batch["response_mask"].sum(1).tolist()  # sampled tokens of each of the B episodes
    fit = [tokens > 0 and (valid is None or bool(valid[row])) for row, tokens in enumerate(own)]
    teaching = {uid for uid, advantage in zip(batch["uid"], advantages.tolist()) if advantage != 0}
    rows = [row for row, uid in enumerate(batch["uid"]) if uid in teaching and fit[row]]
    unknown = ("loss grad_norm approx_kl kl_ref clipfrac_low clipfrac_high tis_truncated entropy "
               "logp_gap_mean logp_gap_max").split()  # None until an update has been taken
    return rows, dict.fromkeys(unknown) | {
        "trained_episodes": len(rows), "skipped": None if rows else "no group had anything to teach",
        "trained_tokens": sum(own[r] for r in rows), "zero_variance_groups": len({*batch["uid"]} - teaching)}


@dataclass
class Pack:
    """One micro-batch: what the decoder is called with, and where the sampled tokens are."""
    inputs: dict  # the decoder's keywords
    source: Tensor  # (N,) int64: slot whose hidden state predicts sampled token n
    targets: Tensor  # (N,) int64: the sampled tokens, episode by episode
    rows: Tensor  # (b,) int64: the episodes, as rows of the batch
    mask: Tensor  # (b, W) bool: the N tokens as a grid, each episode's flush left
    rollout_logp: Tensor  # (b, W) fp32: as recorded while sampling
    old_logp: Tensor | None = None  # (b, W): set by the first pass
    ref_logp: Tensor | None = None  # (b, W): only if there is a KL term


def make_packs(batch: dict, rows: list, make_layout, shared_prefix: bool, budget: int, device) -> list[Pack]:
    """Cut the step into micro-batches of at most `budget` slots; an episode longer than that goes alone.

    All before its first sampled token is its prompt; what follows its last one teaches nothing: cut off."""
    places = {row: batch["response_mask"][row].cpu().nonzero().squeeze(1) for row in rows}
    packs, total, cost = [{}], 0, 0
    for row in rows if make_layout else sorted(rows, key=lambda row: -places[row][-1]):
        start, end = int(places[row][0]), int(places[row][-1]) + 1
        prompt = tuple(batch["input_ids"][row, :start].tolist()) if make_layout and shared_prefix else row
        # A packed row adds what is not there yet; a padded one is as long as the first, the longest.
        cost = end - start * (prompt in packs[-1]) if make_layout else max(cost, end)
        if packs[-1] and total + cost > budget:
            packs, total, cost = [*packs, {}], 0, end
        packs[-1].setdefault(prompt, []).append(row)
        total += cost
    return [make_pack(batch, list(pack.values()), places, make_layout, device) for pack in packs if pack]


def make_pack(batch: dict, groups: list[list[int]], places: dict, make_layout, device) -> Pack:
    """One micro-batch of the sampled tokens at `places`; the episodes of a group have the same prompt.

    With a layout it is one row without padding: prompt, its responses, next prompt, ... Prompt 5, responses
    3 and 2: 10 slots, slot 4 predicts the first token of both responses. Without one, right-padded rows."""
    rows = [row for members in groups for row in members]
    longest, documents, ids, at = max(int(places[row][-1]) for row in rows) + 1, [], [], 0
    slots = {row: torch.arange(i * longest, (i + 1) * longest) for i, row in enumerate(rows)}  # of its tokens
    for members in groups if make_layout else ():
        start = int(places[members[0]][0])
        lengths = tuple(int(places[row][-1]) + 1 - start for row in members)
        documents.append((start, lengths) if len(members) > 1 else (start + lengths[0], ()))
        ids.append(batch["input_ids"][members[0], :start])
        prompt, at = torch.arange(at, at + start), at + start
        for row, length in zip(members, lengths):
            ids.append(batch["input_ids"][row, start:start + length])
            slots[row], at = torch.cat([prompt, torch.arange(at, at + length)]), at + length
    inputs = {k: batch[k][rows, :longest].to(device) for k in ("input_ids", "attention_mask", "position_ids")}
    if make_layout:
        layout = make_layout(documents, device=device)
        inputs = {"input_ids": torch.cat(ids)[None].to(device), "position_ids": layout.position_ids,
                  "sink_mask": layout}
    source = torch.cat([slots[row][places[row] - 1] for row in rows])
    targets = torch.cat([batch["input_ids"][row, places[row]] for row in rows])
    rollout = [batch["rollout_log_probs"][row, places[row]].float() for row in rows]
    grid, rollout = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
                     for x in ([torch.ones_like(x).bool() for x in rollout], rollout))
    return Pack(inputs, *(x.to(device) for x in (source, targets, torch.tensor(rows), grid, rollout)))


def pack_logps(model, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (b, W) of a micro-batch's sampled tokens, 0 elsewhere, and the sum of their entropies."""
    h = model.get_decoder()(**pack.inputs, use_cache=False).last_hidden_state  # (rows, T, C)
    h = h.flatten(0, 1).index_select(0, pack.source)  # (N, C)
    lp, entropy = token_logps(h, model.get_output_embeddings().weight, pack.targets, temperature=temperature)
    return lp.new_zeros(pack.mask.shape).masked_scatter(pack.mask, lp), entropy.sum()


def add_reference(packs: list[Pack], model, ref_model, temperature: float) -> None:
    """Set the log-probs under the frozen reference: ref_model, or else the base under the adapter."""
    for pack in packs:
        with torch.no_grad(), nullcontext() if ref_model is not None else model.disable_adapter():
            pack.ref_logp = pack_logps(model if ref_model is None else ref_model, pack, temperature)[0]


def learn_from(model, pack: Pack, advantages: Tensor, temperature: float, share) -> dict[str, Tensor]:
    """Add one micro-batch's gradient to the parameters'; returns its share of the step's loss and metrics."""
    logp, entropy = pack_logps(model, pack, temperature)
    if pack.old_logp is None:  # no weight has moved yet: these are the log-probs under pi_old, no extra pass
        pack.old_logp = logp.detach()
    loss, sums = share(logp, pack.old_logp, advantages.to(logp.device)[pack.rows], pack.mask,
                       ref_logp=pack.ref_logp, rollout_logp=pack.rollout_logp)
    loss.backward()
    return sums | {"loss": loss.detach(), "entropy": entropy}


def averages(packs: list[Pack], updates: list[dict], wanted: int) -> dict[str, float]:
    """The step's metrics: means over tokens and updates (approx_kl of one update is 0: nothing moved yet)."""
    metrics = {"updates": len(updates), "micro_batches": len(packs),
               "skipped_updates": wanted - len(updates) if packs else 0}
    if updates:
        gap = torch.cat([(pack.old_logp - pack.rollout_logp).abs()[pack.mask] for pack in packs])  # (N,)
        metrics |= {"logp_gap_mean": gap.mean().item(), "logp_gap_max": gap.max().item()}
        for name in updates[0]:
            count = len(updates) * (1 if name in ("loss", "grad_norm") else len(gap))
            metrics[name] = sum(float(update[name]) for update in updates) / count
    return metrics


class ChunkedLogps(torch.autograd.Function):
    """See token_logps. A log-prob's slope in its own hidden state needs no other token, so the forward pass
    takes it along, (N, C). A trained head needs them all: for it the backward pass computes logits again."""
    @staticmethod
    def forward(ctx, hidden, head, targets, temperature, chunk, with_grad):
        terms, slope = [], torch.empty_like(hidden) if with_grad else None  # slope (N, C)
        for part in (slice(i, i + chunk) for i in range(0, len(hidden), chunk)):
            logp, entropy, excess, scale = chunk_terms(hidden[part], head, targets[part], temperature)
            terms.append(torch.cat([logp, entropy], 1))
            if with_grad:
                slope[part] = wide_mm(excess, head) / scale
        ctx.save_for_backward(hidden, head, targets, slope)
        ctx.temperature, ctx.chunk = temperature, chunk
        logps, entropies = (x.clone() for x in torch.cat(terms).T)  # (N,), (N,)
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, head, targets, slope = ctx.saved_tensors
        grad, grad_head, rows = grad.unsqueeze(1), None, 0
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))  # (V, C)
            rows = len(hidden)
        for part in (slice(i, i + ctx.chunk) for i in range(0, rows, ctx.chunk)):
            _, _, excess, scale = chunk_terms(hidden[part], head, targets[part], ctx.temperature)
            add_product(grad_head, excess.T, (hidden[part] * grad[part] / scale).to(head.dtype))
        return slope if slope is None else (slope * grad).to(slope.dtype), grad_head, None, None, None, None


def chunk_terms(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-prob, entropy (n, 1); excess (n, V) / scale (n, 1) is d log-prob / d logit. At least fp32."""
    targets = targets.unsqueeze(1)
    logits = wide_mm(hidden.to(head.dtype), head.T).div_(temperature)
    logits -= logits.amax(1, keepdim=True)
    weights = logits.exp()
    total = weights.sum(1, keepdim=True)
    logp = logits.gather(1, targets) - total.log()
    entropy = total.log() - torch.linalg.vecdot(weights, logits).unsqueeze(1) / total  # no third (n, V)
    return logp, entropy, weights.scatter_add_(1, targets, -total), -temperature * total


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a (n, k) @ b (k, m) without rounding the result to b's dtype: at least float32, of exact products.

    A logit of 43 in bfloat16 is a multiple of 0.25; float32 logits from the same operands cost no more on a
    GPU, whose kernels sum in float32 anyway. A CPU has none that does: b is widened, some columns at a time.
    """
    wide = torch.promote_types(b.dtype, torch.float32)
    if b.dtype == wide:
        return a.to(wide) @ b
    if b.is_cuda:
        return torch.mm(a.to(b.dtype), b, out_dtype=wide)
    a = a.to(wide)
    columns = max(1, 2 ** 24 // len(b))  # 64 MiB of them
    return torch.cat([a @ part.to(wide) for part in b.split(columns, dim=1)], dim=1)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (n, m) += a (n, k) @ b (k, m), in total's dtype; for a narrow b 64 MiB of products at a time."""
    if b.dtype == total.dtype:
        total.addmm_(a, b)
        return
    rows = max(1, 2 ** 24 // b.shape[1])
    for part, factors in zip(total.split(rows), a.split(rows)):
        part += wide_mm(factors, b)


def token_logps(hidden: Tensor, head_weight: Tensor, targets: Tensor, *, temperature: float = 1.0,
                chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(hidden @ head_weight.T / temperature), in the memory of a few.

    Args: hidden (N, C); head_weight (V, C); targets (N,) int64; chunk: tokens at a time, None: 32 or 128 MiB.
    Returns: log-probs (N,) and entropies in nats (N,), fp32; the entropies carry no gradient.
    """
    chunk = chunk or max(1, (2 ** 23 if hidden.device.type == "cpu" else 2 ** 25) // len(head_weight))
    with_grad = torch.is_grad_enabled() and hidden.requires_grad
    return ChunkedLogps.apply(hidden, head_weight, targets, temperature, chunk, with_grad)


class WideAdamW(torch.optim.AdamW):
    """AdamW that sums gradients and updates in float32, whatever dtype the model computes in.

    A bfloat16 weight near 0.02 lies on a grid of 2**-13 = 1.2e-4: an update of 2e-5 would round away, every
    time. So the optimizer's own parameters are float32 masters, and the model's are their rounded values.
    Parameters that are float32 already (adapters, sinks) are handed to torch's AdamW as they are.
    """

    def __init__(self, parameters, lr: float):
        self.rounded = {}  # master -> the model's parameter
        held = []
        for parameter in parameters:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if parameter.dtype == wide or not parameter.requires_grad:
                held.append(parameter)
                continue
            parameter.grad_dtype = wide  # autograd adds micro-batches up in it
            master = torch.nn.Parameter(parameter.detach().to(wide))
            self.rounded[master] = parameter
            held.append(master)
        super().__init__(held, lr=lr, weight_decay=0.0)

    def step(self, closure=None):
        for master, parameter in self.rounded.items():
            master.grad = parameter.grad
        super().step(closure)
        for master, parameter in self.rounded.items():
            parameter.data.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.rounded.values():
            parameter.grad = None
