"""Which policy runs: choose it, load it for training, save it; and checkpoints that survive a kill.

Every model comes out alike: no sampling defaults of its own, a pad token, our attention, either LoRA on the attention
projections or all weights trainable, the expert router frozen, and a head whose log-probs grpo.py computes exactly.
"""
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GptOssConfig, Mxfp4Config

from attention import use_sink_attention

SMALL_POLICY = Path(globals().get("__file__", "model.py")).resolve().parent / "tiny" / "policy"
# What --model auto takes: (GiB that must be free on the card, name), best first. Weights in bf16, LoRA and activations
# on top: gpt-oss-20b alone is 39 GiB once its MXFP4 experts are bf16.
AUTO_LADDER = ((60, "openai/gpt-oss-20b"), (24, "Qwen/Qwen3-4B"), (12, "Qwen/Qwen3-1.7B"))
POLICY_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION_PATHS = ("sinkflex", "eager", "sdpa")
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class Policy:
    """What load_policy hands out; `reason` says why this one, `preset` names the row of train.PRESETS."""
    model: torch.nn.Module
    tokenizer: object
    name: str
    reason: str
    preset: str  # "tiny" | "lora"


def small_config(vocab_size: int, hidden_size: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2,
                 head_dim: int = 32, experts: int = 4, experts_per_token: int = 2, expert_size: int = 256,
                 window: int = 128, max_positions: int = 8192) -> GptOssConfig:
    """The small policy's architecture: gpt-oss in every part (sinks, sliding and full layers, GQA, experts), tiny.

    Defaults with a vocabulary of 1,000 come to 2.0 M parameters. Plain RoPE, since no context exceeds max_positions.
    """
    return GptOssConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, num_local_experts=experts, sliding_window=window,
        num_experts_per_tok=experts_per_token, intermediate_size=expert_size, max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


# ---------------------------------------------------------------- choosing and loading

def free_card_gib(device: torch.device) -> float | None:
    """Free memory of the card in GiB; None on a CPU. Tests replace this probe."""
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else None


def choose_policy(device: torch.device) -> tuple[str, str]:
    """(name, reason) of what --model auto runs: the best of AUTO_LADDER that fits, else the small policy."""
    free = free_card_gib(device)
    if free is None:
        return "tiny", "no CUDA device, so the small policy"
    for need, name in AUTO_LADDER:
        if free >= need:
            return name, f"{free:.0f} GiB free on the card, {need} needed"
    return "tiny", f"only {free:.0f} GiB free on the card, {AUTO_LADDER[-1][0]} needed for {AUTO_LADDER[-1][1]}"


def load_policy(name: str = "auto", device: str = "auto", dtype: str | None = "auto", lora_rank: int | None = None,
                attn: str = "sinkflex", checkpointing: bool = False, train_sinks: bool = False) -> Policy:
    """Loads a policy that is ready for rollout and update.

    Args:
        name: "auto", "tiny" (the small policy), a hub name, a folder (a PEFT adapter's too), or a .gguf file.
        device: auto, cpu, cuda, cuda:1. dtype: float32, bfloat16; None or auto: float32 for the small policy, else
            bfloat16 (MXFP4 weights are dequantised to it).
        lora_rank: 0 trains all weights but the router's; None: 0 for the small policy, else 16.
        attn: sinkflex, eager or sdpa. checkpointing: recompute activations in the backward pass.
        train_sinks: with LoRA, train the attention sinks too (switching the adapter off leaves them as they are).
    Raises:
        ValueError, in one line: an unknown name, device, dtype or attention path; a head that log-probs from hidden
        states cannot reproduce; sinks on a path that ignores them. FileNotFoundError: no such model, or no hub.
    """
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this torch sees no CUDA device; allowed: auto, cpu")
    if dtype not in (None, "auto", *POLICY_DTYPES):
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: auto, {', '.join(POLICY_DTYPES)}")
    if attn not in ATTENTION_PATHS:
        raise ValueError(f"attention path {attn!r} is unknown; allowed: {', '.join(ATTENTION_PATHS)}")
    chosen, reason = choose_policy(where) if name == "auto" else (name, "asked for")
    try:
        model, tokenizer, preset = read_policy(chosen, where, dtype)
    except FileNotFoundError as missing:
        if name != "auto" or chosen == "tiny":
            raise
        chosen, reason = "tiny", f"{missing}; so the small policy"
        model, tokenizer, preset = read_policy(chosen, where, dtype)
    neutralise(model, tokenizer)
    check_head(model.get_base_model() if isinstance(model, PeftModel) else model, chosen)
    set_attention(model, attn, chosen)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rank = lora_rank if lora_rank is not None else (0 if preset == "tiny" else 16)
    return Policy(make_trainable(model, rank, train_sinks), tokenizer, chosen, reason, preset)


