"""The README.md of an exported model: its shape, its training data and its metrics."""

from __future__ import annotations

import json
from pathlib import Path

from minillama import __version__
from minillama.config import RunConfig
from minillama.interop.architectures import Architecture
from minillama.training.metrics import read_metrics


def model_card(checkpoint: Path, config: RunConfig, row: Architecture, dtype: str) -> str:
    """Return the card of a ``checkpoint``, with metrics if it is still in its run folder."""
    model, norm = config.model, config.model.norm
    options = ", ".join(f"{key}: {value}" for key, value in norm.options.items())
    rows = {
        "Architecture": row.model_class,
        "Norm": f"{norm.kind}, placement {norm.placement}, qk_norm {norm.qk_norm}, eps {norm.eps:g}"
        + (f" ({options})" if options else ""),
        "Width, layers": f"{model.dim}, {model.n_layers}",
        "Heads": f"{model.n_heads} for queries, {model.n_kv_heads} for keys and values, "
        f"{model.head_dim} features each",
        "Context": f"{model.max_seq_len} tokens",
        "Vocabulary": f"{model.vocab_size} ids, {config.tokenizer.kind} tokenizer",
        "Weights": dtype,
        "Batch": f"{config.train.batch_size} windows of {config.data.seq_len} tokens",
        "Data": json.dumps(config.data.source.model_dump(exclude_defaults=True)),
        **_metrics(checkpoint),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- minillama
---

# {config.name}

A small language model trained with minillama {__version__}.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
ids = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

The tokenizer puts `<s>`, which began every document, in front of a text. Special tokens that are
typed in a text stay plain text; `split_special_tokens=False` reads them as special.
"""


def _metrics(checkpoint: Path) -> dict[str, str]:
    """Return the metrics of this checkpoint from its run's files, two folders up, if they exist."""
    checkpoint = checkpoint.resolve()
    run, number = checkpoint.parent.parent, checkpoint.name.removeprefix("step-")
    if not number.isdigit():
        return {}
    step = int(number)
    rows = {"Step": str(step)}
    metrics = run / "metrics.jsonl"
    for line in read_metrics(metrics) if metrics.is_file() else ():
        loss, bits = line.get("val_loss"), line.get("val_bits_per_byte")
        if line.get("step") == step and isinstance(loss, float):
            rows["Validation loss"] = f"{loss:.4f} nats per token"
            if isinstance(bits, float):
                rows["Bits per byte"] = f"{bits:.4f}"
    return rows
