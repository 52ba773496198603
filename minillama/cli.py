"""The command line: one table of commands, each of which parses its arguments and makes one call.

A command's modules are imported when it is called, so that ``--help``, ``config show`` and every
error in a config answer before torch is loaded.

Exit status: 0 success; 1 anything not listed; 2 the config or the arguments are wrong; 3 training
diverged; 4 cells of an ablation crashed; 130 interrupted after a clean save.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from types import FrameType
from typing import Any, NamedTuple

from minillama import __version__, launch
from minillama.config import load_config
from minillama.config.ablation import load_ablation
from minillama.config.run import json_schema, to_yaml
from minillama.config.shipped import describe_configs
from minillama.errors import (
    EXTRAS,
    ConfigError,
    InterruptedRunError,
    MinillamaError,
    OtherRankError,
    missing_extra,
)
from minillama.training.assemble import assemble

EPILOG = (
    "exit status: 0 success; 2 config or arguments wrong; 3 training diverged; "
    "4 cells crashed; 130 interrupted; 1 other errors. "
    "Tab in a shell: minillama completion --help"
)

# ----------------------------------------------------------------- what each command calls


def _train(options: Namespace) -> str:
    try:
        config = assemble(load_config(options.config, options.overrides))
    except ConfigError as error:
        raise launch.on_first_rank(error) from None
    from minillama.commands.models import train_run

    resume = options.resume_from or options.resume
    with redirect_stdout(launch.SafeStream(sys.stdout)):  # a plugin's print must not end training
        return train_run(config, resume, options.overwrite, progress=not options.quiet)


def _new(options: Namespace) -> str:
    from minillama.commands.new import new_config

    return new_config(options.text, options.out, options.minutes)


def _plan(options: Namespace) -> str:
    config = assemble(load_config(options.config, options.overrides))
    from minillama.plan.report import as_json, as_text, plan

    figures = plan(config, gpu=options.gpu, n_gpus=options.gpus, mfu=options.mfu)
    return as_json(figures) if options.json else as_text(figures)


def _ablate(options: Namespace) -> str:
    config = load_ablation(options.config, options.overrides)
    if options.power:
        if options.dry_run:
            raise ConfigError("--power and --dry-run: give one of them")
        from minillama.ablation.seed_plan import read_seed_plan

        return read_seed_plan(config)
    from minillama.ablation.runner import check_crashes, dry_run, run

    if options.dry_run:
        return dry_run(config)
    from minillama.ablation.report import write_report  # a missing extra is found before the work

    with ExitStack() as stack:
        if options.watch:
            from minillama.watch.server import watching

            stack.enter_context(watching(config.out_dir))
        if config.runner.kind == "ray":
            from minillama.ablation.ray_runner import run as run_on_ray

            folder = run_on_ray(config, progress=not options.quiet)
        else:
            folder = run(config, progress=not options.quiet)
        page = write_report(folder)
    print(f"report: {page}", flush=True)
    check_crashes(folder)
    return ""


def _watch(options: Namespace) -> Iterable[str]:
    from minillama.watch.server import watch

    watch(options.folder, options.port)
    return ()


def _report(options: Namespace) -> str:
    from minillama.ablation.report import write_report

    return f"report: {write_report(options.folder)}"


def _runs(options: Namespace) -> str:
    from minillama.commands.runs import list_runs

    return list_runs(options.folder, as_json=options.json)


def _compare(options: Namespace) -> str:
    from minillama.commands.compare import compare

    return compare(options.folders, as_json=options.json)


def _eval(options: Namespace) -> str:
    from minillama.commands.models import evaluate_text

    return evaluate_text(
        options.checkpoint, options.text, options.seq_len, options.batch_size, as_json=options.json
    )


def _generate(options: Namespace) -> str | Iterable[str]:
    from minillama.commands.models import generate_text, read_prompt
    from minillama.sampling import SamplingOptions

    if options.interactive and "-" in (options.prompt, options.prompt_file):
        raise ConfigError("--interactive reads standard input itself; give the prompts there")
    prompt = read_prompt(options.prompt, options.prompt_file)
    sampling = SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.interactive:
        from minillama.commands.interactive import converse

        converse(options.checkpoint, prompt, options.max_new_tokens, sampling, _write)
        return ""
    return generate_text(options.checkpoint, prompt, options.max_new_tokens, sampling)


def _export(options: Namespace) -> str:
    if options.to == "hf":
        from minillama.interop.huggingface import export
    else:
        from minillama.interop.gguf import export

    return export(options.checkpoint, options.out, options.dtype)


def _import(options: Namespace) -> str:
    if options.source.endswith(".gguf"):
        from minillama.interop import gguf

        return gguf.import_model(options.source, options.out)
    from minillama.interop import huggingface

    return huggingface.import_model(options.source, options.out)


def _convert_norm(options: Namespace) -> str:
    from minillama.commands.models import convert_norm

    return convert_norm(options.checkpoint, options.out)


def _bench(options: Namespace) -> str:
    from minillama.bench import run

    return run(options.what, options.json, options.threads)


def _tokenizer_train(options: Namespace) -> str:
    config = assemble(load_config(options.config, options.overrides))
    from minillama.commands.models import train_tokenizer_file

    return train_tokenizer_file(config, options.out)


def _data_prepare(options: Namespace) -> str:
    config = assemble(load_config(options.config, options.overrides))
    from minillama.commands.models import prepare_data

    return prepare_data(config, check=options.check)


def _completion(options: Namespace) -> str:
    from minillama.commands.completion import completion_script

    return completion_script(_parser(), options.shell)


def _doctor(options: Namespace) -> Iterable[str]:
    from minillama.commands.doctor import diagnose

    return diagnose(as_json=options.json)


def _norms(options: Namespace) -> str:
    from minillama.commands.models import explain_norms

    return explain_norms(options.name, options.plugin)


def _configs(options: Namespace) -> str:
    return describe_configs()


def _config_show(options: Namespace) -> str:
    return to_yaml(assemble(load_config(options.config, options.overrides))).rstrip()


def _config_schema(options: Namespace) -> str:
    return json_schema()


# --------------------------------------------------------------------- the table of commands


class Argument(NamedTuple):
    """What ``add_argument`` is called with."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def _argument(*names: str, **settings: Any) -> Argument:
    return Argument(names, settings)


