"""The layout's rules, read from imports and syntax; `test_architecture.py` applies them."""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINKED = ("policies", "kernels", "deployments")
SHIPPED = ("ray_cluster", *LINKED)
UNSHIPPED = ("benchmarks", "recipes", "tests")
SCOPES = (*SHIPPED, *UNSHIPPED)

# one state machine should stand in one file
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# files side by side in a folder that users get; what belongs together is a folder of its own
MAX_FILES = 12
# lines of each room; a commit that raises one says why
BUDGET: dict[str, int] = {
    "api": 9_370,
    "benchmarks": 10_203,
    "cell": 1_150,
    "cli": 8_470,
    "codec": 400,
    "compat": 111,
    "config": 3_080,
    "control": 1_010,
    "deployments": 1_900,
    "dispatch": 6_740,
    "engine": 18_097,
    "errors": 160,
    "imaging": 2_390,
    "jobs": 3_650,
    "kernels": 1_250,
    "models": 3_338,
    "observability": 1_110,
    "policies": 10_090,
    "process": 325,
    "protocol": 2_450,
    "quality": 1_430,
    "recipes": 4_350,
    "replica": 7_260,
    "requests": 860,
    "root": 50,
    "simulator": 7_570,
    "storage": 950,
    "tests": 95_205,
    "transport": 1_450,
}

# each floor sees those below it; rooms of one floor do not see each other
FLOORS = (
    {"cli"},
    {"deployments"},
    {"cell"},
    {"api", "jobs", "simulator"},
    {"replica", "dispatch", "control"},
    {"engine", "quality"},
    {"protocol", "models", "transport", "imaging", "storage", "observability"},
    {"codec"},
    {"config"},
    {"requests", "errors", "process", "compat"},
)
# beside the floors: what one room may see on its own floor, and must not see below it
ALSO_SEES: dict[str, set[str]] = {
    "protocol": {"observability"},
    "requests": {"errors"},
}
NEVER_SEES = {"simulator": {"engine"}}
# what stands beside packages in the import root
ROOT_FILES = {"__init__.py", "errors.py", "compat.py"}
# only these see what stands beside the engine
SEES_QUALITY = {"cli", "quality"}
# these see themselves alone, and of third parties only what is listed
SEALED_LAYERS = {
    "root": set(),
    "policies": {"numpy", "scipy", "sklearn", "ortools"},
    "kernels": {"numpy", "torch", "triton"},
}
# third parties that only some layers may see
RESERVED = {
    "ray": {"deployments", "cli", "compat"},
    "fastapi": {"api", "cell", "deployments", "cli"},
    "starlette": {"api", "deployments", "cli"},
    "uvicorn": {"deployments", "cli"},
}

# whose private names stand in `compat.py` alone
PRIVATE_OF = {"accelerate", "diffusers", "peft", "ray", "transformers"}

# a policy sees no clock, no randomness, no environment and no I/O
IMPURE_MODULES = set().union(
    ["datetime", "platform", "random", "secrets", "sys", "time", "uuid", "zoneinfo"],
    ["fileinput", "glob", "importlib", "io", "logging", "mmap", "os", "pathlib", "pickle"],
    ["dbm", "shelve", "shutil", "sqlite3", "syslog", "tempfile", "builtins", "ctypes"],
    ["asyncio", "concurrent", "multiprocessing", "signal", "subprocess", "threading"],
    ["ftplib", "http", "select", "selectors", "smtplib", "socket", "ssl", "urllib"],
)
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
RANDOM_PREFIXES = ("np.random.", "numpy.random.")
RANDOM_TYPES = {"Generator", "BitGenerator", "SeedSequence"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
EMPTY_CONTAINERS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}


@dataclass(frozen=True, slots=True)
class Breach:
    """One violation of one rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file, with the name it is imported by.

    Attributes:
        nodes: all of the tree by their kind: it is walked once, and not for each rule.
    """

    path: str
    module: str
    tree: ast.Module
    num_lines: int
    nodes: Mapping[type[ast.AST], Sequence[Any]]

    @property
    def layer(self) -> str:
        """The part of the layout the file belongs to."""
        root, *rest = self.module.split(".")
        if root != "ray_cluster":
            return root
        return layer_of(rest)

    @property
    def shipped(self) -> bool:
        """Whether users get this file."""
        return self.module.split(".")[0] == "ray_cluster"


