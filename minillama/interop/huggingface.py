"""To and from folders of Hugging Face's transformers.

    checkpoint ─export─▶ config.json  model.safetensors  tokenizer.json  tokenizer_config.json
                         tokenizer.model  generation_config.json  README.md  ─import─▶ checkpoint

Only the names of weights change, and their dtype if asked for; scales are folded into gains where
that gives a model which transformers has (:mod:`minillama.model.folding`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minillama.data.imported_tokenizers import JsonTokenizer, NoTokenizer
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import CheckpointError, ConfigError, TokenizerError
from minillama.files import explain_write_errors, new_folder
from minillama.interop import hf_config
from minillama.interop.architectures import architecture_of, weight_names
from minillama.interop.hf_tokenizer import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    byte_json,
    byte_pieces,
    exportable_pieces,
    is_byte_json,
    sentencepiece_json,
    sentencepiece_of,
    special_tokens,
    tokenizer_config,
)
from minillama.interop.hf_weights import WEIGHTS, read_json, read_model
from minillama.interop.importing import claim, save_imported
from minillama.interop.model_card import model_card
from minillama.model.folding import fold_scales
from minillama.training.checkpoint import load_checkpoint
from minillama.training.checkpoint_folders import resolve_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SENTENCEPIECE = "tokenizer.model"


# ----------------------------------------------------------------------------------------- export


def export(checkpoint: str | Path, out: str | Path, dtype: str | None = None) -> str:
    """Write a checkpoint as a folder that transformers opens; return a line for the user.

    Args:
        checkpoint: a checkpoint, or a run folder (its best, else its last checkpoint).
        out: the new folder; one that exists must be empty.
        dtype: of the weights, a key of ``DTYPES``; default float32, as they are trained.

    Raises:
        ConfigError: there is no such checkpoint or dtype, ``out`` is not empty, or transformers
            has no model that computes what this one computes; the message has every reason.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: ``out`` cannot be written.
    """
    dtype = dtype or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
    folder = resolve_checkpoint(checkpoint)
    model, tokenizer, config = load_checkpoint(folder)
    model = fold_scales(model)
    row = architecture_of(model.config, "transformers")
    ours_to_weight = model.state_dict()
    names = weight_names(row, model.config, "transformers")
    weights = {theirs: ours_to_weight[ours].to(DTYPES[dtype]) for ours, theirs in names.items()}
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    padding = None
    if not isinstance(tokenizer, NoTokenizer):
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        padding = tokenizer.unk_id
    files: dict[str, Any] = {
        "config.json": {
            **hf_config.write(model.config, row),
            **ids,
            "pad_token_id": None,
            "dtype": dtype,
        },
        "generation_config.json": {**ids, "pad_token_id": padding},
        **_tokenizer_files(tokenizer, folder, config.model.max_seq_len),
    }
    claim(Path(out))
    with explain_write_errors(Path(out)), new_folder(Path(out)) as new:
        for name, content in files.items():
            (new / name).write_text(
                json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        if isinstance(tokenizer, SentencePieceTokenizer):
            tokenizer.save(new / _SENTENCEPIECE)
        (new / "README.md").write_text(model_card(folder, config, row, dtype), encoding="utf-8")
        save_file(weights, new / WEIGHTS, {"format": "pt"})
    n_parameters = sum(weight.numel() for weight in weights.values())
    return (
        f"{out}: {row.model_class}, {n_parameters:,} parameters in {dtype}; "
        f"open it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})"
    )


def _tokenizer_files(tokenizer: Tokenizer, folder: Path, max_seq_len: int) -> dict[str, Any]:
    special = (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id)
    prefix = False
    if isinstance(tokenizer, NoTokenizer):
        return {}
    if isinstance(tokenizer, JsonTokenizer):
        content, names = tokenizer.raw, [tokenizer.token(i) for i in special]
    elif isinstance(tokenizer, ByteTokenizer):
        content, names = byte_json(), [byte_pieces()[i] for i in special]
    else:
        model = exportable_pieces(folder / _SENTENCEPIECE)
        content = sentencepiece_json(model, tokenizer.bos_id)
        names, prefix = [model.pieces[i].text for i in special], model.add_dummy_prefix
    unk, bos, eos = names
    settings = tokenizer_config((unk, bos, eos), max_seq_len, add_prefix_space=prefix)
    return {TOKENIZER_JSON: content, TOKENIZER_CONFIG: settings}


# ----------------------------------------------------------------------------------------- import


def import_model(folder: str | Path, out: str | Path) -> str:
    """Write a folder of transformers as a checkpoint; return a line for the user.

    The weights become float32.  The checkpoint can be used wherever one is asked for.

    Args:
        folder: with config.json, safetensors and the tokenizer's files.
        out: the new checkpoint; a folder that exists must be empty.

    Raises:
        ConfigError: there is no such folder, or ``out`` is not empty.
        CheckpointError: something in the folder is damaged, unknown or not supported; the message
            names it.
        RunFolderError: ``out`` cannot be written.
    """
    folder, out = Path(folder), Path(out)
    if not (folder / "config.json").is_file():
        raise ConfigError(_no_folder(folder))
    raw = read_json(folder / "config.json")
    shape, row = hf_config.read(raw, str(folder / "config.json"))
    tokenizer = _read_tokenizer(folder, raw) or NoTokenizer(shape.known_vocab_size)
    model = read_model(folder, shape, row)
    return save_imported(out, folder.resolve().name, model, tokenizer, row)


def _no_folder(folder: Path) -> str:
    if folder.is_file():
        return f"{folder} is a file; give the folder with config.json and {WEIGHTS}"
    if not folder.is_dir():
        return f"no such folder: {folder}"
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    return f"{folder} has no config.json, so it is not a transformers model; it contains {names}"


def _read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer in ``folder``, or None if there is none.

    A sentencepiece model comes first, since it can be exported to all formats; then a
    tokenizer.json that is equivalent to one; then any other tokenizer.json, as it is.

    Raises:
        CheckpointError: there is one, and it cannot be used.
    """
    reasons = []
    if (folder / _SENTENCEPIECE).is_file():
        try:
            return SentencePieceTokenizer((folder / _SENTENCEPIECE).read_bytes())
        except TokenizerError as error:
            reasons.append(f"{_SENTENCEPIECE}: {error}")
    if (folder / TOKENIZER_JSON).is_file():
        raw = read_json(folder / TOKENIZER_JSON)
        if is_byte_json(raw):
            return ByteTokenizer()
        has_settings = (folder / TOKENIZER_CONFIG).is_file()
        settings = read_json(folder / TOKENIZER_CONFIG) if has_settings else {}
        with suppress(TokenizerError):  # it is of another kind
            return SentencePieceTokenizer(sentencepiece_of(raw, settings))
        try:
            return JsonTokenizer.of(raw, special_tokens(settings, config))
        except TokenizerError as error:
            reasons.append(f"{TOKENIZER_JSON}: {error}")
    if reasons:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be used: {'; '.join(reasons)}.  Remove these files "
            "to import the model without a tokenizer"
        )
    return None
