"""Many conversations at once: the policy acts, tools and customers answer, every context token is computed once.

Dimension key: P tasks, G group, B rows, T new tokens, S cached slots, V vocabulary, Hk key heads, D head dim.

`generate_turns` is the one generation loop (policy and policy-played customer alike), `collect` drives P x G
conversations through it in lockstep rounds, `to_batch` lays them out. Why the sampled policy is the scored policy:
- A row's cached keys are one block of real tokens, flush right whenever it is used, and new tokens are padded on the
  right: slot distance is token distance, so a sliding window sees what it sees in training. Every layer keeps its
  full length: one that evicts would drop a slow row's keys while a fast row generates.
- A LogitsProcessor draws the token (Gumbel-argmax, one random stream per episode), records its log-prob under the
  very distribution it was drawn from, and forces it. The model's own generation_config takes no part.
"""
import gc
import hashlib
import json
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from key_cache import Held, Piece, TurnCache, cache_for_turn, cached_slots, cached_tokens
from key_cache import key_bytes, move_together, prefill
from machine import free_bytes, out_of_memory

MEMORY_SHARE = 0.8  # of what is free goes to rows; the rest is for activations of new tokens and the allocator's gaps
LOGIT_COPIES = 6    # float32 vectors of V that a row takes while its token is drawn


@dataclass
class Episode:
    """One conversation. `response_mask` is 1 exactly on the tokens that the policy sampled, stop tokens included."""
    task_id: str
    uid: str                        # the group: f"{step}/{task_id}"
    sibling: int
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)  # nats at the sampling temperature; observed: 0.0
    reward: float = 0.0
    outcome: str = ""
    messages: list[dict] = field(default_factory=list)
    turns: int = 0                  # of the policy
    fault: str | None = None
    reward_info: dict | None = None
    seed: int | None = None         # of the environment: siblings share it

    @property
    def valid(self) -> bool:
        return self.outcome not in ("user_error", "env_error")  # nobody's merit: no reward, out of the group


