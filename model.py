"""Which policy runs: choose it, load it for training, save it; and checkpoints that survive a kill.

Every model comes out alike: no sampling defaults of its own, a pad token, our attention, LoRA on the attention
projections or all weights trainable, the expert router frozen, and a head that grpo.py can take log-probs from.
"""
import hashlib
import json
import shutil
import urllib.error
import urllib.request
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import torch
from huggingface_hub import constants
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GptOssConfig, Mxfp4Config

from attention import use_sink_attention
from grpo import wide_mm
from machine import sync_paths, unseen_card, usable_cards

SMALL_POLICY = Path(globals().get("__file__", "model.py")).resolve().parent / "tiny" / "policy"
# What --model auto takes, best first: GiB that must be free, name. gpt-oss-20b alone is 39 GiB in bf16.
AUTO_LADDER = ((60, "openai/gpt-oss-20b"), (24, "Qwen/Qwen3-4B"), (12, "Qwen/Qwen3-1.7B"))
POLICY_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Policy:
    """What load_policy hands out; `reason` says why this one, `preset` names a row of train.PRESETS: tiny or lora."""
    model: torch.nn.Module
    tokenizer: object
    name: str
    reason: str
    preset: str
    lora_rank: int = 0  # 0: all weights are trained


def small_config(vocab_size: int, hidden_size: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2,
                 head_dim: int = 32, experts: int = 4, experts_per_token: int = 2, expert_size: int = 256,
                 window: int = 128, max_positions: int = 8192) -> GptOssConfig:
    """gpt-oss in every part (sinks, sliding and full layers, GQA, experts), but tiny: 2.0 M parameters, 1,000 words."""
    return GptOssConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, num_local_experts=experts, sliding_window=window,
        num_experts_per_tok=experts_per_token, intermediate_size=expert_size, max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def free_card_gib(device: torch.device) -> float | None:
    """Free memory of the card, None on a CPU. Tests replace this probe."""
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else None


def choose_policy(device: torch.device) -> tuple[str, str]:
    """(name, reason) of what --model auto runs: the best of AUTO_LADDER that fits, else the small policy."""
    if (free := free_card_gib(device)) is None:
        return "tiny", f"the small policy, since {unseen_card() or 'there is no CUDA device'}"
    for need, name in AUTO_LADDER:
        if free >= need:
            return name, f"{free:.0f} GiB free on the card, it needs {need}"
    return "tiny", f"the small policy, since {free:.0f} GiB are free on the card and {name} needs {need}"


def load_policy(name: str = "auto", device: str = "auto", dtype: str | None = "auto", lora_rank: int | None = None,
                attn: str = "sinkflex", checkpointing: bool = False, train_sinks: bool = False) -> Policy:
    """Loads a policy, ready for rollout and update.

    Args:
        name: auto, tiny (the small policy), a hub name, a folder (also of a PEFT adapter) or a .gguf file.
        dtype: float32 or bfloat16, MXFP4 is dequantised to it; auto, None: float32 for the small policy, else bfloat16.
        lora_rank: 0 trains all weights but the router's; None: 0 for the small policy, else 16.
        checkpointing: compute activations again in the backward pass.
        train_sinks: train the attention sinks beside LoRA; switching the adapter off does not take them back.
    Raises: ValueError or FileNotFoundError, in one line: a value that is not allowed, no such model, no hub, a head
        or an attention path that would give other log-probs than the model's own.
    """
    cards = usable_cards()
    if device.startswith("cuda") and not cards and unseen_card():
        raise ValueError(f"device {device!r}: {unseen_card()}")
    for label, value, allowed in (("dtype", dtype or "auto", ("auto", *POLICY_DTYPES)),
                                  ("attention path", attn, ("sinkflex", "eager", "sdpa")),
                                  ("device", device, ("auto", "cpu", *["cuda"][:len(cards)], *cards))):
        if value not in allowed:
            raise ValueError(f"{label} {value!r} is unknown; allowed: {', '.join(allowed)}")
    where = torch.device(("cuda" if cards else "cpu") if device == "auto" else device)
    chosen, reason = choose_policy(where) if name == "auto" else (name, "asked for")
    if name != "auto" and device == "auto" and unseen_card():
        reason += f"; on the CPU, since {unseen_card()}"
    try:
        model, tokenizer = read_policy(chosen, where, dtype)
    except FileNotFoundError as missing:
        if name != "auto" or chosen == "tiny":
            raise
        chosen, reason = "tiny", f"the small policy, since {missing}"
        model, tokenizer = read_policy(chosen, where, dtype)
    preset = "tiny" if "<|tiny|>" in tokenizer.get_vocab() else "lora"
    neutralise(model, tokenizer)
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    use_wide_head(causal)
    check_head(causal, chosen)
    if attn == "sdpa" and any(key.endswith("sinks") for key, _ in model.named_parameters()):
        raise ValueError(f"model {chosen!r} has attention sinks, which sdpa ignores; allowed: sinkflex, eager")
    use_sink_attention(model) if attn == "sinkflex" else model.set_attn_implementation(attn)
    if checkpointing:
        enable_checkpointing(model)
    stored = model.peft_config["default"].r if isinstance(model, PeftModel) else None
    if None not in (stored, lora_rank) and stored != lora_rank:
        raise ValueError(f"lora_rank {lora_rank}: {chosen} is an adapter of rank {stored}; leave the rank out")
    rank = next(r for r in (stored, lora_rank, {"tiny": 0, "lora": 16}[preset]) if r is not None)
    return Policy(make_trainable(model, rank, train_sinks), tokenizer, chosen, reason, preset, rank)


