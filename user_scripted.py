"""`ScriptedUser`, the default customer: offline, deterministic, rules over the sentences of tau2's scenario.

It keeps no state. It turns the scenario's "You want ..." into "I want ..." and answers from those sentences; the gold
actions it never sees. Measured shares, limits and failures: docs/users.md.
"""
import json
import re
import zlib
from collections import namedtuple
from functools import lru_cache

from users import USER_STOP, USER_TRANSFER, UserTurn


# A sentence "if X, then Y": kind "confirm" (the agent asks to), "asked" (about X), "denied" (X is impossible), "note";
# trigger is X as written, text is Y as the customer says it.
ScenarioRule = namedtuple("ScenarioRule", "kind trigger text")
# A scenario in the first person. wishes are told one after another or (one_go) at once, notes when asked about; facts:
# topic -> values; unknown: "I do not remember my email address."; insists: does not take the first no for an answer.
ScenarioScript = namedtuple("ScenarioScript", "wishes notes rules facts unknown one_go insists")

# Topic -> (how the agent asks about it, which sentences of a scenario answer it).
USER_TOPICS = {
    "email": (r"e-?mail", r"e-?mail|@"), "zip code": (r"\bzip|postal", r"\bzip"),
    "name": (r"^(?!.*(passenger|product|item|friend|\bapp\b)).*\bname\b", r"\bname is\b"),
    "user id": (r"user ?id|username|user name|account id|customer id", r"user id"),
    "order number": (r"order (numbers?|ids?|#)|(which|what)( \w+)? orders?\b", r"\border\b"),
    "reservation number": (r"(reservation|confirmation|booking) (ids?|numbers?|codes?|reference)|which reservation",
                           r"reservation|confirmation number"),
    "phone number": (r"phone number|mobile number|line number", r"phone number"),
    "address": (r"(?<!mail )(?<!mail)\baddress|\bstreet\b|where do you live",
                r"(?<!mail )\b(address|live|living|residing|suite|street|drive|avenue|highway|st)\b"),
    "birthday": (r"date of birth|birthday|\bdob\b", r"birth|\bdob\b"),
    "payment": (r"payment|\bpay\b|paying|refund(ed)? (method|to)|which card|credit card|gift card|paypal",
                r"\bpay\b|payment|gift ?card|\bgc\b|paypal|credit card|visa|master ?card|amex|certificate|card ending"),
    "cabin": (r"\bcabin|\bclass\b", r"economy|business|first class"),
    "bags": (r"\bbags?\b|baggage", r"\bbags?\b|baggage"),
    "reason": (r"\breason\b|\bwhy\b", r"because|\breason\b|by mistake|no longer need|\bsince\b|due to"),
}
VALUE_PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+\.\w+", "user id": r"\b[a-z]+_[a-z]+_\d+\b", "order number": r"#W\d{7}\b|\bW\d{7}\b",
    "reservation number": r"\b(?!HAT\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b", "phone number": r"\b\d{3}-\d{3}-\d{4}\b"}
AGENT_SAYS = {  # what the agent's message does
    "denied": r"\bcannot|can't|\bcan not|unable|not (be )?(possible|available|allowed|eligible|permitted)|not able|"
              r"n't (possible|available|allowed|eligible|work|allow)|no longer available|does not allow|basic economy|"
              r"\bdenied|refuse|there (is|are) no\b|could not|couldn't|not found|not work|\bno (\w+ )+is available",
    "transfer": r"being transferred|transferring you|(have|been) transferred|(will|i'll) (now )?transfer you",
    "confirm": r"yes/no|yes or no|\byes\b|do you (want|wish) me to|would you like me to|would you (still )?like to|"
               r"shall (i|we)|should i|(can|may) i (go ahead|proceed)|do you (confirm|agree|approve|accept)|"
               r"please confirm|you confirm|(ok|okay|fine|ready) to (proceed|go)|is (that|this|it|"
               r"everything) (all )?(correct|right|ok|okay|fine)|proceed\?|go ahead\?",
    "ask": r"\b(what|which|who|whom|where|when|how|why)\b|(may|can|could|might) i (please )?(have|get|ask|know)|"
           r"provide|\bshare\b|\btell me\b|give me|\bneed (your|the|to know)|let me know|(verify|confirm) your|"
           r"specify|describe|is there|are there|do you (know|have|remember|need|prefer|travel)|did you|are you|(do|"
           r"would) you like (?!me|to)",
    "more": r"(any|some)thing else|what else|else (can|may|could) i|further (assist|help|request)|other (request|"
            r"questions)|anything more|additional (help|assist)",
    "open": r"how (can|may|could) i (help|assist)|what (can|may) i do|what do you need|what would you like|"
            r"what do you want|how can i be of|what brings you|(help|assist) you (with )?today|what (is|"
            r"are) your (request|issue|problem)",
    "busy": r"\b(let me|one moment|next,|now i|i will now|i'll now|moving on|please wait|please hold)\b",
    "done": r"\bdone\b|(has|have) (now )?been|complete|success|processed|\b(is|are) now\b|updated|all set|confirmed|"
            r"cancell?ed\b|changed|resolved"}