def layer_of(parts: list[str]) -> str:
    """The layer of a module of ours, given the parts of its name after `ray_cluster`."""
    if not parts or parts[0].startswith("__version"):
        return "root"
    return "cli" if parts[0] == "__main__" else parts[0]


def may_see(layer: str, seen: str) -> bool:
    """Whether one part of the layout may import another."""
    if layer == seen or (seen == "root" and layer not in SEALED_LAYERS):
        return True
    if layer in SEALED_LAYERS:
        return False
    if seen in SEALED_LAYERS:
        return True
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    if layer not in floors or seen not in floors or seen in NEVER_SEES.get(layer, ()):
        return False
    if seen == "quality" and layer not in SEES_QUALITY:
        return False
    return floors[layer] < floors[seen] or seen in ALSO_SEES.get(layer, ())


def files(root: Path) -> list[Path]:
    """Every Python file of the project once: the links in `ray_cluster` are not followed."""
    found = []
    for scope in SCOPES:
        for path in sorted((root / scope).rglob("*.py")):
            inside = path.relative_to(root)
            if scope == "ray_cluster" and inside.parts[1] in LINKED:
                continue
            found.append(inside)
    return found


def full_folders(paths: list[Path]) -> list[str]:
    """Which folders that users get have more files than a reader can take in at once."""
    inside = [path for path in paths if path.parts[0] in SHIPPED and path.name != "__init__.py"]
    counts = Counter(path.parent.as_posix() for path in inside)
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > MAX_FILES]


def over_budget(sources: list[Source]) -> list[str]:
    """Which rooms have more lines than they may, or no budget."""
    counts = Counter[str]()
    for source in sources:
        counts[source.layer] += source.num_lines
    return [
        f"{room}: {count} lines, at most {BUDGET.get(room, 0)}"
        for room, count in sorted(counts.items())
        if count > BUDGET.get(room, 0)
    ]


