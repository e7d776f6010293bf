# SPDX-License-Identifier: Apache-2.0
"""The code-search set from made-up wheels and from a made-up installation."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paddle_infcl.data import code_search
from paddle_infcl.data.code_search import functions_of, installed_sources, main, make, wheel_sources
from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.data.rows import DataError
from paddle_infcl.evaluation.retrieval import RetrievalEvaluator

ROOT = Path(__file__).resolve().parents[2]


def function(name: str, doc: str) -> str:
    return f'def {name}(x):\n    """{doc}"""\n    y = x + 1\n    return {name}2(y)\n'


def module(tag: str, count: int) -> str:
    return "\n\n".join(function(f"{tag}_{i}", f"Adds {tag} number {i} to it.") for i in range(count))


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    path = folder / f"{name}-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}-1.5.dist-info/METADATA", f"Name: {name}\nVersion: 1.5\n")
    return str(path)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def only(source: str):
    return [(pair.query, pair.positive) for pair in functions_of(source, "pkg")]


def test_the_docstring_is_cut_out_and_its_first_paragraph_asks():
    source = '''
class A:
    @property
    async def f(self, x):
        """Does one thing
        and another.

        Args:
            x: a thing
        """

        y = 1  # kept
        def inner(z):
            \'\'\'Is inside the other one.\'\'\'
            a = z
            return a
        return inner
'''
    outer, inner = only(source)
    assert outer[0] == "Does one thing and another."
    assert outer[1] == (
        "async def f(self, x):\n    y = 1  # kept\n    def inner(z):\n"
        "        '''Is inside the other one.'''\n        a = z\n        return a\n    return inner"
    )
    assert inner == ("Is inside the other one.", "def inner(z):\n    a = z\n    return a")


@pytest.mark.parametrize(
    "source",
    [
        function("f", "Only three words."),
        function("f", "w " * 65),
        function("f", "Über four words long."),
        'def f():\n    """Has too few lines."""\n    return 1\n',
        'def f(): "Shares its line with code."; a = 1; b = 2\n',
        'def f():\n    "Shares its line with code."; a = 1\n    b = 2\n    return a\n',
        "def f():\n    x = 'no docstring at all'\n    y = 1\n    return x\n",
        'class A:\n    """A class is no function."""\n    a = 1\n    b = 2\n',
    ],
)
def test_what_is_left_out(source):
    assert only(source) == []


@pytest.mark.parametrize("words", [4, 64])
def test_limits_are_inside(words):
    assert only(function("f", "w " * words))[0][0] == " ".join("w" * words)


def test_functions_in_every_kind_of_block():
    body = function("f", "Stands in a block {}.").replace("\n", "\n    ")
    blocks = ["if a:\n    ", "try:\n    pass\nexcept E:\n    ", "try:\n    pass\nfinally:\n    ", "for a in b:\n    ",
              "with a:\n    ", "match a:\n  case 1:\n    ", "while a:\n    pass\nelse:\n    "]  # fmt: skip
    for number, block in enumerate(blocks):
        assert [q for q, _ in only(block + body.format(number))] == [f"Stands in a block {number}."]


def test_lines_are_counted_as_python_counts_them():
    source = "x = 1\n\x0c\ny = '\u2028'\r\n" + function("f", "Comes after a form feed.")
    assert only(source) == [("Comes after a form feed.", "def f(x):\n    y = x + 1\n    return f2(y)")]


def test_tests_vendored_code_and_ourselves_are_skipped(tmp_path):
    skipped = ["tests/a.py", "test/a.py", "_vendor/x/a.py", "vendored/a.py", "externals/a.py", "third_party/a.py",
               "conftest.py", "test_a.py", "a_test.py", "testing/a.py"]  # fmt: skip
    files = {f"pkg/{name}": module("skipped", 3) for name in skipped}
    files |= {"pkg/a.py": "x", "pkg/contest.py": "x", "pkg/data.txt": "x", "paddle_infcl/a.py": "x"}
    files |= {"__editable___a_finder.py": "x", "pkg-1.data/purelib/pkg/b.py": "x", "alone.py": "x"}
    sources = wheel_sources([wheel(tmp_path, "pkg", files)])
    assert sorted(sources.files) == ["alone", "pkg"]
    assert sorted(sources.files["pkg"]) == ["pkg/a.py", "pkg/b.py", "pkg/contest.py"]
    assert sources.versions["pkg"] == "pkg 1.5"


def build(folder: Path, **options):
    wheels = [
        wheel(folder, "one", {"one/a.py": module("alpha", 6), "one/broken.py": "def f(:"}),
        wheel(folder, "two", {"two/a.py": module("beta", 6) + function("again", "Adds alpha number 0 to it.")}),
        wheel(folder, "held", {"held/a.py": module("gamma", 8)}),
    ]
    arguments = {"wheels": wheels, "installed": False, "held_out": ["held"], "eval_queries": 3, "eval_corpus": 5}
    return make(str(folder / "out"), **{**arguments, **options})


def test_the_set(tmp_path):
    counts = build(tmp_path)
    out = tmp_path / "out"
    train = lines(out / "train.jsonl")
    # The docstring that occurs twice is gone from both packages.
    assert counts["train"] == len(train) == 5 + 6
    assert {row["package"] for row in train} == {"one", "two"}
    assert "Adds alpha number 0 to it." not in {row["query"] for row in train}
    assert counts["held_out"] == 8 and counts["files_not_parsed"] == 1
    assert counts["packages"]["held"] == {"pairs": 8, "split": "held out", "from": "held 1.5"}
    assert json.loads((out / "counts.json").read_text()) == counts
    assert counts["eval"] == {"queries": 3, "corpus": 5}
    pairs, queries, corpus = (lines(out / "eval" / f"{name}.jsonl") for name in ("pairs", "queries", "corpus"))
    texts = {row["_id"]: row["text"] for row in corpus}
    judged = [line.split("\t") for line in (out / "eval" / "qrels.tsv").read_text().splitlines()]
    assert judged[0] == ["query-id", "corpus-id", "score"]
    asked = {row["_id"]: row for row in queries}
    found = [(asked[q]["text"], texts[p], asked[q]["package"]) for q, p, _ in judged[1:]]
    assert found == [(row["query"], row["positive"], row["package"]) for row in pairs]
    assert len(texts) == len(set(texts.values())) == 5


def test_it_can_be_trained_on_and_evaluated(tmp_path):
    build(tmp_path)
    assert len(load_pairs(tmp_path / "out")) == 11
    folder = tmp_path / "out" / "eval"
    one = RetrievalEvaluator.from_files(*(folder / f for f in ("queries.jsonl", "corpus.jsonl", "qrels.tsv")))
    two = RetrievalEvaluator.from_pairs(folder / "pairs.jsonl", corpus=folder / "corpus.jsonl", group_field="package")
    assert len(one.query_ids) == len(two.query_ids) == 3
    assert len(one.corpus_ids) == len(two.corpus_ids) == 5


def test_the_same_again_and_another_seed(tmp_path):
    def files(seed):
        build(tmp_path, seed=seed)
        return {p.name: p.read_text() for p in sorted((tmp_path / "out").rglob("*.*")) if p.name != "counts.json"}

    first = files(0)
    assert files(0) == first
    other = files(1)
    assert other["train.jsonl"] == first["train.jsonl"] and other["pairs.jsonl"] != first["pairs.jsonl"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_queries": 9}, r"8 pairs of held for 9 queries: not enough.*There are held, one, two"),
        ({"held_out": []}, "0 pairs of no package"),
        ({"held_out": ["one", "two", "held"]}, "0 pairs to train on"),
        ({"wheels": ["absent.whl"]}, "not a wheel"),
        ({"wheels": [__file__]}, "not a wheel"),
    ],
)
def test_errors(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        build(tmp_path, **options)


def install(folder: Path, name: str, files: dict[str, str], *, record: bool = True) -> None:
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 2.0\n")
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    if record:
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in ["../../bin/x.py", *files]))


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Only what a test installs is installed."""
    site = tmp_path / "site"
    real = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: real(path=[str(site)]))
    return site


