"""The rules that tools/ratchet.py counts: each one is a function that takes a source file and yields its violations.

To add a rule, write such a function and list it in `RULES` with the one sentence that tells a contributor what to do.
Python files are parsed with `ast`. C++ files are read line by line with regular expressions, which is enough to count.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

WORDS = tomllib.loads(Path(__file__).with_name("ratchet_words.toml").read_text(encoding="utf-8"))
PARTICIPLES = frozenset(WORDS["participles"].split())
DOCSTRING_OPENERS = frozenset(WORDS["docstring_openers"].split())
DIALECT: dict[str, str] = WORDS["dialect"]
DIALECT_SCOPE: dict[str, list[str]] = WORDS["dialect_scope"]

# Limits from the project's writing guide.
MAX_POSITIONAL_ARGUMENTS = 6
MAX_LINES_WITHOUT_DOCSTRING = 8
MAX_CPP_COLUMNS = 120
MIN_COMMENTS_PER_100_LINES = 3

# Packages whose code is algorithms rather than plumbing: their steps need comments.
ALGORITHMIC_PACKAGES = ("costmodel/", "graph/", "native/", "quantize/", "tune/search/")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """A source file with the package it counts towards, its path relative to the repository, and its text."""

    package: str
    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree; empty for C++."""
        return list(ast.walk(ast.parse(self.text))) if self.is_python else []

    @cached_property
    def identifiers(self) -> list[Identifier]:
        """Every name that the file binds or defines."""
        return list(_python_identifiers(self.nodes) if self.is_python else _cpp_identifiers(self.lines))

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        """The docstrings of the module, its classes and its functions, each with its line."""
        owners = (node for node in self.nodes if isinstance(node, ast.Module | ast.ClassDef | FunctionNode))
        return [(node.body[0].lineno, text) for node in owners if (text := ast.get_docstring(node))]

    @cached_property
    def own_line_comments(self) -> int:
        """The number of lines that hold a comment and nothing else."""
        markers = ("#",) if self.is_python else ("//", "/*", "* ")
        return sum(line.lstrip().startswith(markers) for line in self.lines)


@dataclass(frozen=True)
class Identifier:
    """A name where it is bound: a function, class, argument, variable or assigned attribute."""

    name: str
    line: int
    is_class: bool = False
    is_function: bool = False

    @property
    def word(self) -> str:
        """The name without the underscores that mark it as private or as a C++ member."""
        return self.name.strip("_")


@dataclass(frozen=True, order=True)
class Violation:
    """One place where a rule is broken."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """A name for the ceilings file, the function that finds violations in a package's files, and the remedy."""

    name: str
    find: Callable[[list[SourceFile]], Iterable[Violation]]
    advice: str


def _per_file(find: Callable[[SourceFile], Iterator[Violation]]) -> Callable[[list[SourceFile]], Iterator[Violation]]:
    """Turn a rule about one file into a rule about a list of files."""
    return lambda files: (violation for file in files for violation in find(file))


# Names -------------------------------------------------------------------------------------------------------------


