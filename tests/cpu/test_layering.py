"""The rules of the code base, each stated once: what may stand where, and what must be said."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "chord"
MAX_COLUMNS, MAX_FILE_LINES, MAX_FUNCTION_LINES = 100, 600, 80

# A module may import modules of a lower layer and of its own name; the lowest layer is open inside.
LAYERS = (
    ("errors", "arguments", "env", "device", "timing"),
    ("weights", "routing"),
    ("plan", "reference"),
    ("jit",),
    ("ops",),
    ("bench", "compat", "emulator", "integrations", "tune"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
REFERENCE_MAY_IMPORT = {"errors", "arguments", "weights", "routing", "reference"}

PYTHON = sorted(p for p in PACKAGE.rglob("*.py") if PACKAGE / "kernels" not in p.parents)
KERNELS = sorted((PACKAGE / "kernels").rglob("*.cuh"))
HOST_CPP = sorted(
    path for ext in ("hpp", "cpp", "cuh") for path in (PACKAGE / "emulator").rglob(f"*.{ext}")
)
DOCUMENTS = sorted(
    p for p in ROOT.rglob("*.md") if not set(p.relative_to(ROOT).parts) & {".venv", ".git", ".ci"}
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fail_with(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in PYTHON:
        yield path, ast.parse(path.read_text(), str(path))


def layer_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each imported module; `from chord import x` gives chord.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module in ("chord", "cuda"):
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"
            else:
                yield node.lineno, node.module
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level + (node.module or "")


def without_comments(source: str) -> str:
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.DOTALL)


def line_of(source: str, offset: int) -> int:
    return source.count("\n", 0, offset) + 1


# --- what may stand where ---------------------------------------------------------------------


def test_asm_stands_only_under_ptx() -> None:
    found = []
    for path in KERNELS:
        if path.relative_to(PACKAGE / "kernels").parts[0] == "ptx":
            continue
        source = without_comments(path.read_text())
        found += [
            f"{relative(path)}:{line_of(source, m.start())}: asm belongs under kernels/ptx/"
            for m in re.finditer(r"\basm\b", source)
        ]
    fail_with(found)


def test_kernels_include_only_their_own_headers() -> None:
    found = []
    for path in KERNELS:
        source = path.read_text()
        found += [
            f"{relative(path)}:{line_of(source, m.start())}: {m.group(1)} is not <chord/...>"
            for m in re.finditer(r"#\s*include\s*([<\"][^>\"]*[>\"])", source)
            if not m.group(1).startswith("<chord/")
        ]
    fail_with(found)


def test_environment_is_read_only_in_env() -> None:
    found = []
    for path, tree in trees():
        if path == PACKAGE / "env.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                found.append(f"{relative(path)}:{node.lineno}: os.{node.attr} belongs in env.py")
    fail_with(found)


def test_restricted_packages_stay_in_their_place() -> None:
    found = []
    for path, tree in trees():
        inside = path.relative_to(PACKAGE)
        for line, module in imported_modules(tree):
            if module.split(".")[0] == "vllm" and inside.parts[:2] != ("integrations", "vllm"):
                found.append(f"{relative(path)}:{line}: vllm belongs under integrations/vllm/")
            if (module + ".").startswith("cuda.core.") and inside.parts[0] not in (
                "jit",
                "device.py",
            ):
                found.append(f"{relative(path)}:{line}: cuda.core belongs in jit/ and device.py")
    fail_with(found)


def test_imports_point_one_way() -> None:
    found = []
    for path, tree in trees():
        own = layer_name(path)
        if own == "__init__":
            continue
        if own not in RANK:
            found.append(f"{relative(path)}: {own} is in no layer; add it to LAYERS of this test")
            continue
        for line, module in imported_modules(tree):
            if module.startswith("."):
                found.append(f"{relative(path)}:{line}: import by the full name, not {module!r}")
                continue
            if module.split(".")[0] != "chord":
                continue
            # `import chord` and `from chord import pack_experts` see what ops see, and more.
            other = module.split(".")[1] if "." in module else ""
            rank = RANK.get(other, RANK["ops"])
            same = other == own or rank == RANK[own] == 0
            if own == "reference" and other not in REFERENCE_MAY_IMPORT:
                found.append(f"{relative(path)}:{line}: reference must not import {module}")
            elif not same and rank >= RANK[own]:
                found.append(f"{relative(path)}:{line}: {own} must not import {module}")
    fail_with(found)


def test_import_touches_no_gpu() -> None:
    code = (
        "import sys, chord, torch\n"
        "assert not torch.cuda.is_initialized(), 'import chord initialised CUDA'\n"
        "late = {'cuda.core', 'matplotlib', 'typer', 'vllm'} & set(sys.modules)\n"
        "assert not late, f'import chord imported {late}'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- what must be said ------------------------------------------------------------------------


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    bodies = [tree.body]
    bodies += [
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
                if not node.name.startswith("_") and not overload:
                    yield node


def tensor_annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    annotations = [a.annotation for a in arguments] + [function.returns]
    return [ast.unparse(a) for a in annotations if a and "Tensor" in ast.unparse(a)]


def test_public_functions_say_shapes_and_dtypes() -> None:
    shape = re.compile(r"\[[^\[\]\n]*\]|scalar|any shape|0-d|same shape", re.IGNORECASE)
    dtype = re.compile(
        r"\b(u?int\d+|bf16|bfloat16|fp(16|32|64)|float(16|32|64)|bool|dtype)\b", re.I
    )
    found = []
    for path, tree in trees():
        for function in public_functions(tree):
            where = f"{relative(path)}:{function.lineno}: {function.name}"
            text = ast.get_docstring(function) or ""
            if not text:
                found.append(f"{where} has no docstring")
            elif tensor_annotations(function) and not (shape.search(text) and dtype.search(text)):
                found.append(
                    f"{where} takes or returns tensors; its docstring must say shape and "
                    "dtype, as `name: int32, [M, K]`"
                )
    fail_with(found)


def first_words(node: ast.expr) -> str | None:
    """Return the leading literal text of a message, or None where it is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
        return "".join(str(p) for p in parts)
    if isinstance(node, ast.BinOp):
        return first_words(node.left)
    return None


