"""EleutherAI's lm-evaluation-harness on an exported folder, on tasks of our own, offline."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from minillama.evaluation import evaluate
from minillama.interop.huggingface import export
from minillama.training.checkpoint import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # of its dependencies

DOCUMENTS = [
    {"context": "The result of a function", "choices": [" is its value", " value its is"]},
    {"context": "  two  spaces\n", "choices": [" and a line", "no line"]},
    {"context": "emoji 🙂 and 中文", "choices": [" are bytes", " ﬁ"]},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
"""
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a task on a folder: its result and its log-likelihoods."""
    pytest.importorskip("accelerate")
    lm_eval, tasks = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data, definitions = tmp_path / "data.jsonl", tmp_path / "tasks"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    definitions.mkdir()
    for name, text in (("choice", CHOICE), ("rolling", ROLLING)):
        (definitions / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    manager = tasks.TaskManager(include_path=str(definitions), include_defaults=False)

    def run(folder: Path, task: str, **model: Any) -> tuple[dict[str, Any], list[Any]]:
        out = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), **model},
            tasks=[task],
            task_manager=manager,
            device="cpu",
            batch_size=2,
            bootstrap_iters=0,
        )
        return out["results"][task], [s["filtered_resps"] for s in out["samples"][task]]

    return run


def test_its_log_likelihoods_are_ours(harness, save, tmp_path):
    folder = save()
    export(folder, tmp_path / "hf")
    model, tokenizer, _ = load_checkpoint(folder)

    result, answers = harness(tmp_path / "hf", "local_choice")
    assert 0 <= result["acc,none"] <= 1
    for document, answer in zip(DOCUMENTS, answers, strict=True):
        context, space = document["context"], document["context"].rstrip()
        for choice, (found, is_greedy) in zip(document["choices"], answer, strict=True):
            ids = tokenizer.encode(context + choice, bos=True)
            n_context = len(tokenizer.encode(space, bos=True))
            with torch.no_grad():
                log_p = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[n_context - 1 :]
            targets = torch.tensor(ids[n_context:])
            expected = log_p.gather(1, targets[:, None]).sum().item()
            assert found == pytest.approx(expected, abs=1e-4)
            assert is_greedy == bool((log_p.argmax(-1) == targets).all())

    # It puts a bos in front itself here, besides the tokenizer's.
    result, answers = harness(tmp_path / "hf", "local_text", add_bos_token=False)
    bits = n_bytes = 0.0
    for document, answer in zip(DOCUMENTS, answers, strict=True):
        ids = tokenizer.encode(document["context"], bos=True)
        size = len(document["context"].encode())
        ours = evaluate(model, ids, n_bytes=size)
        assert answer[0] == pytest.approx(-ours["loss"] * ours["n_tokens"], abs=1e-4)
        bits, n_bytes = bits + ours["bits_per_byte"] * size, n_bytes + size
    assert result["bits_per_byte,none"] == pytest.approx(bits / n_bytes, rel=1e-6)