SMALL_WORDS = frozenset("""a an the of to for from in on at by with and or but not no yes do does did is are was were
be been have has had i me my mine you your yours it its this that these those them they there here what which who whom
whose when where why how may can could would should shall will please provide tell know need want like wish help any
some all also just as if so agent item items order orders product products one ones get got give let me am us we our
about into out up ask asks asked possible available work more most than then much many long exactly sure specific
today now would prefer different new okay able want's make made think thing things kind type""".split())
# Pattern -> replacement, in order; "you" turns into "I" and "the agent" into "you". @I and @A hold these two back.
PERSON_FLIPS = (
    (r"(?i)\s*\([^()]*\b(reveal|mention|hide|you know|do not|don't)\b[^()]*\)\.?", ""),
    (r",? but do(n't| not) (reveal|mention)[^.]*", ""), (r"\b[Yy]ou (name is|mobile)\b", r"your \1"),
    (r"\(your forgot", r"(you forgot"),
    (r"\b(?:[Yy]ou )?(?:also )?(?:explicitly )?(?:[Aa]sk|want) (?:the )?agent (?:explicitly )?to\b", "please"),
    (r"\b(?:[Yy]ou )?(?:can )?(?:also )?[Aa]sk the agent(?: explicitly)? (?=how|wh|if|for|about)", "please tell me "),
    ("please tell me for", "I would like"), (r"\b[Tt]he (?:service |customer service )?agents?\b", "@A"),
    (r"\b[Aa]re you\b", "am @I"), (r"\b[Yy]ou(?:'re| are)\b", "@I am"), (r"\b[Yy]ou were\b", "@I was"),
    (r"\b[Yy]ourself\b", "myself"), (r"\b[Yy]ours\b", "mine"), (r"\b[Yy]our\b", "my"),
    (r"\b(to|for|with|from|asks?|asked|tells?|told|gives?|give|helps?|lets?|allows?|charge|offers?|contact|gets?|"
     r"sends?|of|about|suits?|saves?|informs?|remind) [Yy]ou\b(?!')(?! (want|will|can|have|had|just|would|do|did|live|"
     r"already|ordered|received|bought|purchased|placed|need|like|prefer)\b)", r"\1 me"), (r"\b[Yy]ou\b", "@I"),
    ("@I", "I"), ("@A's", "your"), (r"@A is\b", "you are"), (r"@A has\b", "you have"),
    (r"@A (doesn't|does not)\b", "you don't"), (r"@A (\w+[kyldrtewn])s\b", r"you \1"), ("@A", "you"), (r"\s+", " "))
# The Y of "if X, Y" as an instruction to oneself: "say that it is X" -> "it is X", "ask for X" -> "you would like X".
CONSEQUENCE_FLIPS = (
    (r"(?i)^(then|and|but|you|simply|just|suddenly|abruptly|initially|please|will|can|are ok with|should|,|\s)+ ", ""),
    (r"^(are|become) angry( and swear[^,]*)?,?( but| and| then)? |^add another request and (also )?|"
     r"^do not say yes immediately, because (you )?", ""), (r" and provide (\d+)", r", it is \1"),
    (r"\s*\([^()]*\)", ""), (r"^(?:respond|say|answer)\b[^'\"]*['\"](.+?)['\"]\s*\.?$", r"\1"),
    (r"^(?:say|provide|give)(?: that)?(?: it is| it's)? ([#\w]*\d\w*)( first| initially)?\b.*", r"it is \1"),
    (r"^(?:say|says|mention|tell (?:the )?agent|respond|answer|insist)(?: explicitly)?(?: that)?\s+(?=\w)", ""),
    (r" (initially|first)(?=\.?$)", ""),
    (r"^((?:also |only )?(?:want|prefer)|would|don't|do not|ask|need|like|wish|regret|wonder|accept|have|go|'d|allow|"
     r"decide|change (?:your|my) mind|are|feel|agree)\b", r"you \1"), (r"^you ask to (?!be|get)", "please "),
    (r"^you (do not|don't) (?=exchange|cancel|return|make|process|do\b)", r"please \1 "),
    (r"^you ask ", "you would like "), (r"^you would like for ", "you would like "),
    (r"^((only |also |try to |try )?(exchange|cancel|return|change|use|keep|pick|go|choose|book|drop|move|upgrade|"
     r"refund|modify|switch|add|remove|transfer|proceed|take|make)\b)", r"please \1"))
