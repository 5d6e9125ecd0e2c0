"""The other speaker: customers that talk to the policy, none of which can spoil a run.

The contract: `reply(conversations) -> turns`, batched, so that many episodes wait once; `name` stands beside every
reported number. A conversation is env_tau2.Conversation: all that a customer may know. A turn is a `UserTurn`: text
(with one of tau2's stop words when the customer is done), calls of the customer's own tools, or a fault, which the
environment turns into the outcome `user_error`, never into a reward. A whole customer:

    class ShyCustomer:
        name = "shy"

        def reply(self, conversations):
            return [UserTurn("Cancel my order, please." if len(c.messages) == 1 else USER_STOP) for c in conversations]

Here: `PolicyUser` (the policy's frozen base), `LLMUser` (any endpoint), `ReplayUser` (a record). The default one,
`ScriptedUser`, has its own file: user_scripted.py. Measured shares, limits and failures: docs/users.md.
"""
import copy
import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chat import spoken_text

USER_STOP = "###STOP###"  # tau2/user/base.py
USER_TRANSFER = "###TRANSFER###"


@dataclass
class UserTurn:
    """What the customer does: says something, uses its own tools, or (fault) cannot go on for reasons of the world."""
    text: str = ""
    tool_calls: list[dict] = field(default_factory=list)  # [{"name", "arguments"}]
    fault: str | None = None


