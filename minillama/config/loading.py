"""Load a YAML file, apply overrides, validate it as a frozen section.

    file ──read_yaml──▶ mapping ──override──▶ mapping ──check──▶ Section, or every error at once

This module knows the fields of no config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from minillama.arguments import check_type
from minillama.errors import ConfigError, FieldError
from minillama.registry import nearest, unknown_name


class Section(BaseModel):
    """A frozen part of the config that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        derived = cls.derived_fields()
        return {key: v for key, v in raw.items() if v is not None or key not in derived}

    @classmethod
    def derived_fields(cls) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Return the fields that default to a formula of the others, with their formulas."""
        return {
            name: cast(Callable[[dict[str, Any]], Any], field.default_factory)
            for name, field in cls.model_fields.items()
            if field.default_factory_takes_validated_data
        }


def derived(
    formula: Callable[[dict[str, Any]], Any],
    description: str,
    json_schema_extra: dict[str, Any] | None = None,
) -> Any:
    """Declare a field that ``formula`` fills in, from the fields above it, unless it is set."""
    return Field(
        default_factory=formula,
        validate_default=False,
        description=description,
        json_schema_extra=json_schema_extra,
    )


LARGEST = 2**63 - 1
"""Of the whole numbers that torch, numpy and sizes of files can hold."""


def _reject_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


NotBool = BeforeValidator(_reject_bool)
"""On a field that holds a number: pydantic would read true as 1."""


def refuse(errors: Sequence[FieldError]) -> None:
    """Raise ``errors`` (paths relative to the model being validated) as one pydantic error."""
    if errors:
        text = "; ".join(map(str, errors)).replace("{", "{{").replace("}", "}}")
        raise PydanticCustomError("field_errors", text, {"errors": list(errors)})


# --------------------------------------------------------------------------------- YAML, overrides


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core rules where 1.1 surprises: 3e-4 is a number, `no` a word; no key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, not where mappings are built: by then `<<` may have added keys.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice", key.start_mark
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
    """Read a YAML file that holds one mapping; of a run folder, its ``config.yaml``.

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
    if raw is None and from_a_run:  # or a run with only defaults would start in another folder
        raise ConfigError(f"{path} is damaged: it is empty; name the file that the run came from")
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not a mapping of config fields")
    return raw


class Owned(NamedTuple):
    """The fields that belong to a section's ``kind`` (None: all), and its default kind."""

    fields: Sequence[str] | None
    default_kind: str | None = None


def override(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], owned_by_kind: Mapping[str, Owned]
) -> dict[str, Any]:
    """Return ``raw`` with each dotted name in ``overrides`` set to its value.

    An override that changes a section's ``kind`` drops the settings of the previous kind: those of
    a hub source mean nothing to a list of files.  ``owned_by_kind`` lists them by section.  The
    order of ``overrides`` does not matter: a section is set before its fields, and its ``kind``
    before the others.

    Raises:
        ConfigError: a name leads through something that is not a section.
    """
    out: dict[str, Any] = json_copy(raw)
    for path in sorted(overrides, key=lambda p: (p.count("."), not p.endswith(".kind"))):
        section, _, leaf = path.rpartition(".")
        if leaf == "kind" and section in owned_by_kind:
            fields, default_kind = owned_by_kind[section]
            old = get_path(out, section)
            if isinstance(old, dict) and old.get("kind", default_kind) != overrides[path]:
                for key in tuple(old) if fields is None else fields:
                    old.pop(key, None)
        set_path(out, path, json_copy(overrides[path]))
    return out


