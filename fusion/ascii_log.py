"""Log lines in ASCII: a console that cannot write "−" or "·" (Windows, LC_ALL=C) would answer each line with a traceback.

Typography stays where a browser shows it. The filter sits on our logger, so that no call site has to think of it.
"""

import logging

PLAIN = str.maketrans({"−": "-", "–": "-", "·": "|", "×": "x", "…": "...", "≥": ">=", "²": "^2", "µ": "u", "“": '"', "”": '"', "’": "'"})


def ascii_line(text: str) -> str:
    return text.translate(PLAIN).encode("ascii", "backslashreplace").decode("ascii")


def in_ascii(record: logging.LogRecord) -> bool:
    """A filter that lets every record through, its words and its traceback in ASCII."""
    try:
        record.msg, record.args = ascii_line(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)  # formatters take it as it stands
        record.exc_text = record.exc_text and ascii_line(record.exc_text)
    except Exception:  # noqa: S110 an argument that has no text: logging says so itself, in a place where nothing depends on it
        pass
    return True


def install() -> None:
    logging.getLogger("flux_fast_path").addFilter(in_ascii)
