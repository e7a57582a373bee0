"""CSV as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.runtime.rows import BadData, Source, count, read


def test_a_csv_file_is_rows_of_texts_by_the_names_of_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1+1, in\nwords?",two\r\n\r\n2+2?,4\r\n')
    assert count(Source(str(file))) == (2, 2)
    found = list(read(Source(str(file))))
    assert [one.row for one in found] == [
        {"question": "1+1, in\nwords?", "answer": "two"},
        {"question": "2+2?", "answer": "4"},
    ]
    assert [one.number for one in found] == [3, 5], "the line on which it ends"
    assert [one.row["answer"] for one in read(Source(str(file), -1))] == ["4"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a,b\n1,2\n3\n", "line 3, has 1 values for 2 columns. Write a first line"),
        (b"a,a\n1,2\n", "line 1, does not name its columns"),
        (b"a,\n1,2\n", "line 1, does not name its columns"),
        (b"a\n\xff\n", "is not UTF-8 text"),
        (b'a\n"x"y\n', "line 2, is not CSV"),
    ],
)
def test_what_is_no_csv_is_refused_with_its_line(tmp_path: Path, text: bytes, why: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text)
    with pytest.raises(BadData, match=why):
        count(Source(str(file)))
