"""Keys and values of many rows, held once: between turns, while new tokens come in, and while a turn is sampled.

Dimension key: B rows, T new tokens, S cached slots, Hk key heads, D head dim.

A row's keys are `Piece`s: runs of slots in some cache. New tokens add a piece; a turn is sampled on one cache in which
every row lies flush right, so that slot distance is token distance and a sliding window sees what it sees in training.
Whatever moves keys does it for one layer's keys, then its values, and lets the old ones go at once: beside what the
rows need there is never more than a share of one layer.
"""
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SHARE_FROM = 32         # tokens; a shorter common start of different prompts is not worth its own forward
FILL = 0.8              # rows with this share of the longest row's new tokens go through together
PREFILL_TOKENS = 16384  # most tokens in one forward: it bounds what activations need
FIRST_ROOM = 64         # tokens; room for a turn before any turn is known
LOOSE = 1.25            # rows that left may hold this much before the others move together
PARTS = ("keys", "values")


class Piece(NamedTuple):
    """`length` real tokens of one row: slots from `start` on, in batch entry `index`."""
    cache: DynamicCache
    index: int
    start: int
    length: int


class Held(NamedTuple):
    """A row's keys, in the order of its tokens."""
    pieces: tuple[Piece, ...]
    # Kept alive here: `id(row)` is a key of TurnCache.held, and a dead row's id would be given to another.
    owner: object = None

    @property
    def length(self) -> int:
        return cached_tokens(self.pieces)


def cached_tokens(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.length for piece in pieces)


def key_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers. Worked: gpt-oss-20b, 24 x 2 x 8 x 64 x 2 = 49,152."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers * 2 * heads * size * dtype.itemsize


def empty_counts() -> Counter:
    return Counter(tokens_forwarded=0, slots_forwarded=0, sampled_tokens=0, decode_slots=0, rounds=0)


@dataclass
class TurnCache:
    """What `rollout.generate_turns` returns and takes again."""
    held: dict[int, Held] = field(default_factory=dict)    # id(row) -> its keys
    counts: Counter = field(default_factory=empty_counts)  # over all calls
    room: int = FIRST_ROOM  # tokens a row; what the call before needed