def hub_is_reachable() -> bool:
    """Asks once, for 5 s: transformers would try for 45 s with ten warnings where there is no network."""
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5)
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)  # an answer all the same
    return True


def read_policy(name: str, device: torch.device, dtype: str | None) -> tuple[torch.nn.Module, object]:
    """(model, tokenizer) as stored, on its device, in eval mode; an adapter is put on its base."""
    path = SMALL_POLICY if name == "tiny" else Path(name)
    if not path.exists() and (name == "tiny" or name.count("/") != 1 or name.endswith(".gguf")):
        raise FileNotFoundError(f"model {name!r}: {path} does not exist; allowed: auto, tiny, a folder, a .gguf file, "
                                "or a hub name (owner/name)")
    online = path.exists() or not constants.HF_HUB_OFFLINE and hub_is_reachable()
    if (path / "adapter_config.json").is_file():
        model, tokenizer = read_policy(PeftConfig.from_pretrained(path).base_model_name_or_path, device, dtype)
        with quiet_peft():
            model = PeftModel.from_pretrained(model, path, is_trainable=True)
        if (path / "sinks.safetensors").is_file():
            sinks = {key: widen(p) for key, p in model.named_parameters() if key.endswith("sinks")}
            copy_into(sinks, load_file(path / "sinks.safetensors"), path)
        return model, tokenizer
    source, options = str(path), {"local_files_only": not online}  # without a hub its cache may hold the model
    if path.is_file():
        source, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        config = AutoConfig.from_pretrained(source, **options)
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        if device.type == "cuda":
            options["device_map"] = {"": device}  # straight to the card: 39 GiB need not pass through main memory
        auto = "float32" if "<|tiny|>" in tokenizer.get_vocab() else "bfloat16"
        wanted = POLICY_DTYPES[auto if dtype in (None, "auto") else dtype]
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=wanted, attn_implementation="eager", output_loading_info=True, **options)
        if report["missing_keys"]:  # transformers would only warn, and go on with random weights there
            missing = sorted(report["missing_keys"])
            raise ValueError(f"{len(missing)} weights are missing, as {missing[0]}")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if path.exists():
            raise ValueError(f"model {name!r} cannot be loaded: {str(error).strip().partition(chr(10))[0]}") from error
        trouble = "the hub does not give it" if online else f"{constants.ENDPOINT} cannot be reached"
        raise FileNotFoundError(f"model {name!r} is not a folder here, and {trouble}") from error
    if "quantization_config" in options:
        for parameter in model.parameters():  # transformers 5.17 dequantises to bfloat16 whatever was asked for
            parameter.data = parameter.data.to(wanted)
    return model, tokenizer