class Command(NamedTuple):
    """A command: what it does, an example, the function it calls, its arguments."""

    does: str
    example: str
    run: Callable[[Namespace], str | Iterable[str]]
    arguments: tuple[Argument, ...] = ()


QUIET = _argument("-q", "--quiet", action="store_true", help="show no progress and no log lines")
CONFIG = _argument(
    "config", metavar="CONFIG", help="a YAML file, a name from `minillama configs`, or a run folder"
)
OVERRIDES = _argument("overrides", metavar="a.b=c", nargs="*", default=[], help="set a field")
CHECKPOINT = _argument(
    "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run folder (its best checkpoint)"
)
OUT = _argument("--out", required=True, metavar="PATH", help="the file or folder to write")
AS_JSON = _argument("--json", action="store_true", help="print one JSON object")

COMMANDS = {
    "new": Command(
        "look at a text of yours, and write a config that trains a model on it",
        "minillama new mybook.txt",
        _new,
        (
            _argument("text", metavar="FILE", nargs="+", help="text, tables, a folder; also .gz"),
            _argument("--out", metavar="PATH", help="the config to write; default: TEXT's .yaml"),
            _argument(
                "--minutes",
                type=float,
                default=10.0,
                help="how long training may take here, about; default: 10",
            ),
        ),
    ),
    "train": Command(
        "train a model",
        "minillama train tiny model.norm.kind=layernorm optim.lr=1e-3",
        _train,
        (
            CONFIG,
            OVERRIDES,
            _argument("--resume", action="store_true", help="continue from the last checkpoint"),
            _argument(
                "--resume-from",
                metavar="CHECKPOINT",
                help="continue from this checkpoint of the run; removes the later ones",
            ),
            _argument("--overwrite", action="store_true", help="replace the run in the folder"),
        ),
    ),
    "plan": Command(
        "estimate the parameters, FLOPs, memory and time of a training run",
        "minillama plan llama-7b --gpus 64 --gpu h100",
        _plan,
        (
            CONFIG,
            OVERRIDES,
            _argument("--gpus", type=int, default=1, metavar="N", help="how many; default: 1"),
            _argument("--gpu", metavar="NAME", help="h100, cpu, ...; default: this machine's"),
            _argument("--mfu", type=float, default=0.4, help="share of the peak; default: 0.4"),
            AS_JSON,
        ),
    ),
    "ablate": Command(
        "train a grid of arms × learning rates × seeds, and report on it",
        "minillama ablate quick seeds='[0, 1, 2]'",
        _ablate,
        (
            _argument("config", metavar="CONFIG", help="the YAML file or name of an ablation"),
            OVERRIDES,
            _argument("--dry-run", action="store_true", help="list the cells and what they cost"),
            _argument(
                "--power",
                action="store_true",
                help="train nothing; read the cells that have ended, and print how many seeds the "
                "margin needs",
            ),
            _argument("--watch", action="store_true", help="serve a page that shows the progress"),
        ),
    ),
    "watch": Command(
        "serve a page, to this machine alone, that shows runs and ablations as they train",
        "minillama watch runs",
        _watch,
        (
            _argument("folder", metavar="DIR", help="of an ablation, of a run, or of several"),
            _argument("--port", type=int, metavar="N", help="default: the first free from 8765 on"),
        ),
    ),
    "report": Command(
        "write the report of an ablation, also while it is running, or of one run",
        "minillama report runs/quick",
        _report,
        (_argument("folder", metavar="DIR", help="the folder of an ablation or of a run"),),
    ),
    "runs": Command(
        "list the runs and ablations in a folder, and how each of them stands",
        "minillama runs",
        _runs,
        (
            _argument("folder", metavar="DIR", nargs="?", default="runs", help="default: runs"),
            AS_JSON,
        ),
    ),
    "compare": Command(
        "show where the configs of runs differ, their losses and their speeds",
        "minillama compare runs/tiny runs/tiny-layernorm",
        _compare,
        (_argument("folders", metavar="RUN", nargs="+", help="a run folder; two or more"), AS_JSON),
    ),
    "eval": Command(
        "measure loss, perplexity and bits per byte",
        "minillama eval runs/tiny --text mybook.txt",
        _eval,
        (
            CHECKPOINT,
            _argument("--text", metavar="FILE", help="default: the run's own validation split"),
            _argument("--seq-len", type=int, help="tokens in a window; default: as in training"),
            _argument("--batch-size", type=int, default=16, help="windows in a batch"),
            AS_JSON,
        ),
    ),
    "generate": Command(
        "generate text",
        'minillama generate runs/tiny --prompt "The file" --temperature 0.8',
        _generate,
        (
            CHECKPOINT,
            _argument("--prompt", metavar="TEXT", help="the text to continue; -: standard input"),
            _argument("--prompt-file", metavar="FILE", help="holds the prompt; -: standard input"),
            _argument(
                "-i",
                "--interactive",
                action="store_true",
                help="read a prompt from each line of standard input and continue the text so far; "
                "/reset forgets it, /help lists the other commands, Ctrl-C ends a continuation, "
                "Ctrl-D leaves",
            ),
            _argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200"),
            _argument("--temperature", type=float, default=0.8, help="0: greedy; default: 0.8"),
            _argument("--top-k", type=int, default=50, help="0: all; default: 50"),
            _argument("--top-p", type=float, help="nucleus sampling; default: off"),
            _argument("--seed", type=int, help="default: another text each time"),
        ),
    ),
    "export": Command(
        "write a model for transformers or llama.cpp",
        "minillama export runs/tiny --to hf --out exported",
        _export,
        (
            CHECKPOINT,
            _argument("--to", choices=("hf", "gguf"), required=True, help="the format"),
            OUT,
            _argument("--dtype", help="hf: float32, bfloat16, float16; gguf: f32, f16, q8_0"),
        ),
    ),
    "convert-norm": Command(
        "turn a pre-LayerNorm checkpoint into an equivalent pre-RMSNorm one",
        "minillama convert-norm runs/tiny-layernorm --out converted",
        _convert_norm,
        (CHECKPOINT, OUT),
    ),
    "import": Command(
        "turn a transformers folder, or a .gguf file, into a checkpoint",
        "minillama import some-llama --out imported",
        _import,
        (_argument("source", metavar="HF_DIR", help="or a .gguf file"), OUT),
    ),
    "tokenizer train": Command(
        "train the config's sentencepiece tokenizer on its data",
        "minillama tokenizer train tiny tokenizer.vocab_size=1000 --out my.model",
        _tokenizer_train,
        (CONFIG, OVERRIDES, OUT),
    ),
    "data prepare": Command(
        "tokenize the config's data into the cache",
        "minillama data prepare tiny",
        _data_prepare,
        (
            CONFIG,
            OVERRIDES,
            _argument("--check", action="store_true", help="read all files, remake damaged ones"),
        ),
    ),
    "norms": Command(
        "list norms and placements, or explain one",
        "minillama norms rmsnorm",
        _norms,
        (
            _argument("name", nargs="?", help="a kind or a placement"),
            _argument(
                "--plugin", action="append", default=[], help="a module or .py file with norms"
            ),
        ),
    ),
    "configs": Command("list the configs that come with minillama", "minillama configs", _configs),
    "config show": Command(
        "print the resolved config with every default",
        "minillama config show tiny optim.lr=1e-3",
        _config_show,
        (CONFIG, OVERRIDES),
    ),
    "config schema": Command(
        "print the JSON schema of a run config",
        "minillama config schema > minillama.schema.json",
        _config_schema,
    ),
    "doctor": Command(
        "check this installation, and print what to send with a bug report",
        "minillama doctor",
        _doctor,
        (AS_JSON,),
    ),
    "completion": Command(
        "print the script that completes commands, configs and run folders in a shell",
        "minillama completion bash > ~/.local/share/bash-completion/completions/minillama\n"
        "  minillama completion zsh > ~/.zfunc/_minillama    # a folder of zsh's fpath",
        _completion,
        (_argument("shell", choices=("bash", "zsh"), help="which shell"),),
    ),
    "bench": Command(
        "compare speeds on this machine: ratios between contenders of one run",
        "minillama bench norms --threads 1 --json norms.json",
        _bench,
        (
            _argument(
                "what",
                nargs="?",
                default="norms",
                choices=("norms", "step", "memory", "decode", "ablation", "gpu"),
                help="norms: RMSNorm; step: a training step; memory: its peak; "
                "decode: generation; ablation: cells on one and two workers; gpu: all that only a "
                "GPU can show",
            ),
            _argument("--threads", type=int, help="default: 1, then all cores"),
            _argument("--json", metavar="FILE", help="write the figures to a file as well"),
        ),
    ),
}