def test_raises_and_asserts_have_words() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            message: ast.expr | None = None
            if isinstance(node, ast.Assert):
                message = node.msg
                if message is None:
                    found.append(f"{relative(path)}:{node.lineno}: assert without words")
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func)
                if name.split(".")[-1] in ("Exit", "SystemExit", "StopIteration", "Abort"):
                    continue
                if not name.split(".")[-1][:1].isupper():
                    continue  # a function that words the error from what it is given
                message = node.exc.args[0] if node.exc.args else None
                if message is None:
                    found.append(f"{relative(path)}:{node.lineno}: raise {name} without words")
            elif (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Name)
                and node.exc.id[:1].isupper()  # a class; an instance carries its own message
            ):
                found.append(f"{relative(path)}:{node.lineno}: {node.exc.id} without words")
            if message is None:
                continue
            words = first_words(message)
            if words is not None and (" " not in words.strip() or words.startswith("Invalid")):
                found.append(
                    f"{relative(path)}:{node.lineno}: {words!r} must say what is wrong, with the "
                    "values, and must not start with Invalid"
                )
    fail_with(found)


def test_static_asserts_have_words() -> None:
    found = []
    for path in KERNELS + HOST_CPP:
        source = without_comments(path.read_text())
        for match in re.finditer(r"\bstatic_assert\s*\(", source):
            depth, end = 1, match.end()
            while depth and end < len(source):
                depth += {"(": 1, ")": -1}.get(source[end], 0)
                end += 1
            text = re.findall(r'"((?:[^"\\]|\\.)*)"', source[match.end() : end])
            message = "".join(text)
            if " " not in message.strip() or message.startswith("Invalid"):
                where = f"{relative(path)}:{line_of(source, match.start())}"
                found.append(f"{where}: static_assert must say the rule and the reason")
    fail_with(found)


# --- sizes and text ---------------------------------------------------------------------------


def test_no_line_is_too_long() -> None:
    python = (
        PYTHON + sorted((ROOT / "tests").rglob("*.py")) + sorted(ROOT.glob("benchmarks/**/*.py"))
    )
    found = []
    for path in python + KERNELS + HOST_CPP:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                found.append(f"{relative(path)}:{number}: {len(line)} columns")
    fail_with(found)


def test_no_file_is_too_long() -> None:
    texts = {path: path.read_text() for path in PYTHON + KERNELS + HOST_CPP}
    counted = {  # a generated file is as long as it is; its generator is what people read
        path: text.count("\n")
        for path, text in texts.items()
        if not re.search(r"[Ww]ritten by \w+\.py", text[:400])
    }
    fail_with([f"{relative(p)}: {n} lines" for p, n in counted.items() if n > MAX_FILE_LINES])


def test_no_function_is_too_long() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if ast.get_docstring(node):  # what is said does not count, what is done does
                    length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{relative(path)}:{node.lineno}: {node.name} has {length} lines")
    fail_with(found)


def test_todos_carry_an_issue_number() -> None:
    word = "TO" + "DO"
    found = []
    for path in PYTHON + KERNELS + HOST_CPP + sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if word in line and not re.search(word + r"\(#\d+\)", line):
                found.append(f"{relative(path)}:{number}: write {word}(#issue)")
    fail_with(found)


# --- documents --------------------------------------------------------------------------------


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_relative_links_resolve() -> None:
    found = []
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (path.parent / target.split("#")[0]).exists():
                found.append(f"{relative(path)}: {target} does not exist")
    fail_with(found)


def python_blocks() -> list[tuple[str, str]]:
    blocks = []
    for path in DOCUMENTS:
        for index, code in enumerate(
            re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
        ):
            blocks.append((f"{relative(path)}#{index}", code))
    return blocks


@pytest.mark.parametrize(("name", "code"), [pytest.param(*b, id=b[0]) for b in python_blocks()])
def test_python_blocks_run(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__docs__"})


def test_readme_starts_with_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("```bash"))
    example = next(i for i, line in enumerate(lines, 1) if line.startswith("```python"))
    assert first <= 15, f"the first command stands on line {first}; by line 15, please"
    assert example <= 30, f"the first example stands on line {example}; by line 30, please"
    assert len(lines) <= 120, f"README has {len(lines)} lines; at most 120"