class RoomyLayer(DynamicLayer):
    """Writes new keys into room kept for them, and makes more room when a turn needs it.

    DynamicLayer's torch.cat would copy the whole cache for every token. A layer grows in its own update, so the
    layers grow one after another and the old keys of one are gone before the next one starts.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: int):
        super().__init__()
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True
        self.rooms = {"keys": keys, "values": values}  # (B, Hk, S, D), the first `used` slots of S written
        self.keys = keys[:, :, :used]
        self.values = values[:, :, :used]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        for part, new in zip(PARTS, (key_states, value_states)):
            used = getattr(self, part).shape[2]
            end = used + new.shape[2]
            if end > self.rooms[part].shape[2]:
                self.grow(part, end + max(FIRST_ROOM // 4, used // 8))
            room = self.rooms[part]
            room[:, :, used:end] = new
            setattr(self, part, room[:, :, :end])
        return self.keys, self.values

    def grow(self, part: str, slots: int) -> None:
        """A copy for every eighth of its length: 8 slots written for a token, next to S read for it."""
        written = getattr(self, part)
        B, Hk, used, D = written.shape
        room = written.new_empty(B, Hk, slots, D)
        room[:, :, :used] = written
        self.rooms[part] = room


class BehindPast(DynamicLayer):
    """A layer while new tokens come in: attention sees each row's past before them, only the new keys stay."""

    def __init__(self, pasts: list[tuple[Piece, ...]], number: int):
        super().__init__()
        first = next(piece for pieces in pasts for piece in pieces).cache.layers[number].keys
        self.dtype = first.dtype
        self.device = first.device
        self.is_initialized = True
        self.pasts = pasts
        self.number = number
        self.slots = max(map(cached_tokens, pasts))

    def get_seq_length(self) -> int:
        return self.slots + (0 if self.keys is None else self.keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        seen = []
        for part, new in zip(PARTS, (key_states, value_states)):
            whole = flush_right(self.pasts, self.number, part, spare=new.shape[2])  # (B, Hk, S + T, D)
            whole[:, :, self.slots:] = new
            seen.append(whole)
            own = new.untyped_storage().nbytes() == new.numel() * new.element_size()
            setattr(self, part, new if own else new.clone())  # not a whole fused projection for its sake
        self.pasts = None  # or each piece would keep its forerunners alive
        return tuple(seen)


def flush_right(rows: list[tuple[Piece, ...]], number: int, part: str, spare: int) -> Tensor:
    """Keys or values of one layer, copied: every row's real tokens end at slot S, `spare` slots behind are free.

    Args:
        rows: B rows, at least one with a piece; one without has no past.
        number: of the layer. part: "keys" or "values".
    Returns: (B, Hk, S + spare, D), S the longest row's tokens; free slots are not initialised.
    Worked example: rows of 3 and 1 tokens, spare 2: `a a a|. .` and `0 0 b|. .`
    """
    lengths = [cached_tokens(pieces) for pieces in rows]
    slots = max(lengths)
    like = getattr(next(piece for pieces in rows for piece in pieces).cache.layers[number], part)
    room = like.new_empty(len(rows), like.shape[1], slots + spare, like.shape[3])
    for i, pieces in enumerate(rows):
        at = slots - lengths[i]
        room[i, :, :at] = 0  # what the mask hides must be finite
        for piece in pieces:
            source = getattr(piece.cache.layers[number], part)[piece.index]  # (Hk, S, D)
            room[i, :, at:at + piece.length] = source[:, piece.start:piece.start + piece.length]
            at += piece.length
    return room


def gather_right(rows: list[tuple[Piece, ...]], spare: int, last_use: list[DynamicCache]) -> DynamicCache:
    """One cache with every row's keys flush right and `spare` free slots.

    last_use: caches that nothing needs afterwards; each of their tensors goes as soon as it is copied.
    """
    cache = DynamicCache()  # no config: every layer full length, the mask does the windowing
    first = next((piece for pieces in rows for piece in pieces), None)
    for number in range(len(first.cache.layers) if first else 0):
        rooms = {}
        for part in PARTS:
            rooms[part] = flush_right(rows, number, part, spare)
            for source in last_use:
                let_go(source.layers[number], part)
        cache.layers.append(RoomyLayer(rooms["keys"], rooms["values"], used=max(map(cached_tokens, rows))))
    return cache


def let_go(layer: DynamicLayer, part: str) -> None:
    setattr(layer, part, None)
    if isinstance(layer, RoomyLayer):
        layer.rooms[part] = None


def caches_of(held: list[tuple[Piece, ...]]) -> list[DynamicCache]:
    """The distinct caches in which these rows' pieces lie."""
    return list({id(piece.cache): piece.cache for pieces in held for piece in pieces}.values())


def slots_of(cache: DynamicCache) -> int:
    """Slots, free ones too, that a cache takes: rows times room."""
    layer = cache.layers[0]
    keys = layer.rooms["keys"] if isinstance(layer, RoomyLayer) else layer.keys
    return keys.shape[0] * keys.shape[2]


def cached_slots(cache: TurnCache) -> int:
    return sum(map(slots_of, caches_of([held.pieces for held in cache.held.values()])))


def move_together(held: dict[int, Held]) -> dict[int, Held]:
    """Leaves the room of rows that are gone behind, where that is worth a copy."""
    rows = [h.pieces for h in held.values()]
    longest = max(map(cached_tokens, rows), default=0)
    caches = caches_of(rows)
    if sum(map(slots_of, caches)) <= LOOSE * longest * len(rows):
        return held
    cache = gather_right(rows, spare=0, last_use=caches)
    return {key: Held((Piece(cache, i, longest - h.length, h.length),), h.owner)
            for i, (key, h) in enumerate(held.items())}


def cache_for_turn(rows: list[tuple[Piece, ...]], others: dict[int, Held], spare: int) -> DynamicCache:
    """The cache a turn is sampled on. Where `others` have no keys, the rows' old ones are gone afterwards."""
    needed = {id(cache) for cache in caches_of([h.pieces for h in others.values()])}
    last_use = [cache for cache in caches_of(rows) if id(cache) not in needed]
    return gather_right(rows, spare, last_use)


def forward_new(decoder, work: list[tuple[list[int], tuple[Piece, ...]]], pad_id: int,
                counts: Counter) -> list[tuple[Piece, ...]]:
    """Put each row's new tokens through the model behind its own past; rows of like length go together.

    Args:
        work: (new tokens, past) of each row. counts: of TurnCache, added to.
    Returns: each row's pieces, the new one last.
    Worked layout (pasts of 3 and 1, new tokens of 2 and 4): `p p p|n n . .` and `. . p|n n n n`; position_ids are
    3 4 and 1 2 3 4. The head is skipped: nothing is sampled here.
    """
    left = [new for new, _ in work]
    result = [past for _, past in work]
    device = next(decoder.parameters()).device
    while any(left):
        order = sorted((i for i in range(len(work)) if left[i]), key=lambda i: -len(left[i]))
        width = min(len(left[order[0]]), PREFILL_TOKENS)
        part = [i for i in order if len(left[i]) >= FILL * width]
        part = part[:max(1, PREFILL_TOKENS // width)]
        news = [left[i][:width] for i in part]
        pasts = [result[i] for i in part]
        lengths = [cached_tokens(pieces) for pieces in pasts]
        slots = max(lengths)
        cache = DynamicCache()
        if slots:
            first = next(piece for pieces in pasts for piece in pieces)
            cache.layers = [BehindPast(pasts, number) for number in range(len(first.cache.layers))]
        ids = torch.tensor([n + [pad_id] * (width - len(n)) for n in news], device=device)  # (B, T)
        mask = torch.tensor([[0] * (slots - p) + [1] * (p + len(n)) + [0] * (width - len(n))
                             for n, p in zip(news, lengths)], device=device)  # (B, S + T)
        positions = (mask.cumsum(-1) - 1)[:, slots:]  # (B, T)
        decoder(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        for b, i in enumerate(part):
            result[i] = (*pasts[b], Piece(cache, b, 0, len(news[b])))
            left[i] = left[i][len(news[b]):]
        counts.update(tokens_forwarded=sum(map(len, news)), slots_forwarded=ids.numel())
    return result


def prefill(decoder, rows: list, pad_id: int, held: dict[int, Held], counts: Counter) -> list[tuple[Piece, ...]]:
    """Keys of every row up to its last token but one. Equal prompts go through once, and so does a common start.

    Args:
        rows: rollout.Row, all with tokens that are not in `held` yet. held: id(row) -> keys it has from before.
    """
    fresh = list(dict.fromkeys(tuple(r.ids) for r in rows if id(r) not in held))
    known = [r for r in rows if id(r) in held]
    start, common = (), 0
    if len(fresh) > 1:
        low, high = min(fresh), max(fresh)  # of a sorted list the first and the last differ soonest
        common = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), sys.maxsize)
        common = min(common, *(len(ids) - 1 for ids in fresh))
        common = common if common >= SHARE_FROM else 0
        if common:
            start = forward_new(decoder, [(list(low[:common]), ())], pad_id, counts)[0]
    work = [(list(ids[common:-1]), start) for ids in fresh]
    work += [(r.ids[held[id(r)].length:-1], held[id(r)].pieces) for r in known]
    pieces = dict(zip([*fresh, *map(id, known)], forward_new(decoder, work, pad_id, counts)))
    return [pieces[id(r) if id(r) in held else tuple(r.ids)] for r in rows]