class _Version(argparse.Action):
    """Print the version at once, and then what needs torch to be imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(f"minillama {__version__}", flush=True)
        from minillama.commands.version import describe_machine

        print(describe_machine())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minillama",
        description="Train a small Llama, change its norm by one line, see whether it helps.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="show the versions of minillama and torch, the processor and the kernels' state",
    )
    top = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {"": top}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = top.add_parser(
                group, help=f"see minillama {group} --help"
            ).add_subparsers(required=True, metavar="COMMAND")
        sub = groups[group].add_parser(
            last,
            help=command.does,
            description=f"{command.does[0].upper()}{command.does[1:]}.",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=command.run, parser=sub)
        for argument in (*command.arguments, QUIET):
            sub.add_argument(*argument.names, **argument.settings)
    return parser


def _parse(arguments: Sequence[str] | None) -> Namespace:
    options, rest = _parser().parse_known_args(arguments)
    # argparse takes no positional after an option, as in `train CONFIG --resume optim.lr=1e-3`.
    unknown = [a for a in rest if a.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        options.parser.error(f"unknown argument {unknown[0]!r}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


# ----------------------------------------------------------------------- running a command


def _run_and_record(options: Namespace) -> str | Iterable[str]:
    """Run a command so that torchrun's report shows the error of the process that failed first.

    As soon as one process has left, torchrun sends the others SIGTERM; one that is leaving with an
    error ignores it and so keeps its exit status.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        answer: str | Iterable[str] = options.run(options)
    except OtherRankError:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    except MinillamaError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            raise error.with_traceback(None) from None  # a user's error is in the line alone
        except MinillamaError:
            handler.record_exception(error)
            raise
    except Exception as error:
        handler.record_exception(error)
        raise
    return answer


