"""What real logs do to a parser: each case with the exact records and dead letters that must come out."""

import gzip

import pyarrow as pa
import pyarrow.parquet
import pytest

from training.data import lines
from training.data.sources import find_files, open_sources, plan_chunks
from training.errors import SourceError

HEAD = b"y,c\n"
CASES = {
    "plain": (HEAD + b"1,a\n0,b\n", {}, [(1, "a"), (0, "b")], []),
    "no newline at the end": (HEAD + b"1,a\n0,b", {}, [(1, "a"), (0, "b")], []),
    "crlf": (b"y,c\r\n1,a\r\n0,b\r\n", {}, [(1, "a"), (0, "b")], []),
    "cr only": (b"y,c\r1,a\r0,b\rx,c\r", {}, [(1, "a"), (0, "b")], [(4, "label not understood")]),
    "crlf inside an lf file": (HEAD + b"1,a\r\n0,b\nx,c\r\n", {}, [(1, "a"), (0, "b")], [(4, "label not understood")]),
    "blank lines count but are no records": (HEAD + b"\n1,a\n  \n\r\nx,b\n\n", {}, [(1, "a")], [(6, "label not understood")]),
    "byte order mark": (b"\xef\xbb\xbf" + HEAD + b"1,a\n", {}, [(1, "a")], []),
    "blanks around fields": (b" y , c \n 1 , a \n0,\tb\n", {}, [(1, "a"), (0, "b")], []),
    "blanks kept": (HEAD + b"1, a \n", {"strip_whitespace": False}, [(1, " a ")], []),
    "missing values": (HEAD + b"1,?\n0,\n1,NA\n0,\\N\n1,null\n", {}, [(1, None), (0, None), (1, None), (0, None), (1, None)], []),
    "own missing values": (HEAD + b"1,-1\n0,?\n", {"missing_values": ["-1"]}, [(1, None), (0, "?")], []),
    "rows of only commas": (HEAD + b",\n1,a\n,,\n", {}, [(1, "a")], [(2, "label missing"), (4, "label missing")]),
    "too few and too many fields": (HEAD + b"1\n1,a,b\n0,b\n", {}, [(0, "b")], [(2, "field count"), (3, "field count")]),
    "trailing delimiter in every line": (b"y,c,\n1,a,\n0,b,\n", {}, [(1, "a"), (0, "b")], []),
    "trailing delimiter in records only": (HEAD + b"1,a,\n0,b\n", {}, [(1, "a"), (0, "b")], []),
    "two trailing delimiters": (HEAD + b"1,a,,\n", {}, [], [(2, "field count")]),
    "leading zeros and long ids": (
        HEAD + b"1,007\n0,18446744073709551615\n1,7X\n",
        {},
        [(1, "007"), (0, "18446744073709551615"), (1, "7X")],
        [],
    ),
    "quoted delimiter": (HEAD + b'1,"a,b"\n0,"c"\n', {}, [(1, "a,b"), (0, "c")], []),
    "quoted newline": (HEAD + b'1,"a\nb\r\nc"\nx,d\n', {}, [(1, "a\nb\r\nc")], [(5, "label not understood")]),
    "doubled quotes": (HEAD + b'1,"say ""hi"""\n0,""\n', {}, [(1, 'say "hi"'), (0, None)], []),
    "tripled quotes": (HEAD + b'1,"""id7"""\n', {}, [(1, '"id7"')], []),
    "quote inside a field": (HEAD + b'1,5" disk\n0,a"b"c\n', {}, [(1, '5" disk'), (0, 'a"b"c')], []),
    "quote after blanks": (HEAD + b'1, "a, b" \n', {}, [(1, "a, b")], []),
    "text after a quote": (HEAD + b'1,"a"b\n0,c\n', {}, [(0, "c")], [(2, "text after quote")]),
    "unclosed quote": (HEAD + b'1,"a\n0,b\n1,c\n', {}, [(0, "b"), (1, "c")], [(2, "unterminated quote")]),
    "quoting off": (HEAD + b'1,"a\n0,b"\n', {"quoting": False}, [(1, '"a'), (0, 'b"')], []),
    "quoted header": (b'"y","c"\n1,a\n', {}, [(1, "a")], []),
    "utf-8 text": (HEAD + "1,Amélie 日本\n".encode(), {}, [(1, "Amélie 日本")], []),
    "bytes that are no utf-8": (HEAD + b"1,caf\xe9\n0,b\n", {}, [(0, "b")], [(2, "undecodable")]),
    "latin-1": (HEAD + b"1,caf\xe9\n", {"encoding": "latin-1"}, [(1, "café")], []),
    "long delimiter": (b"y::c\n1::a:b\n0::\n", {"delimiter": "::"}, [(1, "a:b"), (0, None)], []),
    "long delimiter, quoted": (b'y::c\n1::"a::b"\n', {"delimiter": "::"}, [(1, "a::b")], []),
    "blank as delimiter": (b"y c\n1 a\n0 \n", {"delimiter": " "}, [(1, "a"), (0, None)], []),
    "comma and blank": (b"1, a\n0, b\n", {"header": False, "columns": ["y", "c"]}, [(1, "a"), (0, "b")], []),
    "no header": (b"1,a\n0,b\n", {"header": False, "columns": ["y", "c"]}, [(1, "a"), (0, "b")], []),
    "a header all the same": (b"y,c\n1,a\n", {"header": False, "columns": ["y", "c"]}, [(1, "a")], []),
    "labels": (
        HEAD + b"1.0,a\n0e3,b\n2,c\n-1,d\ninf,e\ntrue,f\n",
        {},
        [(1, "a"), (0, "b"), (1, "f")],
        [(n, "label not understood") for n in (4, 5, 6)],
    ),
    "declared names for a broken header": (b"\xfe\xfey,k\n1,a\n", {"columns": ["y", "c"]}, [(1, "a")], []),
    "nul bytes": (HEAD + b"1,a\0b\n", {}, [(1, "a\0b")], []),
    "columns in another order, and more of them": (b"z,c,x,y\n9,a,9,1\n", {}, [(1, "a")], []),
    "tsv": (b"y\tc\n1\ta,b\n0\t\n", {"format": "tsv"}, [(1, "a,b"), (0, None)], []),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_text_files_give_exactly_these_records_and_dead_letters(case, packed, configure, parse):
    content, settings, good, dead = CASES[case]
    name = "log.txt.gz" if packed else "log.txt"
    config = configure({name: gzip.compress(content) if packed else content}, data=settings)
    assert parse(config) == (good, [(name, line, reason) for line, reason in dead])


@pytest.mark.parametrize("case", CASES)
def test_a_chunk_per_record_changes_nothing(case, configure, parse, monkeypatch):
    content, settings, good, dead = CASES[case]
    config = configure({"log.txt": content}, data=settings)
    tiny = config.model_copy(update={"data": config.data.model_copy(update={"chunk_bytes": 1})})
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 3)
    assert parse(tiny) == (good, [("log.txt", line, reason) for line, reason in dead])