WANT_WORDS = r"\b(wants?|wish|like to|need|wonder|ask|request|inquire|check|try to|looking (for|to)|please|'d like)\b"
NOTE_WORDS = r"\bprefer|does(n't| not) matter|do(n't| not) (want|care|remember|know)|never want|not sure"
LATER_WORDS = r"^(you (also|now|then) |then |lastly|finally)|suddenly|want to know"
STAGE_WORDS = (  # how to play the part, not what to say
    r"make sure (you|to)|do(n't| not) (reveal|mention|volunteer|end the|ask for comp|accept the)|^mention |"
    r"will not say anything|more information than|^be |^sound |make everything sound|at the same time|"
    r"ground your responses|^for example|tool call|^you like to (say|do|talk)|conversation as confusing|"
    r"randomly insert|speak (very )?brief|^you are (a|an|very|extremely|polite|in debt|reactive|not good|\w+, )|"
    r"end each of your|this is incorrect|^insist|take no for|tactics|in one go")
ONE_GO_WORDS = (r"in one go|same time|(all (two|three)|two|both) (things|requests|problems)|all requests|(details|"
                r"everything) upfront|very first message|say things together|mention (the )?(two|both)")


def has(text: str, words: str) -> re.Match | None:
    """Where the pattern `words` first stands in the text, in any case; None where it does not."""
    return re.search(words, text, re.I)


def split_sentences(text: str) -> list[str]:
    """Cut scenario or agent text into sentences; list lines ("- add 3 bags") stay with the sentence before them."""
    text = re.sub(r",\s*\n\s*", ", ", re.sub(r"\s*\n\s*([-*]|\d[.)])\s+", " - ", text or ""))
    ends = r"(?<=[.!?;])(?<!\b[A-Z]\.)(?<!\bSt\.)(?<!\bDr\.)(?<!\be\.g\.)(?<!\.\.\.)[\"')]*\s+|\n+|\.\.\.\s+"
    return [p for p in (p.strip().lstrip(".,; ") for p in re.split(ends, text)) if re.search(r"\w\w", p)]


def first_person(sentence: str, flips: tuple = PERSON_FLIPS) -> str:
    """Turn an instruction to the customer into what the customer says: "You want your bag" -> "I want my bag." """
    for pattern, replacement in flips:
        sentence = re.sub(pattern, replacement, sentence.strip(" ,;-"))
    return sentence[:1].upper() + sentence[1:] + ("" if sentence[-1:] in ".!?" else ".")


def parse_rule(sentence: str) -> ScenarioRule | None:
    """Read "If/When X, Y" into a rule; None when the sentence is not conditional."""
    s = re.sub(r"^(But|And|Also|However),? ", "", sentence, flags=re.I)
    head = r"(?:if and only if|only if|only after|if|when|in case|once)\b\s*((?:[^(]|\([^)]*\))+?)"
    m = re.match(head + r",\s*(?:then\s+)?(?=you\b|you'|please|say|mention|ask)(.+)", s, re.I | re.S) or re.match(
        head + r"(?:,\s*(?:then\s+)?|\s+then\s+)(.+)", s, re.I | re.S) or re.match(r"if (not)\b,? (.+)", s, re.I)
    if not m:
        return None
    low, said = m[1].lower(), first_person(first_person(m[2].strip(" ,"), CONSEQUENCE_FLIPS).rstrip("."))
    kinds = (("confirm", r"confirm"), ("asked", r"^(?!.*(cannot|can't|not )).*\bask(s|ed)?\b"),
             ("denied", r"\bnot?\b(?! (yet |been )*shipped)|n't|cannot|unable|fail|refuse|denie|issue|insist|basic|"
                        r"only option|says?\b|mention"))
    kind = next((k for k, words in kinds if has(low, words)), "note")
    # A condition on the world is said along with the wish, except where it only chooses among variants.
    return ScenarioRule(kind, m[1], said if kind != "note" or has(low, "several|multiple") else first_person(s))