@dataclass(eq=False)
class Row:
    """One append-only token sequence. The same `key` draws the same noise in any batch, in any order."""
    ids: list[int]           # starts as []: `hear` brings the prompt
    key: str = ""
    room: int = sys.maxsize  # tokens; ids never grow beyond it
    mask: list[int] = field(default_factory=list)         # beside ids: 1 = sampled
    log_probs: list[float] = field(default_factory=list)  # beside ids: nats, 0.0 on observed tokens
    sampled: list[int] = field(default_factory=list)      # this turn
    done: bool = False       # the turn is over: stop token, length limit or no room
    noise: tuple[int, Tensor] | None = None

    def hear(self, ids: list[int]) -> None:
        """Append observed tokens; a new turn begins."""
        self.add(ids, 0, [0.0] * len(ids))
        self.sampled, self.done = [], False

    def add(self, ids: list[int], sampled: int, log_probs: list[float]) -> None:
        self.ids, self.log_probs = self.ids + ids, self.log_probs + log_probs
        self.mask = self.mask + [sampled] * len(ids)

    def gumbel(self, index: int, vocab: int, device: torch.device) -> Tensor:
        """(V,) noise for the index-th token of this row; drawn in blocks, each seeded by (key, block number)."""
        block, offset = divmod(index, size := max(1, 65536 // vocab))
        if self.noise is None or self.noise[0] != block:
            generator = torch.Generator(device).manual_seed(stable_seed(self.key, block))
            draw = torch.empty(size, vocab, device=device).exponential_(generator=generator)
            self.noise = (block, draw.clamp_min_(1e-10).log_().neg_())  # a draw of 0 would force its token
        return self.noise[1][offset]


def stable_seed(*parts) -> int:
    """63-bit seed that depends only on the parts' text, so it survives a restart (Python's hash() does not)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


class DrawAndRecord(LogitsProcessor):
    """Draws each row's next token, notes its log-prob and forces it on the caller's argmax; says whose turn is over."""

    def __init__(self, rows: list[Row], temperature: float, pause_below: float, stop_ids: Tensor, budget: Tensor):
        self.rows, self.temperature, self.pause_below = rows, temperature, pause_below
        self.stop_ids, self.budget, self.ended = stop_ids, budget, torch.zeros_like(budget, dtype=torch.bool)  # (B,)
        self.log_probs: list[Tensor] = []             # (B,) a step
        self.drawn = [sum(row.mask) for row in rows]  # tokens sampled before this call

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = keyed = scores / (self.temperature or 1.0)  # (B, V) fp32
        if self.temperature > 0:
            keyed = logits + torch.stack([row.gumbel(n + len(self.log_probs), scores.shape[1], scores.device)
                                          for row, n in zip(self.rows, self.drawn)])
        token = keyed.argmax(-1, keepdim=True)  # (B, 1)
        self.log_probs.append(logits.gather(1, token).squeeze(1) - logits.logsumexp(-1))
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def over(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        """(B,) bool, a stopping criterion: stop token, spent budget, or too few rows that still write."""
        self.ended = (self.ended | torch.isin(input_ids[:, -1], self.stop_ids)
                      | (self.budget <= len(self.log_probs)))
        return self.ended | ((~self.ended).sum() < self.pause_below * len(self.rows))


@torch.no_grad()
def generate_turns(model, rows: list[Row], *, stop_ids: list[int], pad_id: int, max_new_tokens: int,
                   temperature: float, cache: TurnCache | None = None, pause_below: float = 0.0,
                   keep_others: bool = False) -> TurnCache:
    """Sample until each row's turn is over; the rows change: `ids`, `sampled`, `log_probs`, `done`.

    Args:
        rows: none done, each with at least one token that is not in the cache and room for another.
        max_new_tokens: of one turn. temperature: 0 is greedy (its log-probs are those of temperature 1).
        cache: of the call before; rows that are not passed any more leave it, unless `keep_others`.
            After an exception it holds nothing: the next call puts whole rows through again.
        pause_below: return early once less than this share of the rows still writes; those carry on next time.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # a LoRA stays active in there
    cache = TurnCache() if cache is None else cache
    was_training, own_config, device = causal.training, causal.generation_config, next(causal.parameters()).device
    budget = [min(max_new_tokens - len(r.sampled), r.room - len(r.ids)) for r in rows]
    if min(budget) < 1:
        raise ValueError(f"every row needs room for one more token, got {budget}")
    stops, limits = torch.tensor(stop_ids, device=device), torch.tensor(budget, device=device)
    draw = DrawAndRecord(rows, temperature, pause_below, stops, limits)
    held, cache.held = cache.held, {}  # whatever fails below, no half moved keys are used again
    here = {id(row) for row in rows}
    held = move_together({key: h for key, h in held.items() if keep_others or key in here})
    plain = GenerationConfig(do_sample=False, max_new_tokens=max(budget), pad_token_id=pad_id, use_cache=True)
    causal.eval()
    causal.generation_config = GenerationConfig()  # generate() fills unset fields from it: top-k, penalties
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*past_key_values.*")  # 5.24 renames it, 5.17 knows no other
            pieces = prefill(causal.base_model, rows, pad_id, held, cache.counts)
            others = {key: h for key, h in held.items() if key not in here}
            lengths = [cached_tokens(row) for row in pieces]
            slots = max(lengths)
            past = cache_for_turn(pieces, others, spare=min(cache.room, max(budget)))
            del pieces, held
            mask = torch.tensor([[0] * (slots - n) + [1] * (n + 1) for n in lengths], device=device)  # (B, S + 1)
            out = causal.generate(torch.tensor([r.ids[-1:] for r in rows], device=device), attention_mask=mask,
                                  past_key_values=past, generation_config=plain,
                                  logits_processor=LogitsProcessorList([draw]),
                                  stopping_criteria=StoppingCriteriaList([draw.over]))
    finally:
        causal.generation_config = own_config
        causal.train(was_training)
    for i, (row, new, logp) in enumerate(zip(rows, out[:, 1:].tolist(), torch.stack(draw.log_probs, 1).tolist())):
        kept = next((j + 1 for j, token in enumerate(new[:budget[i]]) if token in stop_ids), min(budget[i], len(new)))
        row.done = new[kept - 1] in stop_ids or kept == budget[i]
        row.sampled = row.sampled + new[:kept]
        row.add(new[:kept], 1, logp[:kept])
        others[id(row)] = Held((Piece(past, i, slots - lengths[i], len(row.ids) - 1),), row)
        cache.counts.update(tokens_forwarded=kept, sampled_tokens=kept, slots_forwarded=len(new),
                            decode_slots=len(new), rounds=int(i == 0))
    cache.held, cache.room = others, len(draw.log_probs)
    return cache


@dataclass
class Talk:
    """One running conversation: its environment, the policy's row, and the episode that is being written."""
    episode: Episode
    env: object = None
    row: Row | None = None

    def guard(self, outcome: str, call, *args):
        """The one boundary where the world's exceptions are caught: this episode becomes invalid, the rest go on."""
        try:
            return call(*args)
        except Exception as error:  # whatever a task, a tool or a user's code raises
            if out_of_memory(error):
                raise
            self.episode.fault = f"{type(error).__name__}: {error}"
            self.episode.outcome = outcome

    def begin(self, make_env, seed: int, step: int) -> None:
        self.env, task = make_env(), self.episode.task_id
        self.row = Row([], key=f"{seed}/{step}/{task}/{self.episode.sibling}")
        self.episode.seed = stable_seed(seed, step, task) % 2**31
        self.env.begin(task, self.episode.seed)

    def waiting(self) -> str | None:
        return None if self.episode.outcome else self.guard("env_error", getattr, self.env, "waiting")

    def hand_over(self, chat, max_context: int, max_turns: int, late: bool) -> None:
        """Show the policy what it has to answer: the prompt at first, later what its turn is followed by. Or end."""
        env, row = self.env, self.row
        if self.waiting() != "agent":
            return
        writing = row.ids and not row.done  # a turn that carries on, or that memory ran out for
        new = []
        if not writing and row.ids:
            new = chat.suffix_ids(row.sampled, env.new_messages)
        elif not writing:  # a real checkpoint is told what tau2's own agent is told; the small policy reads no rules
            rules = env.policy if chat.family == "tiny" else env.system_prompt
            new = chat.prompt_ids(rules, env.tools, env.new_messages)
        limit = "time limit" if late else "turn limit" if self.episode.turns >= max_turns else ""
        limit = "context limit" if len(row.ids) + len(new) >= max_context else limit
        if limit:
            self.guard("env_error", env.fail, "truncated", limit)
        elif not writing:
            self.episode.prompt_ids, row.room = self.episode.prompt_ids or new, max_context
            row.hear(new)

    def take_turn(self, chat) -> None:
        """A turn that is over goes to the environment."""
        row = self.row
        self.episode.turns += row.done
        if row.done and len(row.ids) >= row.room and row.ids[-1] not in chat.stop_ids:
            self.guard("env_error", self.env.fail, "truncated", "context limit")
        elif row.done:
            self.guard("env_error", self.env.act, chat.parse(row.sampled))

    def close(self) -> None:
        """Write tokens and end into the episode. What the world broke has no reward."""
        episode, row, start = self.episode, self.row or Row([]), len(self.episode.prompt_ids)
        if result := None if episode.outcome else self.guard("env_error", self.env.result):
            info = result[4]
            episode.outcome, episode.fault = info.get("outcome"), info.get("fault")
            episode.reward_info = info.get("reward_info")
            episode.reward = float(result[1]) if episode.valid else 0.0
        episode.response_ids, episode.response_mask = row.ids[start:], row.mask[start:]
        episode.rollout_log_probs, episode.messages = row.log_probs[start:], list(getattr(self.env, "transcript", []))


@dataclass
class RowLimit:
    """How many conversations run at once: as memory holds them. One object a run; it learns what episodes need.

    Args:
        most: never more rows; halved for good when memory runs out all the same.
        token_bytes: keys and values of a token; row_bytes: the rest of a row. Both 0: memory is not asked.
    """
    most: int = 64
    token_bytes: int = 0
    row_bytes: int = 0
    device: torch.device = torch.device("cpu")
    longest: int = 0  # tokens; the longest context of all finished rollouts
    why: str = ""     # in words, after `rows`

    def rows(self, max_context: int, slots: int = 0) -> int:
        """At least 1. slots: that rows hold already, whose memory is theirs to use again."""
        if not self.token_bytes:
            return self.most
        context = min(max_context, self.longest * 5 // 4) if self.longest else max_context
        free = free_bytes(self.device) + slots * self.token_bytes
        fitting = max(1, int(MEMORY_SHARE * free) // (context * self.token_bytes + self.row_bytes))
        self.why = (f"{MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB free hold {fitting}, at {context:,} tokens of "
                    f"{self.token_bytes:,} bytes and {self.row_bytes / 2**20:.1f} MiB for logits; at most {self.most}")
        return min(self.most, fitting)


def limit_rows(model, most: int) -> RowLimit:
    """The RowLimit of a model on its device."""
    weight = model.get_output_embeddings().weight  # (V, C)
    return RowLimit(most, key_bytes(model.config, weight.dtype), LOGIT_COPIES * 4 * len(weight), weight.device)


def collect(model, chat, make_env, user, task_ids, group_size, *, seed, step, temperature, max_context, max_turns,
            max_new_tokens, max_batch=64, limit=None, time_limit_s=None, progress=None) -> tuple[list[Episode], dict]:
    """P x G conversations in lockstep rounds with the current policy: (episodes in task-major order, statistics).

    Args:
        chat: chat.Chat. make_env: () -> a fresh Tau2Env. user: has reply(conversations) -> turns.
        task_ids: P tasks; the group_size siblings of each meet the same customer (same environment seed).
        max_context, max_new_tokens: tokens; max_turns: policy turns; time_limit_s: seconds, looked at between rounds.
            An episode that would pass a limit ends `truncated`; the others go on.
        max_batch: conversations at once, or `limit`, a RowLimit, which asks memory.
        progress: title of the bar, or None.
    Statistics: the counts of `TurnCache`, rollout_s, rollout_tokens_per_s (sampled), busy_share, faults.
    Raises: what memory raises when it runs out with a single conversation. With more, half of them wait, without
        keys, and the rest goes on: tokens stay, and the episodes come out the same.
    """
    started, cache, live, parked = time.perf_counter(), TurnCache(), [], deque()
    limit = limit or RowLimit(max_batch)
    episodes = [Episode(task, f"{step}/{task}", sibling) for task in task_ids for sibling in range(group_size)]
    todo, bar = deque(episodes), tqdm(total=len(episodes), desc=progress, disable=progress is None, unit="ep")
    while todo or live or parked:
        room = limit.rows(max_context, cached_slots(cache))
        while parked and len(live) < room:
            live.append(parked.popleft())
        while todo and not parked and len(live) + min(group_size, room) <= room:  # a whole group: its prompt is shared
            for _ in range(min(group_size, room, len(todo))):
                live.append(Talk(todo.popleft()))
                live[-1].guard("env_error", live[-1].begin, make_env, seed, step)
        try:
            hear_users(live, user)
            late = time_limit_s is not None and time.perf_counter() - started > time_limit_s
            for talk in live:
                talk.hand_over(chat, max_context, max_turns, late)
                if talk.waiting() is None:
                    talk.close()
                    bar.update()
            live = [t for t in live if not t.episode.outcome]
            if live:
                generate_turns(model, [t.row for t in live], stop_ids=chat.stop_ids, pad_id=chat.pad_id, cache=cache,
                               max_new_tokens=max_new_tokens, temperature=temperature, pause_below=0.5)
            kept = len(live)
        except (RuntimeError, MemoryError) as fault:
            if not out_of_memory(fault) or len(live) < 2:
                raise
            kept = len(live) // 2
        if kept < len(live):  # outside the except clause, where the traceback holds no tensors any more
            limit.most = kept
            parked.extendleft(reversed(live[kept:]))
            live = live[:kept]
            free_what_is_dead(cache)
            print(f"out of memory; from now on at most {kept} conversations at once", flush=True)
            continue
        for talk in live:
            talk.take_turn(chat)
        seconds, paid = time.perf_counter() - started, [e.reward for e in episodes if e.outcome and e.valid]
        speed = cache.counts["sampled_tokens"] / seconds
        bar.set_postfix_str(f"{speed:.0f} tok/s, reward {sum(paid) / max(len(paid), 1):.2f}")
    bar.close()
    limit.longest = max([limit.longest, *(len(e.prompt_ids) + len(e.response_ids) for e in episodes)])
    busy = cache.counts["sampled_tokens"] / max(cache.counts["decode_slots"], 1)
    return episodes, {**cache.counts, "rollout_s": seconds, "rollout_tokens_per_s": speed, "busy_share": busy,
                      "faults": sum(not e.valid for e in episodes)}


def free_what_is_dead(cache: TurnCache) -> None:
    """After memory ran out: nothing half made is kept, and the card's allocator gives its gaps back."""
    cache.held.clear()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a card


def hear_users(live: list[Talk], user) -> None:
    """Every conversation that waits for its customer gets a turn, all in one call (again while device actions run).

    Before the policy's first turn siblings are asked as one: the group shares its prompt, whoever plays the customer.
    """
    while waiting := [t for t in live if t.waiting() == "user"]:
        asked: dict = {}
        for talk in waiting:
            asked.setdefault(id(talk) if talk.row.ids else talk.episode.uid, []).append(talk)
        heads = [talks[0] for talks in asked.values()]
        told = [replace(c := t.env.conversation, key=f"{c.key}/{t.episode.sibling}") for t in heads]
        try:
            turns = user.reply(told)
        except Exception as error:
            if out_of_memory(error):
                raise
            turns = []
        if len(turns) != len(told):  # asked again one by one: the fault stays with the conversation that has it
            turns = [t.guard("user_error", lambda c=c: user.reply([c])[0]) for t, c in zip(heads, told)]
        for talks, turn in zip(asked.values(), turns):
            outcome, fault = talks[0].episode.outcome, talks[0].episode.fault
            for talk in talks:
                talk.episode.outcome, talk.episode.fault = outcome, fault
                if not outcome:
                    talk.guard("env_error", talk.env.hear, turn)


def to_batch(episodes: list[Episode], pad_id: int) -> dict:
    """verl's fields, prompt + response padded on the right: every tensor is (B, T) and aligned with input_ids.

    int64: input_ids, attention_mask, position_ids, response_mask (1 = sampled), prompt_length (B,). float32:
    rollout_log_probs (nats, of token t given those before), token_level_scores (the reward, on the last sampled
    token). uid is a list of str.
    Worked row: prompt of 2, response `a b x c` with x observed: response_mask 0 0 1 1 0 1.
    """
    width = max(len(e.prompt_ids) + len(e.response_ids) for e in episodes)

    def padded(values: list[list], pad, dtype=torch.long) -> Tensor:
        return torch.tensor([v + [pad] * (width - len(v)) for v in values], dtype=dtype)  # (B, T)

    heads = [[0] * len(e.prompt_ids) for e in episodes]
    mask = padded([h + e.response_mask for h, e in zip(heads, episodes)], 0)
    real = padded([[1] * len(e.prompt_ids + e.response_ids) for e in episodes], 0)
    last = mask * (mask.cumsum(-1) == mask.sum(-1, keepdim=True))  # 1 on the last sampled token
    return {"input_ids": padded([e.prompt_ids + e.response_ids for e in episodes], pad_id), "attention_mask": real,
            "position_ids": (real.cumsum(-1) - 1) * real, "response_mask": mask,
            "rollout_log_probs": padded([h + e.rollout_log_probs for h, e in zip(heads, episodes)], 0.0, torch.float32),
            "token_level_scores": last * torch.tensor([[e.reward] for e in episodes]),
            "uid": [e.uid for e in episodes], "prompt_length": torch.tensor([len(h) for h in heads])}


def show_episode(where: str) -> None:
    """Print an episode's tokens, the sampled ones in green. where: FILE or FILE:N, the N-th line from 0."""
    path, number = where.rsplit(":", 1) if where.rsplit(":", 1)[-1].isdigit() else (where, "0")
    with open(path, encoding="utf-8") as file:
        record = json.loads(file.readlines()[int(number)])
    print(f"{record['uid']} sibling {record['sibling']}: {record['outcome']}, reward {record['reward']}")
    print("".join(f"\033[32m{text}\033[0m" if sampled else text for text, sampled in record["tokens"]))


if __name__ == "__main__" and "__file__" in globals():
    if sys.argv[1:2] != ["--show"] or len(sys.argv) != 3:
        sys.exit("usage: python rollout.py --show FILE[:N]")
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # a pipe of another code page must not stop it
        show_episode(sys.argv[2])
    except (OSError, IndexError, KeyError, ValueError) as fault:
        sys.exit(f"rollout.py --show {sys.argv[2]}: no such episode ({fault!r})")
