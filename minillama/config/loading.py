"""From a YAML file to a checked, frozen section: the machinery under :mod:`minillama.config`.

    file ──read_yaml──▶ mapping ──override──▶ mapping ──check──▶ Section, or every fault at once

It knows no field of any config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from minillama.errors import ConfigError, FieldError
from minillama.registry import nearest, unknown_name


class Section(BaseModel):
    """A frozen part of the config that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _truth_is_no_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


NotBool = BeforeValidator(_truth_is_no_number)
"""On a field that holds a number: pydantic would read true as 1."""


def refuse(faults: Sequence[FieldError]) -> None:
    """Raise ``faults`` (paths relative to the model being validated) as one pydantic error."""
    if faults:
        text = "; ".join(map(str, faults)).replace("{", "{{").replace("}", "}}")
        raise PydanticCustomError("faults", text, {"faults": list(faults)})


# --------------------------------------------------------------------------------- YAML, overrides


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core rules where 1.1 surprises: 3e-4 is a number, `no` a word; no key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, not where mappings are built: by then `<<` may have added keys of its own.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every word that :class:`_Loader`, or YAML 1.1, would take for something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML reads these line ends back as spaces unless they are escaped.
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


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
        for side in (_Loader, _Dumper):
            side.add_implicit_resolver(
                f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), list(first)
            )


_replace_resolvers()


