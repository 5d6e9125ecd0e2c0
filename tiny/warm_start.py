"""Makes the small policy that ships, from nothing: tokenizer, demonstrations, and a short supervised warm start.

An oracle agent, which knows the gold calls, talks to ScriptedUser in Tau2Env over synthetic tasks; the policy learns
the oracle's turns in exactly the token sequences that a rollout will show it.

    OMP_NUM_THREADS=1 python -m tiny.warm_start --out tiny/policy

Shape key: B sequences, T tokens.
"""
import argparse
import json
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import GptOssForCausalLM

from attention import pack_layout, use_sink_attention
from chat import load_chat
from model import small_config
from tiny.tasks_retail import make_tasks, retail_data

# What the policy reads and writes: tiny/template.jinja. A message is one tagged block, so that a suffix renders like
# the whole. Policy text and tool schemas are left out. Tool results are JSON in tau2; there each becomes one line: of
# an order without address, options and empty fields, of a product the options before the id; a write is "ok".
SMALL_TEMPLATE = Path(globals().get("__file__", "tiny/warm_start.py")).resolve().parent / "template.jinja"
SPECIAL_TOKENS = ("<|pad|>", "<|tiny|>", "<|end|>", "<|user|>", "<|tool|>", "<|assistant|>")
# The fixed parts of a call are one token each: which call to make is one decision, the rest is copying.
CALL_PIECES = [f'{{"name": "{name}", "arguments": {{"{first}": "' for name, first in (
    ("find_user_id_by_email", "email"), ("find_user_id_by_name_zip", "first_name"), ("get_user_details", "user_id"),
    ("get_order_details", "order_id"), ("get_product_details", "product_id"), ("cancel_pending_order", "order_id"),
    ("return_delivered_order_items", "order_id"), ("exchange_delivered_order_items", "order_id"),
    ("modify_pending_order_items", "order_id"), ("modify_pending_order_address", "order_id"),
    ("modify_pending_order_payment", "order_id"), ("modify_user_address", "user_id"))] + [
    '"}}', '", "last_name": "', '", "zip": "', '", "reason": "', '", "item_ids": ["', '"], "new_item_ids": ["',
    '"], "payment_method_id": "', '", "payment_method_id": "', '", "address1": "', '", "address2": "', '", "city": "',
    '", "state": "', '", "country": "USA", "zip": "', "#W",
    "credit_card_", "gift_card_", "paypal_", "@example.com"]
ID_HEADS = ["credit_card_", "gift_card_", "paypal_", "@example.com"]
ASK_IDENTITY = "What is your email, or your name and zip code?"
ANYTHING_ELSE = "Is there anything else?"
WILL_NOT_TELL = "That can not be seen here."
GREETING = "Hi! How can I help you today?"
VOCABULARY = 1408
MUON_LR, ADAM_LR = 0.005, 1.5e-3
SLIPS = 0.08     # share of the demonstrated calls that first go wrong and are then put right
STEPS = 1378     # of the warm start that ships; the learning rate follows them
COOL_DOWN = 0.3  # share of the steps, at the end, in which the learning rate falls: copying gets exact
COPIED = 0.9  # share of repeated tokens right at which the copying curriculum gives way to conversations


def whole_words() -> list[str]:
    """Names, places and products of the retail database: one token each, with or without a space before them.

    A word that is glued to its space in the customer's sentence and stands behind a quote in a call would be two
    different tokens, and the policy could not copy it.
    """
    words = {"Suite"}
    for user in retail_data()["users"].values():
        first, last = user["name"]["first_name"], user["name"]["last_name"]
        words |= {first, last, first.lower(), user["address"]["city"], user["address"]["state"]}
        words.add(user["address"]["address1"].split(" ", 1)[1])
    return sorted(words | {product["name"] for product in retail_data()["products"].values()})


