"""Chat templates of GGUF files: a subset of Jinja that can neither run code nor take unbounded time or memory.

A template is text with statements in `{% %}` and expressions in `{{ }}`. Both are nearly Python's, so they are written
as Python, and Python's parser builds the syntax tree. The renderer walks that tree and accepts only the nodes, methods
and filters that are listed here. Every step costs a part of a fixed budget, in proportion to the text it touches, so
that a template of a stranger ends after a second at the latest.
"""

from __future__ import annotations

import ast
import datetime
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tilewise.errors import ConfigurationError

Scope = dict[str, Any]
_MAX_TEMPLATE, _MAX_LENGTH = 1 << 18, 1 << 21  # characters (or elements), far above real ones
_BUDGET, _CHARACTERS_PER_STEP = 300_000, 64  # less than a second
_FILTER = "ƒ_"  # prefix of the attribute that a filter becomes: `x | trim` is read as `x.ƒ_trim`
_UNDEFINED: Any = type("Undefined", (), {"__bool__": lambda _: False, "__iter__": lambda _: iter(())})()


class _Namespace(dict[str, Any]):
    """A dictionary whose entries a template may assign from inside loops."""


class TemplateError(Exception):
    """A template is damaged, asks for something unsupported, or exceeds the budget."""


# Exceptions by which a template fails while it is parsed or rendered.
_FAILURES: tuple[type[Exception], ...] = (TemplateError, SyntaxError, RecursionError, MemoryError, ArithmeticError)
_FAILURES += (AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """A parsed template.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role | upper }}] {{ m['content'] }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "hello"}])
    '[USER] hello'
    """

    def __init__(self, source: str) -> None:
        """Parse the template; raise ConfigurationError if it uses an unsupported feature."""
        try:
            if len(source) > _MAX_TEMPLATE:
                raise TemplateError("it is too long")
            self._statements = ast.parse(_as_python(source.removesuffix("\n"))).body
        except _FAILURES as error:
            raise _unusable(error) from None

    def render(self, messages: Sequence[Scope], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return a conversation as text; with `add_generation_prompt` up to where the model's answer begins."""
        renderer = _Renderer()
        names: Scope = {name: partial(function, renderer) for name, function in _FUNCTIONS.items()}
        names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None}
        try:
            return renderer.run(self._statements, [names | variables])
        except _FAILURES as error:
            raise _unusable(error) from None


def _unusable(error: Exception) -> ConfigurationError:
    """Convert an exception of a template to the one-sentence error that users see."""
    reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
    return ConfigurationError(f"the chat template of this model cannot be used: {reason}")


def _supported(table: dict[str, Callable[..., Any]], name: str, kind: str) -> Callable[..., Any]:
    """Return the filter, test or function (`kind`) called `name` from `table`; raise if it is not supported."""
    if name not in table:
        raise TemplateError(f"the {kind} {name[:40]!r} is not supported")
    return table[name]


# --- parsing ---

_STRING = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
_CODE = rf"([-+]?)((?:{_STRING}|[^\"'])*?)([-+]?)"
_TAGS = {"{": _CODE + r"\}\}", "%": _CODE + r"%\}", "#": r"([-+]?)(.*?)([-+]?)#\}"}
_TOKENS = re.compile(rf"({_STRING})|\|\s*([A-Za-z_]\w*)|(~)|\bis\s+(not\s+)?in\b|(\s+)", re.DOTALL)


def _split(source: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, content): literal text after Jinja's whitespace control, "{" expressions, "%" statements."""
    position, removes_all, removes_line_break, at_line_start = 0, False, False, True
    while position <= len(source):
        start = re.compile(r"\{[{%#]|\Z").search(source, position)
        assert start is not None
        text = source[position : start.start()]
        if removes_all:
            text = text.lstrip()
        elif removes_line_break and text.startswith("\n"):
            text, at_line_start = text[1:], True
        kind = start[0][1:]
        if not kind:
            yield "text", text
            return
        tag = re.compile(_TAGS[kind], re.DOTALL).match(source, start.end())
        if tag is None:
            raise TemplateError("a tag is not closed")
        indentation = text.rpartition("\n")[2]
        if tag[1] == "-":
            text = text.rstrip()
        elif kind in "%#" and not tag[1] and not indentation.strip(" \t") and ("\n" in text or at_line_start):
            text = text.removesuffix(indentation)
        yield "text", text
        if kind in "{%":
            yield kind, tag[2].strip()
        removes_all, removes_line_break, at_line_start = tag[3] == "-", kind in "%#" and not tag[3], False
        position = tag.end()


def _as_python(source: str) -> str:
    """Translate a template to Python source, whose syntax tree `_Renderer` interprets."""
    lines: list[str] = []
    ends: list[str] = []  # the words that end the open blocks
    for kind, content in _split(source):
        word, _, arguments = content.partition(" ")
        if kind != "%":
            lines.append(" " * len(ends) + (repr(content) if kind == "text" else _expression(content)))
        elif ends and word in ("elif", "else"):
            condition = f" {_expression(arguments)}" if arguments else ""
            lines += [" " * len(ends) + "pass", f"{' ' * (len(ends) - 1)}{word}{condition}:"]
        elif ends and word == ends[-1]:
            lines.append(" " * len(ends) + "pass")
            ends.pop()
        elif word not in ("generation", "endgeneration"):  # marks of the answer, for training
            statement = _supported(_STATEMENTS, word, "statement")(arguments)
            lines.append(" " * len(ends) + statement)
            if statement.endswith(":"):
                ends.append(f"end{word}")
    if ends:
        raise TemplateError(f"{ends[-1]!r} is missing")
    return "\n".join(lines)


def _expression(text: str) -> str:
    """Translate an expression to Python: filters, `~`, strings, and the `else` that Jinja does not require."""

    def translate(token: re.Match[str]) -> str:
        """Translate one token of an expression."""
        if token[1]:  # a string may contain line breaks, and any backslash
            return repr(token[1][1:-1].encode("ascii", "backslashreplace").decode("unicode-escape"))
        return (
            f" .{_FILTER}{token[2]}" if token[2] else "@" if token[3] else " " if token[5] else f" {token[4] or ''}in "
        )

    for ending in ("", " else ''"):
        try:
            python = f"({_TOKENS.sub(translate, text)}{ending})"
            ast.parse(python, mode="eval")
            return python
        except (SyntaxError, ValueError):
            continue
    raise TemplateError(f"{text.strip()[:60]!r} is not an expression")


def _for_loop(text: str) -> str:
    """Translate `a, b in iterable if condition` to Python; the condition filters the iterable."""
    header = re.fullmatch(r"\(?\s*(\w+(?:\s*,\s*\w+)*)\s*\)?\s+in\s+(.*)", text, re.DOTALL)
    if header is None:
        raise TemplateError(f"'for {text[:60]}' is not a loop")
    iterable, _, condition = header[2].rpartition(" if ")
    if not iterable or " else " in condition:
        return f"for {header[1]} in {_expression(header[2])}:"
    return f"for {header[1]} in {_expression(iterable)}, lambda: {_expression(condition)}:"


def _assignment(text: str) -> str:
    """Translate `name = value` to Python, or the beginning of a block whose text becomes the value."""
    target, equals, value = text.partition("=")
    if not re.fullmatch(r"\w+(\.\w+)?\s*", target):
        raise TemplateError(f"'set {text[:60]}' is not an assignment")
    return f"{target}= {_expression(value)}" if equals else f"with {target}:"


_STATEMENTS: dict[str, Callable[[str], str]] = {
    "for": _for_loop,
    "if": lambda text: f"if {_expression(text)}:",
    "set": _assignment,
    "macro": lambda text: f"def {_TOKENS.sub(lambda token: ' ' if token[5] else token[0], text)}:",
}

# --- rendering ---


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _equal(a: Any, b: Any) -> bool:
    """Compare two values; comparing two non-empty containers raises, as nested ones could take forever."""
    if isinstance(a, list | dict) and isinstance(b, list | dict) and a and b:
        raise TemplateError("lists cannot be compared")
    return bool(a == b)


def _contains(a: Any, b: Any) -> bool:
    """Tell whether a is in b, as the template language defines it."""
    if isinstance(a, list | dict):
        raise TemplateError("lists cannot be compared")
    return a in b


_CONSTANTS = {"true": True, "false": False, "none": None}
_TESTS: dict[str, Callable[..., bool]] = {
    "defined": lambda x: x is not _UNDEFINED,
    "undefined": lambda x: x is _UNDEFINED,
    **{name: partial(operator.is_, value) for name, value in _CONSTANTS.items()},
    "string": lambda x: isinstance(x, str),
    "mapping": lambda x: isinstance(x, dict),
    **dict.fromkeys(("iterable", "sequence"), lambda x: isinstance(x, str | list | dict)),
    "number": _is_number,
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "boolean": lambda x: isinstance(x, bool),
    "odd": lambda x: x % 2 == 1,
    "even": lambda x: x % 2 == 0,
    **dict.fromkeys(("equalto", "eq"), _equal),
    "in": _contains,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda a, b: not _equal(a, b),
    ast.In: _contains,
    ast.NotIn: lambda a, b: not _contains(a, b),
    **dict(zip((ast.Lt, ast.LtE, ast.Gt, ast.GtE), (operator.lt, operator.le, operator.gt, operator.ge), strict=True)),
}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod}
_ARITHMETIC |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}


