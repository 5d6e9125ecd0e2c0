"""GRPO: act several times on the same task, compare the siblings, make what did better than its siblings likelier.

No critic, no reward model, no KL by default, no second network. What PPO has and this has not: a value function,
GAE, a discount. The siblings of a group are the baseline.

| symbol (arXiv:2402.03300) | here | what it is |
|---|---|---|
| q, o_i | prompt, `Episode` | a task, and one of G conversations about it |
| G | `group_size` | conversations per task |
| r_i | `rewards` (P, G) | tau2's reward at the end of conversation i |
| A-hat_i | `advantages` (B,) | r_i against its siblings; every token of conversation i gets it |
| pi_theta, pi_old, pi_ref | `logp`, `old_logp`, `ref_logp` | log-probs: now, when the step began, of the frozen base |
| epsilon, beta, mu | `clip_low` / `clip_high`, `kl_coef`, `updates_per_step` | clip range, KL weight, updates per step |

Shapes: P tasks, G group, B episodes, W sampled tokens of the longest episode of a micro-batch, T slots of a row,
N sampled tokens, C hidden size, V vocabulary. A token counts if the policy sampled it (`response_mask` 1).
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm


def group_advantages(rewards: Tensor, valid: Tensor, divide_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """How much better an episode did than its siblings on the same task: the baseline that replaces a critic.

    Args: rewards (P, G) float; valid (P, G) bool, False where the world failed (environment or user fault), not the
        policy; divide_by_std False gives Dr. GRPO's centred reward (arXiv:2503.20783); eps, in units of the reward.
    Returns: (P, G). Invalid entries get 0 and touch neither mean nor deviation. A row of equal rewards, or with
        fewer than two valid entries, is exactly 0. [1, 0, 0, 0] -> [1.4997, -0.4999, -0.4999, -0.4999].
    Source: arXiv:2402.03300, section 4.1.2, with the n - 1 deviation of TRL (eps 1e-4) and verl (eps 1e-6).
    """
    valid = valid.bool()
    count = valid.sum(1, keepdim=True)                                                        # (P, 1)
    mean = rewards.where(valid, 0.0).sum(1, keepdim=True) / count.clamp(min=1)                # (P, 1)
    centred = (rewards - mean).where(valid, 0.0)                                              # (P, G)
    # Equal rewards are found by comparing them: their rounded mean may miss them by a bit, which eps would amplify.
    spread = rewards.where(valid, -math.inf).amax(1) > rewards.where(valid, math.inf).amin(1)
    centred = centred * spread.unsqueeze(1)
    if not divide_by_std:
        return centred
    return centred / ((centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt() + eps)


def grpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, kind: str = "grpo",
              clip_low: float = 0.2, clip_high: float = 0.2, episodes: int | None = None, tokens: int | None = None,
              max_response_tokens: int | None = None, ref_logp: Tensor | None = None, kl_coef: float = 0.0,
              rollout_logp: Tensor | None = None, tis_cap: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy gradient of one micro-batch, as its share of the whole step's loss: shares add up exactly.

    Args: logp, old_logp, ref_logp, rollout_logp, mask: (B, W); advantages (B,). kind: grpo (arXiv:2402.03300),
        dr_grpo (2503.20783), dapo (2503.14476: token mean and clip-higher; not its dynamic sampling, not its overlong
        shaping), gspo (2507.18071: one ratio an episode), cispo (2506.13585: ratio bounded above by 1 + clip_high
        and detached, so that no token loses its gradient). episodes, tokens: of the whole step after dropped groups
        (None: of this call). tis_cap: truncated importance sampling, weight min(pi_old / pi_rollout, tis_cap).
    Returns: the loss, and sums over tokens (divide by `tokens`): approx_kl, kl_ref, clipfrac_low/_high, tis_truncated.
    """
    mask, advantage = mask.bool(), advantages.unsqueeze(1)                                    # (B, W), (B, 1)
    own = mask.sum(1, keepdim=True).clamp(min=1)                                              # (B, 1)
    episodes, tokens = episodes or len(mask), tokens or int(mask.sum())
    logp = logp.where(mask, 0.0)  # where, not a product: whatever stands in a masked place, even NaN, cannot leak
    logratio = logp - old_logp.where(mask, 0.0)
    ratio = (logratio.sum(1, keepdim=True) / own if kind == "gspo" else logratio).exp()       # (B, 1) or (B, W)
    if kind == "cispo":
        per_token = -ratio.clamp(max=1 + clip_high).detach() * advantage * logp
    else:
        per_token = -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    low, high = (ratio < 1 - clip_low) & (advantage < 0), (ratio > 1 + clip_high) & (advantage > 0)
    sums = {"approx_kl": logratio.exp() - 1 - logratio, "clipfrac_high": high,
            "clipfrac_low": low & (kind != "cispo")}
    if tis_cap is not None and rollout_logp is not None:
        weight = (old_logp - rollout_logp).where(mask, 0.0).exp().detach()
        per_token = per_token * weight.clamp(max=tis_cap)
        sums["tis_truncated"] = weight > tis_cap
    if kl_coef:
        gap = (ref_logp - logp).where(mask, 0.0)
        sums["kl_ref"] = gap.exp() - 1 - gap  # k3: unbiased, never negative (joschu.net/blog/kl-approx.html)
        per_token = per_token + kl_coef * sums["kl_ref"]
    scale = {"grpo": 1 / (episodes * own), "gspo": 1 / (episodes * own), "dapo": 1 / tokens, "cispo": 1 / tokens,
             "dr_grpo": 1 / (episodes * (max_response_tokens or mask.shape[1]))}[kind]
    return (per_token * mask * scale).sum(), {k: (v.detach() * mask).sum() for k, v in sums.items()}