def load(root: Path, path: Path) -> Source:
    """Parse one file, given relative to `root`."""
    text = (root / path).read_text()
    parts = list(path.with_suffix("").parts)
    if parts[0] in LINKED:
        parts.insert(0, "ray_cluster")
    if parts[-1] == "__init__":
        parts.pop()
    tree = ast.parse(text)
    nodes: defaultdict[type[ast.AST], list[Any]] = defaultdict(list)
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
    return Source(path.as_posix(), ".".join(parts), tree, text.count("\n"), nodes)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported anywhere; relative imports start with a dot."""
    for node in source.nodes.get(ast.Import, ()):
        yield from ((node.lineno, alias.name) for alias in node.names)
    for node in source.nodes.get(ast.ImportFrom, ()):
        base = "." * node.level + (node.module or "")
        yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    for node in source.nodes.get(ast.Call, ()):
        match node:
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if _last_name(func) in {"import_module", "__import__"}:
                    yield node.lineno, name


def _last_name(func: ast.expr) -> str:
    match func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def check(source: Source) -> list[Breach]:
    """Every breach in one file."""
    rules = [check_names, check_sizes, check_swallowing]
    if source.shipped:
        rules += [check_rooms, check_private, check_direction, check_environment, check_state]
    if source.layer == "policies":
        rules.append(check_purity)
    return [
        Breach(source.path, line, rule.__name__.removeprefix("check_"), message)
        for rule in rules
        for line, message in rule(source)
    ]


def check_names(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imports(source):
        if name.startswith("."):
            yield line, f"relative import {name}: write it from ray_cluster on"
        elif name.split(".")[0] in LINKED:
            yield line, f"bare import {name}: write ray_cluster.{name}"


def check_rooms(source: Source) -> Iterator[tuple[int, str]]:
    folder, *rest = source.path.split("/")
    if folder == "ray_cluster" and len(rest) == 1 and rest[0] not in ROOT_FILES:
        yield 1, f"{rest[0]} stands loose in ray_cluster/: put it into one of its packages"
    rooms = set().union(*FLOORS, SEALED_LAYERS)
    if source.layer not in rooms:
        yield 1, f"{source.layer} has no floor: say in tests/architecture.py whom it may see"


def check_private(source: Source) -> Iterator[tuple[int, str]]:
    if source.layer == "compat":
        return
    for line, name in imports(source):
        top, *rest = name.split(".")
        if top in PRIVATE_OF and any(part.startswith("_") for part in rest):
            yield line, f"{name} is private to {top}: put what it is for into ray_cluster/compat.py"


def check_direction(source: Source) -> Iterator[tuple[int, str]]:
    layer = source.layer
    for line, name in imports(source):
        top, *rest = name.split(".")
        if top == "ray_cluster":
            seen = layer_of(rest)
            if not may_see(layer, seen):
                yield line, f"{layer} must not see {seen} ({name})"
        elif top in UNSHIPPED:
            yield line, f"{layer} must not see {top}, which users do not get"
        elif layer not in RESERVED.get(top, {layer}):
            yield line, f"only {sorted(RESERVED[top])} import {top}, not {layer}"
        elif layer in SEALED_LAYERS and top not in SEALED_LAYERS[layer] | sys.stdlib_module_names:
            yield line, f"{layer} must not import {top}"


def check_purity(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imports(source):
        if name.split(".")[0] in IMPURE_MODULES or _draws_random(name):
            yield line, f"a policy imports {name}: inject the value instead"
    for node in source.nodes.get(ast.Call, ()):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                yield node.lineno, f"a policy calls {name}()"
    for node in source.nodes.get(ast.Attribute, ()):
        if _draws_random(name := ast.unparse(node)):
            yield node.lineno, f"a policy uses {name}: inject a Generator"


def _draws_random(name: str) -> bool:
    if name == "numpy.random":
        return True
    return name.startswith(RANDOM_PREFIXES) and name.split(".")[2] not in RANDOM_TYPES


def check_environment(source: Source) -> Iterator[tuple[int, str]]:
    if source.layer == "config":
        return
    for node in source.nodes.get(ast.Attribute, ()):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
                yield node.lineno, f"os.{name} outside ray_cluster/config/loading.py"
    for node in source.nodes.get(ast.ImportFrom, ()):
        for alias in node.names if node.module == "os" else ():
            if alias.name in ENVIRONMENT:
                yield node.lineno, f"os.{alias.name} outside ray_cluster/config/loading.py"


def check_sizes(source: Source) -> Iterator[tuple[int, str]]:
    if source.num_lines > MAX_FILE_LINES:
        yield source.num_lines, f"{source.num_lines} lines, at most {MAX_FILE_LINES}: split it"
    if source.layer == "kernels":
        return
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
        for node in source.nodes.get(kind, ()):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def check_swallowing(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes.get(ast.ExceptHandler, ()):
        caught = ast.unparse(node.type) if node.type else "everything"
        broad = node.type is None or "Exception" in caught.strip("()").split(", ")
        broad = broad or "BaseException" in caught
        idle = all(isinstance(s, ast.Pass | ast.Continue) or _is_dots(s) for s in node.body)
        if broad and idle:
            yield node.lineno, f"catches {caught} and does nothing"


def _is_dots(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def check_state(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes.get(ast.Global, ()):
        yield node.lineno, f"global {', '.join(node.names)}: give the state an owner"
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_fillable(node.value):
            yield node.lineno, "a module-level container that starts empty is module state"


def _is_fillable(value: ast.expr | None) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=func):
            return _last_name(func) in EMPTY_CONTAINERS and not value.args
    return False


def route(sources: list[Source], start: str, goal: str) -> list[str]:
    """A chain of imports from layer `start` to layer or third party `goal`; empty if none."""
    by_module = {source.module: source for source in sources if source.shipped}
    chains = [[source.module] for source in by_module.values() if source.layer == start]
    seen = {chain[0] for chain in chains}
    while chains:
        chain = chains.pop(0)
        # its functions import what their callers have anyway
        if chain[-1] == "ray_cluster.compat":
            continue
        for _, name in imports(by_module[chain[-1]]):
            top, *rest = name.split(".")
            if goal == (layer_of(rest) if top == "ray_cluster" else top):
                return [*chain, name]
            # importing a.b.c runs a and a.b too, and c may be a module or a name inside a.b
            parts = name.split(".")
            run = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
            for target in sorted(run & by_module.keys() - seen):
                seen.add(target)
                chains.append([*chain, target])
    return []