@lru_cache(maxsize=4096)
def read_scenario(known: str, unknown: str, reason: str, instructions: str) -> ScenarioScript:
    """Sort the sentences of a tau2 scenario into wishes, notes and rules, and collect the values that identify."""
    wishes, notes, rules, later, unknowns, wanted = [], [], [], [], [], False
    for sentence in split_sentences(re.sub(r",? but (?=(if|when) the agent asks)", ". But ", reason)):
        rule, text = parse_rule(sentence), first_person(sentence)
        if rule and (rule.kind != "note" or wishes and has(rule.trigger, r"several|multiple|options|\bonly\b|^so$")):
            rules.append(rule)
        elif has(sentence, STAGE_WORDS) and wishes or not has(text, r"\w"):
            continue
        elif wishes and has(sentence, NOTE_WORDS) and not has(sentence, "want(ed)? to|exchange|wish to|^also"):
            notes.append(text)
        else:
            wants = bool(has(sentence, WANT_WORDS + "|^(and )?(also|finally|lastly|then|after|if)\\b"))
            same = has(sentence, r"^but (?!after)|^in fact") or has(sentence, r"(refund|payment|pay)\b") \
                and not has(sentence, r"\balso|how much|cancel|return")  # it belongs to the wish before
            new = not wishes or wanted and wants and not same
            wishes[len(wishes) - (not new):] = [text if new else f"{wishes[-1]} {text}"]
            wanted = wants or wanted and not new
    for sentence in split_sentences(instructions):
        rule, text = parse_rule(sentence), first_person(sentence)
        if rule:
            rules.append(rule)
        elif has(sentence, LATER_WORDS) and has(sentence, WANT_WORDS):
            later.append(text)
        elif not has(sentence, STAGE_WORDS) and (  # "You are ..." alone is the character, not the case
                not has(sentence, "^you( are|'re) ") or has(sentence, r"willing|fine|\bok\b|happy with")):
            notes.append(text)
    for sentence in split_sentences(unknown):
        rule = parse_rule(sentence)
        (rules if rule else unknowns).append(rule or first_person(sentence))
    everything = f"{reason}\n{instructions}"
    facts = {t: list(dict.fromkeys(re.findall(p, known + "\n" + everything))) for t, p in VALUE_PATTERNS.items()}
    facts["zip code"] = list(dict.fromkeys(re.findall(r"(?<![\w#$-])\d{5}\b", known)))
    facts["name"] = re.findall(r"(?:[Yy]ou are|[Yy]our? name is|[Yy]ou're|[Yy]our name:|called)\s+(?:user )?"
                               r"((?:[A-Z][\w'-]+)(?: [A-Z][\w'-]+)*)", known)[:1]
    notes += [first_person(s) for s in split_sentences(known)]
    return ScenarioScript(wishes + later, notes, rules, facts, unknowns, bool(has(everything, ONE_GO_WORDS)),
                          bool(has(everything, r"\binsist|persistent|take no for")))


@lru_cache(maxsize=16384)
def content_words(text: str) -> frozenset[str]:
    """Words that carry meaning, with plural and -ing/-ed endings cut, for overlap between question and sentence."""
    words = [w for w in re.findall(r"[a-z0-9#]+", text.lower()) if w not in SMALL_WORDS]
    return frozenset(re.sub(r"(ies|es|s|ing|ed|e)$", "", w) if len(w) > 3 else w for w in words)


@lru_cache(maxsize=4096)
def asked_topics(question: str) -> tuple[str, ...]:
    return tuple(t for t, (asks, _) in USER_TOPICS.items() if has(question, asks))


ACTION_SYNONYMS = {"cancel": r"cancel|remov|refund|undo", "return": r"return|refund|money back|send back",
                   "exchange": r"exchang|swap|replac|chang|switch|instead|different|new|modif|upgrad|want"}
PAYMENT_SYNONYMS = {"gift": r"gift|\bgc\b", "paypal": r"paypal", "credit": r"credit|visa|master|amex|\bcc\b|card end"}