def update_policy(model, optimizer, batch: dict, advantages: Tensor, *, make_layout=None, loss: str = "grpo",
                  clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, ref_model=None,
                  temperature: float = 1.0, updates_per_step: int = 1, max_tokens_per_micro_batch: int = 16384,
                  max_grad_norm: float | None = 1.0, tis_cap: float | None = 2.0,
                  max_response_tokens: int | None = None, valid: Tensor | None = None, shared_prefix: bool = True,
                  progress: str | None = None) -> dict:
    """Learn from one batch: mu optimizer steps, each over all of it, gradients added up over micro-batches."""
    check_update(model, loss, kl_coef, ref_model, updates_per_step, max_response_tokens)
    rows, metrics = teaching_rows(batch, advantages, valid)
    if not rows:
        return metrics | {"skipped": "no group had anything to teach"}
    packs = make_packs(batch, rows, make_layout, shared_prefix, max_tokens_per_micro_batch, model.device)
    metrics["update_tokens"] = sum(pack.inputs["input_ids"].numel() for pack in packs)
    settings = {"kind": loss, "clip_low": clip_low, "clip_high": clip_high, "kl_coef": kl_coef, "tis_cap": tis_cap,
                "max_response_tokens": max_response_tokens, "episodes": len(rows), "tokens": metrics["trained_tokens"]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    updates, skipped, was_training = [], None, model.training
    model.train()  # gradient checkpointing is off in eval mode; dropout is the caller's to leave at 0
    try:
        for _ in range(updates_per_step):
            optimizer.zero_grad(set_to_none=True)
            sums: dict[str, Tensor] = {}
            for pack in tqdm(packs, desc=progress, leave=False, disable=progress is None):
                sums = learn_from(model, ref_model, pack, advantages, temperature, settings, sums)
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
            # A NaN would poison every weight and the optimizer's memory: such an update is not taken at all.
            skipped = None if norm.isfinite() else "non-finite gradient"
            skipped = skipped if sums["loss"].isfinite() else "non-finite loss"
            if skipped:
                break
            optimizer.step()
            updates.append(sums | {"grad_norm": norm})
    except (torch.OutOfMemoryError, MemoryError):
        if not updates:
            raise  # nothing has been stepped: the caller may halve max_tokens_per_micro_batch and call again
        skipped = "out of memory"
    finally:
        optimizer.zero_grad(set_to_none=True)
        model.train(was_training)
    metrics |= {"skipped": skipped, "skipped_updates": updates_per_step - len(updates)}
    return metrics | averages(updates, metrics["trained_tokens"])


# ---- Below: which episodes teach, micro-batches, log-probs in chunks ------------------------------------------------

LOSS_KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
UPDATE_METRICS = ("loss", "approx_kl", "kl_ref", "clipfrac_low", "clipfrac_high", "tis_truncated", "entropy",
                  "grad_norm", "logp_gap_mean", "logp_gap_max")


def check_update(model, kind: str, kl_coef: float, ref_model, updates_per_step: int, max_response_tokens) -> None:
    """Refuse by name, before any token is computed, what would otherwise be ignored or wrong without a word."""
    if kind not in LOSS_KINDS:
        raise ValueError(f"loss {kind!r} is not one of {', '.join(LOSS_KINDS)}")
    if updates_per_step < 1:
        raise ValueError(f"updates_per_step must be at least 1, not {updates_per_step}")
    if kind == "dr_grpo" and not max_response_tokens:
        raise ValueError("loss 'dr_grpo' divides by max_response_tokens: give it, the same for every step")
    if kl_coef and ref_model is None and not hasattr(model, "disable_adapter"):
        raise ValueError(f"kl_coef {kl_coef} needs a reference policy: train an adapter (its base is the reference) "
                         "or, with full weights, keep a frozen copy with --ref-copy")
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None or hasattr(head, "lora_A") or hasattr(head, "modules_to_save"):
        raise ValueError("log-probs are computed from the output head's weight alone: a head with a bias or an adapter "
                         "of its own is not supported")


def teaching_rows(batch: dict, advantages: Tensor, valid: Tensor | None) -> tuple[list[int], dict]:
    """Which episodes the step learns from: valid ones with a sampled token, in groups where not all advantages are 0.

    Args: batch as `rollout.to_batch` gives it; advantages (B,); valid (B,) bool, None for all.
    Returns: row numbers, and the step's metrics with every name present: None until known.
    """
    own = batch["response_mask"].sum(1).tolist()                                              # (B,)
    faulty = [False] * len(own) if valid is None else (~valid.bool()).tolist()
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(batch["uid"]):
        groups.setdefault(uid, []).append(row)
    teaching = [members for members in groups.values() if any(advantages[row] != 0 for row in members)]
    rows = sorted(row for members in teaching for row in members if own[row] and not faulty[row])
    return rows, dict.fromkeys(UPDATE_METRICS) | {
        "zero_variance_groups": len(groups) - len(teaching), "response_tokens": sum(own),
        "trained_tokens": sum(own[row] for row in rows), "update_tokens": 0, "skipped": None, "skipped_updates": 0}


@dataclass
class Pack:
    """One micro-batch: what the decoder is called with, and where the sampled tokens are."""
    inputs: dict                    # the decoder's keywords
    source: Tensor                  # (N,) int64: slot whose hidden state predicts sampled token n
    targets: Tensor                 # (N,) int64: the sampled tokens, episode by episode
    rows: Tensor                    # (b,) int64: the episodes, as rows of the batch
    mask: Tensor                    # (b, W) bool: the N tokens as a grid, each episode's flush left
    rollout_logp: Tensor            # (b, W) fp32: as recorded while sampling
    old_logp: Tensor | None = None  # (b, W): set by the first pass
    ref_logp: Tensor | None = None  # (b, W): set by the first pass when there is a KL term


def make_packs(batch: dict, rows: list[int], make_layout, shared_prefix: bool, budget: int, device) -> list[Pack]:
    """Cut the step into micro-batches of at most `budget` tokens; an episode longer than that goes alone.

    With `make_layout` (attention.pack_layout) a micro-batch is one row without padding, in which episodes with the
    same prompt share it: prompt 5, responses 3 and 2 -> 10 slots instead of 15. Without it, right-padded rows.
    What follows an episode's last sampled token teaches nothing and is cut off.
    """
    sampled = batch["response_mask"].bool()                                                   # (B, T)
    starts = dict(zip(rows, sampled[rows].int().argmax(1).tolist()))  # first sampled token = length of the prompt
    ends = {row: int(sampled[row].nonzero()[-1]) + 1 for row in rows}
    packs, members, total = [], {}, 0
    if make_layout is None:
        rows = sorted(rows, key=lambda row: -ends[row])  # neighbours of like length: little padding
    for row in rows:
        prompt = tuple(batch["input_ids"][row, :starts[row]].tolist()) if make_layout and shared_prefix else row
        if make_layout is None:
            cost = ends[next(iter(members), row)]  # a padded row is as long as the first of its micro-batch
        else:
            cost = ends[row] - starts[row] * (prompt in members)
        if members and total + cost > budget:
            packs.append(members)
            members, total, cost = {}, 0, ends[row]
        members.setdefault(prompt, []).append(row)
        total += cost
    packs.append(members)
    if make_layout is None:
        return [padded_pack(batch, [row for row in pack], max(ends[row] for row in pack), device) for pack in packs]
    return [packed_pack(batch, list(pack.values()), starts, ends, make_layout, device) for pack in packs]


def padded_pack(batch: dict, rows: list[int], length: int, device) -> Pack:
    """Right-padded rows, cut to the last sampled token of the longest."""
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = {name: batch[name][rows, :length].to(device) for name in names}                  # (b, T)
    slots = batch["response_mask"][rows, :length].bool().flatten().nonzero().squeeze(1)
    return finish_pack(batch, rows, inputs, slots - 1, device)


def packed_pack(batch: dict, groups: list[list[int]], starts: dict, ends: dict, make_layout, device) -> Pack:
    """One row: prompt, its responses, next prompt, ... A response's first token is predicted by the prompt's last."""
    ids, documents, source, at = [], [], [], 0
    for members in groups:
        start = starts[members[0]]
        lengths = tuple(ends[row] - start for row in members)
        documents.append((start, lengths) if len(members) > 1 else (start + lengths[0], ()))
        ids.append(batch["input_ids"][members[0], :start])
        after_prompt = at + start
        at = after_prompt
        for row, length in zip(members, lengths):
            ids.append(batch["input_ids"][row, start:start + length])
            place = batch["response_mask"][row, start:start + length].nonzero().squeeze(1)    # 0 = first of response
            source.append(torch.where(place == 0, after_prompt - 1, at + place - 1))
            at += length
    layout = make_layout(documents, device=device)
    inputs = {"input_ids": torch.cat(ids).unsqueeze(0).to(device), "position_ids": layout.position_ids,
              "sink_mask": layout}
    return finish_pack(batch, [row for members in groups for row in members], inputs, torch.cat(source), device)


def finish_pack(batch: dict, rows: list[int], inputs: dict, source: Tensor, device) -> Pack:
    """The part that both kinds of micro-batch have in common: targets, and their grid."""
    sampled = batch["response_mask"][rows].bool()                                             # (b, T)
    own = sampled.sum(1)                                                                      # (b,)
    mask = torch.arange(int(own.max())) < own.cpu().unsqueeze(1)                              # (b, W)
    mask = mask.to(sampled.device)
    rollout = torch.zeros(mask.shape, device=mask.device)
    rollout[mask] = batch["rollout_log_probs"][rows][sampled].float()
    return Pack(inputs, source.to(device), batch["input_ids"][rows][sampled].to(device),
                torch.tensor(rows, device=device), mask.to(device), rollout.to(device))


def pack_logps(model, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (b, W) of a micro-batch's sampled tokens, 0 where there is none, and the sum of their entropies."""
    hidden = model.get_decoder()(**pack.inputs, use_cache=False).last_hidden_state            # (b, T, C)
    hidden = hidden.flatten(0, 1).index_select(0, pack.source)                                # (N, C)
    logps, entropy = token_logps(hidden, model.get_output_embeddings().weight, pack.targets, temperature=temperature)
    return logps.new_zeros(pack.mask.shape).masked_scatter(pack.mask, logps), entropy.sum()


def learn_from(model, ref_model, pack: Pack, advantages: Tensor, temperature: float, settings: dict, sums: dict):
    """Add one micro-batch's gradient to the parameters and its sums to the step's; returns the new sums."""
    first = pack.old_logp is None
    if first and settings["kl_coef"]:
        with torch.no_grad():
            if ref_model is not None:
                pack.ref_logp = pack_logps(ref_model, pack, temperature)[0]
            else:
                with model.disable_adapter():
                    pack.ref_logp = pack_logps(model, pack, temperature)[0]
    logp, entropy = pack_logps(model, pack, temperature)
    if first:  # no weight has moved yet, so these are the log-probs under pi_old: no pass of their own
        pack.old_logp = logp.detach()
    part, new = grpo_loss(logp, pack.old_logp, advantages.to(logp.device)[pack.rows], pack.mask,
                          ref_logp=pack.ref_logp, rollout_logp=pack.rollout_logp, **settings)
    part.backward()
    gap = (pack.old_logp - pack.rollout_logp).abs()[pack.mask]
    new |= {"loss": part.detach(), "entropy": entropy, "logp_gap_mean": gap.sum()}
    added = {name: value + sums.get(name, 0.0) for name, value in new.items()}
    return added | {"logp_gap_max": torch.maximum(gap.max(), sums.get("logp_gap_max", gap.max()))}


def averages(updates: list[dict], tokens: int) -> dict[str, float]:
    """The step's metrics: means over its tokens, and over its updates where those differ.

    entropy, tis_truncated and the gap belong to the policy that sampled, so they come from the first update;
    loss and grad_norm (before clipping) are each update's own and are averaged; clip fractions, approx_kl and kl_ref
    are averaged over tokens and updates (approx_kl of a single update is 0: nothing has moved when it is measured).
    """
    whole, of_first = ("loss", "grad_norm", "logp_gap_max"), ("entropy", "tis_truncated", "logp_gap_mean", "logp_gap_max")
    metrics = {}
    for name in updates[0] if updates else ():
        values = [float(update[name]) for update in (updates[:1] if name in of_first else updates)]
        metrics[name] = sum(values) / len(values) / (1 if name in whole else tokens)
    return metrics


class ChunkedLogps(torch.autograd.Function):
    """log softmax(hidden @ head.T / temperature)[target], a few tokens at a time.

    The gradient of a token's log-prob with respect to its own hidden state needs no other token, so the forward pass
    takes it along, chunk by chunk, while the logits are there: (N, C) is kept, (N, V) never exists. A head that is
    trained needs the incoming gradient first: its logits are computed a second time in the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, temperature, chunk, with_grad):
        logps, entropy, slope, lses = [], [], torch.empty_like(hidden) if with_grad else None, []
        for i in range(0, len(hidden), chunk):
            shifted, top = chunk_logits(hidden[i:i + chunk], head, temperature)               # (n, V), (n, 1)
            at = targets[i:i + chunk].unsqueeze(1)                                            # (n, 1)
            target = shifted.gather(1, at)
            weights = shifted.exp()
            total = weights.sum(1, keepdim=True)                                              # (n, 1)
            mean = torch.linalg.vecdot(weights, shifted).unsqueeze(1) / total  # a dot product: no third (n, V)
            logps.append(target - total.log())
            entropy.append(total.log() - mean)
            lses.append(top + total.log())
            if with_grad:  # d logp / d hidden = (onehot - softmax) @ head / temperature
                weights.scatter_add_(1, at, -total)
                slope[i:i + chunk] = (weights.to(head.dtype) @ head) / (-temperature * total)
        logps, entropy, lses = torch.cat(logps).squeeze(1), torch.cat(entropy).squeeze(1), torch.cat(lses)
        ctx.save_for_backward(hidden, head, targets, slope, lses)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, head, targets, slope, lses = ctx.saved_tensors
        grad = grad.unsqueeze(1)                                                              # (N, 1)
        grad_hidden = (slope * grad).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None  # a frozen head allocates nothing
        for i in range(0, len(hidden), ctx.chunk) if ctx.needs_input_grad[1] else ():
            part = slice(i, i + ctx.chunk)
            shifted, top = chunk_logits(hidden[part], head, ctx.temperature)
            probs = shifted.sub_(lses[part] - top).exp_()
            probs.scatter_add_(1, targets[part].unsqueeze(1), torch.full_like(lses[part], -1.0))
            scaled = (hidden[part] * (grad[part] / -ctx.temperature)).to(head.dtype)
            grad_head.addmm_(probs.to(head.dtype).T, scaled)
        return grad_hidden, grad_head, None, None, None, None


def chunk_logits(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits (n, V) less their row's maximum, and that maximum (n, 1): in fp32 at least, rounded as the model's own."""
    logits = hidden.to(head.dtype) @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits /= temperature
    top = logits.amax(1, keepdim=True)
    return logits.sub_(top), top


def token_logps(hidden: Tensor, head_weight: Tensor, targets: Tensor, *, temperature: float = 1.0,
                chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token under softmax(hidden @ head_weight.T / temperature), in the memory of a few.

    Args: hidden (N, C); head_weight (V, C); targets (N,) int64; chunk: tokens at a time, None for as many as keep
        (chunk, V) at 32 MiB in fp32 on a CPU, 128 MiB elsewhere.
    Returns: log-probs (N,) and entropies in nats (N,), fp32; the entropies carry no gradient.
    """
    if chunk is None:
        chunk = max(1, (2 ** 23 if hidden.device.type == "cpu" else 2 ** 25) // len(head_weight))
    with_grad = torch.is_grad_enabled() and hidden.requires_grad
    return ChunkedLogps.apply(hidden, head_weight, targets, temperature, chunk, with_grad)
