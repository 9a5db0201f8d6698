import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.jsonl import parse_jsonl
from training.data.raw import Wanted


def parsed(*lines, scalars=("a",), lists=()):
    data = np.frombuffer(bytearray(b"\n".join(lines)), np.uint8)
    return parse_jsonl(data, piece=0, first_line=1, wanted=Wanted(scalars, lists))


def texts(raw, name):
    column = raw.scalars[name]
    return [column.data[s:e].tobytes().decode() if s >= 0 else None for s, e in zip(column.starts, column.ends, strict=True)]


def items(raw, name):
    column = raw.lists[name]
    values = [column.data[s:e].tobytes().decode() if s >= 0 else None for s, e in zip(column.starts, column.ends, strict=True)]
    return [values[a:b] for a, b in zip(column.offsets, column.offsets[1:], strict=False)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"a": 1}', "1"),
        (b'{"a":18446744073709551615}', "18446744073709551615"),
        (b'{"a":1.50e3}', "1.50e3"),
        (b'{"a":"007"}', "007"),
        (b'{"a":"tab\\tquote\\"\\u00e9"}', 'tab\tquote"é'),
        (b'{"a":"\\ud83d\\ude00"}', "😀"),
        ('{"a":"日本"}'.encode(), "日本"),
        (b'{"a":true}', "true"),
        (b'{"a":null}', None),
        (b'{"b":1}', None),
        (b"{}", None),
        (b'{"a":1,"a":2}', "2"),
        (b' {"b":{"a":3,"c":[1,{"d":[]}]},"a" : 4 } ', "4"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
    ],
)
def test_values_keep_their_text(line, text):
    raw = parsed(line)
    assert raw.faults.found() == []
    assert texts(raw, "a") == [text]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "bad json"),
        (b'{"a":1', "bad json"),
        (b'{"a":1,}', "bad json"),
        (b'{"a":01}', "bad json"),
        (b'{"a":+1}', "bad json"),
        (b'{"a":.5}', "bad json"),
        (b'{"a" 1}', "bad json"),
        (b"{'a':1}", "bad json"),
        (b'{"a":"\\x"}', "bad json"),
        (b'{"a":"\x01"}', "bad json"),
        (b'{"a":1}{"a":2}', "bad json"),
        (b"[1]", "bad json"),
        (b"3", "bad json"),
        (b'{"a":"\\ud800"}', "bad json"),
        (b'{"b":' + b"[" * 65 + b"]" * 65 + b"}", "bad json"),
        (b'{"a":"\xff"}', "undecodable"),
        (b'{"a":[1]}', "nested value"),
        (b'{"a":{}}', "nested value"),
    ],
)
def test_lines_that_do_not_fit_are_faults(line, reason):
    raw = parsed(b'{"a":1}', b"", line)
    assert [(row, why) for row, why, _ in raw.faults.found()] == [(1, reason)]
    assert raw.lines.tolist() == [1, 3]


@pytest.mark.parametrize("key", ["é", "Größe/1", 'quo"te', "back\\slash"])
def test_keys_are_found_however_they_are_escaped(key):
    escaped = json.dumps({key: 1})
    forms = [json.dumps({key: 1}, ensure_ascii=False), escaped, escaped.replace("/", "\\/")]
    raw = parsed(*(form.encode() for form in forms), scalars=(key,))
    assert texts(raw, key) == ["1", "1", "1"]


def test_lists_give_their_plain_values_and_strings_stay_whole():
    lines = [b'{"t":["a", "b\\n", 3, null, true]}', b'{"t":[]}', b'{"t":"a|b"}', b"{}", b'{"t":[[1]]}', b'{"t":{}}', b'{"t":7}']
    raw = parsed(*lines, scalars=(), lists=("t",))
    assert items(raw, "t")[:4] == [["a", "b\n", "3", None, "true"], [], [], []]
    assert texts(raw, "t")[2:4] == ["a|b", None]
    assert texts(raw, "t")[6] == "7"
    assert [(row, why) for row, why, _ in raw.faults.found()] == [(4, "nested value"), (5, "nested value")]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.data())
@settings(deadline=None, max_examples=200)
def test_accepts_exactly_what_python_accepts(value, ascii_only, data):
    text = json.dumps({"a": 1, "k": value}, ensure_ascii=ascii_only)
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.sampled_from(["", "{", "}", "[", "]", ",", ":", '"', "0", "e", "\\", " "])) + text[place + 1 :]
    try:
        sound = isinstance(json.loads(changed), dict)
        changed.encode()
    except ValueError:
        sound = False
    raw = parsed(changed.encode("utf-8", "replace"), scalars=("zzz",))
    if "\n" not in changed and "\r" not in changed and changed.strip():
        assert (raw.faults.found() == []) == sound
