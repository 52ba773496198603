import errno
import functools
import hashlib
import io
import itertools
import pickle

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from minillama.config.run import TokenizerConfig
from minillama.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    split_text,
    train_tokenizer,
)
from minillama.errors import TokenizerError

PROSE = (
    "The quick brown fox jumps over the lazy dog.\n\n    def f(x):\n        return  x + 12345\n"
    "Ça va très bien, and a tab:\there; 你好，世界。 "
)
DOCUMENTS = [PROSE * 20, "another text, which says little\n" * 30]
BPE = train_tokenizer(DOCUMENTS, 400)
TOKENIZERS = [BPE, ByteTokenizer()]
both = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bpe", "byte"])

# What is most likely to go wrong, mixed with everything else there is.
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t\r\0▁▅<>/sunk0xA"))
)


@both
@given(text=TEXTS)
@example("")
@example(" ")
@example("  two spaces  ")
@example("\n\n\t\r\n")
@example("▁")
@example("a▁ ▁▁b ▁")
@example("▅")
@example("\0")
@example("\ufeffmark")
@example("e\u0301 ﬁ Ａ")
@example("<s></s><unk><pad><0x0A>")
@example("👩‍👩‍👧 🇩🇪")
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@both
def test_special_ids(tokenizer):
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    plain = tokenizer.encode("fox")
    assert tokenizer.encode("fox", bos=True, eos=True) == [1, *plain, 2]
    assert tokenizer.encode("", bos=True) == [1]
    assert tokenizer.decode([1, *plain, 0, *plain, 2]) == "foxfox"


@both
def test_an_id_out_of_range_is_named(tokenizer):
    assert max(tokenizer.encode("fox")) < tokenizer.vocab_size
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(TokenizerError, match=f"id {wrong} is out of range"):
            tokenizer.decode([3, wrong])


@both
def test_arguments_of_the_wrong_type_are_refused(tokenizer):
    for text in (5, None, b"fox", ["fox"]):
        with pytest.raises(TokenizerError, match="the text must be a string, not"):
            tokenizer.encode(text)
    for ids in ("fox", "", 5, None, [1.5], ["x"], [[1]]):
        with pytest.raises(TokenizerError, match="decode takes a list of integer ids, not"):
            tokenizer.decode(ids)
    ids = tokenizer.encode("fox")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(iter(ids)) == "fox"