def customer_view(conversation) -> tuple[str, list[dict]]:
    """What a model that plays the customer is shown: (tau2's guidelines with the scenario, messages, roles swapped)."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing tau2 waits for the network
    from tau2.user.user_simulator import SYSTEM_PROMPT, get_global_user_sim_guidelines
    guidelines = get_global_user_sim_guidelines(use_tools=bool(conversation.user_tools))
    swap = {"assistant": "user", "user": "assistant", "tool": "tool"}
    return (SYSTEM_PROMPT.format(instructions=str(conversation.scenario), global_user_sim_guidelines=guidelines),
            [{**m, "role": swap[m["role"]]} for m in conversation.messages])


def read_turn(text: str, calls: list[dict], conversation) -> UserTurn:
    """A model's answer as a turn. Its reasoning is left out, so that no stop word in it counts.

    Nothing said and nothing done, and a tool that is not there, are faults. Raises: ValueError for arguments that are
    a string but no JSON.
    """
    text = spoken_text(text)
    calls = [{"name": c["name"], "arguments": json.loads(c["arguments"]) if isinstance(c["arguments"], str)
              else c["arguments"]} for c in calls]  # models do write "arguments": "{...}"
    names = [t["function"]["name"] for t in conversation.user_tools]
    wrong = [c["name"] for c in calls if c["name"] not in names or not isinstance(c["arguments"], dict)]
    if wrong or not (calls or text):
        return UserTurn(fault=f"the customer's model {f'called {wrong[0]!r}' if wrong else 'said nothing'}")
    return UserTurn(tool_calls=calls) if calls else UserTurn(text)


class LLMUser:
    """A customer behind any OpenAI-compatible endpoint, with tau2's guidelines; waiting conversations are concurrent.

    Args:
        model: name that the endpoint knows. base_url: None is OpenAI. timeout_s: of a request; deadline_s: of a turn.
        retries: further attempts after 408, 409, 429, 5xx, a broken or empty answer or no connection; the pauses double
            from pause_s.
    The key is OPENAI_API_KEY in the environment (local servers need none); it is cut out of every fault.
    """

    def __init__(self, model: str, base_url: str | None = None, *, timeout_s: float = 60.0, retries: int = 3,
                 pause_s: float = 1.0, deadline_s: float = 240.0, workers: int = 64):
        from openai import OpenAI
        key = os.environ.get("OPENAI_API_KEY", "")
        if not key and base_url is None:
            raise ValueError("no OPENAI_API_KEY in the environment and no base URL of a server that needs none")
        self.name, self.model, self.workers = f"llm:{model}", model, workers
        self.retries, self.pause_s, self.deadline_s = retries, pause_s, deadline_s
        self.client = OpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_s, max_retries=0)

    def reply(self, conversations: list) -> list[UserTurn]:
        """All conversations at once; a turn that is not there by the deadline is a fault, and nobody waits for it."""
        pool, end, turns = ThreadPoolExecutor(self.workers), time.monotonic() + self.deadline_s, []
        for job in [pool.submit(self._turn, c, end) for c in conversations]:
            try:
                turns.append(job.result(timeout=max(0.0, end - time.monotonic())))
            except TimeoutError:
                turns.append(UserTurn(fault=f"{self.name}: no answer within {self.deadline_s:g} s"))
        pool.shutdown(wait=False, cancel_futures=True)
        return turns

    def _turn(self, conversation, end: float) -> UserTurn:
        from openai import APIStatusError, OpenAIError
        wire = openai_messages(*customer_view(conversation))
        request = {"model": self.model, "seed": conversation.seed, "messages": wire}
        request |= {"tools": conversation.user_tools} if conversation.user_tools else {}
        for attempt in range(self.retries + 1):
            try:
                said = self.client.chat.completions.create(**request).choices[0].message
                calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments or "{}")}
                         for c in said.tool_calls or []]
                turn = read_turn(said.content or "", calls, conversation)
                if not turn.fault:
                    return turn
                reason = turn.fault
            except (OpenAIError, ValueError, AttributeError, TypeError, IndexError) as error:  # the last: broken JSON
                status = getattr(error, "status_code", "")
                reason = f"{type(error).__name__} {status}: {str(error)[:200]}"
                if isinstance(error, APIStatusError) and status < 500 and status not in (408, 409, 429):
                    break
            pause = self.pause_s * 2 ** attempt
            if attempt == self.retries or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        clean = re.sub(r"sk-[\w*-]+", "***", reason.replace(os.environ.get("OPENAI_API_KEY") or "\0", "***"))
        return UserTurn(fault=f"{self.name}: {clean} (attempt {attempt + 1} of {self.retries + 1})")


def openai_messages(system: str, messages: list[dict]) -> list[dict]:
    """Our messages in the wire format, which ties each tool result to its call by an id."""
    wire, waiting = [{"role": "system", "content": system}], []
    for m in messages:
        wire.append({"role": m["role"], "content": m.get("content") or ""})
        if m.get("tool_calls"):
            wire[-1]["tool_calls"] = [{"id": f"call_{len(wire)}_{i}", "type": "function", "function": {
                "name": c["name"], "arguments": json.dumps(c["arguments"])}} for i, c in enumerate(m["tool_calls"])]
            waiting = [c["id"] for c in wire[-1]["tool_calls"]]
        elif m["role"] == "tool":
            wire[-1]["tool_call_id"], waiting = waiting[0], waiting[1:]
    return wire


class PolicyUser:
    """The policy's frozen base plays the customer: same weights, LoRA adapter off, tau2's guidelines, own cache.

    Args:
        model: a PEFT model (its adapter is off while the customer speaks) or, with `frozen`, a copy that nobody trains.
        generate_turns, make_row: rollout's generate_turns and Row. temperature: 0 is greedy.
    Raises: ValueError for full weights, which change while they train, and for the small policy, which reads no rules.
    """
    name = "policy"

    def __init__(self, model, chat, generate_turns, make_row, *, frozen: bool = False, max_context: int = 16384,
                 max_new_tokens: int = 256, temperature: float = 0.0):
        if not frozen and not hasattr(model, "disable_adapter"):
            raise ValueError("the policy can play the customer with a LoRA adapter or as a frozen copy (--ref-copy): "
                             "full weights change while they train, and with them the customer")
        if chat.family == "tiny":
            raise ValueError("the small policy cannot play the customer: its prompt holds no instructions")
        self.model, self.chat, self.generate_turns, self.make_row = model, chat, generate_turns, make_row
        self.max_context, self.sampling = max_context, {"max_new_tokens": max_new_tokens, "temperature": temperature}
        self.rows, self.cache = {}, None  # conversation up to and with the customer's turn -> the row that holds it

    def reply(self, conversations: list) -> list[UserTurn]:
        """One turn each, in one batch; tokens and keys are kept from turn to turn."""
        if all(len(c.messages) == 1 for c in conversations):  # new episodes: the old ones are over
            self.rows, self.cache = {}, None
        rows, turns = [self._row(c) for c in conversations], []
        self._forget_spent(conversations)
        able = [r for r in rows if len(r.ids) < self.max_context]
        if able:
            with self.model.disable_adapter() if hasattr(self.model, "disable_adapter") else nullcontext():
                self.cache = self.generate_turns(self.model, able, stop_ids=self.chat.stop_ids, pad_id=self.chat.pad_id,
                                                 cache=self.cache, keep_others=True, **self.sampling)
        for c, row in zip(conversations, rows):
            full = UserTurn(fault=f"{c.key}: the customer's context is full")
            turns.append(self._read(c, row) if row in able else full)
            own = {"role": "user", "content": turns[-1].text, "tool_calls": turns[-1].tool_calls}
            self.rows[conversation_hash(c, [*c.messages, own])] = row
        return turns

    def _row(self, conversation):
        """A row with all that was said so far; what a former turn's row holds is not encoded again."""
        system, messages = customer_view(conversation)
        spoken = max((i + 1 for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        old = self.rows.get(conversation_hash(conversation, conversation.messages[:spoken]))
        if old is None:
            row = self.make_row([], f"user/{conversation.key}", self.max_context)
            row.hear(self.chat.prompt_ids(system, conversation.user_tools, messages))
            return row
        row = copy.copy(old)  # siblings may have said the same so far
        row.hear(self.chat.suffix_ids(old.sampled, messages[spoken:]))
        self.cache.held |= {id(row): self.cache.held[id(old)]} if id(old) in self.cache.held else {}
        return row

    def _forget_spent(self, conversations) -> None:
        """Keys of rows that were carried on go: a late sibling of theirs would have its tokens forwarded again."""
        for c in conversations:
            spoken = max((i + 1 for i, m in enumerate(c.messages) if m["role"] == "user"), default=0)
            old = self.rows.get(conversation_hash(c, c.messages[:spoken]))
            if old is not None and self.cache is not None:
                self.cache.held.pop(id(old), None)

    def _read(self, conversation, row) -> UserTurn:
        action = self.chat.parse(row.sampled)  # without its thinking
        try:
            call = json.loads(action) if action[:1] in ("{", "[") else {}
        except ValueError:
            call = {}
        if isinstance(call, dict) and list(call) == ["content"]:  # speech that looks like a call
            return read_turn(call["content"], [], conversation)
        calls = call.get("tool_calls", [call]) if isinstance(call, dict) else call
        calls = [c for c in calls if isinstance(c, dict) and "name" in c and "arguments" in c]
        try:
            return read_turn("" if calls else action, calls, conversation)
        except ValueError as error:
            return UserTurn(fault=f"the customer's model wrote arguments that are not JSON: {str(error)[:200]}")


class ReplayUser:
    """Plays recorded turns back, or (`record`) lets another customer speak and adds its turns to the file.

    A turn is found by seed, scenario and all messages so far; while recording, a conversation that is in the file gets
    the recorded turn, so a replay gives exactly what the recording gave. Faults are not recorded.
    Raises: ValueError for a file that is missing (without `record`) or holds a broken line.
    """

    def __init__(self, path: str | Path, record=None):
        self.path, self.record, self.name, self.turns = Path(path), record, record.name if record else "replay", {}
        if record is None and not self.path.exists():
            raise ValueError(f"no recorded conversations at {self.path}")
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines = text.splitlines()
        torn = record is not None and bool(text) and not text.endswith("\n")  # a run was killed while it wrote
        torn = torn and (len(lines) > 1 or text.startswith('{"key": '))  # or this is no record at all
        for number, line in enumerate(lines[:-1] if torn else lines, 1):
            try:
                row = json.loads(line)
                turn = UserTurn(**row["turn"])
                turn.text = spoken_text(turn.text)
                if turn.text or turn.tool_calls:  # a turn that was only reasoning is none: asked again, or a fault
                    self.turns[row["key"]] = turn
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: not a recorded turn ({error})") from None
        if record:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text[:text.rfind("\n") + 1] if torn else text, encoding="utf-8")

    def reply(self, conversations: list) -> list[UserTurn]:
        keys = [conversation_hash(c, c.messages) for c in conversations]
        new = {k: c for k, c in zip(keys, conversations) if k not in self.turns}
        fresh = {k: UserTurn(fault=f"{self.path} holds no turn for {c.key} after message {len(c.messages)}: "
                                   f"{str(c.messages[-1].get('content'))[:80]!r}") for k, c in new.items()}
        if self.record and new:
            fresh = dict(zip(new, self.record.reply(list(new.values()))))
            good = {k: turn for k, turn in fresh.items() if not turn.fault}
            with self.path.open("a", encoding="utf-8") as file:
                for k, turn in good.items():
                    file.write(json.dumps({"key": k, "where": new[k].key, "turn": asdict(turn)}) + "\n")
            self.turns |= good
        return [self.turns.get(k) or fresh[k] for k in keys]


def conversation_hash(conversation, messages: list[dict]) -> str:
    said = [[m["role"], m.get("content") or "", m.get("tool_calls") or []] for m in messages]
    text = json.dumps([conversation.seed, str(conversation.scenario), said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