def neutralise(model, tokenizer) -> None:
    """Takes away sampling defaults (with top-k or a penalty the policy that samples is not the one that is scored) and
    gives a pad token, which may equal eos: no loss mask looks at ids."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    stored = model.generation_config
    model.generation_config = GenerationConfig(bos_token_id=stored.bos_token_id, eos_token_id=stored.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    model.config.pad_token_id = tokenizer.pad_token_id


def use_wide_head(model):
    """Makes a model's own logits float32 with the product that grpo.token_logps scores with: what samples is scored.

    The weight stays as it is, tied or not. Changed in place.
    """
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.weight.dtype != torch.float32:
        head.forward = MethodType(wide_logits, head)  # a method, so that a deep copy gets its own
    return model


def wide_logits(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    """Float32 logits (..., V) of hidden states (..., C): the forward of an output head."""
    logits = wide_mm(hidden.flatten(0, -2), head.weight.T).unflatten(0, hidden.shape[:-1])
    return logits if head.bias is None else logits + head.bias


@torch.no_grad()
def check_head(model, name: str, tolerance: float = 1e-2) -> float:
    """Refuses, by name, a model whose logits are not hidden states times head, as grpo.token_logps takes them to be.

    Returns: largest |difference| of log-probs over 16 tokens in nats; 0 for a plain head.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    ids = torch.arange(1, 17, device=model.device)[None] * 37 % config.vocab_size  # (1, 16)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # (1, 16, C)
    ours = wide_mm(hidden[0], head.weight.T).log_softmax(-1)[None]  # (1, 16, V)
    gap = (ours - model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)).abs().max().item()
    if not gap <= tolerance:
        known = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        causes = [key for key in known if getattr(config, key, None)]
        causes += ["a bias on the head"] if getattr(head, "bias", None) is not None else []
        raise ValueError(f"model {name!r} ({config.model_type}) is not supported: {', '.join(causes) or 'its head'} "
                         f"makes log-probs differ by {gap:.3g} nats from hidden states times head")
    return gap


def make_trainable(model, lora_rank: int, train_sinks: bool):
    """LoRA on the attention projections, or all weights; never the expert router: its choices must stay comparable."""
    if lora_rank and not isinstance(model, PeftModel):
        lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.0, task_type="CAUSAL_LM",
                          target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        # The adapter's random half is the same in every run, resumed or not.
        with quiet_peft(), torch.random.fork_rng():
            torch.manual_seed(0)
            model = get_peft_model(model, lora)
    for key, parameter in model.named_parameters():
        if not isinstance(model, PeftModel):
            parameter.requires_grad_(".router." not in key and ".mlp.gate." not in key)
        elif key.endswith("sinks"):
            parameter.requires_grad_(train_sinks)
        if key.endswith("sinks") and parameter.requires_grad:
            widen(parameter)  # beside fp32 adapters, as attention takes them
    return model