def _python_identifiers(nodes: list[ast.AST]) -> Iterator[Identifier]:
    """Yield every binding of a syntax tree; imports are left out because another file chose those names."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Identifier(name, node.lineno, is_function=True)
            case ast.ClassDef(name=name):
                yield Identifier(name, node.lineno, is_class=True)
            case ast.arg(arg=name):
                yield Identifier(name, node.lineno)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield Identifier(name, node.lineno)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield Identifier(name, node.lineno)


# A declaration reads `type name` followed by one of `= ; , ) { ( [ :`. The type ends in a word, `>`, `*` or `&`.
_CPP_DECLARATION = re.compile(r"\b(\w+)(?:\s*<[^<>;]*>+)?(?:\s+|\s*[*&]+\s*)(\w+)\s*(?=[=;,){(\[:])")
_CPP_CLASS = re.compile(r"\b(?:class|struct)\s+(\w+)")
_CPP_NOT_A_TYPE = frozenset(WORDS["cpp_keywords"].split())
_CPP_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//.*|/\*.*?\*/')


def _cpp_identifiers(lines: list[str]) -> Iterator[Identifier]:
    """Yield the names that look declared, line by line; strings and comments are blanked first."""
    for number, line in enumerate(lines, start=1):
        code = _CPP_STRING_OR_COMMENT.sub(" ", line)
        for match in _CPP_CLASS.finditer(code):
            yield Identifier(match[1], number, is_class=True)
        for match in _CPP_DECLARATION.finditer(code):
            if match[1] not in _CPP_NOT_A_TYPE and not match[1].isdigit() and match[2] != "const":
                yield Identifier(match[2], number, is_function=code[match.end() :].startswith("("))


def participles(file: SourceFile) -> Iterator[Violation]:
    """Find names that are a bare participle, except `left` beside `right` and functions called `read`."""
    words = {identifier.word for identifier in file.identifiers}
    for identifier in file.identifiers:
        word = identifier.word.lower()
        is_operand = word == "left" and "right" in words
        is_verb = word == "read" and identifier.is_function
        if word in PARTICIPLES and not is_operand and not is_verb:
            yield Violation(file.path, identifier.line, f"`{identifier.name}` is a bare participle")


def dialect(file: SourceFile) -> Iterator[Violation]:
    """Find names of the private dialect for which the field has a word."""
    for identifier in file.identifiers:
        word = identifier.word
        counts_for_classes_only = word[:1].isupper() and not word.isupper()
        if word not in DIALECT or (counts_for_classes_only and not identifier.is_class):
            continue
        scope = DIALECT_SCOPE.get(word, [file.package])
        if any(f"{file.package}/".startswith(f"{package}/") for package in scope):
            yield Violation(file.path, identifier.line, f"`{identifier.name}`: say {DIALECT[word]}")


def repeated_class_names(files: list[SourceFile]) -> Iterator[Violation]:
    """Find class names that are defined more than once; one violation per name, at its second definition."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((file.path, node.lineno))
    for name, definitions in places.items():
        if len(definitions) > 1:
            first, (path, line), *more = (definitions[0], definitions[1], *definitions[2:])
            others = ", ".join(f"{other}:{number}" for other, number in (first, *more))
            yield Violation(path, line, f"class `{name}` is also defined at {others}")


# Shape of the code -------------------------------------------------------------------------------------------------


def long_calls(file: SourceFile) -> Iterator[Violation]:
    """Find calls with so many positional arguments that a reader has to count them."""
    for node in file.nodes:
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL_ARGUMENTS:
            yield Violation(
                file.path, node.lineno, f"`{ast.unparse(node.func)}` receives {len(node.args)} positional arguments"
            )


# Strings that come from the interpreter or the operating system rather than from our own data.
_FOREIGN_KINDS = frozenset(("__name__", "sys.platform", "os.name"))


def kind_branches(file: SourceFile) -> Iterator[Violation]:
    """Find branches that compare a name or an attribute with a string literal, in conditions and in `match`."""
    for node in file.nodes:
        if isinstance(node, ast.If | ast.IfExp):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare) and _compares_kind(part):
                    yield Violation(file.path, part.lineno, f"branch on `{ast.unparse(part)}`")
        elif isinstance(node, ast.MatchValue) and _is_text(node.value):
            yield Violation(file.path, node.lineno, f"branch on `case {ast.unparse(node)}`")


def _compares_kind(comparison: ast.Compare) -> bool:
    """Tell whether a comparison is `name == "text"`, `name != "text"` or `name in ("text", ...)`."""
    left, right = comparison.left, comparison.comparators[0]
    if not isinstance(left, ast.Name | ast.Attribute) or ast.unparse(left) in _FOREIGN_KINDS:
        return False
    if isinstance(comparison.ops[0], ast.Eq | ast.NotEq):
        return _is_text(right)
    is_membership = isinstance(comparison.ops[0], ast.In | ast.NotIn)
    return is_membership and isinstance(right, ast.Tuple | ast.List | ast.Set) and all(map(_is_text, right.elts))


