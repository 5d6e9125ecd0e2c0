"""Messages <-> tokens: what the policy is shown, what a new message appends, what the policy's turn means.

The training sequence is append-only. The policy's own tokens are never decoded and encoded again: a turn is followed
by the *suffix* that its chat template writes after an assistant turn, and nothing before that suffix is touched.
Where a template would rewrite history (gpt-oss and Qwen3 drop earlier thinking), the sampled tokens stay as they
were: docs/chat.md lists that difference for each family.

Families: harmony (gpt-oss), hermes (Qwen2.5, Qwen3: JSON inside <tool_call>), llama3 (bare JSON), tiny (the policy
that ships), plain (any template that ignores `tools`, such as SmolLM2's: tools go into the system message as text).

An action for the environment is text: the JSON of a call {"name", "arguments"}, a JSON list of calls,
{"content", "tool_calls"} for both at once, and anything else is said to the customer.
"""
import json
import re
from dataclasses import dataclass

from jinja2 import TemplateError

# Stands where the policy's turn would be, so that what the template writes after a turn can be cut off behind it.
TURN_MARK = "TURN0MARK0STANDS0HERE"

# Reasoning as models write it into their text: <think>, <thinking> or [THINK], and harmony's channels.
THINK_OPEN = r"(?:<think(?:ing)?>|\[THINK\])"
THINK_CLOSE = r"(?:</think(?:ing)?>|\[/THINK\])"
HARMONY_MESSAGE = re.compile(r"<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)"
                             r"(?=<\|(?:end|return|call|start|channel)\|>|\Z)", re.S)
CALL_LIKE = re.compile(r"[{\[]|\w+\s*\(.*\)\Z", re.S)  # what the environment may read as a call

# The tokens that end an assistant turn. Elsewhere the template shows it: the added token right behind the turn.
HARMONY_STOPS = ("<|return|>", "<|call|>")
EXTRA_STOPS = ("<|eom_id|>",)  # Llama 3 ends a turn with it when it expects a tool's answer