class _Renderer:
    """Interprets a template's syntax tree within a budget of steps; scopes are dicts, the innermost last."""

    def __init__(self) -> None:
        self._budget = _BUDGET

    def spend(self, *values: Any) -> Any:
        """Charge the budget for one step and the sizes of these values; return the last value."""
        self._budget -= 1
        for value in values:
            if isinstance(value, str | list | dict):
                self.reserve(len(value))
                self._budget -= len(value) // (_CHARACTERS_PER_STEP if isinstance(value, str) else 4)
            elif isinstance(value, int) and abs(value) >= 1 << 63:
                raise TemplateError("a number is too large")
        if self._budget < 0:
            raise TemplateError("it takes too long")
        return values[-1] if values else None

    def run(self, statements: list[ast.stmt], scopes: list[Scope]) -> str:
        """Execute statements and return the text they output."""
        return str(self.spend("".join([self.spend(self._run(statement, scopes)) for statement in statements])))

    def _run(self, statement: ast.stmt, scopes: list[Scope]) -> str:
        """Execute one statement and return its text; raise if it is not supported."""
        match statement:
            case ast.Expr(expression):
                return self.text(self.value(expression, scopes))
            case ast.If(test, body, else_body):
                return self.run(body if self.value(test, scopes) else else_body, scopes)
            case ast.For(target, iterable, body, else_body):
                rows = self._rows(target, iterable, scopes)
                texts = [self.run(body, [*scopes, row]) for row in rows]
                return "".join(texts) if rows else self.run(else_body, scopes)
            case ast.Assign([target], expression):
                self._assign(target, self.value(expression, scopes), scopes)
            case ast.With([item], body):
                self._assign(item.context_expr, self.run(body, scopes), scopes)
            case ast.FunctionDef(name, parameters, body):
                scopes[-1][name] = self._macro(parameters, body, scopes)
            case ast.Pass():
                pass
            case _:
                raise TemplateError(f"{ast.unparse(statement)[:60]!r} is not supported")
        return ""

    def _rows(self, target: ast.expr, iterable: ast.expr, scopes: list[Scope]) -> list[Scope]:
        """Return the variables of each loop iteration: the target's names, and `loop`."""
        names = [ast.unparse(name) for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
        condition: ast.expr = ast.Constant(True)
        if isinstance(iterable, ast.Tuple) and isinstance(test := iterable.elts[-1], ast.Lambda):
            iterable, condition = iterable.elts[0], test.body
        rows: list[Scope] = []
        for element in self.elements(self.value(iterable, scopes)):
            row = dict(zip(names, element if len(names) > 1 else [element], strict=True))
            if self.value(condition, [*scopes, row]):
                rows.append(row)
        elements = [_UNDEFINED, *(row[names[0]] for row in rows), _UNDEFINED]
        for i, row in enumerate(rows):
            facts = {"index": i + 1, "index0": i, "first": i == 0, "last": i + 1 == len(rows), "length": len(rows)}
            facts |= {"revindex": len(rows) - i, "previtem": elements[i], "nextitem": elements[i + 2]}
            row["loop"] = facts
        return rows

    def _assign(self, target: ast.expr, value: Any, scopes: list[Scope]) -> None:
        """Assign to a variable of the innermost scope, or to an attribute of a namespace."""
        if isinstance(target, ast.Name):
            scopes[-1][target.id] = value
            return
        owner = self.value(target.value, scopes) if isinstance(target, ast.Attribute) else None
        if not isinstance(target, ast.Attribute) or not isinstance(owner, _Namespace):
            raise TemplateError(f"{ast.unparse(target)[:40]!r} is not in a namespace")
        owner[target.attr] = value

    def _macro(self, parameters: ast.arguments, body: list[ast.stmt], scopes: list[Scope]) -> partial[str]:
        """Return a function that executes a macro's body in a scope with its parameters."""
        names = [parameter.arg for parameter in parameters.args]
        defaults = [_UNDEFINED] * (len(names) - len(parameters.defaults))
        defaults += [self.value(each, scopes) for each in parameters.defaults]

        def call(*values: Any, **keywords: Any) -> str:
            """Execute the body with these arguments and return its text."""
            arguments = dict(zip(names, defaults, strict=True)) | dict(zip(names, values, strict=False)) | keywords
            return self.run(body, [scopes[0], arguments])

        return partial(call)

    # --- expressions ---

    def value(self, node: ast.expr, scopes: list[Scope]) -> Any:
        """Evaluate an expression; raise if it contains an unsupported node."""
        self.spend()
        return self._value(node, lambda part: self.value(part, scopes), scopes)

    def _value(self, node: ast.expr, value: Callable[[ast.expr], Any], scopes: list[Scope]) -> Any:
        """Evaluate one node; `value` evaluates its children."""
        match node:
            case ast.Constant(str() | int() | float() | None as constant):
                return constant
            case ast.Name(name):
                return next((s[name] for s in reversed(scopes) if name in s), _CONSTANTS.get(name, _UNDEFINED))
            case ast.List(elements) | ast.Tuple(elements):
                return [value(element) for element in elements]
            case ast.Dict(keys, values):
                return {str(value(key)): value(each) for key, each in zip(keys, values, strict=True) if key}
            case ast.IfExp(test, body, else_body):
                return value(body if value(test) else else_body)
            case ast.BoolOp(op, values):
                for each in values:
                    result = value(each)
                    if bool(result) == isinstance(op, ast.Or):
                        break
                return result
            case ast.UnaryOp(ast.Not(), operand):
                return not value(operand)
            case ast.UnaryOp(ast.USub(), operand):
                return self._compute(ast.Sub(), 0, value(operand))
            case ast.BinOp(left, op, right):
                return self._compute(op, value(left), value(right))
            case ast.Compare(left, [op], [right]) if isinstance(op, ast.Is | ast.IsNot):
                return self._test(value(left), right, value) == isinstance(op, ast.Is)
            case ast.Compare(left, [op], [right]):
                a, b = value(left), value(right)
                self.spend(a, b)
                return _COMPARISONS[type(op)](a, b)
            case ast.Attribute(owner, name):
                return self._filter(value(owner), name) if name.startswith(_FILTER) else _item(value(owner), name)
            case ast.Subscript(owner, ast.Slice(lower, upper, step)):
                bounds = (None if part is None else value(part) for part in (lower, upper, step))
                return self.spend(value(owner)[slice(*bounds)])
            case ast.Subscript(owner, key):
                return _item(value(owner), value(key))
            case ast.Call(function, arguments, pairs):
                keywords = {str(keyword.arg): value(keyword.value) for keyword in pairs}
                return self._call(function, [value(each) for each in arguments], keywords, value)
        raise TemplateError(f"{ast.unparse(node)[:60]!r} is not supported")

    def _compute(self, op: ast.operator, a: Any, b: Any) -> Any:
        """Apply an arithmetic operator, or concatenate: + for texts and lists, `~` (parsed as `@`) for any."""
        if isinstance(op, ast.MatMult):
            return self.spend(self.text(a) + self.text(b))
        is_sum = isinstance(op, ast.Add) and type(a) is type(b) and isinstance(a, str | list)
        if not is_sum and not (_is_number(a) and _is_number(b)):
            raise TemplateError("numbers are expected")
        return self.spend(_ARITHMETIC[type(op)](a, b))

    def _test(self, tested: Any, node: ast.expr, value: Callable[[ast.expr], Any]) -> bool:
        """Tell whether `tested` passes the test that the node names, as in `x is defined`."""
        arguments = [value(each) for each in node.args] if isinstance(node, ast.Call) else []
        node = node.func if isinstance(node, ast.Call) else node
        return bool(_supported(_TESTS, ast.unparse(node).lower(), "test")(tested, *arguments))

    def _call(self, function: ast.expr, arguments: list[Any], keywords: Scope, value: Callable[[ast.expr], Any]) -> Any:
        """Call a macro, function, text method or filter with evaluated arguments."""
        if isinstance(function, ast.Name):
            target = value(function)
            if not isinstance(target, partial):
                raise TemplateError(f"the function {function.id[:40]!r} is not supported")
            return target(*arguments, **keywords)
        if not isinstance(function, ast.Attribute):
            raise TemplateError(f"{ast.unparse(function)[:60]!r} cannot be called")
        owner, name = value(function.value), function.attr
        if name.startswith(_FILTER):
            return self._filter(owner, name, *arguments, **keywords)
        if isinstance(owner, str) and name in _TEXT_METHODS:
            return self._filter(owner, _FILTER + name, *arguments)
        return _supported(_DICT_METHODS if isinstance(owner, dict) else {}, name, "method")(self, owner, *arguments)

    def _filter(self, filtered: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Apply the filter `name` to a value, or the text method of that name."""
        name = name.removeprefix(_FILTER)
        self.spend(filtered, *arguments)
        if name in _TEXT_METHODS:
            texts = [tuple(each) if isinstance(each, list) else each for each in arguments]
            if len(texts) >= 2 and isinstance(texts[1], str):  # a replacement: its length before it is made
                self.reserve((self.text(filtered).count(str(texts[0])) + 1) * len(texts[1]))
            return self.spend(getattr(self.text(filtered), name)(*texts))
        return self.spend(_supported(_FILTERS, name, "filter")(self, filtered, *arguments, **keywords))

    # --- values ---

    def reserve(self, length: int) -> None:
        """Raise if a text of this length would exceed the budget, before it is allocated."""
        if length > _MAX_LENGTH:
            raise TemplateError("a text is too long")

    def text(self, value: Any) -> str:
        """Convert a scalar value to text; a list raises, since nested ones could be endless."""
        if not isinstance(value, str | int | float | None) and value is not _UNDEFINED:
            raise TemplateError("a list or dictionary is printed without tojson")
        return "" if value is _UNDEFINED else str(value)

    def elements(self, value: Any) -> list[Any]:
        """Return the elements of a list, text, dict (its keys) or range as a list; tuples in it become lists."""
        self.reserve(0 if value is _UNDEFINED else len(value))
        elements = [list(each) if isinstance(each, tuple) else each for each in value]
        self.spend(elements)
        return elements

    def json(self, value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        """Serialize a value as JSON, after charging the budget for each nested value."""
        nested, white_space, spaces = [(value, 1)], 0, None if indent is None else min(8, max(0, indent))
        while nested:
            part, depth = nested.pop()
            self.spend(part)
            white_space += depth * (spaces or 0)
            nested += [(each, depth + 1) for each in part.values()] if isinstance(part, dict) else []
            nested += [(each, depth + 1) for each in part] if isinstance(part, list) else []
        self.reserve(white_space)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=spaces)

    def join(self, value: Any, separator: str = "") -> str:
        """Concatenate the elements of a list as text, within the budget."""
        texts = [self.text(each) for each in self.elements(value)]
        self.reserve(len(texts) * len(separator))
        return separator.join(texts)

    def select(self, value: Any, key: str, test: str = "", *arguments: Any) -> tuple[list[Any], list[Any]]:
        """Split elements into those whose attribute `key` passes a test (default: is true) and the others."""
        groups: tuple[list[Any], list[Any]] = [], []
        for each in self.elements(value):
            item = _item(each, key)
            groups[0 if (_supported(_TESTS, test, "test")(item, *arguments) if test else item) else 1].append(each)
        return groups

    def raise_exception(self, message: Any = "it refuses this conversation") -> None:
        raise TemplateError(self.text(message))

    def strftime_now(self, form: str) -> str:
        """Format the current local time; the format may have at most 40 characters."""
        if not re.fullmatch(r"(?:%[A-Za-z%]|[^%]){0,40}", form):
            raise TemplateError(f"the time format {form[:40]!r} is not supported")
        return datetime.datetime.now().strftime(form)


def _item(owner: Any, key: Any) -> Any:
    """Return owner[key] of a dict, list or text; undefined if there is none."""
    if owner is _UNDEFINED:
        raise TemplateError(f"there is nothing that has {str(key)[:40]!r}")
    if isinstance(owner, dict):
        return owner.get(key, _UNDEFINED) if isinstance(key, str) else _UNDEFINED
    is_index = isinstance(owner, str | list) and isinstance(key, int) and -len(owner) <= key < len(owner)
    return owner[key] if is_index else _UNDEFINED


_TEXT_METHODS = {"strip", "lstrip", "rstrip", "split", "startswith", "endswith", "upper", "lower", "title", "replace"}
_DICT_METHODS: dict[str, Callable[..., Any]] = {
    "get": lambda _, owner, *arguments: owner.get(*arguments),
    "items": lambda r, owner: r.elements(owner.items()),
    "keys": lambda r, owner: r.elements(owner),
    "values": lambda r, owner: r.elements(owner.values()),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "namespace": lambda _, **keywords: _Namespace(keywords),
    "range": lambda r, *bounds: r.elements(range(*bounds)),
    "raise_exception": _Renderer.raise_exception,
    "strftime_now": _Renderer.strftime_now,
}
_FILTERS: dict[str, Callable[..., Any]] = {
    "trim": lambda r, x: r.text(x).strip(),
    "capitalize": lambda r, x: r.text(x).capitalize(),
    **dict.fromkeys(("string", "safe"), _Renderer.text),
    **dict.fromkeys(("length", "count"), lambda r, x: len(r.elements(x))),
    **dict.fromkeys(
        ("default", "d"), lambda _, x, y="", boolean=False: y if x is _UNDEFINED or (boolean and not x) else x
    ),
    "first": lambda r, x: (r.elements(x) or [_UNDEFINED])[0],
    "last": lambda r, x: (r.elements(x) or [_UNDEFINED])[-1],
    "list": _Renderer.elements,
    "items": _DICT_METHODS["items"],
    "int": lambda r, x, y=0: int(x) if _is_number(x) or re.fullmatch(r"[-+]?\d{1,18}", r.text(x)) else y,
    "join": _Renderer.join,
    "map": lambda r, x, attribute: [_item(each, attribute) for each in r.elements(x)],
    "selectattr": lambda r, *arguments: r.select(*arguments)[0],
    "rejectattr": lambda r, *arguments: r.select(*arguments)[1],
    "tojson": _Renderer.json,
}
