"""Promises about the repository itself: who imports whom, names, sizes, flags, metrics, notebooks, README."""
import ast
import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CARD = ["train.py", "rollout.py", "grpo.py", "attention.py", "env_tau2.py", "bench_memory.py"]
HELPERS = ["key_cache.py", "chat.py", "users.py", "user_scripted.py", "model.py", "report.py", "run_folder.py",
           "machine.py"]
TINY = ["tiny/tasks_retail.py", "tiny/warm_start.py"]
FILES = CARD + HELPERS + TINY
# DESIGN.md's table: who may import whom. "all" needs no entry; tiny/ may use every room.
MAY_IMPORT = {
    "rollout.py": {"key_cache", "machine"}, "key_cache.py": set(), "grpo.py": set(), "attention.py": set(),
    "env_tau2.py": set(), "chat.py": set(),
    "users.py": {"chat"}, "user_scripted.py": {"users"}, "report.py": set(), "machine.py": set(),
    "model.py": {"attention", "grpo", "machine"}, "run_folder.py": {"machine", "model", "report"},
    "bench_memory.py": {"attention", "grpo", "key_cache", "machine", "model"},
}
LOCAL = {Path(f).stem for f in CARD + HELPERS} | {"tiny"}
# Bottom first, as a notebook would have them: every file after those it uses.
PASTE_ORDER = ["attention.py", "chat.py", "env_tau2.py", "grpo.py", "users.py", "user_scripted.py", "report.py",
               "machine.py", "key_cache.py", "rollout.py", "model.py", "run_folder.py", "tiny/tasks_retail.py", "train.py",
               "tiny/warm_start.py", "bench_memory.py"]


def tree_of(name):
    return ast.parse((ROOT / name).read_text())


def local_imports(name):
    """(module, line node) of every import of our own files."""
    found = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOCAL:
            found.append((node.module, node))
        if isinstance(node, ast.Import):
            found += [(a.name, node) for a in node.names if a.name.split(".")[0] in LOCAL]
    return found


@pytest.mark.parametrize("name", FILES)
def test_rooms_import_only_their_neighbours(name):
    """Guards against rooms that grow into each other: DESIGN.md's table says who imports whom."""
    for module, node in local_imports(name):
        assert isinstance(node, ast.ImportFrom) and node.level == 0, f"{name}: write `from {module} import ...`"
        assert all(a.asname is None for a in node.names), f"{name}:{node.lineno} renames an import"
        assert node.lineno == node.end_lineno, f"{name}:{node.lineno} local imports stand on one line"
        if name in MAY_IMPORT:
            assert module in MAY_IMPORT[name], f"{name} imports {module}"


def test_top_level_names_are_unique():
    """Two files that define the same name overwrite each other when pasted into one notebook."""
    owner = {}
    for name in FILES:
        for node in tree_of(name).body:
            names = []
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)
                         and isinstance(t.ctx, ast.Store)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for n in names:
                assert owner.setdefault(n, name) == name, f"{n} is defined in {owner[n]} and in {name}"
    assert len(owner) > 100


@pytest.mark.parametrize("name", FILES)
def test_lines_are_short_and_statements_single(name):
    """A budget kept by `a; b; c` or by 200-column lines is not kept."""
    source = (ROOT / name).read_text()
    for number, line in enumerate(source.splitlines(), 1):
        assert len(line) <= 120, f"{name}:{number} has {len(line)} columns"
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        if isinstance(body, list):
            starts = [s.lineno for s in body]
            assert len(starts) == len(set(starts)), f"{name}:{starts[0]} holds two statements on a line"