class ScriptedCustomer:
    """One conversation as the scripted customer sees it; made anew for each turn, so nothing is remembered."""

    def __init__(self, conversation):
        ins, texts = conversation.scenario.instructions, {"assistant": [], "user": [], "tool": []}
        self.script = read_scenario("", "", ins, "") if isinstance(ins, str) else read_scenario(
            ins.known_info or "", ins.unknown_info or "", ins.reason_for_call, ins.task_instructions or "")
        for m in conversation.messages:
            texts[m["role"]] += [m["content"]] if m.get("content") else []
        self.heard, self.said, self.told = texts["assistant"] or [""], texts["user"], " ".join(texts["user"])
        self.last, self.low = self.heard[-1], self.heard[-1].lower()
        self.says = {act for act, words in AGENT_SAYS.items() if has(self.last, words)}
        self.texts = [*self.script.wishes, *self.script.notes, *(r.text for r in self.script.rules)]
        self.current = next((w for w in reversed(self.script.wishes) if w in self.told), "")  # the wish told last
        self.draw = zlib.crc32(f"{conversation.seed}|{len(conversation.messages)}|{self.last}".encode())

    def pick(self, *choices: str) -> str:
        """Seeded wording: the same conversation always gets the same words."""
        return choices[self.draw % len(choices)]

    def speak(self) -> str:
        """What to say to the agent's last message."""
        wishes, low, says, answers, confirms = self.script.wishes, self.low, self.says, [], False
        untold = [w for w in wishes if w not in self.told]
        if "transfer" in says and not low.rstrip().endswith("?"):
            return USER_TRANSFER
        if not self.said:
            opening = " ".join(wishes if self.script.one_go else wishes[:1]) or "I need some help, please."
            return self.pick("Hi! ", "Hello. ", "") + opening
        for question in split_sentences(self.last):
            if has(question, AGENT_SAYS["more"]) or has(question, AGENT_SAYS["open"]) and not asked_topics(question):
                continue
            opens = has(question, r"\b(which|what|how|when|where|why)\b")
            plan = has(question, AGENT_SAYS["confirm"]) and not has(question, "(confirm|verify) (me )?your") \
                and (not opens or has(question, "yes|you confirm"))
            asks = opens and asked_topics(question) if plan else has(question, AGENT_SAYS["ask"]) and \
                has(question, r"\?|please|need|provide|let me know")
            confirms = confirms or plan
            answers += [self.answer(question)] if asks else []
        identity = [t for t in ("email", "name", "zip code", "user id") if t in asked_topics(low)]
        rule = None if identity else self.next_rule("denied")
        if not rule and "denied" in says and identity and not answers and not confirms:
            known = [t for t in ("email", "name", "zip code", "user id") if self.script.facts[t]]
            return " ".join(map(self.fact, known)) or "I do not know more than that."
        rule = rule or confirms and self.next_rule("confirm") or (confirms or answers) and self.next_rule("note")
        if rule:
            return rule.text
        if confirms:
            return self.objection() or " ".join([self.pick("Yes.", "Yes, please.", "Yes, go ahead.")] + answers)
        if answers:
            useful = [a for a in dict.fromkeys(answers) if not has(a, r"^(I|Sorry, I) do not know( that)?\.$")]
            return " ".join(useful[:3] or answers[:1])
        if "more" not in says and "open" in says:
            return (wishes if self.said[-1:] == wishes[:1] else untold or wishes or ["I do not know."])[0]
        if "more" not in says and "busy" in says:
            return self.pick("Okay.", "Okay, thank you.")
        if "more" not in says and "denied" in says and not untold and "no other way" not in self.told:
            return "Is there really no other way?"
        if not says & {"more", "done", "denied"}:  # nothing is asked: wait politely twice, then give up on the agent
            idle = [bool(re.match("Okay|Sorry, I do not und", t)) for t in [*self.said[::-1], "end"]].index(False)
            if idle >= 2 or idle and self.heard[-1:] == self.heard[-2:-1]:
                return "This does not help me. Goodbye. " + USER_STOP
            puzzled = "Sorry, I do not understand. What do you need from me?"
            return puzzled if idle else self.pick("Okay.", "Okay, thank you.")
        if self.script.insists and "denied" in says and self.told.count("I insist") < 2:
            return "I insist. " + wishes[0]
        goodbye = self.pick("Thank you, that is all. ", "No, that is all. Thanks! ", "Thanks, bye. ") + USER_STOP
        return untold[0] if untold else goodbye

    def next_rule(self, kind: str) -> ScenarioRule | None:
        """The unused rule of this kind that fits the agent's message best; in order among equals.

        Half of the words of X make X come about. A refusal needs one word, or none where it or the rule names nothing
        in particular ("Sorry, that is not possible."); a request to confirm needs none.
        """
        words, best, best_score = content_words(self.last), None, -1
        for rule in self.script.rules:
            about = content_words(rule.trigger)
            score = len(words & about)
            fits = kind == "confirm" or score >= max(2, len(about) / 2) or \
                kind == "denied" and "denied" in self.says and (score or not about or len(words) <= 3)
            if rule.kind == kind and rule.text not in self.told and score > best_score and fits:
                best, best_score = rule, score
        return best

    def objection(self) -> str | None:
        """What contradicts the scenario in the plan to confirm: order, action, reason or payment; None: nothing."""
        wishes, low, everything = self.script.wishes, self.low, " ".join(self.texts).lower()
        named, own = ([v.strip("#") for v in re.findall(r"#w\d{7}|\bw\d{7}", t)] for t in (low, everything))
        if own and named and not set(own) & set(named) and not has(
                everything, r"(other|another|pending|recent|all|any|cancelled)( \w+)? order|\borders\b|guess|not sure"):
            return f"No, I mean order {self.script.facts['order number'][0]}."
        about = [w for w in wishes if any(n in w.lower() for n in named)]
        scope = " ".join(about + [r.text for r in self.script.rules]).lower() if about else everything
        for text in self.script.notes:  # "I don't want to cancel if I don't get a refund."
            words = content_words(text)
            lost = has(text, r"(n't|\bnot\b).*\b(if|unless|without)") and has(low, r"without|\bnot?\b|n't")
            if lost and len(words & content_words(low)) >= max(2, len(words) / 2):
                return "No. " + text
        plan = has(low, r"(?:me to|(?:shall|should|can|may) i|i will|i'll|like to|want to|going to|you to) (\w+)")
        verb = plan[1] if plan else ""
        if not has(scope, ACTION_SYNONYMS.get(verb, "")):
            return "No. " + (about or [self.current])[0]
        for offered, wanted in (("mistake", "no longer need"), ("no longer need", "mistake")):
            if verb == "cancel" and offered in low and offered not in everything and wanted in everything:
                return "No. " + reason_clause(next(t for t in self.texts if wanted in t.lower()))
        paying = [r.text for r in self.script.rules if has(r.text, USER_TOPICS["payment"][1])] or self.texts
        kinds, mine = ([k for k, p in PAYMENT_SYNONYMS.items() if has(t, p)] for t in (low, " ".join(paying)))
        if len(kinds) == 1 and len(mine) == 1 and kinds != mine and not has(everything, "original|other"):
            return "No. " + next(t for t in [*paying, *self.texts] if has(t, PAYMENT_SYNONYMS[mine[0]]))
        return None

    def answer(self, question: str) -> str:
        """Answer one question from the scenario; what the scenario does not give, the customer does not know."""
        facts, script = self.script.facts, self.script
        topics, asked = asked_topics(question), content_words(question)
        for rule in script.rules:  # "If asked for your zip code, say ..." comes before the plain fact
            about = asked_topics(rule.trigger)
            words = content_words(rule.trigger) or content_words(rule.text)
            hit = set(topics) & set(about) if about else asked & words
            if rule.kind == "asked" and rule.text not in self.told and hit:
                return rule.text
        if "email" in topics and facts["email"] and len(topics) > 1:
            topics = ["email"] + [t for t in topics if t not in ("email", "name", "zip code")]
        known = [t for t in topics if facts.get(t)]
        if set(topics) & {"name", "zip code"} and not facts["name"] and facts["user id"] and "user id" not in known:
            known.insert(0, "user id")
        if known[:2] == ["zip code", "name"]:
            return self.pick("I am {}, zip code {}.", "My name is {} and my zip code is {}.", "{}, {}.").format(
                facts["name"][0], " or ".join(facts["zip code"]))
        if known:
            return " ".join(self.fact(t) for t in known)

        def overlap(text: str) -> int:
            return len(asked & content_words(text))

        sentences = [*script.notes, *script.wishes, *(r.text for r in script.rules if r.kind in ("note", "asked"))]
        for topic in topics:
            unknown, about = ([s for s in source if has(s, USER_TOPICS[topic][1])]
                              for source in (script.unknown, sentences))
            telling = {"address": r"\d \w+ \w+,|suite \d", "payment": r"card|paypal|certificate|\bgc\b|original"}
            first = [s for s in about if has(s, telling.get(topic, "^$"))]
            if topic == "reason" and about:
                return reason_clause(max(about, key=overlap))
            if unknown or about:
                return (unknown or [max(first or about, key=overlap)])[0]
        if topics:
            return {"payment": "I have no preference.", "reason": "I have no special reason."}.get(
                topics[0], f"I do not know {topic_words(topics[0])}.")
        best = max([*sentences, *script.unknown], key=overlap, default="")
        if best and overlap(best):
            return best
        if has(question, "item|product|order|which one|what exactly|detail|do you want"):
            return self.current or (script.wishes or ["I do not know."])[0]
        prefers = has(question, "prefer|would you like|do you (want|need)")
        return "I have no preference." if prefers else self.pick("I do not know.", "Sorry, I do not know that.")

    def fact(self, topic: str) -> str:
        """A known value as a sentence; order numbers of the wish under discussion come before all others."""
        values = [v for v in self.script.facts[topic] if re.match("order|reserv", topic) and v in self.current]
        words = topic_words(topic)
        joined = (" or " if topic == "zip code" else " and ").join(values or self.script.facts[topic])
        return f"{words[0].upper()}{words[1:]} is {joined}."

    def device(self, conversation) -> UserTurn | None:
        """Carry out what the agent asks for with the customer's own tools (telecom) and report what they return.

        One action for each message (tau2's guideline); a switch that ended up on the wrong side is pressed again;
        whether the issue is over is looked up, never made up. None: the message is not about the device.
        """
        start = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        calls = [c for m in conversation.messages[start:] for c in m.get("tool_calls") or []]
        results = [m["content"] for m in conversation.messages[start:] if m["role"] == "tool"]
        low, tools = re.sub(r"\bon (or|/) off\b", "", self.low), [t["function"] for t in conversation.user_tools]
        goal = " ".join([*self.script.wishes, *(s for s in self.texts if "issue resolved" in s)]).lower()
        check, good = next(g for g in DEVICE_GOALS if g[2] in goal)[:2]
        closing = has(low, AGENT_SAYS["more"] + r"|resolved|fixed|works?(ing)? (now|again|fine|properly|as)\b")
        if results:
            wanted = has(low, r"\b(?:turn|switch|toggle|put)\b[^.]*?\b(on|off)\b(?! your)|\b(enable|disable)\b")
            state = has(results[-1], r"is now (on|off)")
            if len(calls) == 1 and wanted and state and {"enable": "on", "disable": "off"}.get(
                    wanted[2], wanted[1]) != state[1].lower():
                return UserTurn(tool_calls=calls)
            report = "; ".join(results[-1].split("\n"))
            if not closing or calls[-1]["name"] != check:
                return UserTurn(report)
            return UserTurn(f"It still does not work. {report}" if not has(report, good) else
                            f"It works now, thank you! {USER_STOP}")
        other = has(low, r"\b(full|your) name|phone number|e-?mail|address") or "transfer" in self.says \
            or closing and not has(low, r"please|(could|can) you")
        tool = None if other else requested_tool(self.last, tools)
        if tool:
            arguments = tool_arguments(tool, low)
            return UserTurn("Which one exactly do you mean?") if arguments is None else UserTurn(
                tool_calls=[{"name": tool["name"], "arguments": arguments}])
        if closing and "transfer" not in self.says:
            return UserTurn(tool_calls=[{"name": check, "arguments": {}}])
        odd = has(low, "^please|(could|can) you") and not asked_topics(low) and not self.says & {"confirm", "transfer"}
        return UserTurn("I do not know how to do that on my phone.") if odd else None