def test_installed_packages(tmp_path, environment, monkeypatch, caplog):
    monkeypatch.setattr("paddle_infcl.log.logger.propagate", True)
    caplog.set_level("INFO")
    install(environment, "pkg", {"pkg/a.py": module("delta", 4), "pkg/gone.py": "x", "pkg/data.bin": "x"})
    install(environment, "held", {"held/a.py": module("gamma", 4)})
    install(environment, "bare", {"bare/a.py": module("epsilon", 4)}, record=False)
    (environment / "pkg/gone.py").unlink()
    assert installed_sources().versions == {"pkg": "pkg-dist 2.0", "held": "held-dist 2.0"}
    assert "without a list of files, not used: bare-dist 2.0" in caplog.text
    newer = wheel(tmp_path, "pkg", {"pkg/a.py": module("zeta", 2)})
    options = {"held_out": ["held", "absent"], "eval_queries": 2}
    assert make(str(tmp_path / "out"), **options)["train"] == 4
    assert "held-out packages that are not here: absent" in caplog.text
    counts = make(str(tmp_path / "out"), wheels=[newer], **options)
    assert counts["packages"]["pkg"] == {"pairs": 2, "split": "train", "from": "pkg 1.5"}


def test_command_line(tmp_path, environment, capsys):
    install(environment, "pkg", {"pkg/a.py": module("delta", 4)})
    held = wheel(tmp_path, "held", {"held/a.py": module("gamma", 4)})
    out = str(tmp_path / "out")
    options = ["--output_dir", out, "--held_out", "held", "--wheels", held, "--eval_corpus", "4"]
    main([*options, "--eval_queries", "2"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["package", "pairs", "split"]
    assert "4 pairs to train on, 4 held out; 2 queries against 4 functions" in printed
    with pytest.raises(SystemExit) as caught:
        main([*options, "--only_wheels"])
    assert caught.value.code == 2
    assert "not enough" in capsys.readouterr().err


def test_this_environment_gives_a_set():
    # The real thing, one package of it: numpy is always here.
    files = installed_sources().files
    assert "paddle_infcl" not in files
    pairs = [
        pair
        for path in ("numpy/lib/function_base.py", "numpy/ma/core.py", "numpy/lib/_function_base_impl.py")
        if path in files["numpy"]
        for pair in functions_of(files["numpy"][path]().decode(), "numpy")
    ]
    assert len(pairs) > 50
    assert all(pair.query.isascii() and '"""' not in pair.positive.split("\n")[0] for pair in pairs)
    assert set(code_search.HELD_OUT) & set(files)


@pytest.mark.parametrize("name", ["make_code_search", "make_wordnet"])
def test_scripts_start(name):
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--help"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and "--output_dir" in result.stdout