def parse_overrides(
    arguments: Iterable[str], text_fields: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Turn ``["optim.lr=1e-3", ...]`` into a mapping of dotted names to values, read as YAML.

    The value of a field in ``text_fields`` (see :func:`text_fields`) is kept as it is written, so
    that ``name=2026`` and ``out_dir=runs/exp #2`` mean what they say.  Quotes around it are
    removed, and an empty value, ``~`` and ``null`` mean null.

    Raises:
        ConfigError: an argument is not of the form ``a.b=value``.
    """
    overrides = {}
    for argument in arguments:
        check_type("an override", argument, str)
        path, equals, text = argument.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path):
            raise ConfigError(
                f"{argument!r} is not an override; write a.b=value, as in optim.lr=1e-3"
            )
        kind = (text_fields or {}).get(path)
        if kind is None or text.strip() in ("", "~", "null"):
            overrides[path] = _parse_yaml(text, f"override {path}")
        else:
            overrides[path] = _parse_text(text, kind)
    return overrides


def _parse_text(text: str, kind: type) -> Any:
    if text.lstrip().startswith(("'", '"', "[") if kind is list else ("'", '"')):
        with suppress(ConfigError):  # `'tis` is no YAML
            value = _parse_yaml(text, "override")
            if isinstance(value, kind | str):
                return value
    return text


# ----------------------------------------------------------------- nested mappings by dotted path


def json_copy(value: Any) -> Any:
    """Copy nested mappings and lists of plain data."""
    if isinstance(value, Mapping):
        return {key: json_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(item) for item in value]
    return value


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted path; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def get_path(raw: Any, path: str) -> Any:
    """Return the value at a dotted path, or None if there is none."""
    for key in path.split("."):
        raw = raw.get(key) if isinstance(raw, Mapping) else None
    return raw


def set_path(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path; sections that are missing or null are added.

    Raises:
        ConfigError: the path leads through something that is not a section.
    """
    *parents, leaf = path.split(".")
    section: Any = raw
    for depth, parent in enumerate(parents):
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            at = ".".join(parents[: depth + 1])
            raise ConfigError(f"override {path}: {at} is {section!r}, which has no fields")
    section[leaf] = value


def delete_path(raw: dict[str, Any], path: str) -> None:
    """Delete the entry at a dotted path, if there is one."""
    section, _, leaf = path.rpartition(".")
    parent = get_path(raw, section) if section else raw
    if isinstance(parent, dict):
        parent.pop(leaf, None)


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


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of a config, sections and their fields, with its dotted name."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for section in _sections(field.annotation):
            yield from fields_of(section, f"{prefix}{name}.")


def text_fields(model: type[BaseModel]) -> dict[str, type]:
    """Return the dotted names of the fields that hold a string, or a list of strings."""

    def is_text(annotation: Any) -> bool:
        if get_origin(annotation) is Annotated:
            return is_text(get_args(annotation)[0])
        if get_origin(annotation) in (Union, UnionType, list):
            return all(map(is_text, get_args(annotation)))
        return annotation in (str, type(None))

    return {
        path: list if get_origin(field.annotation) is list else str
        for path, field in fields_of(model)
        if is_text(field.annotation)
    }


def _no_such_field(model: type[BaseModel], path: str, leaf: str, siblings: list[str]) -> str:
    if "." in leaf:
        outer, *inner = leaf.split(".")
        nested = f"{outer}: " + "".join(f"{{{name}: " for name in inner) + "..." + "}" * len(inner)
        return f"no such field; in a file, sections are nested: {nested}"
    elsewhere = {name.rpartition(".")[2]: name for name, _ in fields_of(model)}
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
    if kind == "int_parsing_size" or context.get("le") == LARGEST:
        return f"must be at most {LARGEST:,}"  # pydantic's own message rounds it
    message = error["msg"].removeprefix("Input ").removeprefix("Value ")
    return message[0].lower() + message[1:]


def field_errors(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Translate pydantic's report on ``model`` into errors with paths that users know."""
    errors = []
    for detail in error.errors(include_url=False):
        path, siblings = _follow(model, detail["loc"])
        if detail["type"] == "default_factory_not_called":
            continue  # a field that the formula needs is wrong, and is reported
        if detail["type"] == "field_errors":
            for inner in detail["ctx"]["errors"]:
                errors.append(
                    FieldError(
                        ".".join(filter(None, (path, inner.path))),
                        inner.value,
                        inner.rule,
                        ".".join(filter(None, (path, inner.other))) if inner.other else "",
                    )
                )
        else:
            value = None if detail["type"] == "missing" else detail["input"]
            errors.append(FieldError(path, value, _rule(model, detail, path, siblings)))
    return errors


def _innermost(raw: Any, path: str) -> str:
    """Return the longest leading part of ``path`` that ``raw`` has; empty if none."""
    present: list[str] = []
    for key in path.split("."):
        if not isinstance(raw, Mapping) or key not in raw:
            break
        present.append(key)
        raw = raw[key]
    return ".".join(present)


def _not_unicode(raw: Mapping[str, Any]) -> list[FieldError]:
    """Return the errors of texts that hold bytes which Python could not decode."""
    errors = []
    for path, value in flatten(raw).items():
        try:
            json.dumps([str(path), value], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            rule = "holds bytes that are not UTF-8; rename it, or set LC_ALL=C.UTF-8"
            errors.append(FieldError(path, value, rule))
    return errors


SectionT = TypeVar("SectionT", bound=Section)


def check(model: type[SectionT], raw: Mapping[str, Any], where: str) -> SectionT:
    """Build ``model`` from ``raw``, or report everything that is wrong with it.

    A rule about two fields can only be checked once each of them is valid, so the wrong entries are
    dropped and the rest is checked again, until nothing is left to drop.

    Raises:
        ConfigError: with every error; ``where`` names the file in its message.
    """
    rest: dict[str, Any] = json_copy(raw)
    errors = _not_unicode(rest)
    dropped = {error.path for error in errors}
    for path in dropped:
        delete_path(rest, path)

    def is_present(path: str) -> bool:
        return bool(path) and _innermost(rest, path) == path

    def is_about_the_input(error: FieldError) -> bool:
        """Return False for an error about a default that took the place of a dropped entry."""
        paths = [f"{path}." for path in (error.path, error.other) if path]
        gone = any(path.startswith(f"{hole}.") for path in paths for hole in dropped)
        return not dropped or (not gone and any(map(is_present, (error.path, error.other))))

    while True:
        try:
            config = model(**rest)
            break
        except ValidationError as error:
            found = field_errors(error, model)
        except TypeError:
            raise ConfigError(f"{where}: field names must be words") from None
        errors += filter(is_about_the_input, found)
        holes: set[str] = set()
        for wrong in found:
            present = set(filter(is_present, (wrong.path, wrong.other)))
            # For a missing entry, or an item of a list, the entry around it is dropped.
            holes |= present or {_innermost(rest, wrong.path)}
        # A section without its kind cannot be validated.
        holes = {hole.removesuffix(".kind") for hole in holes if hole}
        if not holes:
            break
        for hole in holes:
            delete_path(rest, hole)
        dropped |= holes
    if errors:
        raise ConfigError.of(where, errors)
    return config
