"""The command line: parsing only.  Every command is one call into the package.

A command's module is imported when the command is called, so that ``--help``, ``config show`` and
every faulty config answer before torch is loaded.

Exit status: 0 good; 1 anything not listed; 2 the config or the arguments are wrong; 3 training
diverged; 130 interrupted after a clean save.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from minillama import __version__, launch
from minillama.config import load_config
from minillama.config.ablation import load_ablation
from minillama.config.run import json_schema, to_yaml
from minillama.errors import EXTRAS, ConfigError, MinillamaError, OtherRankError, missing_extra

EPILOG = "exit status: 0 good; 2 your config or arguments; 3 training diverged; 130 interrupted"


def _train(options: Namespace) -> str:
    try:
        config = load_config(options.config, options.overrides)
    except ConfigError as error:
        raise launch.alike(error) from None
    from minillama.commands import train_run

    return train_run(config, options.resume, options.overwrite, progress=not options.quiet)


def _plan(options: Namespace) -> str:
    config = load_config(options.config, options.overrides)
    from minillama.plan.report import as_json, as_text, plan

    figures = plan(config, gpu=options.gpu, n_gpus=options.gpus, mfu=options.mfu)
    return as_json(figures) if options.json else as_text(figures)


def _ablate(options: Namespace) -> str:
    config = load_ablation(options.config, options.overrides)
    from minillama.ablation.runner import check_crashes, dry_run, run

    if options.dry_run:
        return dry_run(config)
    from minillama.ablation.report import write_report  # before hours of work, should it be missing

    if config.runner.kind == "ray":
        from minillama.ablation.ray_runner import run as run_on_ray

        folder = run_on_ray(config, progress=not options.quiet)
    else:
        folder = run(config, progress=not options.quiet)
    page = write_report(folder)
    print(f"report: {page}", flush=True)
    check_crashes(folder)
    return ""


def _report(options: Namespace) -> str:
    from minillama.ablation.report import write_report

    return f"report: {write_report(options.folder)}"


def _eval(options: Namespace) -> str:
    from minillama.commands import evaluate_text

    return evaluate_text(
        options.checkpoint, options.text, options.seq_len, options.batch_size, as_json=options.json
    )


def _generate(options: Namespace) -> str:
    from minillama.commands import write_text

    write_text(
        options.checkpoint,
        options.prompt,
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
    )
    return ""


def _export(options: Namespace) -> str:
    if options.to == "hf":
        from minillama.interop.huggingface import export
    else:
        from minillama.interop.gguf import export

    return export(options.checkpoint, options.out, options.dtype)


def _import(options: Namespace) -> str:
    if options.source.endswith(".gguf"):
        from minillama.interop import gguf_import

        return gguf_import.import_model(options.source, options.out)
    from minillama.interop import huggingface

    return huggingface.import_model(options.source, options.out)


def _convert_norm(options: Namespace) -> str:
    from minillama.commands import convert_norm

    return convert_norm(options.checkpoint, options.out)


def _bench(options: Namespace) -> str:
    from minillama.bench import run

    return run(options.what, options.json, options.threads)


def _tokenizer_train(options: Namespace) -> str:
    config = load_config(options.config, options.overrides)
    from minillama.commands import train_tokenizer_file

    return train_tokenizer_file(config, options.out)


def _data_prepare(options: Namespace) -> str:
    config = load_config(options.config, options.overrides)
    from minillama.commands import prepare_data

    return prepare_data(config, check=options.check)


def _norms(options: Namespace) -> str:
    from minillama.commands import explain_norms

    return explain_norms(options.name, options.plugin)


def _config_show(options: Namespace) -> str:
    return to_yaml(load_config(options.config, options.overrides)).rstrip()


def _config_schema(options: Namespace) -> str:
    return json_schema()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minillama",
        description="Train a small Llama, change its norm by one line, see whether it helps.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"minillama {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        parent: Any, name: str, does: str, example: str, run: Callable[[Namespace], str]
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = parent.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress, no log lines")
        return sub

    def takes_config(
        sub: argparse.ArgumentParser, what: str = "a YAML file or a run folder"
    ) -> None:
        sub.add_argument("config", metavar="CONFIG", help=what)
        sub.add_argument(
            "overrides", metavar="a.b=c", nargs="*", default=[], help="set a field of the config"
        )

    def takes_checkpoint(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run folder (its best)"
        )

    sub = command(
        commands,
        "train",
        "train a model",
        "minillama train configs/tiny.yaml model.norm.kind=layernorm optim.lr=1e-3",
        _train,
    )
    takes_config(sub)
    sub.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    sub.add_argument("--overwrite", action="store_true", help="replace the run in the folder")

    sub = command(
        commands,
        "plan",
        "foretell a training's parameters, FLOPs, memory and time",
        "minillama plan configs/llama-7b.yaml --gpus 64 --gpu h100",
        _plan,
    )
    takes_config(sub)
    sub.add_argument("--gpus", type=int, default=1, metavar="N", help="how many; default: 1")
    sub.add_argument("--gpu", metavar="NAME", help="such as h100, or cpu; default: what is here")
    sub.add_argument("--mfu", type=float, default=0.4, help="share of its peak that is reached")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command(
        commands,
        "ablate",
        "train a grid of arms × learning rates × seeds, and report on it",
        "minillama ablate configs/ablations/quick.yaml seeds='[0, 1, 2]'",
        _ablate,
    )
    takes_config(sub, "a YAML file of an ablation")
    sub.add_argument("--dry-run", action="store_true", help="list the cells and what they cost")

    sub = command(
        commands,
        "report",
        "write the report of an ablation, or of one run, anew",
        "minillama report runs/ablations/quick",
        _report,
    )
    sub.add_argument("folder", metavar="DIR", help="the folder of an ablation or of a run")

    sub = command(
        commands,
        "eval",
        "measure loss, perplexity and bits per byte",
        "minillama eval runs/tiny --text mybook.txt",
        _eval,
    )
    takes_checkpoint(sub)
    sub.add_argument("--text", metavar="FILE", help="default: the run's own validation split")
    sub.add_argument("--seq-len", type=int, help="tokens read at once; default: as in training")
    sub.add_argument("--batch-size", type=int, default=16, help="windows read at once")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command(
        commands,
        "generate",
        "let a model write",
        'minillama generate runs/tiny --prompt "The file" --temperature 0.8',
        _generate,
    )
    takes_checkpoint(sub)
    sub.add_argument("--prompt", metavar="TEXT", default="", help="the text to continue")
    sub.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    sub.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest each time")
    sub.add_argument("--top-k", type=int, default=50, help="0: all")
    sub.add_argument("--top-p", type=float, default=None)
    sub.add_argument("--seed", type=int, default=None)

    sub = command(
        commands,
        "export",
        "write a model for other tools",
        "minillama export runs/tiny --to hf --out exported",
        _export,
    )
    takes_checkpoint(sub)
    sub.add_argument("--to", choices=("hf", "gguf"), required=True)
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--dtype", help="hf: float32, bfloat16, float16; gguf: f32, f16, q8_0")

    sub = command(
        commands,
        "convert-norm",
        "turn a pre-LayerNorm checkpoint into an equivalent pre-RMSNorm one",
        "minillama convert-norm runs/tiny-layernorm --out converted",
        _convert_norm,
    )
    takes_checkpoint(sub)
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = command(
        commands,
        "import",
        "read a transformers folder, or a .gguf file, as a checkpoint",
        "minillama import some-llama --out imported",
        _import,
    )
    sub.add_argument("source", metavar="HF_DIR", help="or a .gguf file")
    sub.add_argument("--out", required=True, metavar="DIR")

    group = commands.add_parser("tokenizer", help="train a tokenizer").add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND"
    )
    sub = command(
        group,
        "train",
        "train the config's sentencepiece tokenizer on its data",
        "minillama tokenizer train configs/tiny.yaml tokenizer.vocab_size=1000 --out my.model",
        _tokenizer_train,
    )
    takes_config(sub)
    sub.add_argument("--out", required=True, metavar="FILE", help="the model file to write")

    group = commands.add_parser("data", help="prepare data").add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND"
    )
    sub = command(
        group,
        "prepare",
        "tokenize the config's data into the cache",
        "minillama data prepare configs/tiny.yaml",
        _data_prepare,
    )
    takes_config(sub)
    sub.add_argument(
        "--check", action="store_true", help="read all that is there; make damaged files again"
    )

    sub = command(
        commands,
        "norms",
        "list norms and placements, or explain one",
        "minillama norms rmsnorm",
        _norms,
    )
    sub.add_argument("name", nargs="?", help="a kind or a placement")
    sub.add_argument("--plugin", action="append", default=[], help="a module or .py file of yours")

    group = commands.add_parser("config", help="show a config, or its schema").add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND"
    )
    sub = command(
        group,
        "show",
        "print the resolved config with every default",
        "minillama config show configs/tiny.yaml optim.lr=1e-3",
        _config_show,
    )
    takes_config(sub)
    command(
        group,
        "schema",
        "print the JSON schema of a run config",
        "minillama config schema > minillama.schema.json",
        _config_schema,
    )

    sub = command(
        commands,
        "bench",
        "time this machine: ratios between contenders of one run",
        "minillama bench norms --threads 1 --json norms.json",
        _bench,
    )
    sub.add_argument(
        "what",
        nargs="?",
        default="norms",
        choices=("norms", "step", "memory", "decode", "ablation"),
        help="norms: RMSNorm; step: a training step; memory: its peak; decode: generation; "
        "ablation: cells on one and two workers",
    )
    sub.add_argument("--threads", type=int, default=None)
    sub.add_argument("--json", metavar="FILE", help="write the figures to a file as well")
    return parser


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = _parser()
    # argparse takes no positional after an option, as in `train CONFIG --resume optim.lr=1e-3`.
    options, rest = parser.parse_known_args(arguments)
    unknown = [a for a in rest if a.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; see minillama {options.command} --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _recorded(options: Namespace) -> str:
    """Run a command so that torchrun's report shows the error of the process that failed first.

    As soon as one process has left, torchrun sends the others SIGTERM; one that is leaving with an
    error of its own, or of all, keeps its exit status.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        answer: str = options.run(options)
    except OtherRankError:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    except MinillamaError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            raise error.with_traceback(None) from None  # the user's fault is in the line alone
        except MinillamaError:
            handler.record_exception(error)
            raise
    except Exception as error:
        handler.record_exception(error)
        raise
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parse(arguments)
    # Before torch is imported.  Threads that spin long while they wait starve whatever else the
    # machine does, and then themselves; threads that never spin make small steps slow.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    level = logging.WARNING if options.quiet else logging.INFO
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("minillama").setLevel(level)
    try:
        answer = options.run(options) if not launch.by_torchrun() else _recorded(options)
        if answer:
            print(answer, flush=True)
    except OtherRankError as error:  # that one says it
        return error.exit_status
    except MinillamaError as error:
        print(f"minillama: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"minillama: {missing_extra(package)}", file=sys.stderr)
        return ConfigError.exit_status
    except KeyboardInterrupt:
        print("minillama: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def entry_point() -> None:
    """Run the command that the shell was given."""
    sys.exit(main())
