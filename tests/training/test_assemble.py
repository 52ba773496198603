import pytest
import sentencepiece

from minillama.config import load_config
from minillama.errors import ConfigError
from minillama.training.assemble import assemble


@pytest.fixture
def load(tmp_path):
    def load(text=""):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return assemble(load_config(path), str(path))

    return load


@pytest.fixture
def errors_in(load):
    def errors_in(text):
        with pytest.raises(ConfigError) as error:
            load(text)
        return [str(found) for found in error.value.field_errors]

    return errors_in


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "mine.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat"] * 20),
            model_writer=file,
            vocab_size=280,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return path


def test_a_sentencepiece_model_says_its_own_size(load, errors_in, sentencepiece_model, monkeypatch):
    size = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model)).vocab_size()
    monkeypatch.chdir(sentencepiece_model.parent)
    config = load("tokenizer: {path: mine.model}")
    assert config.tokenizer.vocab_size == config.model.vocab_size == size
    assert config.tokenizer.path == str(sentencepiece_model)  # so that any folder can be current
    assert assemble(config) == config
    assert load(f"tokenizer: {{path: mine.model, vocab_size: {size}}}") == config
    found = errors_in("tokenizer: {path: mine.model, vocab_size: 300}")
    assert found == [
        f"tokenizer.vocab_size = 300: the model at tokenizer.path has {size} ids; leave this out"
    ]


def test_a_file_that_is_no_sentencepiece_model_is_refused(errors_in, tmp_path):
    for content in (b"", b"hello", b"\0" * 99):
        (tmp_path / "wrong.model").write_bytes(content)
        found = errors_in(f"tokenizer: {{path: '{(tmp_path / 'wrong.model').as_posix()}'}}")
        assert "is not a sentencepiece model file" in found[0]
    assert "no such file" in errors_in(f"tokenizer: {{path: '{tmp_path.as_posix()}'}}")[0]
    missing = "tokenizer.path = 'nowhere.model': no such file"
    assert errors_in("tokenizer: {path: nowhere.model}") == [missing]
