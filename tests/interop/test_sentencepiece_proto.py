import io

import pytest
import sentencepiece

from minillama.errors import TokenizerError
from minillama.interop.sentencepiece_proto import Kind, read_pieces, write_pieces


def train(text: list[str], **settings: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, minloglevel=2, **settings
    )
    return model.getvalue()


TEXT = [f"the cat {i} sat on the mat, {i * 7} times" for i in range(200)]


def test_pieces_are_read_as_sentencepiece_reads_them(bpe):
    model = bpe.read_bytes()
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    ours = read_pieces(model)
    assert ours.obstacles() == []
    assert not ours.add_dummy_prefix
    assert len(ours.pieces) == processor.vocab_size()
    for i, piece in enumerate(ours.pieces):
        assert piece.text == processor.id_to_piece(i)
        assert piece.score == processor.get_score(i)
        assert (piece.kind == Kind.CONTROL) == processor.is_control(i)
        assert (piece.kind == Kind.BYTE) == processor.is_byte(i)
        assert (piece.kind == Kind.UNKNOWN) == processor.is_unknown(i)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_written_model_gives_the_same_ids(bpe, pieces, hard_texts, prefix):
    model = read_pieces(bpe.read_bytes())
    written = write_pieces(model.pieces, (0, 1, 2), add_dummy_prefix=prefix)
    assert read_pieces(written).pieces == model.pieces
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(written)
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id()) == (0, 1, 2)
    for text in hard_texts:
        expected = pieces.encode(f" {text}" if prefix and text else text)
        assert processor.encode(text) == expected


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"model_type": "unigram"}, "it is no BPE model"),
        ({"byte_fallback": False}, "it has no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalises text"),
        ({"remove_extra_whitespaces": True}, "it removes extra spaces"),
        ({"user_defined_symbols": ["<x>"]}, "it has user-defined pieces"),
        ({"treat_whitespace_as_suffix": True}, "it puts the space after the word"),
    ],
)
def test_what_other_programs_would_encode_differently_is_named(settings, obstacle):
    plain = {
        "model_type": "bpe",
        "vocab_size": 300,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
    }
    assert read_pieces(train(TEXT, **plain)).obstacles() == []
    if settings.get("byte_fallback") is False:
        settings = settings | {"vocab_size": 60}
    assert read_pieces(train(TEXT, **plain | settings)).obstacles() == [obstacle]


@pytest.mark.parametrize(
    "junk",
    [
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\xff" * 12,
        b"\x0a\x02\x0a\x05",
        b"\x0f",
        b"\x0a\x03\x0a\x01\xff",
    ],
)
def test_junk_is_refused(junk):
    with pytest.raises(TokenizerError, match="not a sentencepiece model"):
        read_pieces(junk)