class ScriptedUser:
    """The default customer: offline, deterministic, built from the scenario's own sentences."""
    name = "scripted"

    def reply(self, conversations: list) -> list[UserTurn]:
        """One turn for each conversation; nothing is kept between calls."""
        people = [(c, ScriptedCustomer(c)) for c in conversations]
        return [(me.device(c) if c.user_tools and me.said else None) or UserTurn(me.speak()) for c, me in people]


def topic_words(topic: str) -> str:
    return ("the " if re.match("order|reserv", topic) else "my ") + topic


def reason_clause(sentence: str) -> str:
    """The reason alone: "I want to cancel it because I no longer need it." -> "Because I no longer need it." """
    m = re.search(r"\b(because|since|due to|as it)\b.*", sentence)
    return m[0][:1].upper() + m[0][1:] if m else sentence


# The tool that shows whether the issue is over, what it then returns, and a word of the scenario by which it is chosen.
DEVICE_GOALS = (("can_send_mms", r"can send", "mms"), ("run_speed_test", r"excellent", "internet"),
                ("check_status_bar", r"^(?!.*(no signal|airplane)).*(poor|fair|good|excellent)", ""))
LOOK_WORDS = (r"\b(check\w*|shows?|displays?|is|are|does|what|which|see|look|verify|tell|returns|measures?|run|try|"
              r"can you|send)\b")