def read_policy(name: str, device: torch.device, dtype: str | None) -> tuple[torch.nn.Module, object, str]:
    """(model, tokenizer, preset) as stored, on its device; an adapter folder is put on its base."""
    path = SMALL_POLICY if name == "tiny" else Path(name)
    if not path.exists() and (name == "tiny" or name.count("/") != 1 or name.endswith(".gguf")):
        raise FileNotFoundError(f"model {name!r}: {path} does not exist; allowed: auto, tiny, a folder, a .gguf file, "
                                "or a hub name (owner/name)")
    source, extra = (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})
    try:
        if (path / "adapter_config.json").is_file():
            base, tokenizer, preset = read_policy(PeftConfig.from_pretrained(source).base_model_name_or_path, device, dtype)
            model = PeftModel.from_pretrained(base, source, is_trainable=True)
            if (path / "sinks.safetensors").is_file():
                copy_into(dict(model.named_parameters()), load_file(path / "sinks.safetensors"), path)
            return model, tokenizer, preset
        tokenizer = AutoTokenizer.from_pretrained(source, **extra)
        config = AutoConfig.from_pretrained(source, **extra)
        preset = "tiny" if "<|tiny|>" in tokenizer.get_vocab() else "lora"
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
            extra["quantization_config"] = Mxfp4Config(dequantize=True)
        if device.type == "cuda":
            extra["device_map"] = {"": device}  # straight to the card: 39 GiB need not pass through main memory
        default = "float32" if preset == "tiny" else "bfloat16"
        wanted = POLICY_DTYPES[default if dtype in (None, "auto") else dtype]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, attn_implementation="eager", **extra)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, FileNotFoundError) and str(error).startswith("model "):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if path.exists():
            raise ValueError(f"model {name!r} cannot be loaded: {first}") from error
        raise FileNotFoundError(f"model {name!r}: no such folder, and the hub does not give it ({first})") from error
    return model, tokenizer, preset


def neutralise(model, tokenizer) -> None:
    """Takes the model's own sampling defaults away (top-k, top-p, penalties would make the sampled policy another one
    than the scored one) and makes sure of a pad token. Loss masks come from the rollout, so pad may equal eos."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    stored = model.generation_config
    model.generation_config = GenerationConfig(bos_token_id=stored.bos_token_id, eos_token_id=stored.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    model.config.pad_token_id = tokenizer.pad_token_id


@torch.no_grad()
def check_head(model, name: str, tolerance: float = 1e-2) -> float:
    """Refuses, by name, a model whose logits are not hidden states times the head: grpo.token_logps never builds logits.

    Returns: largest |difference| of log-probs over 16 tokens, in nats; 0 where the head is plain.
    """
    head = model.get_output_embeddings()
    ids = (torch.arange(1, 17, device=model.device) * 37 % model.config.get_text_config().vocab_size)[None]  # (1, 16)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # (1, 16, C)
    ours = (hidden @ head.weight.T).float().log_softmax(-1)  # (1, 16, V)
    theirs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)  # (1, 16, V)
    gap = (ours - theirs).abs().max().item()
    if not gap <= tolerance:
        names = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
        causes = [f"{key} {value}" for key in names if (value := getattr(model.config, key, None)) not in (None, 1)]
        causes += ["a bias on the head"] if getattr(head, "bias", None) is not None else []
        raise ValueError(f"model {name!r} ({model.config.model_type}) is not supported: {', '.join(causes) or 'its head'} "
                         f"makes its log-probs differ by {gap:.3g} nats from hidden states times head")
    return gap


def set_attention(model, attn: str, name: str) -> None:
    """sinkflex, or one of transformers' own paths; a model with sinks on a path that ignores them is refused."""
    if attn == "sdpa" and any(key.endswith("sinks") for key, _ in model.named_parameters()):
        raise ValueError(f"model {name!r} has attention sinks, which sdpa ignores; allowed: sinkflex, eager")
    if attn == "sinkflex":
        use_sink_attention(model)
    elif attn == "sdpa":
        model.set_attn_implementation("sdpa")


def make_trainable(model, lora_rank: int, train_sinks: bool):
    """LoRA on the attention projections, or all weights; never the expert router, whose choices must stay comparable."""
    if lora_rank and not isinstance(model, PeftModel):
        lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.0, target_modules=LORA_TARGETS,
                          task_type="CAUSAL_LM")
        with torch.random.fork_rng():  # the adapter's random half is the same in every run, resumed or not
            torch.manual_seed(0)
            model = get_peft_model(model, lora)
    adapted = isinstance(model, PeftModel)
    for key, parameter in model.named_parameters():
        if not adapted:
            parameter.requires_grad_(".router." not in key and ".mlp.gate." not in key)
        elif train_sinks and key.endswith("sinks"):
            parameter.requires_grad_(True)
    return model


