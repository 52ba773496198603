"""Every error that minillama raises on purpose, and the exit status a command ends with.

    MinillamaError                      1    any other error
    ├── ConfigError (a ValueError)      2    the config or the arguments are wrong
    │   └── UnknownNameError            2    a name that no registry holds
    ├── DataError                       2    the user's text cannot be used as it is
    │   └── SourceUnreachableError      1    the network fails, not the user
    ├── TokenizerError                  2    the vocabulary and the text do not fit
    ├── CheckpointError                 1    a checkpoint is damaged or does not match
    ├── RunFolderError                  1    the run folder cannot be written
    ├── RankLostError                   1    a process that trains with this one is gone
    ├── OtherRankError                  1    another rank raised; or the status of its error
    ├── CellsCrashedError               4    cells of an ablation crashed; the others are done
    ├── DivergedError                   3    loss or gradient is no longer finite
    └── InterruptedRunError             130  stopped by Ctrl-C or SIGTERM, after a clean save

A message is one sentence on what is wrong and where, and one on what to do.  An ``assert`` in this
package checks what only a bug in it could break; a user's error raises one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class MinillamaError(Exception):
    """The root of the tree; ``exit_status`` is what the command line ends with."""

    exit_status: ClassVar[int] = 1


@dataclass(frozen=True)
class FieldError:
    """One wrong entry of a config: its dotted path, the value found there and the rule it breaks.

    ``other`` is the path of the field that ``rule`` compares it with, if there is one.
    """

    path: str
    value: Any
    rule: str
    other: str = ""

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return f"{self.path} = {shown}: {self.rule}" if self.path else self.rule


class ConfigError(MinillamaError, ValueError):
    """The config or the arguments are wrong; ``field_errors`` lists every wrong entry."""

    exit_status = 2

    def __init__(self, message: str, field_errors: Sequence[FieldError] = ()) -> None:
        super().__init__(message)
        self.field_errors = tuple(field_errors)

    @classmethod
    def of(cls, where: str, errors: Sequence[FieldError]) -> ConfigError:
        """Build the error that reports all ``errors`` of the config ``where`` at once."""
        if len(errors) == 1:
            return cls(f"{where}: {errors[0]}", errors)
        lines = "\n".join(f"  {error}" for error in errors)
        return cls(f"{where}: {len(errors)} errors\n{lines}", errors)


class UnknownNameError(ConfigError):
    """A name that no registry holds."""


class DataError(MinillamaError):
    """The user's text cannot be used as it is.

    Args:
        message: what is wrong.
        field: the field or option that names the text, which the message then begins with.
    """

    exit_status = 2

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message, self.field = message, field


class SourceUnreachableError(DataError):
    """A hub or URL source cannot be reached."""

    exit_status = 1


class TokenizerError(MinillamaError):
    """The vocabulary and the text do not fit, or a tokenizer file is not one."""

    exit_status = 2


class CheckpointError(MinillamaError):
    """A checkpoint is damaged, incomplete or does not match the model it is loaded into."""


class RunFolderError(MinillamaError):
    """The run folder cannot be written, or its disk is full."""


class RankLostError(MinillamaError):
    """A process that trains together with this one is gone, or has not answered for too long."""


class OtherRankError(MinillamaError):
    """A process that trains together with this one has raised an error, which it prints itself.

    Args:
        message: the other's.
        exit_status: the other's, which is this one's too.
    """

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status  # type: ignore[misc]  # the one class where it varies


class CellsCrashedError(MinillamaError):
    """Cells of an ablation crashed; all others have ended, and the report exists if any has."""

    exit_status = 4


class DivergedError(MinillamaError):
    """Training stopped before an update because the loss or a gradient was not finite."""

    exit_status = 3


class InterruptedRunError(MinillamaError):
    """Training was stopped by Ctrl-C or SIGTERM; its state was saved first."""

    exit_status = 130


EXTRAS = {
    "jinja2": "report",
    "matplotlib": "report",
    "pandas": "report",
    "plotly": "report",
    "scipy": "report",
    "transformers": "hf",
    "tokenizers": "hf",
    "gguf": "gguf",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The extra of this package that installs each optional package."""


def missing_extra(package: str, what: str = "this", extra: str | None = None) -> ConfigError:
    """Return the error for ``what`` needing an optional ``package`` (default extra: EXTRAS')."""
    return ConfigError(
        f"{what} needs {package}; install it: pip install 'minillama[{extra or EXTRAS[package]}]'"
    )