# For transformers' parse_response. Regions stay text: whether a call is valid JSON is for the environment to say.
TURN_PARTS = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text", "repeats": True},
            "tool_calls": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "content": "text",
                           "repeats": True},
            "content": {"content": "text", "repeats": True},
        },
    },
    # A header names a channel and perhaps a recipient, in either order; a message with a recipient is a call.
    # Commentary without a recipient is what gpt-oss says to the user before a call.
    "harmony": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open_pattern": r"<\|channel\|>analysis(?![^<]*to=)[^<]*<\|message\|>",
                         "close_pattern": r"<\|(?:end|return|call)\|>", "content": "text", "repeats": True},
            "content": {"open_pattern": r"<\|channel\|>(?:final|commentary)(?![^<]*to=)[^<]*<\|message\|>",
                        "close_pattern": r"<\|(?:end|return|call)\|>", "content": "text", "repeats": True},
            "tool_calls": {
                "open_pattern": r"(?:<\|channel\|>\w+ +)?to=(?:functions\.)?(?P<name>[^\s<]+)[^<]*"
                                r"(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>",
                "close_pattern": r"<\|(?:end|return|call)\|>", "content": "text", "repeats": True,
                "transform": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@dataclass
class Chat:
    """One tokenizer's way of holding a conversation. Made by `load_chat`."""

    tokenizer: object
    family: str
    closers: tuple[str, ...]  # texts of the tokens that close an assistant turn in the template
    stop_ids: list[int]       # sampling any of these ends the policy's turn
    pad_id: int
    think_open: bool = False  # the generation prompt itself opens <think>, so a turn begins inside the thinking

    def prompt_ids(self, policy: str, tools: list[dict], messages: list[dict]) -> list[int]:
        """The tokens before the policy's first turn: rules, tools, history, generation prompt.

        Args:
            policy: the domain's rules, the system message. tools: OpenAI JSON schemas.
            messages: {"role", "content", "tool_calls"?, "name"?}, oldest first.
        """
        if self.family == "plain" and tools:
            policy = f"{policy}\n\n{tools_as_text(tools)}"
            tools = []
        shown = [{"role": "system", "content": policy}, *self._shown(messages)]
        return self._encode(render_chat(self.tokenizer, shown, tools, generation_prompt=True))

    def suffix_ids(self, turn_ids: list[int], new_messages: list[dict]) -> list[int]:
        """The tokens between a sampled turn and the next one: all of them are observed, none is trained on.

        Args:
            turn_ids: the sampled turn. One that ends in a stop token is closed already; one that was cut short
                (length limit) is closed here first.
            new_messages: what came in reply, roles "tool" and "user".
        Worked example (Qwen2.5): turn `Hi<|im_end|>`, reply `Yes` gives
            `\\n<|im_start|>user\\nYes<|im_end|>\\n<|im_start|>assistant\\n`.
        """
        shown = self._shown(new_messages)
        if self.family == "harmony":
            text = self._harmony_tail(shown)
        else:
            text = self._tail([{"role": "assistant", "content": TURN_MARK}, *shown], generation_prompt=True)
        closer = next(c for c in self.closers if text.startswith(c))
        closed = bool(turn_ids) and turn_ids[-1] in self.stop_ids
        return self._encode(text[len(closer):] if closed else text)

    def parse(self, turn_ids: list[int]) -> str:
        """The action that a sampled turn stands for; the policy's thinking is left out of it. Never raises."""
        opened = "<think>" if self.think_open else ""
        if self.family in ("tiny", "llama3"):
            text = spoken_text(opened + self.tokenizer.decode(turn_ids, skip_special_tokens=True))
            return llama3_action(text) if self.family == "llama3" else text
        if self.family == "harmony":
            text = self.tokenizer.decode(turn_ids, skip_special_tokens=False)
            parts = self.tokenizer.parse_response(text, prefix="", schema=TURN_PARTS["harmony"])
            content = spoken_text("\n".join(piece for piece in parts.get("content", []) if piece))
            calls = [call_text(call) for call in parts.get("tool_calls", [])]
            if content and not calls:  # a message without a recipient is speech, even one that looks like a call
                return json.dumps({"content": content}) if CALL_LIKE.match(content) else content
            return action_text(content, calls)
        closed = bool(turn_ids) and turn_ids[-1] in self.stop_ids
        text = self.tokenizer.decode(turn_ids[:-1] if closed else turn_ids, skip_special_tokens=False)
        parts = self.tokenizer.parse_response(spoken_text(opened + text), prefix="", schema=TURN_PARTS["hermes"])
        content = "\n".join(piece for piece in parts.get("content", []) if piece)
        return action_text(content, [call_text(call) for call in parts.get("tool_calls", [])])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _shown(self, messages: list[dict]) -> list[dict]:
        """Messages as templates expect them. A special token inside a text is broken up: nobody can forge a turn."""
        special = "|".join(re.escape(t) for t in sorted(self.tokenizer.all_special_tokens, key=len, reverse=True))
        shown = []
        for message in messages:
            # Lone surrogates come out of JSON escapes such as "\ud800" and no tokenizer takes them.
            content = (message.get("content") or "").encode("utf-8", "replace").decode()
            if special:
                content = re.sub(special, lambda hit: hit[0][0] + " " + hit[0][1:], content)
            out = {"role": message["role"], "content": content}
            if message.get("tool_calls"):
                out["tool_calls"] = [{"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                                     for c in message["tool_calls"]]
            if message.get("name"):  # of the tool as the policy called it: any text at all
                out["name"] = re.sub(r"[^\w.-]", "_", message["name"])
            if self.family == "plain" and out["role"] == "tool":
                answer = f"<tool_response>\n{content}\n</tool_response>"
                if shown and shown[-1].get("answers"):
                    shown[-1]["content"] += "\n" + answer
                    continue
                out = {"role": "user", "content": answer, "answers": True}
            shown.append(out)
        return shown

    def _tail(self, messages: list[dict], generation_prompt: bool) -> str:
        """What the template writes behind the turn that holds TURN_MARK; starts with the token that closes it."""
        text = render_chat(self.tokenizer, [{"role": "user", "content": "x"}, *messages], [], generation_prompt)
        return cut_tail(text, self.closers)

    def _harmony_tail(self, shown: list[dict]) -> str:
        """gpt-oss names a tool's answer after the call just before it, so each answer gets a call of its own name."""
        text = ""
        for i, message in enumerate(shown):
            turn = {"role": "assistant", "content": TURN_MARK}
            if message["role"] == "tool":
                function = {"name": message.get("name") or "tool", "arguments": {"x": TURN_MARK}}
                turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            tail = self._tail([turn, message], generation_prompt=i == len(shown) - 1)
            closer = next(c for c in self.closers if tail.startswith(c))
            text += tail if i == 0 else tail[len(closer):]
        return text or self._tail([{"role": "assistant", "content": TURN_MARK}], generation_prompt=True)


def spoken_text(text: str) -> str:
    """What of a model's text is said aloud: its reasoning taken out, the rest stripped; "" where all is reasoning.

    A block may be closed, cut short (all that follows is reasoning) or closed without an opening, where a template
    opened it in the prompt (all before it is reasoning). Of harmony's channels final is speech, and commentary that
    names no recipient; "analysis...assistantfinal..." is what a server leaves of it that drops special tokens.
    """
    if "<|channel|>" in text:
        said = [body for header, body in HARMONY_MESSAGE.findall(text)
                if "to=" not in header and header.split()[:1] in (["final"], ["commentary"])]
        text = "\n".join(said)
    elif text.lstrip().startswith("analysis") and "assistantfinal" in text:
        text = text.rpartition("assistantfinal")[2]
    text = re.sub(rf"{THINK_OPEN}.*?{THINK_CLOSE}", "", text, flags=re.S | re.I)
    text = re.sub(rf"\A.*{THINK_CLOSE}", "", text, flags=re.S | re.I)
    text = re.sub(rf"{THINK_OPEN}.*\Z", "", text, flags=re.S | re.I)
    return text.strip()


def load_chat(tokenizer) -> Chat:
    """The tokenizer's chat family, found from its template and tried out once.

    Raises:
        ValueError: no chat template, a tool format that is not read here, or a suffix that cannot be isolated;
            the message names the tokenizer.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not tokenizer.chat_template:
        raise ValueError(f"{name}: this tokenizer has no chat template, so turns cannot be told apart")
    try:
        family = chat_family(tokenizer)
        closers = ("<|end|>", *HARMONY_STOPS) if family == "harmony" else (turn_closer(tokenizer),)
        open_turn = render_chat(tokenizer, [{"role": "user", "content": "x"}], [], generation_prompt=True)
    except (ValueError, TemplateError) as error:
        raise ValueError(f"{name}: cannot hold a conversation with this chat template: {error}") from error
    stops = HARMONY_STOPS if family == "harmony" else (*closers, *EXTRA_STOPS)
    vocabulary = tokenizer.get_vocab()
    stop_ids = [vocabulary[s] for s in stops if s in vocabulary]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stop_ids:
        stop_ids.append(tokenizer.eos_token_id)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[-1]
    return Chat(tokenizer, family, closers, stop_ids, pad_id, think_open=open_turn.rstrip().endswith("<think>"))


def chat_family(tokenizer) -> str:
    """harmony, hermes, llama3, tiny or plain; ValueError where tools are rendered in a form that is not read here."""
    template = str(tokenizer.chat_template)
    if "<|tiny|>" in tokenizer.get_vocab():
        return "tiny"
    if "<|channel|>" in template and "<|call|>" in template:
        return "harmony"
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {}}}}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    if render_chat(tokenizer, messages, [tool], True) == render_chat(tokenizer, messages, [], True):
        return "plain"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3"
    raise ValueError("its form of tool calls is not one of harmony, Hermes JSON, Llama-3 JSON")


def turn_closer(tokenizer) -> str:
    """The added token that the template puts right behind an assistant turn that is followed by a user turn."""
    text = render_chat(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN_MARK},
                                   {"role": "user", "content": "y"}], [], generation_prompt=True)
    behind = text.split(TURN_MARK)[-1]
    closer = max((t for t in tokenizer.get_added_vocab() if behind.startswith(t)), key=len, default="")
    if text.count(TURN_MARK) != 1 or not closer:
        raise ValueError("no single token closes an assistant turn, so its suffix cannot be isolated")
    return closer


def render_chat(tokenizer, messages: list[dict], tools: list[dict], generation_prompt: bool) -> str:
    """The chat template's text. Llama 3 has to keep tools in the system message: our talks open with a greeting."""
    return tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=generation_prompt,
                                         tokenize=False, tools_in_user_message=False)


def cut_tail(text: str, closers: tuple[str, ...]) -> str:
    """The rendered text from the first closing token behind TURN_MARK on."""
    behind = text.split(TURN_MARK)[-1]
    return behind[min(behind.index(c) for c in closers if c in behind):]


def tools_as_text(tools: list[dict]) -> str:
    """Hermes-style tool text, for a template that has no place for tools."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return ("# Tools\n\nThese functions can be called; each line is the JSON schema of one:\n"
            f"<tools>\n{listed}\n</tools>\n\nA call is a JSON object inside these tags, and nothing after it:\n"
            '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>')


def action_text(content: str, calls: list[str]) -> str:
    """One action string from the spoken text and the raw JSON of each call (bad JSON stays bad: an error turn)."""
    if not calls:
        return content
    if content:
        return f'{{"content": {json.dumps(content)}, "tool_calls": [{", ".join(calls)}]}}'
    return calls[0] if len(calls) == 1 and calls[0].startswith("{") else f"[{', '.join(calls)}]"


def call_text(call: dict | str) -> str:
    """A call's JSON; harmony gives the name in the header and the arguments' JSON as the message."""
    if isinstance(call, str):
        return call
    return f'{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"].strip() or "{}"}}}'


def llama3_action(text: str) -> str:
    """Llama 3 writes {"name", "parameters"}, several one after another; anything that fails to read stays as it is."""
    if not text.startswith(("{", "[")):
        return text
    values, at = [], 0
    try:
        while at < len(text):
            value, at = json.JSONDecoder().raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
            at += len(text[at:]) - len(text[at:].lstrip("; ,\n\t"))
        calls = [json.dumps({"name": v["name"], "arguments": v.get("parameters", v.get("arguments", {}))})
                 for v in values]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text
    return action_text("", calls)