def test_criteo_lines_keep_blanks_negatives_and_trailing_tabs(configure, parse):
    content = b"0\t-1\t\t68fd1e64\t\n1\t-2\t3\t\t80e26c9b\n0\t\t\t\t\n"
    columns = ["y", "i1", "i2", "c", "d"]
    dense = [{"name": "i1"}, {"name": "i2"}]
    schema = {"dense": dense, "categorical": [{"name": "c"}, {"name": "d"}]}
    config = configure({"day_0": content}, data={"format": "tsv", "header": False, "columns": columns}, schema=schema)
    assert parse(config)[0] == [(0, -1.0, None, "68fd1e64", None), (1, -2.0, 3.0, None, "80e26c9b"), (0, None, None, None, None)]


def test_avazu_hours_long_ids_and_a_header_in_one_file_only(configure, parse):
    files = {"a.csv": b"id,y,hour,c\n10000371904215119486,1,14102100,-1\n", "b.csv": b"9,0,14102101,7\n8,1,1410210,7\n"}
    schema = {"time": {"column": "hour", "format": "%y%m%d%H"}, "categorical": [{"name": "c"}, {"name": "id"}]}
    good, dead = parse(configure(files, schema=schema))
    assert good == [(1, 1413849600, "-1", "10000371904215119486"), (0, 1413853200, "7", "9")]
    assert dead == [("b.csv", 2, "time not understood")]


def test_with_declared_names_only_the_same_header_is_skipped_in_later_files(configure, parse):
    files = {"a.csv": b"label,id\n1,a\n", "b.csv": b"0,b\n", "c.csv": b"label,id\n1,c\n"}
    assert parse(configure(files, data={"columns": ["y", "c"]})) == ([(1, "a"), (0, "b"), (1, "c")], [])


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (b"a|b|c", ["a", "b", "c"]),
        (b"", []),
        (b"a", ["a"]),
        (b"a||b|", ["a", "b"]),
        (b" a | b ", ["a", "b"]),
        (b"?", []),
        (b"|", []),
        (b"a|NA", ["a"]),
    ],
)
def test_multi_valued_text_is_cut_at_its_separator(text, ids, configure, parse):
    config = configure({"log.csv": HEAD + b"1," + text + b"\n"}, schema={"categorical": [{"name": "c", "separator": "|"}]})
    assert parse(config) == ([(1, ids)], [])


