import gzip
import json
import random
import shlex

import pytest

from minillama.cli import main
from minillama.commands.new import find_text
from minillama.config import load_config
from minillama.errors import ConfigError, DataError


def prose(n_bytes):
    """Return about so many bytes of words that recur, of two to four syllables."""
    drawn = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "en", "i", "or", "u")]
    words = ["".join(drawn.choices(syllables, k=drawn.randint(2, 4))) for _ in range(2000)]
    text = " ".join(drawn.choices(words, k=n_bytes // 7))
    return text.replace("a b", "a\nb")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(*arguments):
    assert main(["new", *map(str, arguments)]) == 0


@pytest.mark.parametrize(("n_bytes", "kind"), [(2000, "byte"), (1_000_000, "bpe")])
def test_the_command_that_it_prints_trains_on_the_text(here, capsys, n_bytes, kind):
    (here / "mybook.txt").write_text(prose(n_bytes), encoding="utf-8")
    new("mybook.txt", "--minutes", "1")
    shown = capsys.readouterr().out
    command = shlex.split(shown.splitlines()[-1])
    assert command == ["minillama", "train", "mybook.yaml"]
    config = load_config("mybook.yaml")
    assert config.tokenizer.kind == kind
    assert f"{config.train.steps:,} steps of" in shown
    assert ("learn it by heart" in shown) == (n_bytes == 2000)
    assert main([*command[1:], "train.steps=2", "optim.warmup_steps=0", "-q"]) == 0
    assert json.loads((here / "runs/mybook/summary.json").read_bytes())["fate"] != "diverged"


def test_a_config_is_never_overwritten(here, capsys):
    (here / "mine.txt").write_text(prose(3000), encoding="utf-8")
    (here / "mine.yaml").write_text("name: precious\n")
    assert main(["new", "mine.txt"]) == 2
    assert "mine.yaml exists already; choose another name with --out" in capsys.readouterr().err
    assert (here / "mine.yaml").read_text() == "name: precious\n"
    new("mine.txt", "--out", "other.yaml")
    assert load_config("other.yaml").name == "mine"
    assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []


def test_odd_names_and_first_words_are_quoted(here):
    name = 'my: "book" #1 – größe.txt'
    first = '- "Quoth: #\\ the raven'
    (here / name).write_text(f"\n{first} nevermore'\n{prose(3000)}", encoding="utf-8")
    new(name, "--out", "odd.yaml")
    config = load_config("odd.yaml")
    assert config.data.source.files == [name]
    assert config.train.sample_prompt == " ".join(first.split()[:3])
    assert config.name == "my-book-1-gr-e"


def test_a_text_of_many_characters_gets_a_vocabulary_that_holds_them(here):
    drawn = random.Random(0)
    characters = [chr(0x4E00 + i) for i in range(1500)]
    lines = ("".join(drawn.choices(characters, k=30)) + "\n" for _ in range(1500))
    (here / "zh.txt").write_text("".join(lines), encoding="utf-8")
    new("zh.txt", "--minutes", "1")
    config = load_config("zh.yaml")
    assert config.tokenizer.kind == "bpe"
    assert config.tokenizer.vocab_size == 2048
    assert "2.9" in (here / "zh.yaml").read_text(encoding="utf-8").split("vocab_size:")[1][:60]


def test_of_a_folder_the_ending_with_most_text_is_taken(here, capsys):
    inner = here / "texts [1]" / "deep"
    inner.mkdir(parents=True)
    rows = "".join(json.dumps({"body": prose(500)}) + "\n" for _ in range(20)).encode()
    (inner / "a.jsonl.gz").write_bytes(gzip.compress(rows, mtime=0))
    (inner.parent / "b.jsonl.gz").write_bytes(gzip.compress(rows, mtime=0))
    (inner / "readme.md").write_text("short")
    (inner / "picture.png").write_bytes(bytes(99_999))
    (inner / ".hidden.txt").write_text(prose(99_999))
    new("texts [1]", "--out", "folder.yaml")
    shown = capsys.readouterr().out
    assert ".jsonl.gz files are used, and not its .md files" in shown
    config = load_config("folder.yaml")
    source = config.data.source
    assert (source.format, source.text_field) == ("json", "body")
    overrides = ["train.steps=2", "optim.warmup_steps=0", "data.seq_len=32"]
    assert main(["train", "folder.yaml", "-q", *overrides]) == 0


def test_what_cannot_be_used_is_one_line(here, capsys):
    (here / "empty").mkdir()
    (here / "short.txt").write_text("a few words")
    for name, said in (
        ("gone.txt", "no such file"),
        ("short.txt", "has 11 bytes, and needs 1000"),
        ("empty", "contains no text files"),
        ("http://example.org/a.txt", "download it first"),
    ):
        assert main(["new", name]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert said in line
    assert main(["new", "short.txt", "--minutes", "nan"]) == 2
    assert list(here.glob("*.yaml")) == []


def test_files_of_two_formats_are_refused(here):
    with pytest.raises(ConfigError, match="several formats"):
        find_text(["a.txt", "b.jsonl"])
    with pytest.raises(DataError, match="contains no text files"):
        find_text([str(here)])
