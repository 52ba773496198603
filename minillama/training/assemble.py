"""Complete a run's config with what only other files say: a tokenizer's, or a checkpoint's.

After this nothing of a config changes.  No torch is loaded unless a checkpoint is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece

from minillama.config import RunConfig
from minillama.config.loading import check
from minillama.errors import ConfigError, FieldError, MinillamaError
from minillama.plugins import load_plugins
from minillama.training.checkpoint_folders import TOKENIZER, resolve_checkpoint


def assemble(config: RunConfig, where: str = "config") -> RunConfig:
    """Return ``config`` with the model and tokenizer of ``init_from`` and the vocabulary's size.

    Assembling twice changes nothing.

    Raises:
        ConfigError: a file is missing or damaged, or does not fit the config; ``where`` names the
            config in its message.
    """
    load_plugins(config.plugins)
    if config.init_from is not None:
        config = _inherit(config, config.init_from, where)
    tokenizer = config.tokenizer
    if tokenizer.path is None or tokenizer.kind != "bpe":
        return config
    if tokenizer.vocab_size is not None and not Path(tokenizer.path).exists():
        return config  # a checkpoint's config was assembled before, and it keeps its own copy
    size = _sentencepiece_size(tokenizer.path, where)
    if tokenizer.vocab_size not in (None, size):
        rule = f"the model at tokenizer.path has {size} ids; leave this out"
        error = FieldError("tokenizer.vocab_size", tokenizer.vocab_size, rule)
        raise ConfigError.of(where, [error])
    raw = config.model_dump()
    raw["tokenizer"] |= {"vocab_size": size, "path": str(Path(tokenizer.path).absolute())}
    return check(RunConfig, raw, where)


def _sentencepiece_size(path: str, where: str) -> int:
    try:
        return int(sentencepiece.SentencePieceProcessor(model_file=path).vocab_size())
    except (OSError, RuntimeError):
        rule = "is not a sentencepiece model file" if Path(path).is_file() else "no such file"
        raise ConfigError.of(where, [FieldError("tokenizer.path", path, rule)]) from None


def _inherit(config: RunConfig, init_from: str, where: str) -> RunConfig:
    """Take model and tokenizer from the checkpoint ``init_from``."""
    from minillama.training.checkpoint import read_config

    if config.model.vocab_size is not None and not Path(init_from).exists():
        return config  # assembled before; a run that is resumed does not need its first weights
    try:
        folder = resolve_checkpoint(init_from).absolute()
        saved = read_config(folder)
    except (MinillamaError, OSError, ValueError) as error:
        raise ConfigError.of(where, [FieldError("init_from", init_from, str(error))]) from None
    path = str(folder / TOKENIZER) if saved.tokenizer.has_file else None
    tokenizer = saved.tokenizer.model_dump() | {"path": path}
    shape = saved.model.model_dump(exclude={"norm", "max_seq_len"})
    errors = [
        FieldError(
            f"{section}.{name}",
            given,
            f"the checkpoint of init_from has {inherited[name]!r}; leave this out",
        )
        for section, inherited in (("model", shape), ("tokenizer", tokenizer))
        for name, given in _set_fields(getattr(config, section)).items()
        if name in inherited and given not in (None, inherited[name])
    ]
    if errors:
        raise ConfigError.of(where, errors)
    norm, chosen = saved.model.norm.model_dump(), _set_fields(config.model.norm)
    if chosen.get("kind", norm["kind"]) != norm["kind"]:
        del norm["options"]
    context = {"max_seq_len": saved.model.max_seq_len}
    if "max_seq_len" in config.model.model_fields_set:
        context = {"max_seq_len": config.model.max_seq_len}
    raw = config.model_dump(exclude={"tokenizer", "model"}) | {
        "init_from": str(Path(init_from).absolute()),
        "tokenizer": tokenizer,
        "model": shape | context | {"norm": norm | chosen},
    }
    return check(RunConfig, raw, where)


def _set_fields(section: Any) -> dict[str, Any]:
    """Return the fields of a section that were set, not filled in, as plain values."""
    return {n: v for n, v in section.model_dump().items() if n in section.model_fields_set}
