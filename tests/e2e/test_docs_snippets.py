"""Every code block of the documentation runs as a reader runs it, or says why it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.snippets import ROOT, Reader, SnippetFailed, problems, read_blocks
from tests.support.spark_session import SETTINGS, skip_without_java, spark_environment

pytestmark = pytest.mark.slow

FOLDERS = ("bench", "deploy", "docs", "examples", "native")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md")))
)
# One after the other with one Spark session, because a start of Spark takes ten seconds.
SPARK_PAGES = ["docs/spark.md", "docs/pipelines.md", "docs/reconcile.md"]
OTHER_PAGES = [
    name
    for name in PAGES
    if name not in SPARK_PAGES and any(block.is_run for block in read_blocks(ROOT / name))
]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_page_can_be_run_or_says_why_not(name: str) -> None:
    assert not list(problems(ROOT / name))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHER_PAGES)
def test_a_page_works_for_a_reader(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.read(ROOT / name)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_pages_about_spark_work_for_a_reader(tmp_path: Path) -> None:
    skip_without_java()
    conf = tmp_path / "conf"
    conf.mkdir()
    defaults = "".join(f"{name} {value}\n" for name, value in SETTINGS.items())
    (conf / "spark-defaults.conf").write_text(defaults)
    environment = {**spark_environment(), "SPARK_CONF_DIR": str(conf)}
    directory = tmp_path / "reader"
    directory.mkdir()
    with Reader(directory, environment) as reader:
        for name in SPARK_PAGES:
            reader.read(ROOT / name)


# --- the reader itself ----------------------------------------------------------------------------


def write_page(directory: Path, *blocks: str) -> Path:
    page = directory / "page.md"
    page.write_text("# A page\n\n" + "\n".join(blocks))
    return page


def fenced(language: str, source: str, mark: str = "") -> str:
    return (f"<!-- {mark} -->\n" if mark else "") + f"```{language}\n{source}\n```\n"


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (fenced("", "escrowmq serve"), "unknown language ''"),
        (fenced("bash", "true"), "unknown language 'bash'"),
        (fenced("sh", "true", "not run"), "`not run` needs a text"),
        (fenced("text", "a picture", "endless: it is a picture"), "is never run"),
        (fenced("text", "1", "output"), "the block before this output is not run"),
        (fenced("python", "1", "skipped"), "unknown mark 'skipped'"),
        ("<!-- hidden: text\n1\n-->\n", "is for running"),
        ("<!-- not run: no reason -->\n\n" + fenced("sh", "true"), "directly before"),
        ("```sh\ntrue\n", "1 fences, but 0 blocks"),
    ],
)
def test_a_block_that_is_not_run_needs_a_reason(tmp_path: Path, block: str, problem: str) -> None:
    assert any(problem in text for text in problems(write_page(tmp_path, block)))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader of blocks that need no broker."""
    with Reader(tmp_path_factory.mktemp("reader"), needs_broker=False) as reader:
        yield reader


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (fenced("sh", "echo before; false"), "exit code 1:\nbefore"),
        (fenced("sh", "echo $undefined"), "unbound variable"),
        (fenced("python", "x = 1\nraise ValueError(x)"), 'page.md", line 5'),
        (fenced("python", "print(1)  # 2"), "'2' is not printed"),
        (fenced("python", "print(1)", "endless: 2"), "it ended by itself"),
        (fenced("sh", "echo 1", "endless: 2"), "it ended with exit code 0"),
        (fenced("sh", "echo 1 2 3") + fenced("text", "1 … 4", "output"), "it prints:\n1 2 3"),
    ],
)
def test_a_block_that_does_not_do_what_it_says_is_found(
    reader: Reader, tmp_path: Path, block: str, reason: str
) -> None:
    with pytest.raises(SnippetFailed, match=r"page\.md:") as failure:
        reader.read(write_page(tmp_path, block))
    assert reason in str(failure.value)


def test_the_blocks_of_a_page_share_names_and_files(reader: Reader, tmp_path: Path) -> None:
    page = write_page(
        tmp_path,
        fenced("python", "import asyncio\nname = await asyncio.sleep(0, 'lamp')"),
        fenced("text", "one", "file: numbers/a.txt"),
        fenced("text", "two", "append: numbers/a.txt"),
        "<!-- hidden: sh\necho three >> numbers/a.txt\n-->\n",
        fenced("sh", "exit 1", "not run: it fails"),
        fenced("python", "print(name, open('numbers/a.txt').read().split())  # lamp … 'three']"),
        fenced("sh", "cat numbers/a.txt  # a comment\necho 127.0.0.1:9876"),
        fenced("text", "one\n…three\n127.0.0.1:9876", "output"),
        fenced("python", "print('begin')\nawait asyncio.Event().wait()", "endless: begin"),
        fenced("python", "print(len(name))  # 4"),
    )
    assert not list(problems(page))
    reader.read(page)