def _parse_yaml(text: str, where: str) -> Any:
    try:
        # A SafeLoader: it builds plain data only.  The copy finds what holds itself.
        return json_copy(yaml.load(text, _Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{place}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply, or holds itself") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    except (AttributeError, LookupError):
        raise ConfigError(f"{where}: not valid YAML: a value does not fit its !!tag") from None


def dump_yaml(value: Any) -> str:
    """Write plain data as YAML that :func:`read_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping; a run folder stands for its ``config.yaml``.

    Raises:
        ConfigError: there is no such file, it is not YAML, or it holds something else.
    """
    path = Path(path)
    from_a_run = path.is_dir()
    if from_a_run:
        path = path / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no config at {path}; name a YAML file, or a run folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    raw = _parse_yaml(text, str(path))
    if raw is None and from_a_run:  # else a run of nothing but defaults would begin elsewhere
        raise ConfigError(f"{path} is damaged: it is empty; name the file that the run came from")
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not a mapping of config fields")
    return raw


class Owned(NamedTuple):
    """What belongs to a section's ``kind``: the fields (None: all), and the kind it has unasked."""

    fields: Sequence[str] | None
    default_kind: str | None = None


def override(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], owned_by_kind: Mapping[str, Owned]
) -> dict[str, Any]:
    """Return ``raw`` with each dotted name in ``overrides`` set to its value.

    An override that changes a section's ``kind`` drops the settings of the kind before: those of a
    hub source mean nothing to a list of files.  ``owned_by_kind`` names them by section.  Their
    order does not matter: a section goes before its fields, and its ``kind`` before the others.

    Raises:
        ConfigError: a name leads through something that is not a section.
    """
    out: dict[str, Any] = json_copy(raw)
    for *parents, leaf in sorted(
        (dotted.split(".") for dotted in overrides), key=lambda p: (len(p), p[-1] != "kind")
    ):
        dotted = ".".join((*parents, leaf))
        value = overrides[dotted]
        section: Any = out
        for depth, parent in enumerate(parents):
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                at = ".".join(parents[: depth + 1])
                raise ConfigError(f"override {dotted}: {at} is {section!r}, which has no fields")
        prefix = ".".join(parents)
        if leaf == "kind" and prefix in owned_by_kind:
            fields, default_kind = owned_by_kind[prefix]
            if section.get("kind", default_kind) != value:
                for key in tuple(section) if fields is None else fields:
                    section.pop(key, None)
        section[leaf] = json_copy(value)
    return out


def dotted(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted names."""
    for name, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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
        path.append(str(key) or "''")
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


def _no_such_field(model: type[BaseModel], path: str, leaf: str, siblings: list[str]) -> str:
    if "." in leaf:
        outer, *inner = leaf.split(".")
        nested = f"{outer}: " + "".join(f"{{{name}: " for name in inner) + "..." + "}" * len(inner)
        return f"no such field; in a file, sections are nested: {nested}"
    elsewhere = {dotted.rpartition(".")[2]: dotted for dotted in _leaves(model)}
    guess = (
        elsewhere.get(leaf)
        or nearest(leaf, siblings)
        or elsewhere.get(nearest(leaf, elsewhere) or "")
    )
    hint = f"did you mean {guess}? " if guess not in (None, path) else ""
    return f"no such field; {hint}valid here: {', '.join(sorted(set(siblings))) or 'nothing'}"


def _rule(model: type[BaseModel], error: ErrorDetails, path: str, siblings: list[str]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _no_such_field(model, path, str(error["loc"][-1]), siblings)
    if kind in ("model_type", "model_attributes_type"):
        return "must be a mapping of fields"
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


def field_errors(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Translate pydantic's report on ``model`` into faults with paths that users know."""
    faults = []
    for detail in error.errors(include_url=False):
        path, siblings = _follow(model, detail["loc"])
        if detail["type"] == "faults":
            for fault in detail["ctx"]["faults"]:
                faults.append(
                    FieldError(
                        ".".join(filter(None, (path, fault.path))),
                        fault.value,
                        fault.rule,
                        ".".join(filter(None, (path, fault.other))) if fault.other else "",
                    )
                )
        else:
            value = None if detail["type"] == "missing" else detail["input"]
            faults.append(FieldError(path, value, _rule(model, detail, path, siblings)))
    return faults


def _innermost(raw: Any, dotted: str) -> str:
    """Return the path of the innermost entry that holds ``dotted``, or would; empty if none."""
    there: list[str] = []
    for key in dotted.split("."):
        if not isinstance(raw, Mapping) or key not in raw:
            break
        there.append(key)
        raw = raw[key]
    return ".".join(there)


def _delete(raw: dict[str, Any], dotted: str) -> None:
    *parents, leaf = dotted.split(".")
    section: Any = raw
    for parent in parents:
        section = section.get(parent, {})
    section.pop(leaf, None)


SectionT = TypeVar("SectionT", bound=Section)


def check(model: type[SectionT], raw: Mapping[str, Any], where: str) -> SectionT:
    """Build ``model`` from ``raw``, or report everything that is wrong with it.

    A rule about two fields can only be checked once each of them is sound, so the faulty entries
    are dropped and the rest is looked at again, until nothing is left to drop.

    Raises:
        ConfigError: with every fault; ``where`` names the file in its message.
    """
    faults: list[FieldError] = []
    rest: dict[str, Any] = json_copy(raw)
    dropped: set[str] = set()

    def is_there(path: str) -> bool:
        return bool(path) and _innermost(rest, path) == path

    def is_news(fault: FieldError) -> bool:
        """Tell a fault of what the user wrote from one of the defaults now in its place."""
        paths = [f"{path}." for path in (fault.path, fault.other) if path]
        gone = any(path.startswith(f"{hole}.") for path in paths for hole in dropped)
        return not dropped or (not gone and any(map(is_there, (fault.path, fault.other))))

    while True:
        try:
            config = model(**rest)
            break
        except ValidationError as error:
            found = field_errors(error, model)
        except TypeError:
            raise ConfigError(f"{where}: field names must be words") from None
        faults += filter(is_news, found)
        holes: set[str] = set()
        for fault in found:
            there = set(filter(is_there, (fault.path, fault.other)))
            # What is missing, or is one item of a list, takes with it what it is missing in.
            holes |= there or {_innermost(rest, fault.path)}
        # Without its kind, a section means nothing.
        holes = {hole.removesuffix(".kind") for hole in holes if hole}
        if not holes:
            break
        for hole in holes:
            _delete(rest, hole)
        dropped |= holes
    if faults:
        raise ConfigError.of(where, faults)
    return config
