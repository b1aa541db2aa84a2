"""Strict YAML: text -> msgspec Struct, with every error at its line and column.

YAML 1.1 turns `off` into False and `10:20` into 620, so every scalar stays the string that was written (an empty one,
`~` or `null` is None) and msgspec converts it to what the Struct asks for. Refused: duplicate keys, anchors and aliases
(a small text could grow without bound), tags, more than one document, and what is too big or nested too deep.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import msgspec.inspect
import yaml

#: A ConfigMap holds at most 1 MiB; a policy of 256 KiB has over a thousand rows.
MAX_TEXT_BYTES = 256 * 1024
MAX_DEPTH = 16

_NULL_TAG = "tag:yaml.org,2002:null"
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")

Path = tuple[str | int, ...]
T = TypeVar("T", bound=msgspec.Struct)


class PolicyError(ValueError):
    """A refused policy: `what` is wrong at `line` and `column` (from 1) of `file`, and what to `do` about it."""

    def __init__(self, file: str, line: int, column: int, what: str, do: str) -> None:
        super().__init__(f"{file}:{line}:{column}: {what}. {do}")
        self.file = file
        self.line = line
        self.column = column
        self.what = what
        self.do = do


@dataclass(frozen=True, slots=True)
class Document:
    """A composed document: plain values, and the nodes they came from."""

    file: str
    root: yaml.Node
    value: object

    def error(self, path: Sequence[str | int], what: str, do: str, *, at_key: bool = False) -> PolicyError:
        """A PolicyError at the node of `path`; with `at_key` at the key of its last step."""
        return PolicyError(self.file, *_place(_locate(self.root, path, at_key).start_mark), what, do)

    def convert(self, kind: type[T]) -> T:
        """The document as this Struct. Raises PolicyError at the first value that does not fit."""
        try:
            return msgspec.convert(self.value, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _explain(self, kind, str(error)) from error


def parse(text: str, file: str) -> Document:
    """Compose one document. Raises PolicyError."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise PolicyError(file, 1, 1, f"more than {MAX_TEXT_BYTES} bytes", "Make it smaller")
    try:
        _check_events(text, file)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line, column = _place(error.problem_mark or error.context_mark)
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise PolicyError(file, line, column, f"not YAML: {what}", "Correct the syntax") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PolicyError(file, line, 1, f"not YAML: {error.reason}", "Remove the character") from error
    if root is None:
        raise PolicyError(file, 1, 1, "the file is empty", "Begin with `version: 1`")
    return Document(file, root, _plain(root, file))


class _Mark(Protocol):
    """Where PyYAML saw something, counted from 0: its marks in Python and in C share no base."""

    line: int
    column: int


def _place(mark: _Mark | None) -> tuple[int, int]:
    """Line and column, counted from 1."""
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _check_events(text: str, file: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line, column = _place(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise PolicyError(file, line, column, "anchors and aliases are not taken", "Write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise PolicyError(file, line, column, f"the tag {tag} is not taken", "Leave the tag out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise PolicyError(file, line, column, f"nested deeper than {MAX_DEPTH} levels", "Make it flatter")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(node: yaml.Node, file: str) -> object:
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.tag == _NULL_TAG else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, file) for item in node.value]
    first: dict[str, int] = {}
    mapping: dict[str, object] = {}
    for key, value in node.value:
        line, column = _place(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            raise PolicyError(file, line, column, "a key must be a word", "Replace the list or map used as a key")
        if key.value in first:
            what = f"duplicate key `{key.value}` (first on line {first[key.value]})"
            raise PolicyError(file, line, column, what, "Keep one of the two")
        first[key.value] = line
        mapping[key.value] = _plain(value, file)
    return mapping


def _locate(root: yaml.Node, path: Sequence[str | int], at_key: bool) -> yaml.Node:
    """The node at `path`, or the deepest one on the way to it that exists."""
    node = found = root
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == step), None)
            if pair is None:
                return node
            found, node = pair
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node = node.value[step]
        else:
            return node
    return found if at_key else node


def shown(path: Sequence[str | int]) -> str:
    """(`pools`, 0, `level`) -> `pools[0].level`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the file"


def _explain(document: Document, kind: type[msgspec.Struct], message: str) -> PolicyError:
    """msgspec's message -> what, where and what to do."""
    found = _PATH.search(message)
    path: Path = ()
    if found:
        message = message[: found.start()]
        steps = _STEP.finditer(found["path"])
        path = tuple(int(step[2]) if step[2] else step[1] for step in steps if step[1] or step[2])
    type_here = _type_at(msgspec.inspect.type_info(kind), path)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        what = f"unknown key `{unknown[1]}` in {shown(path)}"
        return document.error((*path, unknown[1]), what, _known_keys(type_here, unknown[1]), at_key=True)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        return document.error(path, f"`{missing[1]}` is missing in {shown(path)}", f"Add `{missing[1]}: ...`")
    value = _value_at(document.value, path)
    if isinstance(type_here, msgspec.inspect.EnumType | msgspec.inspect.LiteralType):
        words = _words(type_here)
        near = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else []
        hint = f"Did you mean `{near[0]}`? " if near else ""
        return document.error(path, f"{shown(path)} is {_shape(value)}", f"{hint}Use one of: {', '.join(words)}")
    expected = re.sub(r", got `[a-z]+`$", "", message).removeprefix("Expected ")
    expected = re.sub(r"`(\w+)(?: \| null)?`", lambda found: _PLAIN_TYPES.get(found[1], found[0]), expected)
    if found and found["path"].endswith("[...]"):
        return document.error(path, f"a value in {shown(path)} does not fit", f"Expected {expected}")
    return document.error(path, f"{shown(path)} is {_shape(value)}", f"Expected {expected}")


_PLAIN_TYPES = {"int": "a whole number", "float": "a number", "str": "text", "array": "a list", "object": "a map"}


def _shape(value: object) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    return "a map" if isinstance(value, dict) else "a list" if isinstance(value, list) else "empty"


def _words(kind: msgspec.inspect.EnumType | msgspec.inspect.LiteralType) -> list[str]:
    if isinstance(kind, msgspec.inspect.EnumType):
        return [str(member.value) for member in kind.cls]
    return [str(value) for value in kind.values]


def _known_keys(kind: msgspec.inspect.Type | None, key: str) -> str:
    if not isinstance(kind, msgspec.inspect.StructType):
        return "Remove it"
    known = [field.encode_name for field in kind.fields]
    near = difflib.get_close_matches(key, known, 1)
    return (f"Did you mean `{near[0]}`? " if near else "") + f"Known keys: {', '.join(known)}"


def _type_at(kind: msgspec.inspect.Type | None, path: Path) -> msgspec.inspect.Type | None:
    """The type that a Struct expects at `path`; of a union the member that is not None."""
    kind = _without_none(kind)
    for step in path:
        if isinstance(kind, msgspec.inspect.StructType):
            kind = next((field.type for field in kind.fields if field.encode_name == step), None)
        elif isinstance(kind, msgspec.inspect.CollectionType):
            kind = kind.item_type
        else:
            return None
        kind = _without_none(kind)
    return kind


def _without_none(kind: msgspec.inspect.Type | None) -> msgspec.inspect.Type | None:
    if isinstance(kind, msgspec.inspect.UnionType):
        return next((member for member in kind.types if not isinstance(member, msgspec.inspect.NoneType)), None)
    if isinstance(kind, msgspec.inspect.Metadata):
        return _without_none(kind.type)
    return kind


def _value_at(value: object, path: Path) -> object:
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
    return value