def save_policy(folder: str | Path, policy: Policy) -> None:
    """The final policy and its tokenizer: AutoModelForCausalLM.from_pretrained or PeftModel.from_pretrained reads it.

    Sinks trained beside a LoRA adapter go to sinks.safetensors, which load_policy reads and PeftModel alone does not.
    """
    def write(aside: Path) -> None:
        adapter = {"save_embedding_layers": False} if isinstance(policy.model, PeftModel) else {}
        policy.model.save_pretrained(aside, **adapter)
        policy.tokenizer.save_pretrained(aside)
        sinks = {k: v for k, v in trainable_weights(policy.model).items() if k.endswith("sinks")}
        if adapter and sinks:
            save_file(sinks, aside / "sinks.safetensors")
    write_folder(Path(folder), write)


# ---------------------------------------------------------------- checkpoints

def trainable_weights(model) -> dict[str, Tensor]:
    """name -> parameter, of what is trained: all weights, or adapter (and sinks)."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def copy_into(parameters: dict[str, Tensor], stored: dict[str, Tensor], source: Path) -> None:
    """Overwrites parameters with what was stored under their names. ValueError where a name or shape does not fit."""
    for name, value in stored.items():
        if name not in parameters or parameters[name].shape != value.shape:
            raise ValueError(f"{source} does not fit this model: {name} {tuple(value.shape)}")
        parameters[name].data.copy_(value)


def write_folder(folder: Path, write) -> None:
    """Calls write(temporary folder beside), adds sha256 sums, syncs to disk and renames: a reader sees all or nothing.

    Raises: OSError in one line where the disk is full; the temporary folder is gone then, what was there before is not.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed run
    try:
        aside.mkdir()
        write(aside)
        sums = {path.name: file_sum(path) for path in sorted(aside.iterdir())}
        (aside / "manifest.json").write_text(json.dumps(sums, indent=1))
        for path in [*aside.iterdir(), aside]:
            sync_path(path)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged or repeated one of the same name
        aside.rename(folder)
        sync_path(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number, f"{folder} could not be written ({error}); earlier checkpoints are intact") from error


def file_sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_path(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(folder: str | Path, model, optimizer, state: dict, keep: int = 2) -> None:
    """Writes run_dir/ckpt_STEP: what is trained, AdamW's moments by parameter name, and the state; no pickle anywhere.

    Args:
        state: tensors (RNG states) and JSON values by name. keep: the newest so many ckpt_* beside it stay.
    """
    folder = Path(folder)
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {f"{names[id(p)]}::{key}": torch.as_tensor(value).detach().contiguous()
               for p, values in optimizer.state.items() for key, value in values.items()}
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def write(aside: Path) -> None:
        save_file({k: v.contiguous() for k, v in trainable_weights(model).items()}, aside / "weights.safetensors")
        save_file(moments, aside / "optimizer.safetensors")
        save_file(tensors, aside / "state.safetensors")
        (aside / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k not in tensors}))
    write_folder(folder, write)
    for old in sorted(folder.parent.glob("ckpt_*"))[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(folder: str | Path, model, optimizer) -> dict:
    """Puts weights and moments back in place and returns the state. Hyperparameters (lr) stay the optimizer's own."""
    folder = Path(folder)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stored = load_file(folder / "weights.safetensors")
    if missing := sorted(set(weights) - set(stored)):
        raise ValueError(f"{folder} does not fit this model: it lacks {missing[0]} and {len(missing) - 1} more")
    copy_into(weights, stored, folder)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        moments.setdefault(key.partition("::")[0], {})[key.partition("::")[2]] = value
    names = {id(p): name for name, p in weights.items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"param_groups": groups,
                               "state": {i: moments[name] for i, name in enumerate(order) if name in moments}})
    return json.loads((folder / "state.json").read_text()) | load_file(folder / "state.safetensors")


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file of its manifest is there with its sum."""
    try:
        sums = json.loads((folder / "manifest.json").read_text())
        wrong = [name for name, value in sums.items() if file_sum(folder / name) != value]
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{wrong[0]} has changed since it was written" if wrong else None


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The newest whole checkpoint of a run; prints one line for each damaged one that it passes over.

    Raises: FileNotFoundError where there is none.
    """
    damaged = 0
    for folder in sorted(Path(run_dir).glob("ckpt_*"), reverse=True):
        damage = checkpoint_damage(folder)
        if damage is None:
            return folder
        damaged += 1
        print(f"checkpoint {folder.name} is damaged ({damage}); taking the one before", flush=True)
    raise FileNotFoundError(f"{run_dir} holds no {'whole ' * bool(damaged)}checkpoint (ckpt_*)"
                            + (f"; {damaged} damaged" if damaged else ""))
