"""`weft complete`: a script by which a shell completes commands, keys and their choices. Imports no torch."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.commands.command import Command
from weft.commands.console import HELP, print_result, wants_help
from weft.errors import Fault, UserError

NAME = "weft complete"
USAGE = "bash | zsh"
LINE = "print a script that completes commands and keys in a shell"
HELP_TEXT = f"""usage: {NAME} {USAGE}

{LINE}

  mkdir -p ~/.local/share/bash-completion/completions
  weft complete bash > ~/.local/share/bash-completion/completions/weft

  weft complete zsh > ~/.zfunc/_weft    # with fpath+=~/.zfunc before compinit

It knows the commands and keys of this version: write it again after an update."""
FLAG = re.compile(r"^[│ ] +(--[\w.]+)(?: \{([\w,. -]+)\})?", re.MULTILINE)
WITH_KEYS_OF_A_RUN = "eys of `weft train` as well"
"""What the help of a command says that takes the keys of a run, too; some begin a sentence with it."""
BASH = """\
_weft() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} choices=
  if [ "$COMP_CWORD" -eq 1 ]; then choices="{commands}"
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
    if [ -z "$choices" ]; then case "${{COMP_WORDS[1]}} $cur" in
{keys}
    esac; fi
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$cur"))
}}
complete -o bashdefault -o default -F _weft weft"""
ZSH = """\
#compdef weft
_weft() {{
  local cur=$words[CURRENT] choices=
  if (( CURRENT == 2 )); then choices="{commands}"
  else
    case "$words[2] $words[CURRENT-1]" in
{values}
    esac
    if [[ -z $choices ]]; then case "$words[2] $cur" in
{keys}
    esac; fi
  fi
  if [[ -n $choices ]]; then compadd -- ${{=choices}}; else _files; fi
}}
_weft "$@\""""
SCRIPTS: Mapping[str, str] = {"bash": BASH, "zsh": ZSH}


@dataclass(frozen=True)
class CompletedCommand:
    """What follows the name of a command.

    Attributes:
        choices: flag -> its values; () where they are not a few words.
    """

    name: str
    choices: Mapping[str, tuple[str, ...]]


def complete(words: Sequence[str], commands: Mapping[str, Command]) -> int:
    """Print the script of a shell.

    Args:
        commands: all commands by name.

    Raises:
        UserError: no shell is named that there is a script for.
    """
    if wants_help(words):
        return print_result(HELP_TEXT)
    if len(words) != 1 or words[0] not in SCRIPTS:
        got = " ".join(words) or "nothing"
        need = f"one of {', '.join(SCRIPTS)}"
        raise UserError(Fault(NAME, "takes a shell", got=got, need=need, fix=f"{NAME} bash"))
    return print_result(script(words[0], completed(commands)))


def completed(commands: Mapping[str, Command]) -> list[CompletedCommand]:
    """The commands with the flags that their help names."""
    texts = {name: _help_of(command) for name, command in commands.items()}
    found = {name: _choices(text) for name, text in texts.items()}
    for name, text in texts.items():
        if WITH_KEYS_OF_A_RUN in " ".join(text.split()):
            found[name] = {**found["train"], **found[name]}
    return [CompletedCommand(name, choices) for name, choices in found.items()]


def _help_of(command: Command) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(UserError):
        command.run([HELP[-1]])
    return shown.getvalue()


def _choices(text: str) -> dict[str, tuple[str, ...]]:
    return {flag: tuple(values.split(",")) if values else () for flag, values in FLAG.findall(text)}


def script(shell: str, commands: Sequence[CompletedCommand]) -> str:
    """The script of a shell."""
    return SCRIPTS[shell].format(
        commands=" ".join(command.name for command in commands),
        values="\n".join(_value_cases(commands)),
        keys="\n".join(_key_cases(commands)),
    )


def _value_cases(commands: Sequence[CompletedCommand]) -> Iterator[str]:
    for command in commands:
        for flag, values in command.choices.items():
            if values:
                yield f'    "{command.name} {flag}") choices="{" ".join(values)}" ;;'


def _key_cases(commands: Sequence[CompletedCommand]) -> Iterator[str]:
    for command in commands:
        if command.choices:
            yield f'    "{command.name} -"*) choices="{" ".join(command.choices)}" ;;'