def test_genres_separated_by_blanks(configure, parse):
    config = configure({"log.csv": HEAD + b"1,Drama  Sci-Fi \n"}, schema={"categorical": [{"name": "c", "separator": " "}]})
    assert parse(config)[0] == [(1, ["Drama", "Sci-Fi"])]


def test_numbers_and_times_that_do_not_fit_are_dead_letters(configure, parse):
    content = b"y,c,t,x\n1,a,5,nan\n1,b,6,1e999\n1,c,7,2x\n1,d,,3\n1,e,never,3\n0,f,8,4.5\n"
    schema = {"time": {"column": "t"}, "dense": [{"name": "x"}]}
    good, dead = parse(configure({"log.csv": content}, schema=schema))
    assert good == [(1, 5, None, "a"), (0, 8, 4.5, "f")]
    assert [(line, reason) for _, line, reason in dead] == [
        (3, "number not finite"),
        (4, "number not understood"),
        (5, "time missing"),
        (6, "time not understood"),
    ]


def test_a_label_with_a_trailing_dot_is_another_text(configure, parse):
    content = b"y,c\n>50K,a\n>50K.,b\n?,c\n"
    config = configure({"log.csv": content}, schema={"label": {"column": "y", "positive": [">50K"]}})
    assert parse(config) == ([(1, "a"), (0, "b")], [("log.csv", 4, "label missing")])


def test_a_label_threshold(configure, parse):
    config = configure({"log.csv": b"y,c\n3.5,a\n4,b\n5,c\nx,d\n"}, schema={"label": {"column": "y", "threshold": 4}})
    assert parse(config) == ([(0, "a"), (1, "b"), (1, "c")], [("log.csv", 5, "label not understood")])


def test_a_file_with_267_columns(configure, parse):
    names = ["y", "c", *(f"f{i}" for i in range(265))]
    content = ",".join(names) + "\n" + ",".join(["1", "a"] + ["0"] * 265) + "\n"
    assert parse(configure({"log.csv": content.encode()})) == ([(1, "a")], [])


def test_jsonl_sessions_with_nested_events(configure, parse):
    content = b'{"y":1,"c":12345678901234567890,"events":[{"t":1}],"tags":["a",7]}\n{"y":true,"tags":"a|b"}\n\n{"y":0,"c":["x"]}\n{"y":0\n'
    schema = {"categorical": [{"name": "c"}, {"name": "tags", "separator": "|"}]}
    good, dead = parse(configure({"log.jsonl": content}, data={"format": "jsonl"}, schema=schema))
    assert good == [(1, "12345678901234567890", ["a", "7"]), (1, None, ["a", "b"])]
    assert dead == [("log.jsonl", 4, "nested value"), ("log.jsonl", 5, "bad json")]