def _is_text(node: ast.expr) -> bool:
    """Tell whether an expression is a string literal other than the empty string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""


def broad_excepts(file: SourceFile) -> Iterator[Violation]:
    """Find handlers that catch every exception."""
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
                yield Violation(file.path, node.lineno, "handler for every exception")


_CPP_CONSTANT = re.compile(
    r"^\s*(?:static\s+|inline\s+)*constexpr\s+(?:std::)?(?:u?int\w*|size_t|ptrdiff_t|long|float|double|auto|unsigned)\s+(k\w+)\s*=[^;]*\d"
)


# A number computed from another constant, or one whose comment says that a machine or a kernel's code defines it.
_CPP_DEFINED = re.compile(r"^[^=]*=[^;,=]*\bk[A-Z]\w*[^,]*;|// (?:definition|hardware)\b")


def numeric_constants(file: SourceFile) -> Iterator[Violation]:
    """Find numbers with a name at module level (in C++: `constexpr` numbers called k… that somebody chose).

    In C++ a comment `// hardware: …` marks a fact about machines (a cache line), `// definition: …` a number that is
    part of a kernel, a format or arithmetic (the rows of a register tile, the bytes of a block, a square root).
    """
    for number, line in enumerate([] if file.is_python else file.lines, start=1):
        if (match := _CPP_CONSTANT.match(line)) and not _CPP_DEFINED.search(line):
            yield Violation(file.path, number, f"numeric constant `{match[1]}`")
    module = file.nodes[0] if file.nodes else None
    for statement in module.body if isinstance(module, ast.Module) else ():
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                if value is not None and _is_number(value):
                    yield Violation(file.path, statement.lineno, f"numeric constant `{name}`")


def _is_number(node: ast.expr) -> bool:
    """Tell whether an expression is a number or arithmetic on numbers, such as `64 * 1024` or `-1.0`."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


# Prose -------------------------------------------------------------------------------------------------------------


def docstring_openers(file: SourceFile) -> Iterator[Violation]:
    """Find docstrings that start with a pronoun, a preposition or "The same"."""
    for line, text in file.docstrings:
        words = re.findall(r"[\w']+", text.lower())[:2]
        if words and (words[0] in DOCSTRING_OPENERS or words == ["the", "same"]):
            yield Violation(file.path, line, f"docstring starts with {text.splitlines()[0][:60]!r}")


def missing_docstrings(file: SourceFile) -> Iterator[Violation]:
    """Find functions too long to be understood at a glance that have no docstring."""
    for node in file.nodes:
        if isinstance(node, FunctionNode) and ast.get_docstring(node) is None:
            length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if length > MAX_LINES_WITHOUT_DOCSTRING:
                yield Violation(file.path, node.lineno, f"`{node.name}` has {length} lines and no docstring")


def missing_comments(files: list[SourceFile]) -> Iterator[Violation]:
    """Yield one violation for every comment that an algorithmic package lacks, at its longest files without comments.

    A count that falls to 0 fits the ratchet better than a percentage: it stays 0 however much the package grows above
    the limit.
    """
    if not files or not f"{files[0].package}/".startswith(ALGORITHMIC_PACKAGES):
        return
    required = {file: math.ceil(len(file.lines) * MIN_COMMENTS_PER_100_LINES / 100) for file in files}
    total = math.ceil(sum(len(file.lines) for file in files) * MIN_COMMENTS_PER_100_LINES / 100)
    missing = total - sum(file.own_line_comments for file in files)
    for file in sorted(files, key=lambda file: file.own_line_comments - required[file]):
        count = max(0, min(missing, required[file] - file.own_line_comments))
        missing -= count
        text = f"{file.own_line_comments} own-line comments in {len(file.lines)} lines"
        yield from (Violation(file.path, 1, text) for _ in range(count))


def long_cpp_lines(file: SourceFile) -> Iterator[Violation]:
    """Find C++ lines that do not fit the agreed width (ruff checks Python's)."""
    for number, line in enumerate([] if file.is_python else file.lines, start=1):
        if len(line) > MAX_CPP_COLUMNS:
            yield Violation(file.path, number, f"{len(line)} columns")


RULES = (
    Rule("participles", _per_file(participles), "Name the value by what it is: `result`, `layer`, `config`, `reason`."),
    Rule("dialect", _per_file(dialect), "Use the field's word."),
    Rule("long_calls", _per_file(long_calls), "Pass arguments by keyword, or group them in a dataclass."),
    Rule("kind_branches", _per_file(kind_branches), "Use a method, a table or an enum instead of comparing strings."),
    Rule("broad_excepts", _per_file(broad_excepts), "Catch the exceptions that the code can handle."),
    Rule(
        "numeric_constants",
        _per_file(numeric_constants),
        "Derive or learn the number, or move it to the data it describes.",
    ),
    Rule("docstring_openers", _per_file(docstring_openers), "Start the docstring with a verb or a noun."),
    Rule("missing_docstrings", _per_file(missing_docstrings), "Say in a docstring what the function does."),
    Rule(
        "missing_comments", missing_comments, "Comment the steps of the algorithm: say why, give shapes and the source."
    ),
    Rule("long_cpp_lines", _per_file(long_cpp_lines), "Run clang-format, or shorten the line."),
)

# Rules about all packages together.
TREE_RULES = (Rule("repeated_class_names", repeated_class_names, "Give the class a name that no other class has."),)
