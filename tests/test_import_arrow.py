"""Who may import whom, and what no file may contain: read from the source, nothing is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "penteract"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each imports only from rows above, from its own file or folder, and, where its row is a tuple,
# from what stands before it there; the members of a set do not know each other.
ARROW: tuple[tuple[str, ...] | set[str], ...] = (
    (
        "errors",
        "layout_rules",
        "config_values",
        "config_sections",
        "config_output",
        "config",
        "config_file",
    ),
    ("grid", "layout_picture"),
    ("compat", "mesh"),
    ("placement",),
    ("random",),
    ("mailbox", "shared_memory", "pending", "wire", "collectives", "checking"),
    ("testing",),
    ("parallel",),
    ("nn",),
    ("families",),
    ("interop",),
    {"optim", "checkpoint", "data"},
    ("train",),
    {"plan", "verify"},
    (
        "svg",
        "schedule_picture",
        "schedule_command",
        "load_picture",
        "load_command",
        "checkpoint_command",
        "options",
        "launch",
        "generate_command",
        "local_ranks",
        "cli",
        "__main__",
    ),
)
READ_ENVIRONMENT = {"launch.py", "local_ranks.py", "cli.py"}
PURE = {
    "errors.py", "layout_rules.py", "config_values.py", "config_sections.py", "config_output.py",
    "config.py",
    "grid.py", "layout_picture.py", "placement.py",
    "svg.py", "schedule_picture.py", "load_picture.py",
    "parallel/pipeline/stages.py", "parallel/pipeline/trace.py",
    "parallel/pipeline/schedules.py", "parallel/pipeline/actions.py",
    "parallel/pipeline/zero_bubble.py", "parallel/pipeline/tables.py",
    "parallel/pipeline/lowering.py", "parallel/pipeline/timeline.py",
    "checkpoint/plan.py", "checkpoint/format.py", "data/order.py",
    "data/blend.py", "optim/schedule.py", "optim/muon_plan.py", "optim/loss_scale.py",
    "nn/flops.py", "train/batch_ramp.py", "train/passed.py", "train/traffic.py",
    "parallel/context/cut.py", "data/packing.py",
}  # fmt: skip
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal", "importlib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "local"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules, also of those imported in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(dotted: str) -> str | None:
    """The row entry a penteract module belongs to; None for others and for the package itself."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "penteract" and len(parts) > 1 else None


def may_import() -> dict[str, set[str]]:
    allowed: dict[str, set[str]] = {}
    above: set[str] = set()
    for row in ARROW:
        for place, name in enumerate(row):
            before = set(row[:place]) if isinstance(row, tuple) else set()
            allowed[name] = above | before | {name}
        above = above | set(row)
    collectives = {"mailbox", "shared_memory", "compat", "pending", "wire", "collectives"}
    allowed["testing"] = {"mesh", "layout_rules", "testing"} | collectives
    return allowed


def wrong_imports(name: str, tree: ast.AST) -> set[str]:
    """Units that the unit `name` imports and may not."""
    known = may_import()
    found = {unit(module) for module in imported(tree)} - {None, "__version__"}
    return {str(x) for x in found if x not in known[name]}


def module_state(tree: ast.Module) -> list[str]:
    """Module-level names of mutable objects, but for constant tables that nobody changes."""
    found = [f"global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    found += [f"cache of {n.name}" for n in tree.body if isinstance(n, FUNCTIONS) and is_cached(n)]
    changed = set(changed_names(tree))
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        if is_mutable(node.value):
            bad = [n for n in names if n != "__all__" and (n != n.upper() or n in changed)]
            found += bad
    return found


def is_cached(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator keeps results for as long as the process lives."""
    nodes = (node for d in function.decorator_list for node in ast.walk(d))
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
    return bool(names & {"cache", "lru_cache"})


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        return name in MUTABLE_CALLS
    kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, kinds)


def changed_names(tree: ast.Module) -> Iterator[str]:
    """Names whose object something stores into, deletes from, or calls a mutating method of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target: ast.expr = node.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in MUTATORS:
                continue
            target = node.func.value
        else:
            continue
        if isinstance(target, ast.Name):
            yield target.id


def forbidden(tree: ast.AST) -> list[str]:
    found = [m for m in imported(tree) if m.split(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in FORBIDDEN_CALLS else []
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append("bare except")
    return found


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    attributes = (n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return bool(names & {*attributes, *(m.split(".")[-1] for m in imported(tree))})


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_imports_only_from_its_left(path: Path) -> None:
    name = relative(path).removesuffix(".py").split("/")[0]
    if name == "__init__":
        assert not wrong_imports("layout_rules", parse(path))
        return
    assert name in may_import(), f"{name} has no place in the arrow"
    assert not wrong_imports(name, parse(path))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_has_no_state_and_nothing_forbidden(path: Path) -> None:
    tree = parse(path)
    assert module_state(tree) == []
    assert forbidden(tree) == []
    if relative(path) not in READ_ENVIRONMENT:
        assert not reads_environment(tree), f"only {READ_ENVIRONMENT} read the environment"


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_files_do_not_know_torch_distributed(name: str) -> None:
    modules = list(imported(parse(PACKAGE / name)))
    assert not [m for m in modules if m.startswith("torch.distributed")]
    # Nor files whose business it is.
    assert not {"wire", "collectives", "compat"} & {unit(m) for m in modules}


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("nn", "from penteract.train.run import Run", {"train"}),
        ("mesh", "def f():\n    import penteract.collectives", {"collectives"}),
        ("wire", "from penteract import collectives", {"collectives"}),
        ("optim", "from penteract.data import order", {"data"}),
        ("layout_rules", "from penteract.config import Config", {"config"}),
        ("train", "from penteract.optim import norm\nfrom penteract.data import order", set()),
        ("collectives", "from penteract import compat\nimport torch", set()),
    ],
)
def test_a_wrong_import_is_seen(name: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(name, ast.parse(source)) == wrong


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("cache = {}", ["cache"]),
        ("items: list[int] = []", ["items"]),
        ("_seen = set()", ["_seen"]),
        ("TABLE = {1: 2}", []),
        ("TABLE = {1: 2}\ndef f():\n    TABLE[3] = 4", ["TABLE"]),
        ("NAMES = ['a']\nNAMES.append('b')", ["NAMES"]),
        ("def f():\n    global x\n    x = 1", ["global x"]),
        ("__all__ = ['a']", []),
        ("PAIR = (1, 2)", []),
        ("@functools.cache\ndef f(): ...", ["cache of f"]),
        ("@lru_cache(maxsize=1)\ndef f(): ...", ["cache of f"]),
    ],
)
def test_module_state_is_seen(source: str, names: list[str]) -> None:
    assert module_state(ast.parse(source)) == names


@pytest.mark.parametrize(
    "source", ["import pickle", "from importlib import reload", "eval('1')", "exec('1')",
               "try:\n    pass\nexcept:\n    pass"],
)  # fmt: skip
def test_forbidden_code_is_seen(source: str) -> None:
    assert forbidden(ast.parse(source))


def test_a_method_named_eval_is_fine_and_reading_the_environment_is_seen() -> None:
    assert not forbidden(ast.parse("model.eval()"))
    assert reads_environment(ast.parse("import os\nos.environ['RANK']"))
    assert reads_environment(ast.parse("from os import getenv"))
