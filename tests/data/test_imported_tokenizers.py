import json
import pickle
from typing import Any

import pytest
import tokenizers

from minillama.config.run import TokenizerConfig
from minillama.data.imported_tokenizers import JsonTokenizer, NoTokenizer
from minillama.data.tokenizer import load_tokenizer
from minillama.errors import TokenizerError


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """A small byte-level BPE, as GPT-2, Llama 3 and Qwen have them."""
    made = tokenizers.ByteLevelBPETokenizer()
    lines = ["the cat sat on the mat\n", "def f(x):\n    return x  # twice the cat's\n"] * 40
    made.train_from_iterator(lines, vocab_size=320, special_tokens=["<|end|>", "<|begin|>"])
    return made


def test_ids_are_those_of_tokenizers(gpt2, tmp_path):
    raw = json.loads(gpt2.to_str())
    ours = JsonTokenizer.of(raw, {"eos": "<|end|>", "bos": "<|begin|>"})
    assert (ours.unk_id, ours.bos_id, ours.eos_id) == (0, 1, 0)
    assert ours.vocab_size == gpt2.get_vocab_size()
    for text in ("", " the  cat", "🙂 中\n\t\x01", "the cat's mat " * 50):
        ids = ours.encode(text)
        assert ids == gpt2.encode(text).ids
        assert ours.decode(ids) == text
        assert ours.encode(text, bos=True, eos=True) == [1, *ids, 0]
        assert [i for part in ours.encode_parts(text) for i in part] == ids
    assert ours.decode([1, *ours.encode("x"), 0]) == "x"
    typed = ours.encode("<|end|>")
    assert 0 not in typed
    assert ours.decode(typed) == "<|end|>"

    ours.save(tmp_path / "tokenizer.model")
    config = TokenizerConfig(kind="json", vocab_size=ours.vocab_size)
    for copy in (
        load_tokenizer(config, tmp_path / "tokenizer.model"),
        pickle.loads(pickle.dumps(ours)),
    ):
        assert copy.encode("the cat", bos=True) == ours.encode("the cat", bos=True)
        assert copy.sha256 == ours.sha256


def test_a_missing_bos_or_unk_becomes_eos(gpt2):
    raw = json.loads(gpt2.to_str())
    ours = JsonTokenizer.of(raw, {"eos": 1, "bos": None, "unk": "<no such>"})
    assert (ours.unk_id, ours.bos_id, ours.eos_id) == (1, 1, 1)
    with pytest.raises(TokenizerError, match="ends a text"):
        JsonTokenizer.of(raw, {"eos": None, "bos": 1})


def test_bytes_that_are_no_tokenizer_json_are_refused(gpt2):
    ids = {"unk_id": 0, "bos_id": 0, "eos_id": 0}
    for content in (b"", b"{}", b"[]", json.dumps({**ids, "tokenizer": {}}).encode()):
        with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
            JsonTokenizer(content)
    whole = {**ids, "eos_id": 10**6, "tokenizer": json.loads(gpt2.to_str())}
    with pytest.raises(TokenizerError, match="beyond its vocabulary"):
        JsonTokenizer(json.dumps(whole).encode())


def test_ids_and_texts_out_of_range_are_refused(gpt2):
    ours = JsonTokenizer.of(json.loads(gpt2.to_str()), {"eos": 0})
    with pytest.raises(TokenizerError, match="id 999 is out of range"):
        ours.decode([999])
    with pytest.raises(TokenizerError, match="lone surrogate"):
        ours.encode("\ud800")
    with pytest.raises(TokenizerError, match="must be a string, not int: 5"):
        ours.encode(5)
    with pytest.raises(TokenizerError, match="integer ids, not 'x'"):
        ours.decode("x")


def test_no_tokenizer_refuses_every_text(tmp_path):
    none = load_tokenizer(TokenizerConfig(kind="none", vocab_size=50), None)
    assert isinstance(none, NoTokenizer)
    assert none.vocab_size == 50
    none.save(tmp_path / "tokenizer.model")
    assert not (tmp_path / "tokenizer.model").exists()
    for use in (lambda: none.encode("x"), lambda: none.decode([1]), lambda: none.encode_parts("x")):
        with pytest.raises(TokenizerError, match="came without a tokenizer"):
            use()
