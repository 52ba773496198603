"""From a YAML file to a checked, frozen section: the machinery under :mod:`minillama.config`.

    file ──read_yaml──▶ mapping ──override──▶ mapping ──check──▶ Section, or every fault at once

It knows no field of any config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from minillama.errors import ConfigError, Fault
from minillama.registry import nearest, unknown_name


class Section(BaseModel):
    """A frozen part of the config that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def refuse(faults: Sequence[Fault]) -> None:
    """Raise ``faults`` (paths relative to the model being validated) as one pydantic error."""
    if faults:
        text = "; ".join(map(str, faults)).replace("{", "{{").replace("}", "}}")
        raise PydanticCustomError("faults", text, {"faults": list(faults)})


# --------------------------------------------------------------------------------- YAML, overrides


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core rules where 1.1 surprises: 3e-4 is a number, `no` a word; no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _replace_resolvers() -> None:
    ours = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in pairs if tag not in ours]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    digits = r"[0-9][0-9_]*"
    exponent = r"[eE][-+]?[0-9]+"
    number = rf"(?:{digits}\.[0-9_]*(?:{exponent})?|\.[0-9]+(?:{exponent})?|{digits}{exponent})"
    for name, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
        ("float", rf"[-+]?(?:{number}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)", "-+0123456789."),
    ):
        _Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), list(first)
        )


_replace_resolvers()


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain data only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{place}: not valid YAML: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error) or 'too deeply nested'}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping; a run folder stands for its ``config.yaml``.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it holds something else.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}; name a YAML file, or a run folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    raw = _parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not a mapping of config fields")
    return raw


OwnedByKind = Mapping[str, Sequence[str] | None]


def override(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], owned_by_kind: OwnedByKind
) -> dict[str, Any]:
    """Return ``raw`` with each dotted name in ``overrides`` set to its value.

    An override that changes a section's ``kind`` drops the settings of the kind before: those of a
    hub source mean nothing to a list of files.  ``owned_by_kind`` names them by section; None means
    all of them.

    Raises:
        ConfigError: a name leads through something that is not a section.
    """
    out: dict[str, Any] = json_copy(raw)
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        section: Any = out
        for depth, parent in enumerate(parents):
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                at = ".".join(parents[: depth + 1])
                raise ConfigError(f"override {dotted}: {at} is {section!r}, which has no fields")
        prefix = ".".join(parents)
        if leaf == "kind" and prefix in owned_by_kind and section.get("kind", value) != value:
            owned = owned_by_kind[prefix]
            for key in tuple(section) if owned is None else owned:
                section.pop(key, None)
        section[leaf] = json_copy(value)
    return out