CHANGE_WORDS = (r"\b(turn|toggl\w+|switch|enable|disable|reset\w*|reboot\w*|restart\w*|re-?(seat|insert)\w*|remov\w+|"
                r"grants?|allow|gives?|sets? |changes?|connects?|disconnects?|pay|makes?)\b")
AGENT_ACTS = r"^(i|we)('ve|'ll|'m| have| will| am| was| can| see)\b|\b(shall|should|may|can) i\b|(want|like) me to"
DEVICE_SYNONYMS = (
    ("_", " "), ("wi-fi", "wifi"), (r"re-(insert|seat)", r"re\1"), (r"power[- ]cycl\w+|restart\w*", "reboot"),
    (r"\bpay\b", "make payment"), (r"(picture|multimedia) messages?", "mms"),
    (r"(turn|switch) off (your |the )?vpn|disable (your |the )?vpn", "disconnect vpn"),
    (r"mode preference|network type|preferred network", "network mode preference"))


@lru_cache(maxsize=4096)
def device_words(text: str) -> frozenset[str]:
    for pattern, word in DEVICE_SYNONYMS:
        text = re.sub(pattern, word, text.lower())
    return content_words(text)


def requested_tool(text: str, tools: list[dict]) -> dict | None:
    """The tool that a sentence of the agent asks for: it shares the rarest words, above all those of its name."""
    words = {t["name"]: device_words(t["name"] + " " + t["description"]) for t in tools}

    def score(sentence: str, tool: dict) -> float:
        name, asked = device_words(tool["name"]), device_words(sentence)
        core = name - {"check", "statu", "run", "toggl", "set", "devic", "setting"}
        shared = sum((3 if w in name else 1) / sum(w in v for v in words.values()) for w in asked & words[tool["name"]])
        looks, changes = (next((m.start() for m in re.finditer(kind, sentence)), len(sentence))
                          for kind in (LOOK_WORDS, CHANGE_WORDS))
        fits = looks != changes and (looks < changes) == bool(re.match(r"check|run|can", tool["name"]))
        return (shared + len(core) * (core <= asked)) * (1.0 if fits else 0.15)

    sentences = [s for s in split_sentences(text.lower()) if not re.search(AGENT_ACTS, s)]
    found = [(score(s, t), -i, t) for i, s in enumerate(sentences) for t in tools]
    best = max(found, key=lambda f: f[:2], default=(0, 0, None))
    return best[2] if best[0] >= 0.5 else None


def tool_arguments(tool: dict, low: str) -> dict | None:
    """Arguments as the agent words them: an allowed value, or the word before "app" / "permission"; None: not all."""
    values, spoken = {}, set(re.findall(r"[a-z0-9]+", low))
    for name in tool["parameters"].get("required", []):
        kind, what = json.dumps(tool["parameters"]["properties"][name]), name.split("_")[0]
        defs = [d for d in tool["parameters"].get("$defs", {}).values() if f"/{d['title']}\"" in kind]
        allowed = [v for d in defs for v in d.get("enum", []) if spoken & set(v.split("_"))]
        best = max(allowed, key=lambda v: (v in low, len(spoken & set(v.split("_")))), default=None)
        hits = re.findall(rf"\b{what}s?(?: name)?:? (?:is |called |named )?['\"](\w+)|"
                          r"\b(?!(?:the|your|this|that|an?|each|to|of|specific|default|any|app|which|following)\b)"
                          rf"(\w+)['\"]? {what}", low)
        values[name] = best if defs else next((a or b for a, b in hits), None)
    return None if None in values.values() else values