def test_no_other_python_files_at_the_top():
    """The design card is a handful of flat scripts."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    ours = {f for f in tracked if not f.startswith("tests/")}
    assert ours == set(FILES) | {"tiny/__init__.py"}


def test_every_config_field_is_read():
    """A flag that nothing reads is a lie in --help."""
    from train import Config
    tree = tree_of("train.py")
    read = {n.attr for f in tree.body + tree_of("run_folder.py").body if isinstance(f, ast.FunctionDef)
            for n in ast.walk(f)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "cfg"}
    config = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    properties = [n for n in config.body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    read |= {n.attr for p in properties for n in ast.walk(p) if isinstance(n, ast.Attribute)}
    missing = {f.name for f in dataclasses.fields(Config)} - read
    assert not missing, f"nothing reads {missing}"


def test_presets_fill_every_policy_field_and_no_other():
    """A default stands in one place only: None in Config and a value in every preset, or a value in Config alone."""
    from train import PRESETS, Config, resolve
    left_open = {f.name for f in dataclasses.fields(Config) if f.default is None}
    optional = {"user_model", "user_base_url", "user_record", "user_replay", "run_dir", "resume"}
    for name, preset in PRESETS.items():
        assert set(preset) == left_open - optional, name
    kept = resolve(Config(steps=7), "tiny", "tiny")
    assert kept.steps == 7 and kept.lr == PRESETS["tiny"]["lr"] and kept.tasks == "synthetic" and kept.model == "tiny"
    assert resolve(Config(), "lora", "owner/name").tasks == resolve(Config(env="mock"), "tiny", "tiny").tasks == "tau2"


def test_design_metrics_are_listed():
    """Others script against these names (DESIGN.md, "Names that stay")."""
    from report import METRICS
    promised = """step reward_mean reward_std outcome_counts faults zero_variance_groups loss approx_kl kl_ref clipfrac_low
        clipfrac_high tis_truncated entropy grad_norm logp_gap_mean logp_gap_max response_tokens rollout_tokens_per_s
        rollout_s update_s rollout_peak_gib update_peak_gib rss_gib eval_mean_at_1 eval_ci95 eval_greedy eval_pass_hat_k
        eval_do_nothing eval_tasks user tau2_version split""".split()
    assert not set(promised) - set(METRICS)


def test_paste_everything_into_one_namespace_and_run_a_step(tmp_path, monkeypatch):
    """The notebook promise: files pasted one after another, local imports dropped, run a step."""
    monkeypatch.chdir(ROOT)  # a notebook beside the files
    space = {"__name__": "__main__"}
    for name in PASTE_ORDER:
        text = (ROOT / name).read_text().splitlines()
        for module, node in local_imports(name):
            indent = re.match(r"\s*", text[node.lineno - 1]).group()
            text[node.lineno - 1] = indent + "pass"
        exec(compile("\n".join(text), f"<cell {name}>", "exec"), space)
    assert "__file__" not in space
    run = space["train"](space["Config"](steps=1, tasks_per_step=2, group_size=2, eval_every=0, run_dir=str(tmp_path / "run"),
                                         max_turns=4))
    rows = space["read_rows"](run / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1] and rows[0]["response_tokens"] > 0


def test_nothing_private_in_the_repository():
    """No absolute path of a developer's machine, no registry host, no pickle in what we ship."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    forbidden = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "pypi" + r"\.org", "files\\.python" + "hosted",
                                     r"torch\.lo" + r"ad\(", r"import pick" + "le"]))
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".txt", ".toml", ".json", ".log", ".ipynb", ""} and path.is_file():
            hit = forbidden.search(path.read_text(errors="ignore"))
            assert not hit, f"{name} contains {hit.group()!r}"


def readme_commands():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    return [line.split("#")[0].strip() for b in blocks for line in b.splitlines() if line.split("#")[0].strip()]


def test_readme_commands_exist_and_parse():
    """A README command that no longer runs is the first thing a newcomer meets."""
    from train import parse_args
    commands = readme_commands()
    assert any(c.startswith("python train.py --env retail") or "&& python train.py --env retail" in c for c in commands)
    for command in commands:
        for part in command.split("&&"):
            words = shlex.split(part)
            while words and "=" in words[0] and not words[0].startswith("-"):
                words = words[1:]
            if words[:2] == ["python", "train.py"]:
                if "--resume" in words or "--help" in words:
                    continue
                parse_args(words[2:])
            elif words[:2] == ["python", "-m"]:
                target = words[2].replace(".", "/")
                assert words[2] == "pytest" or (ROOT / f"{target}.py").exists(), part
            elif words[:1] == ["python"]:
                assert (ROOT / words[1]).exists(), part
            elif words[:2] == ["pip", "install"]:
                assert all((ROOT / w).exists() for w in words[2:] if w.endswith(".txt")), part


def test_readme_first_screen():
    """Issue: the first 60 lines hold, in this order: a sentence, the plot, the commands, the output, the reading table."""
    head = (ROOT / "README.md").read_text().splitlines()[:60]
    text = "\n".join(head)
    places = [text.find("# SINKFLEX-RL"), text.find("!["), text.find("pip install -r requirements.txt"),
              text.find("evaluation at"), text.find("| file |")]
    assert -1 not in places and places == sorted(places), places
    table = set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.M))
    assert set(CARD) <= table, set(CARD) - table