def json_copy(value: Any) -> Any:
    """Copy nested mappings and lists of plain data."""
    if isinstance(value, Mapping):
        return {key: json_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(item) for item in value]
    return value


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn ``["optim.lr=1e-3", ...]`` into a mapping of dotted names to values, read as YAML.

    Raises:
        ConfigError: an argument is not of the form ``a.b=value``.
    """
    overrides = {}
    for argument in arguments:
        dotted, equals, text = argument.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", dotted):
            raise ConfigError(
                f"{argument!r} is not an override; write a.b=value, as in optim.lr=1e-3"
            )
        overrides[dotted] = _parse_yaml(text, f"override {dotted}")
    return overrides


# ------------------------------------------------------------------------------------------ check


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None:
        for part in get_args(annotation):
            yield from _sections(part)


def _follow(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, list[str]]:
    """Return the dotted path of pydantic's ``loc`` and the valid names beside its last part.

    pydantic puts the tag of a tagged union into ``loc``; users know no such name.
    """
    path: list[str] = []
    names: list[str] = []
    sections = [model]
    for key in loc:
        tagged = [s for s in sections if key == _tag(s)]
        if len(sections) > 1 and tagged:
            sections = tagged
            continue
        path.append(str(key))
        names = [name for section in sections for name in section.model_fields]
        fields = [s.model_fields[str(key)] for s in sections if str(key) in s.model_fields]
        sections = [section for field in fields for section in _sections(field.annotation)]
    return ".".join(path), names


def _tag(section: type[BaseModel]) -> str | None:
    kind = section.model_fields.get("kind")
    tags = get_args(kind.annotation) if kind is not None else ()
    return tags[0] if len(tags) == 1 else None


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every field of a config."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections(field.annotation):
            yield from _leaves(section, f"{prefix}{name}.")


def _no_such_field(model: type[BaseModel], path: str, siblings: list[str]) -> str:
    leaf = path.rpartition(".")[2]
    elsewhere = {dotted.rpartition(".")[2]: dotted for dotted in _leaves(model)}
    guess = (
        elsewhere.get(leaf)
        or nearest(leaf, siblings)
        or elsewhere.get(nearest(leaf, elsewhere) or "")
    )
    hint = f"did you mean {guess}? " if guess else ""
    return f"no such field; {hint}valid here: {', '.join(sorted(set(siblings))) or 'nothing'}"


def _rule(model: type[BaseModel], error: ErrorDetails, path: str, siblings: list[str]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _no_such_field(model, path, siblings)
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        return unknown_name("choice", str(error["input"]), valid)
    if kind == "union_tag_invalid":
        valid = re.findall(r"'([^']*)'", str(context.get("expected_tags", "")))
        return unknown_name("kind", str(context.get("tag")), valid)
    if kind == "union_tag_not_found":
        return "needs a `kind`"
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"does not match {context['pattern']}"
    message = error["msg"].removeprefix("Input ").removeprefix("Value ")
    return message[0].lower() + message[1:]


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Translate pydantic's report on ``model`` into faults with paths that users know."""
    faults = []
    for detail in error.errors(include_url=False):
        path, siblings = _follow(model, detail["loc"])
        if detail["type"] == "faults":
            for fault in detail["ctx"]["faults"]:
                faults.append(
                    Fault(
                        ".".join(filter(None, (path, fault.path))),
                        fault.value,
                        fault.rule,
                        ".".join(filter(None, (path, fault.other))) if fault.other else "",
                    )
                )
        else:
            value = None if detail["type"] == "missing" else detail["input"]
            faults.append(Fault(path, value, _rule(model, detail, path, siblings)))
    return faults


def _lookup(raw: Any, dotted: str) -> bool:
    for key in dotted.split("."):
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True


def _drop(raw: dict[str, Any], dotted: str) -> None:
    """Delete the innermost mapping entry that holds ``dotted``."""
    *parents, leaf = dotted.split(".")
    section: Any = raw
    for parent in parents:
        inner = section.get(parent)
        if not isinstance(inner, dict):
            leaf = parent
            break
        section = inner
    section.pop(leaf, None)


SectionT = TypeVar("SectionT", bound=Section)


def check(model: type[SectionT], raw: Mapping[str, Any], where: str) -> SectionT:
    """Build ``model`` from ``raw``, or report everything that is wrong with it.

    A rule about two fields can only be checked once each of them is sound, so the faulty entries
    are dropped and the rest is looked at again, until nothing new is found.

    Raises:
        ConfigError: with every fault; ``where`` names the file in its message.
    """
    faults: list[Fault] = []
    rest: dict[str, Any] = json_copy(raw)
    while True:
        try:
            config = model(**rest)
            break
        except ValidationError as error:
            found = faults_of(error, model)
        except TypeError:
            raise ConfigError(f"{where}: field names must be words") from None
        dropped = {fault.path for fault in faults}
        news = [
            fault
            for fault in found
            if not faults or (_lookup(rest, fault.path) and not dropped & {fault.path, fault.other})
        ]
        faults += news
        if not news:
            break
        for fault in news:
            _drop(rest, fault.path)
            if fault.other:
                _drop(rest, fault.other)
    if faults:
        raise ConfigError.of_faults(where, faults)
    return config
