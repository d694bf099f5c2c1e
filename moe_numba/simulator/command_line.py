"""Command lines whose errors are one sentence, with the nearest name where one is wrong."""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence


class UserError(Exception):
    """An error that is printed as one sentence, without a traceback; exit code 2."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`; its commands are such parsers, too."""

    def error(self, message):
        raise UserError(f"{message}; see `{self.prog} --help`")


def parse(parser: Parser, commands: Mapping[str, Parser], arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line that begins with a command.

    Raises
    ------
    UserError
        A command or an option does not exist, or an argument is missing, wrong or one too many.
    """
    command = parser
    if arguments and not arguments[0].startswith("-"):
        check_name("command", arguments[0], commands)
        command = commands[arguments[0]]
    options, more = parser.parse_known_args(arguments)
    if more and not more[0].startswith("-"):
        raise UserError(f"{more[0]!r} is one argument too many; see `{command.prog} --help`")
    if more:
        check_name("option", more[0].partition("=")[0], {"--help", *re.findall(r"--[\w-]+", command.format_usage())})
    return options


def check_name(what: str, name: str, names: Iterable[str]) -> None:
    """Raise `UserError` for a name that does not exist, with those that do."""
    if name not in names:
        raise UserError(unknown(what, name, names))


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """Say that there is no such name, which one may be meant, and which there are."""
    names = sorted(names)
    close = [other for other in names if other.startswith(name)] or difflib.get_close_matches(name, names, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"there is no {what} {name!r}{meant}; there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
    )