def corpus_lines(tasks) -> list[str]:
    """Text to train the tokenizer on: scenarios, the oracle's phrases, tool results as the template shows them."""
    import jinja2
    shown = jinja2.Environment().from_string(SMALL_TEMPLATE.read_text(encoding="utf-8"))
    lines = [GREETING, ASK_IDENTITY, ANYTHING_ELSE] * 50 + [f"{a}{b} {a}" for a in range(10) for b in range(10)] * 20
    for task in tasks:
        said = task.user_scenario.instructions
        wishes = json.loads(task.description.notes)
        lines += [said.reason_for_call.replace("You", "I"), (said.known_info or "").replace("You are", "I am")]
        lines += [wish["answer"] + wish["ask"] for wish in wishes]
        lines += ["Yes, please go ahead.", "No, that is all. Thank you. Thanks, bye. ###STOP###"]
    for user in retail_data()["users"].values():
        lines += [user["user_id"], user["email"]] * 4
    for records in (retail_data()["orders"], retail_data()["users"], retail_data()["products"]):
        for record in records.values():
            message = {"role": "tool", "content": json.dumps(record), "name": "get"}
            lines.append(re.sub(r"<\|\w+\|>", "", shown.render(messages=[message])))
    return lines


def build_tokenizer(vocabulary: int = VOCABULARY):
    """A byte-level BPE of its own: digits in pairs so that numbers can be copied, calls and names whole.

    Returns: PreTrainedTokenizerFast with the chat template; eos and stop `<|end|>`, pad `<|pad|>`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d{1,2}| ?\p{L}+| ?[^\s\p{L}\d]| "), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    words = whole_words()
    lines = corpus_lines(make_tasks(3000, 7, "train"))
    for piece in CALL_PIECES + sorted(words, key=len, reverse=True):  # tokens already: nothing to learn there
        lines = [line.replace(piece, " ") for line in lines] if len(piece) > 3 and not piece.islower() else lines
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - len(words) - len(CALL_PIECES), show_progress=False,
                                  special_tokens=list(SPECIAL_TOKENS),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(lines, trainer)
    core.add_tokens([AddedToken(piece, normalized=False) for piece in CALL_PIECES])
    core.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in words])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>",
                                        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
                                        clean_up_tokenization_spaces=False, model_max_length=4096)
    tokenizer.chat_template = SMALL_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


# ---- the oracle and its demonstrations

def oracle_call(name: str, arguments: dict) -> str:
    """A call as the policy writes it."""
    return json.dumps({"name": name, "arguments": arguments})


def oracle_turns(task, rng: random.Random | None = None, careless: float = 0.0) -> list[str]:
    """What an agent that knows the gold calls says and does: identity, look-ups, go-ahead, the write, the next wish.

    With probability `careless` a wish is served by a clerk who says "Done." without making the call, or who looks and
    then will not tell. Nobody in the conversation notices; only tau2's reward does.
    """
    calls = [(action.name, action.arguments) for action in task.evaluation_criteria.actions]
    turns, at = [ASK_IDENTITY, oracle_call(*calls[0])], 1
    for wish in json.loads(task.description.notes):
        lazy = rng is not None and rng.random() < careless
        for name, arguments in calls[at:at + wish["calls"]]:
            write = name.split("_")[0] in ("cancel", "modify", "return", "exchange")
            turns += [wish["ask"]] if write else []
            turns += [] if write and lazy else [oracle_call(name, arguments)]
        at += wish["calls"]
        answer = wish["answer"] or "Done."
        turns.append(f"{WILL_NOT_TELL if lazy and answer[:4] not in ('Done', 'I am') else answer} {ANYTHING_ELSE}")
    return turns


@dataclass
class Demo:
    """One conversation as a rollout would hold it: `ids` and, for each, 1 where the agent wrote the token."""
    task_id: str
    ids: list[int]
    agent: list[int]


def demonstrate(task, chat, env, user, seed: int = 0, slip_share: float = 0.0, careless: float = 0.0) -> Demo:
    """The oracle talks to the user in the environment; tokens are put together exactly as rollout.collect does.

    Args: slip_share: share of calls that are first made with a wrong number, so that the policy sees errors and how
        one goes on from them. The slip itself is not trained on. careless: see oracle_turns.
    Raises: RuntimeError when a careful conversation does not end with reward 1: task, user or oracle is wrong.
    """
    rng = random.Random(f"slips/{task.id}/{seed}")
    env.begin(task.id, seed)
    hear_user(env, user)
    ids = chat.prompt_ids(env.policy, env.tools, env.transcript)
    agent, turns, planned = [0] * len(ids), [], oracle_turns(task, rng, careless)
    for turn in planned:
        slip = slipped(turn, rng) if rng.random() < slip_share else turn
        turns += [(slip, 0), (turn, 1)] if slip != turn else [(turn, 1)]
    for turn, trained in turns:
        turn_ids = chat.tokenizer.encode(turn, add_special_tokens=False) + [chat.stop_ids[0]]
        env.act(turn)
        hear_user(env, user)
        ids, agent = ids + turn_ids, agent + [trained] * len(turn_ids)
        if env.waiting is None:
            break
        suffix = chat.suffix_ids(turn_ids, env.new_messages)
        ids, agent = ids + suffix, agent + [0] * len(suffix)
    _, reward, terminated, _, info = env.result()
    if not terminated or (reward != 1.0 and planned == oracle_turns(task)):
        raise RuntimeError(f"the oracle failed on {task.id}: reward {reward}, {json.dumps(env.transcript, indent=1)}")
    return Demo(task.id, ids, agent)


def slipped(turn: str, rng: random.Random) -> str:
    """A call with one of its numbers made up, which no record has; other turns, and numbers in an address, stay."""
    numbers = [hit for hit in re.finditer(r"\d{4,}", turn.split('", "address1')[0]) if turn.startswith("{")]
    if not numbers:
        return turn
    hit = rng.choice(numbers)
    return turn[:hit.start()] + "".join(rng.choice("0123456789") for _ in hit[0]) + turn[hit.end():]


def hear_user(env, user) -> None:
    while env.waiting == "user":
        env.hear(user.reply([env.conversation])[0])


def make_demos(n: int, seed: int, split: str, chat, slips: float = 0.0, careless: float = 0.0) -> list[Demo]:
    """n demonstrations over fresh tasks of a split."""
    from env_tau2 import Tau2Env
    from user_scripted import ScriptedUser
    tasks = make_tasks(n, seed, split)
    env = Tau2Env("retail", tasks=tasks)
    shown = tqdm(tasks, desc=f"demonstrations {split}", mininterval=10)
    return [demonstrate(task, chat, env, ScriptedUser(), slip_share=slips, careless=careless) for task in shown]


# ---- batches

def copy_batch(rng: random.Random, tokens: list[int], rows: int, length: int) -> list[Demo]:
    """Random segments, repeated in random order: all of a repeat but its first token can be copied, and only copied.

    Args:
        tokens: ids to draw from (all that has to be copied later, or the tied embeddings of the others drift away).
    """
    batch = []
    for _ in range(rows):
        segments = [[rng.choice(tokens) for _ in range(rng.randint(4, 12))] for _ in range(rng.randint(3, 8))]
        ids, agent = [], []
        for segment in segments:
            ids, agent = ids + segment, agent + [0] * len(segment)
        while len(ids) < length:
            segment = rng.choice(segments)
            ids, agent = ids + segment, agent + [0] + [1] * (len(segment) - 1)
        batch.append(Demo("copy", ids[:length], agent[:length]))
    return batch


def agent_log_probs(model, demos: list[Demo]) -> tuple:
    """Log-probs (N,) of all agent tokens of packed conversations, and whether each was the likeliest (N,) bool."""
    ids = torch.tensor([t for demo in demos for t in demo.ids])[None]  # (1, T)
    layout = pack_layout([(len(demo.ids), ()) for demo in demos])
    hidden = model.model(input_ids=ids, position_ids=layout.position_ids, sink_mask=layout,
                         use_cache=False).last_hidden_state[0]  # (T, C)
    agent = torch.tensor([t for demo in demos for t in demo.agent], dtype=torch.bool)
    where = agent.nonzero()[:, 0]  # a conversation never starts with the agent, so where - 1 is in the same one
    logits = model.lm_head(hidden[where - 1])  # (N, V)
    target = ids[0, where]
    log_probs = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    return log_probs, logits.argmax(-1) == target


@torch.no_grad()
def held_out(model, demos: list[Demo]) -> dict:
    """How far the policy is from the oracle on unseen customers, without a rollout.

    Returns: token_accuracy; greedy (share of conversations whose every agent token is the most likely one); sampled
    (mean probability of the oracle's exact words: a lower bound of mean@1 at temperature 1, as other words may do).
    """
    right, greedy, sampled = [], [], []
    for start in range(0, len(demos), 8):
        chunk = demos[start:start + 8]
        log_probs, hits = agent_log_probs(model, chunk)
        sizes = [sum(demo.agent) for demo in chunk]
        for logp, hit in zip(log_probs.split(sizes), hits.split(sizes)):
            right.append(hit.float().mean().item())
            greedy.append(hit.all().item())
            sampled.append(logp.sum().exp().item())
    return {"token_accuracy": sum(right) / len(demos), "greedy": sum(greedy) / len(demos),
            "sampled": sum(sampled) / len(demos)}


# ---- the model and its training

def policy_config(tokenizer):
    """gpt-oss, small: a window of 8 makes "the token before" easy to find, which copying builds on; tied head."""
    config = small_config(len(tokenizer), hidden_size=128, layers=4, heads=8, kv_heads=4, head_dim=32, experts=4,
                          experts_per_token=2, expert_size=80, window=8)
    config.tie_word_embeddings = True
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return config


def make_optimizers(model) -> tuple:
    """Muon for the 2-d matrices (with AdamW alone copying did not appear), AdamW for experts, embedding, vectors."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.dim() == 2 and "embed" not in name else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)


def save_stage(folder: Path, model, tokenizer, optimizers, step: int, copied: bool) -> None:
    """A policy folder like any other, plus the optimizers' tensors so that the run can go on from here."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {}
    for i, optimizer in enumerate(optimizers):
        for j, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{j}.{key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    save_file(tensors, folder / "optimizers.safetensors")
    stage = json.dumps({"step": step, "copied": copied})
    (folder / "stage.json").write_text(stage, encoding="utf-8")  # last: the folder is complete


def load_stage(folder: Path, model, optimizers) -> tuple[int, bool]:
    """Put weights and optimizers back; returns (steps done, copying learned)."""
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # the tied head is not in the file
    tensors = load_file(folder / "optimizers.safetensors")
    for i, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for name, value in tensors.items():
            which, j, key = name.split(".", 2)
            if int(which) == i:
                state["state"].setdefault(int(j), {})[key] = value
        optimizer.load_state_dict(state)
    stage = json.loads((folder / "stage.json").read_text(encoding="utf-8"))
    return stage["step"], stage["copied"]


def training_batch(step: int, seed: int, copied: bool, demos: list[Demo], tokens: list[int]) -> list[Demo]:
    """The step's sequences, from the step alone so that a resumed run sees the same: mostly copying, then talk."""
    rng = random.Random(f"warm/{seed}/{step}")
    digits = tokens[:len(tokens) // 2]  # see copy_tokens
    copy_rows, talks = (2, 14) if copied else (14, 6)
    batch = [copy_batch(rng, rng.choice((tokens, digits)), 1, 160)[0] for _ in range(copy_rows)]
    return batch + rng.sample(demos, talks)


def copy_tokens(tokenizer) -> list[int]:
    """Ids for the copying curriculum: the first half numbers (as often as needed), the second every other token."""
    number = [i for token, i in tokenizer.get_vocab().items() if token.isdigit()]
    other = [i for token, i in tokenizer.get_vocab().items() if not token.isdigit() and i >= len(SPECIAL_TOKENS)]
    number, other = sorted(number), sorted(other)
    return [number[i % len(number)] for i in range(len(other))] + other


def warm_start(out: str, steps: int, work: str, seed: int = 0, demos: int = 3000, careless: float = 0.0) -> Path:
    """Train the small policy and leave it in `out`; goes on from the last snapshot in `work` when there is one.

    Args:
        steps: of training; they alone set the learning rate, so that the same seed gives the same weights.
        work: folder of the snapshots, one every 100 steps, each a policy folder of its own.
        careless: share of wishes that the clerk of the demonstrations only pretends to serve; see oracle_turns.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    snapshots = Path(work)
    snapshots.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    chat = load_chat(tokenizer)
    model = use_sink_attention(GptOssForCausalLM(policy_config(tokenizer)))
    optimizers, step, copied = make_optimizers(model), 0, False
    done = sorted(path.parent for path in snapshots.glob("step_*/stage.json"))
    if done:
        step, copied = load_stage(done[-1], model, optimizers)
    train = make_demos(demos, seed, "train", chat, SLIPS, careless)
    held = make_demos(64, 1, "val", chat)
    tokens = copy_tokens(tokenizer)
    log, started, seen = Path(out) / "warm_start.log", time.process_time(), 0
    log_line(log, f"{'resumed at' if done else 'start:'} step {step}, "
                  f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}, "
                  f"{len(train)} demonstrations, careless {careless}, 1 thread, torch {torch.__version__}")
    while step < steps:
        batch = training_batch(step, seed, copied, train, tokens)
        left = 1 - step / steps
        rate = min(1.0, (step + 1) / 30, max(left / COOL_DOWN, 0.03))
        loss, copy_hits, talk_hits = warm_step(model, optimizers, batch, rate)
        step, seen = step + 1, seen + sum(len(demo.ids) for demo in batch)
        if step % 50 == 0 or step == steps:
            score, minutes = held_out(model, held), (time.process_time() - started) / 60
            log_line(log, f"step {step} {'talk' if copied else 'copy'} loss {loss:.3f} copy_accuracy {copy_hits:.3f} "
                     f"agent_accuracy {talk_hits:.3f} | held out: token_accuracy {score['token_accuracy']:.4f} "
                     f"greedy {score['greedy']:.3f} sampled {score['sampled']:.3f} | "
                     f"{seen / (60 * minutes):.0f} tokens/s {minutes:.1f} min of processor time")
        copied = copied or (step % 25 == 0 and copy_hits > COPIED)
        if step % 100 == 0:
            save_stage(snapshots / f"step_{step:06d}", model, tokenizer, optimizers, step, copied)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    log_line(log, f"done at step {step}, saved in {Path(out).name}")
    return Path(out)


def warm_step(model, optimizers, batch: list[Demo], warmth: float) -> tuple[float, float, float]:
    """One step on the agent's tokens; returns (loss, share of copy tokens right, share of agent tokens right)."""
    log_probs, hits = agent_log_probs(model, batch)
    loss = -log_probs.mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(optimizers, (MUON_LR, ADAM_LR)):
        for group in optimizer.param_groups:
            group["lr"] = rate * warmth
        optimizer.step()
        optimizer.zero_grad()
    copies = sum(sum(demo.agent) for demo in batch if demo.task_id == "copy")  # they come first in the batch
    return loss.item(), hits[:copies].float().mean().item(), hits[copies:].float().mean().item()


def log_line(log: Path, line: str) -> None:
    """Print and keep."""
    print(line, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def warm_start_main() -> None:
    """Rebuild the small policy: tokenizer and weights, from nothing."""
    parser = argparse.ArgumentParser(description=warm_start_main.__doc__)
    parser.add_argument("--out", default="tiny/policy", help="policy folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps; about 1.4 s each on one thread")
    parser.add_argument("--work", default="runs/warm_start", help="snapshots; an interrupted run goes on from the last")
    parser.add_argument("--seed", type=int, default=0, help="weights, tasks and batches")
    parser.add_argument("--careless", type=float, default=0.0,
                        help="share of wishes only pretended to be served: a planted fault, as an experiment")
    args = parser.parse_args()
    warm_start(args.out, args.steps, args.work, args.seed, careless=args.careless)


if __name__ == "__main__" and "__file__" in globals():
    warm_start_main()