def parquet_bytes(table, **options):
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def test_parquet_values_become_their_text(configure, parse):
    table = pa.table(
        {
            "y": pa.array([1, 0, None, 1], pa.int8()),
            "c": pa.array([2**64 - 1, 7, 8, None], pa.uint64()),
            "f": pa.array([1.0, 0.5, 3.0, None]),
            "d": pa.array(["x", None, "z", "é"]).dictionary_encode(),
            "b": pa.array([True, False, None, True]),
            "t": pa.array([0, 1, 2, 3_000], pa.timestamp("ms")),
            "tags": pa.array([["a", "b"], None, [], ["c", None]]),
        }
    )
    schema = {
        "time": {"column": "t", "format": "iso8601"},
        "dense": [{"name": "x", "column": "f"}],
        "categorical": [{"name": n} for n in "cfdb"] + [{"name": "tags", "separator": ","}],
    }
    good, dead = parse(configure({"log.parquet": parquet_bytes(table, row_group_size=3)}, data={"format": "parquet"}, schema=schema))
    assert good == [
        (1, 0, 1.0, "18446744073709551615", "1", "x", "true", ["a", "b"]),
        (0, 0, 0.5, "7", "0.5", None, "false", []),
        (1, 3, None, None, None, "é", "true", ["c"]),
    ]
    assert dead == [("log.parquet", 3, "label missing")]


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"a.csv": b"x,c\n1,a\n"}, {}, r"a.csv: no column 'y'; columns present: 'x', 'c'"),
        ({"a.csv": b"\xff\xfey,c\n1,a\n"}, {}, r"no column 'y'; columns present: .*xff.*xfey', 'c'"),
        ({"a.csv": b"\xff\xfey\0,\0"}, {}, "is UTF-16; convert it"),
        ({"a.csv": b""}, {}, "no records in 1 file"),
        ({"a.csv": b"y,c\n"}, {}, "no records"),
        ({"a.csv": b"\n\n\r\n"}, {}, "no records"),
        ({"a.csv": b"y,c,y\n1,a,1\n"}, {}, "column 'y' occurs twice"),
        ({"a.csv.gz": b"y,c\n1,a\n"}, {}, "called .gz but is not a gzip file"),
        ({"a.csv": b"y;c\n1;a\n"}, {}, r"the header looks separated by ';': set data.delimiter: ';'"),
        ({"a.csv": b"y\tc\n1\ta\n"}, {}, r"the header looks separated by '\\t': set data.format: tsv"),
        ({"a.csv": b"y,c_\n1,a\n"}, {}, r"no column 'c' \(did you mean 'c_'\?\)"),
        ({"a.csv": b"PAR1\x15\x04,\x15\n\x00\x01,b\n"}, {}, r"does not look like text: is data.format right"),
        ({"a.csv": b"1,a\n"}, {"header": False, "columns": ["y", "d"]}, r"no column 'c'; columns present \(data.columns\)"),
        ({"a.csv": b"y,c\n1,a\n", "b.csv": b"y,d\n1,a\n"}, {}, "b.csv: no column 'c'"),
        ({"a.csv": b"y,c\n1,a\n", "b.csv": b"1,2,3\n"}, {}, "b.csv: no column 'y', 'c'"),
        ({"a.csv": b"y,c,d\n1,a,b\n"}, {"columns": ["y", "c"]}, "the header has 3 fields, data.columns 2 names"),
        ({"a.parquet": b"PAR1nonsense"}, {"format": "parquet"}, "cannot be read as Parquet"),
        ({"a.parquet": parquet_bytes(pa.table({"y": [1]}))}, {"format": "parquet"}, "no column 'c'; columns present: 'y'"),
    ],
)
def test_files_that_cannot_be_used_are_refused(files, settings, message, configure, parse):
    with pytest.raises(SourceError, match=message):
        parse(configure(files, data=settings))


def test_a_truncated_gzip_file_is_refused(configure, parse):
    packed = gzip.compress(HEAD + b"1,abcdefghij\n" * 5000)
    with pytest.raises(SourceError, match="damaged gzip file"):
        parse(configure({"log.csv.gz": packed[:-20]}))


def test_gzip_members_one_after_another_are_one_file(configure, parse):
    assert parse(configure({"log.csv.gz": gzip.compress(HEAD + b"1,a\n") + gzip.compress(b"0,b\n")}))[0] == [(1, "a"), (0, "b")]


def test_a_line_without_end_is_refused(configure, parse, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 512)
    with pytest.raises(SourceError, match="line 3 is longer than"):
        parse(configure({"log.csv": HEAD + b"1,a\n" + b"x" * 5000}))


def test_a_quote_that_is_never_closed_costs_one_line_of_a_big_file(configure, parse):
    rows = lines.MAX_QUOTED_BYTES // 8 + 50_000
    content = HEAD + b'1,"a\n' + b"0,abcde\n" * rows
    good, dead = parse(configure({"log.csv": content}, data={"chunk_bytes": 200_000}))
    assert (len(good), dead) == (rows, [("log.csv", 2, "unterminated quote")])


def test_patterns_are_read_in_order_and_each_file_once(tmp_path):
    for name in ("b.csv", "a.csv", "c.csv"):
        (tmp_path / name).write_bytes(b"")
    found = find_files([str(tmp_path / "b*"), str(tmp_path / "*.csv")])
    assert [path.name for path in found] == ["b.csv", "a.csv", "c.csv"]


@pytest.mark.parametrize(
    ("pattern", "message"), [("none*.csv", "no file matches"), (".", "only a directory"), ("gs://x/*.csv", "mount the bucket")]
)
def test_patterns_without_a_file_are_refused(pattern, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        find_files([pattern if "://" in pattern else str(tmp_path / pattern)])


def test_chunks_cover_a_file_in_whole_records(configure):
    content = HEAD + b"".join(b'1,"%d\n%s"\n' % (i, b"z" * (i % 90)) for i in range(500))
    config = configure({"log.csv": content}, data={"chunk_bytes": 1024})
    from training.data.raw import Wanted

    (file,) = open_sources(find_files(config.data.paths), config.data, Wanted.by(config))
    chunks = list(plan_chunks(file, config.data))
    assert len(chunks) > 10
    assert [chunk.start for chunk in chunks] == [4, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == len(content)
    for chunk in chunks:
        assert content[chunk.start : chunk.start + 3] == b'1,"'
        assert chunk.first_line == 1 + content[: chunk.start].count(b"\n")