def _write(text: str) -> None:
    """Write to stdout at once; raises :class:`_OutputError` where it takes no more."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        raise _OutputError from error


class _OutputError(Exception):
    """Writing to stdout failed; the cause is an OSError."""


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
        answer = options.run(options) if not launch.by_torchrun() else _run_and_record(options)
        for text in [f"{answer}\n"] if isinstance(answer, str) and answer else answer:
            _write(text)
    except OtherRankError as error:  # the other process prints it
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
    except _OutputError as error:
        return _stdout_failed(error.__cause__)
    except SystemExit as error:
        print(
            f"minillama: {options.command} did not finish: a plugin or a library called "
            f"sys.exit({error.code if error.code is not None else ''})",
            file=sys.stderr,
        )
        return 1
    return 0


def _stdout_failed(error: BaseException | None) -> int:
    """Return the exit status, with a line unless the reader has left, as in ``| head``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer
    if isinstance(error, BrokenPipeError):
        return 0
    print(f"minillama: the output cannot be written: {error}", file=sys.stderr)
    return 1


def _protect_output() -> None:
    """Make writing to stderr never fail, and to stdout not for a character it cannot encode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = launch.SafeStream(stderr)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and ignore further ones while the program ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def entry_point(*command: str) -> None:
    """Run ``command``, if any, with the arguments of the process, and exit with its status."""
    launch.open_missing_streams()
    _protect_output()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        try:
            status: Any = main([*command, *sys.argv[1:]])
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # only leaving is left to do
    except KeyboardInterrupt:
        status = InterruptedRunError.exit_status
    except SystemExit as left:  # argparse, after --help or a wrong argument
        status = left.code
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError as error:
            status = status or _stdout_failed(error)
    sys.exit(status)
