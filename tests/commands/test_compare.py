import json

import pytest

from minillama.cli import main
from minillama.commands.compare import comparability, compare, differences
from minillama.commands.runs import read_state
from minillama.errors import ConfigError


@pytest.fixture(scope="module")
def runs(tmp_path_factory, trained, text_file):
    root = tmp_path_factory.mktemp("runs")
    other = root / "other.txt"
    other.write_text(text_file.read_text()[::-1])
    changes = {
        "a": {},
        "b": {"model.norm.kind": "layernorm", "optim.lr": 1e-2},
        "bpe": {"tokenizer": {"kind": "bpe", "vocab_size": 280}},
        "other": {"data.source.files": [str(other)]},
        "longer": {"data.seq_len": 32},
        "larger": {"data.val_fraction": 0.2},
    }
    return {name: trained(root / name, **change) for name, change in changes.items()}


def states(runs, *names):
    return [read_state(runs[name]) for name in names]


def test_only_the_fields_that_differ_are_shown(runs):
    differing = differences(states(runs, "a", "b"))
    assert differing["model.norm.kind"] == ["rmsnorm", "layernorm"]
    assert differing["optim.lr"] == [0.003, 0.01]
    assert {name for name in differing if not name.startswith("model.norm.options")} == {
        "model.norm.kind",
        "optim.lr",
    }


def test_a_field_that_an_old_config_lacks_has_its_default(runs, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    text = (runs["a"] / "config.yaml").read_text()
    assert "  z_loss: 0.0\n" in text
    (old / "config.yaml").write_text(text.replace("  z_loss: 0.0\n", ""))
    assert differences([read_state(old), read_state(runs["a"])]) == {}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("b", (True, True)),
        ("longer", (True, True)),
        ("bpe", (False, True)),
        ("other", (False, False)),
        ("larger", (False, False)),
    ],
)
@pytest.mark.parametrize("hashes", [True, False])
def test_losses_are_compared_on_the_same_text_and_tokens_only(runs, other, expected, hashes):
    pair = states(runs, "a", other)
    if not hashes:  # a summary of an earlier version
        for state in pair:
            for key in ("source_sha256", "tokenizer_sha256"):
                del state.summary[key]
    found = comparability(pair)
    assert (found.nats_per_token, found.bits_per_byte) == expected
    assert bool(found.why) is not all(expected)


def test_a_text_that_moved_is_the_same_text(runs, trained, text_file, tmp_path):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())
    moved = trained(tmp_path / "moved", **{"data.source.files": [str(copy)]})
    assert comparability([read_state(runs["a"]), read_state(moved)]).nats_per_token


def test_the_table_has_the_losses_and_what_may_not_be_compared(runs):
    text = compare([str(runs["a"]), str(runs["bpe"])], as_json=False)
    (line,) = (line for line in text.splitlines() if line.startswith("validation loss"))
    for state in states(runs, "a", "bpe"):
        assert f"{state.summary['val_loss']:.4f}" in line
    assert "compare bits per byte" in text
    assert "seq_len differs" in compare([str(runs["a"]), str(runs["longer"])], as_json=False)


def test_speeds_of_two_machines_are_not_compared(runs):
    pair = [str(runs["a"]), str(runs["b"])]
    assert "speeds" not in compare(pair, as_json=False)
    path = runs["b"] / "summary.json"
    whole = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(whole) | {"threads": 64}))
        assert "the speeds cannot be compared: threads" in compare(pair, as_json=False)
    finally:
        path.write_text(whole)


def test_json_holds_every_run_and_an_unfinished_one_has_nulls(runs, tmp_path, capsys):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_bytes((runs["a"] / "config.yaml").read_bytes())
    assert main(["compare", str(runs["a"]), str(runs["b"]), str(begun), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [result["fate"] for result in found["results"]][2] == "unfinished"
    assert found["results"][0]["val_loss"] == states(runs, "a")[0].val_loss
    assert found["results"][2]["val_loss"] is None
    assert found["config"]["optim.lr"] == [0.003, 0.01, 0.003]


def test_what_cannot_be_compared_is_one_line(runs, tmp_path):
    with pytest.raises(ConfigError, match="two run folders or more"):
        compare([str(runs["a"])], as_json=False)
    with pytest.raises(ConfigError, match="there is no run folder"):
        compare([str(runs["a"]), str(tmp_path / "absent")], as_json=False)
    (tmp_path / "ablation.yaml").write_text("name: grid\n")
    with pytest.raises(ConfigError, match="minillama report"):
        compare([str(runs["a"]), str(tmp_path)], as_json=False)
