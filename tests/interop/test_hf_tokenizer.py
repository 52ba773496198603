import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import ConfigError, TokenizerError
from minillama.interop import hf_tokenizer
from minillama.interop.sentencepiece_proto import read_pieces, write_pieces

Theirs = Callable[[Tokenizer], Any]


def write(tokenizer: Tokenizer, folder: Path) -> Any:
    """Write the files of ``tokenizer`` and let transformers open them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    prefix = False
    if isinstance(tokenizer, ByteTokenizer):
        content = hf_tokenizer.byte_json()
    else:
        tokenizer.save(folder / "tokenizer.model")
        model = hf_tokenizer.exportable_pieces(folder / "tokenizer.model")
        content, prefix = hf_tokenizer.sentencepiece_json(model, 1), model.add_dummy_prefix
    special = ("<unk>", "<s>", "</s>")
    settings = hf_tokenizer.tokenizer_config(special, 10_000, add_prefix_space=prefix)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizers(pieces, bpe, tmp_path_factory) -> list[tuple[Tokenizer, Any]]:
    """Ours and theirs: bytes, a model trained here, and one with a space in front, as Llama 2."""
    prefixed = write_pieces(read_pieces(bpe.read_bytes()).pieces, (0, 1, 2), add_dummy_prefix=True)
    ours = [ByteTokenizer(), pieces, SentencePieceTokenizer(prefixed)]
    return [(tokenizer, write(tokenizer, tmp_path_factory.mktemp("hf"))) for tokenizer in ours]


def test_hard_texts_get_the_same_ids(tokenizers, hard_texts):
    for ours, theirs in tokenizers:
        for text in hard_texts:
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text
            assert theirs(text).input_ids == ours.encode(text, bos=True), text
            assert theirs.decode(ours.encode(text)) == text
        assert theirs("a", "b").input_ids == ours.encode("a", bos=True) + ours.encode("b", bos=True)


@given(st.text(), st.text("ab \n-", max_size=60))
def test_any_text_gets_the_same_ids(tokenizers, text, repetitive):
    for ours, theirs in tokenizers:
        for sample in (text.replace("▁", ""), repetitive):
            assert theirs.encode(sample, add_special_tokens=False) == ours.encode(sample)


def test_special_tokens_are_special_only_if_asked_for(tokenizers):
    for ours, theirs in tokenizers:
        assert (theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
        assert theirs.pad_token_id == 0
        assert theirs.encode("</s>", add_special_tokens=False) == ours.encode("</s>")
        special = theirs.encode("</s>", add_special_tokens=False, split_special_tokens=False)
        assert special == [2]
        assert theirs.decode([1, *ours.encode("x"), 2], skip_special_tokens=True) == "x"


def test_a_typed_lower_block_is_the_one_text_that_differs(tokenizers):
    (bytes_ours, bytes_theirs), (ours, theirs), _ = tokenizers
    assert bytes_theirs.encode("▁", add_special_tokens=False) == bytes_ours.encode("▁")
    assert theirs.encode("a▁b", add_special_tokens=False) == ours.encode("a b")
    assert theirs.decode(ours.encode("a▁b")) == "a▁b"


def test_the_class_named_llama_gives_the_same_ids(tokenizers, hard_texts):
    _, (ours, theirs), _ = tokenizers
    llama = transformers.LlamaTokenizer.from_pretrained(theirs.name_or_path)
    for text in hard_texts:
        assert llama.encode(text, add_special_tokens=False) == ours.encode(text), text


def read_back(folder: Path) -> SentencePieceTokenizer:
    raw, settings = (
        json.loads((folder / file).read_text(encoding="utf-8"))
        for file in ("tokenizer.json", "tokenizer_config.json")
    )
    return SentencePieceTokenizer(hf_tokenizer.sentencepiece_of(raw, settings))


def test_what_transformers_saves_is_read_back(tokenizers, tmp_path, hard_texts):
    _, plain, prefixed = tokenizers
    as_llama = transformers.LlamaTokenizer.from_pretrained(plain[1].name_or_path)
    for i, (ours, theirs) in enumerate((plain, prefixed, (plain[0], as_llama))):
        theirs.save_pretrained(tmp_path / str(i))
        back = read_back(tmp_path / str(i))
        assert (back.unk_id, back.bos_id, back.eos_id) == (0, 1, 2)
        for text in hard_texts:
            assert back.encode(text) == ours.encode(text), (i, text)


def test_a_space_in_front_of_some_texts_only_is_refused(tokenizers, tmp_path):
    """Metaspace leaves a text that begins with a space as it is; sentencepiece does not."""
    _, _, (_, prefixed) = tokenizers
    transformers.LlamaTokenizer.from_pretrained(prefixed.name_or_path).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="in front of some texts only"):
        read_back(tmp_path)


def test_a_byte_tokenizer_is_recognised(tokenizers, tmp_path):
    (_, theirs), (_, others), _ = tokenizers
    theirs.save_pretrained(tmp_path)
    assert hf_tokenizer.is_byte_json(json.loads((tmp_path / "tokenizer.json").read_text()))
    assert not hf_tokenizer.is_byte_json(json.loads(others.backend_tokenizer.to_str()))


def changed(raw: dict[str, Any], **model: Any) -> dict[str, Any]:
    return raw | {"model": raw["model"] | model}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: changed(raw, type="Unigram"), "is Unigram without byte fallback"),
        (lambda raw: changed(raw, byte_fallback=False), "is BPE without byte fallback"),
        (lambda raw: hf_tokenizer.byte_json(), "is byte-level BPE"),
        (
            lambda raw: raw | {"normalizer": {"type": "NFKC"}},
            "changes or splits the text first (NFKC)",
        ),
        (
            lambda raw: raw | {"pre_tokenizer": {"type": "Digits"}},
            "changes or splits the text first",
        ),
        (lambda raw: changed(raw, merges=raw["model"]["merges"][1:]), "do not follow"),
        (lambda raw: changed(raw, merges=sorted(raw["model"]["merges"])), "do not follow"),
        (lambda raw: changed(raw, vocab=raw["model"]["vocab"] | {"new": 9999}), "not 0 to n - 1"),
        (lambda raw: changed(raw, vocab=[]), "is damaged"),
        (lambda raw: changed(raw, merges=[["a"]]), "is damaged"),
        (lambda raw: {}, "is damaged"),
        (
            lambda raw: raw | {"added_tokens": [{"id": 50, "content": "x", "special": False}]},
            "added tokens that are ordinary text",
        ),
    ],
)
def test_another_tokenizer_is_refused_by_name(pieces, tmp_path, change, said):
    write(pieces, tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    with pytest.raises(TokenizerError) as caught:
        hf_tokenizer.sentencepiece_of(change(raw), {})
    assert said in str(caught.value)


def test_a_model_that_others_would_encode_differently_is_refused(bpe, tmp_path):
    # protobuf merges what is appended: remove_extra_whitespaces = 1 in the normalizer's settings.
    (tmp_path / "tokenizer.model").write_bytes(bpe.read_bytes() + b"\x1a\x02\x20\x01")
    with pytest.raises(ConfigError, match="would not give the same ids: it removes extra spaces"):
        hf_tokenizer.exportable_pieces(tmp_path / "tokenizer.model")