@both
def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(TokenizerError, match=r"ud800.* at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(TokenizerError, match="lone surrogate"):
        train_tokenizer(["ab\ud800" * 100], 300)


@both
def test_half_a_character_decodes_to_the_replacement_character(tokenizer):
    euro = tokenizer.encode("€")
    assert "�" in tokenizer.decode(euro[:2])
    assert tokenizer.decode(euro) == "€"


@both
def test_it_survives_pickling(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(PROSE) == tokenizer.encode(PROSE)
    assert again.sha256 == tokenizer.sha256


@both
@pytest.mark.parametrize("text", ["word " * 120_000, "x" * 600_000, PROSE * 4000])
def test_long_texts_are_encoded_in_parts_that_add_up(tokenizer, text):
    parts = list(tokenizer.encode_parts(text))
    assert len(parts) > 1
    ids = [i for part in parts for i in part]
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_parts_do_not_change_the_ids():
    text = PROSE * 4000
    whole = BPE._processor.encode(text)
    assert BPE.encode(text) == whole


def test_byte_ids_are_the_bytes_and_three():
    assert ByteTokenizer().encode("aé") == [0x61 + 3, 0xC3 + 3, 0xA9 + 3]
    assert ByteTokenizer().vocab_size == 259


def test_training_is_deterministic():
    again = train_tokenizer(DOCUMENTS, 400)
    assert again._model == BPE._model
    assert again.sha256 == hashlib.sha256(BPE._model).hexdigest()


def test_pieces_are_those_of_llama():
    pieces = [BPE._processor.id_to_piece(i) for i in range(BPE.vocab_size)]
    assert len(pieces) == 400
    assert pieces[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    digits = [p for p in pieces[259:] if any(c.isdigit() for c in p)]
    assert all(len(p) == 1 for p in digits)
    assert "▁▁▁▁" in pieces  # indentation is one piece
    assert any("\n" in p for p in pieces[259:])  # the trainer saw line ends
    assert BPE._processor.encode("fox", out_type=str)[0][0] != "▁"  # no space put in front


def test_a_reserved_character_does_not_drop_the_text_around_it():
    hidden = "zebra▅zebra▁zebra " * 50
    pieces = train_tokenizer([hidden, PROSE * 20], 400)._processor.encode("zebra", out_type=str)
    assert pieces == ["zebra"]


def test_a_text_without_spaces_can_be_trained_on():
    tokenizer = train_tokenizer(["abcdefgh" * 30_000], 275)
    assert tokenizer.decode(tokenizer.encode("abcabc")) == "abcabc"
    assert len(tokenizer.encode("abcdefgh" * 4)) < 32


def test_a_vocabulary_that_does_not_fit_names_the_limit_and_the_fix():
    with pytest.raises(
        TokenizerError, match=r"vocab_size = 9999 is too large .* at most (\d+)"
    ) as e:
        train_tokenizer(DOCUMENTS, 9999)
    limit = int(str(e.value).split("at most ")[1].split()[0])
    assert train_tokenizer(DOCUMENTS, limit).vocab_size == limit

    chinese = ["".join(chr(0x4E00 + i) for i in range(600))] * 20
    with pytest.raises(TokenizerError, match=r"= 512 is too small .* set it to 8\d\d or more"):
        train_tokenizer(chinese, 512)
    with pytest.raises(TokenizerError, match="use kind: byte, or add text"):
        train_tokenizer(["ab"], 512)
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer([], 512)


def test_save_and_load(tmp_path):
    file = tmp_path / "tokenizer.model"
    BPE.save(file)
    loaded = load_tokenizer(TokenizerConfig(kind="bpe"), file)
    assert loaded.encode(PROSE) == BPE.encode(PROSE)
    by_path = load_tokenizer(TokenizerConfig(kind="bpe", path=str(file)), None)
    assert by_path.sha256 == BPE.sha256

    ByteTokenizer().save(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert isinstance(load_tokenizer(TokenizerConfig(kind="byte"), None), ByteTokenizer)


def test_a_missing_or_wrong_model_file_is_named(tmp_path):
    config = TokenizerConfig(kind="bpe")
    with pytest.raises(TokenizerError, match=r"gone\.model: No such file"):
        load_tokenizer(config, tmp_path / "gone.model")
    for content in (b"no model", b""):
        (tmp_path / "wrong.model").write_bytes(content)
        with pytest.raises(TokenizerError, match=r"wrong\.model: not a sentencepiece model"):
            load_tokenizer(config, tmp_path / "wrong.model")
    with pytest.raises(TokenizerError, match="needs its model file"):
        load_tokenizer(config, None)


def default_sentencepiece_model(**options) -> bytes:
    """Train a model with sentencepiece's own defaults, as another project would."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.splitlines() * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@given(text=TEXTS)
@example("▁a")
@example(" a")
def test_a_model_with_a_dummy_prefix_gives_text_back(text):
    tokenizer = _with_dummy_prefix()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_dummy_prefix_is_put_before_the_first_part_only():
    tokenizer = _with_dummy_prefix()
    assert tokenizer._processor.encode("fox", out_type=str)[0].startswith("▁")
    text = "x" * 600_000
    assert len(list(tokenizer.encode_parts(text))) > 1
    assert tokenizer.decode(tokenizer.encode(text)) == text


@functools.cache
def _with_dummy_prefix() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(default_sentencepiece_model())


def test_a_model_without_eos_is_refused():
    with pytest.raises(TokenizerError, match="no bos or no eos"):
        SentencePieceTokenizer(default_sentencepiece_model(eos_id=-1))


@given(text=st.text("ab ", max_size=60), limit=st.integers(1, 20))
def test_split_text_keeps_everything_and_the_limit(text, limit):
    parts = list(split_text(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)
    for left, right in itertools.pairwise(parts):
        hard_cut = len(left) == limit
        assert hard_cut or (right[0] == " " and left[-1] != " ")


def test_saving_leaves_the_file_as_it_was_where_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "a.model"
    file.write_bytes(b"before")

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("minillama.files.fsync", full)
    tokenizer = train_tokenizer(["some words of a text, and some others"], 300)
    with pytest.raises(OSError, match="No space"):
        tokenizer.save(file)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