def widen(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The same parameter, now of at least float32."""
    parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return parameter


def enable_checkpointing(model) -> None:
    """Activations are computed again in the backward pass. transformers 5.24 has another name for it than 5.17."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@contextmanager
def quiet_peft():
    """Holds back one FutureWarning: peft asks for transformers' `is_gradient_checkpointing`, which has a new name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def save_policy(folder: str | Path, policy: Policy, note: dict | None = None) -> None:
    """Policy and tokenizer, for AutoModelForCausalLM.from_pretrained, or PeftModel.from_pretrained where it is LoRA.
    Sinks trained beside an adapter go to sinks.safetensors, which load_policy reads and PeftModel does not.
    note: what is worth knowing about it (step, score), kept as evaluation.json."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "manifest.json").exists():
        raise ValueError(f"{folder} holds something else than a saved policy; give a new folder")

    def write(aside: Path) -> None:
        policy.tokenizer.save_pretrained(aside)
        if note is not None:
            (aside / "evaluation.json").write_text(json.dumps(note), encoding="utf-8")
        if not isinstance(policy.model, PeftModel):
            policy.model.save_pretrained(aside)
            return
        policy.model.save_pretrained(aside, save_embedding_layers=False)
        if sinks := {name: p for name, p in trained_weights(policy.model).items() if name.endswith("sinks")}:
            save_file(sinks, aside / "sinks.safetensors")
    write_folder(folder, write)


def trained_weights(model) -> dict[str, Tensor]:
    """name -> parameter, of what is trained: all weights, or adapter (and sinks)."""
    return {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def copy_into(parameters: dict[str, Tensor], stored: dict[str, Tensor], source: Path) -> None:
    """Puts stored values into parameters of the same names; ValueError, before any is touched, if they don't fit."""
    shapes, found = ({name: value.shape for name, value in tensors.items()} for tensors in (parameters, stored))
    if wrong := sorted(name for name in shapes | found if shapes.get(name) != found.get(name)):
        raise ValueError(f"{source} does not fit this model: {len(wrong)} names or shapes differ, first {wrong[0]}")
    for name, value in stored.items():
        parameters[name].data.copy_(value)


def write_folder(folder: Path, write) -> None:
    """Lets write(temporary folder) work beside, adds sha256 sums, syncs to disk, renames: a reader sees all or nothing.

    Raises: OSError in one line, as when the disk is full; the temporary folder is gone then, nothing else is.
    """
    aside = folder.parent / f".{folder.name}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a killed run
        aside.mkdir(parents=True)
        write(aside)
        sums = {path.name: file_sum(path) for path in aside.iterdir()}
        (aside / "manifest.json").write_text(json.dumps(sums), encoding="utf-8")
        sync_paths([*aside.iterdir(), aside])
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or written by this run after a resume
        aside.rename(folder)
        sync_paths([folder.parent])
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {error}") from error


def file_sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(folder: str | Path, model, optimizer, state: dict, keep: int = 2) -> None:
    """Writes run_dir/ckpt_STEP: what is trained, AdamW's moments and masters by parameter name, and the state (tensors
    such as RNG states, and JSON values, by name). No pickle anywhere. The `keep` newest ckpt_* beside it stay."""
    folder, names = Path(folder), names_in(model, optimizer)
    moments = {f"{names[p]}::{key}": value for p, values in optimizer.state.items() for key, value in values.items()}
    moments |= {f"{names[p]}::master": p.detach() for p in getattr(optimizer, "rounded", {})}
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def write(aside: Path) -> None:
        for file, content in (("weights", trained_weights(model)), ("optimizer", moments), ("state", tensors)):
            save_file(content, aside / f"{file}.safetensors")
        plain = {key: value for key, value in state.items() if key not in tensors}
        (aside / "state.json").write_text(json.dumps(plain), encoding="utf-8")
    write_folder(folder, write)
    for old in sorted(folder.parent.glob("ckpt_*"))[:-keep]:
        shutil.rmtree(old)


def names_in(model, optimizer) -> dict[Tensor, str]:
    """What the optimizer holds -> its name in the model; a grpo.WideAdamW holds masters of narrow parameters."""
    names = {p: name for name, p in model.named_parameters()}
    return names | {master: names[p] for master, p in getattr(optimizer, "rounded", {}).items()}


def load_checkpoint(folder: str | Path, model, optimizer) -> dict:
    """Puts weights, masters and moments back and returns the state. Hyperparameters (lr) stay the optimizer's own."""
    folder, weights = Path(folder), {p: name for name, p in model.named_parameters() if p.requires_grad}
    copy_into({name: p for p, name in weights.items()}, load_file(folder / "weights.safetensors"), folder)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, kind = key.partition("::")
        moments.setdefault(name, {})[kind] = value
    names = names_in(model, optimizer)
    for master, parameter in getattr(optimizer, "rounded", {}).items():
        master.data.copy_(moments.get(names[master], {}).pop("master", parameter.detach()))
    moments = {name: values for name, values in moments.items() if values}  # a master alone: not stepped yet
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]  # torch counts parameters
    optimizer.load_state_dict(optimizer.state_dict() | {
        "state": {i: moments[name] for i, name in enumerate(order) if name in moments}})
    return json.loads((folder / "state.json").read_text(encoding="utf-8")) | load_file(folder / "state.safetensors")


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The newest checkpoint whose files match their sums; a line is printed for each that is passed over."""
    folders = sorted(Path(run_dir).glob("ckpt_*"), reverse=True)
    for folder in folders:
        try:
            sums = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            damage = [name for name, value in sums.items() if file_sum(folder / name) != value]
        except (OSError, ValueError) as error:
            damage = [str(error)]
        if not damage:
            return folder
        print(f"checkpoint {folder} is damaged ({damage[0]}); trying the one before", flush=True)
    raise FileNotFoundError(f"{run_dir} holds no whole checkpoint (ckpt_*; damaged: {len(folders)})")
