"""What the progress line says."""

import io

from kalman_attention._progress import Live, Progress


def test_share_rate_and_time_left():
    line = Progress("tokenising", 200_000_000).line(50_000_000, 25.0)
    assert line == "tokenising: 50.0 MB of 200.0 MB (25 %), 2.0 MB/s, 1:15 left"
    assert Progress("reading", None, "docs").line(1500, 1.0) == "reading: 1.5 k docs, 1.5 k docs/s"
    assert Progress("reading", None, "docs").line(15, 1.0) == "reading: 15 docs, 15 docs/s"


def test_an_earlier_run_does_not_count_for_the_rate():
    progress = Progress("tokenising", 1000)
    progress.update(500)
    assert ", 50 B/s, 0:08 left" in progress.line(600, 2.0)


def test_logs_get_lines_now_and_then_only():
    log = io.StringIO()
    progress = Progress("x", 10, file=log)
    for done in range(10):
        progress.update(done)
    assert log.getvalue() == ""
    progress.last -= 11
    progress.update(10, "3 shards")
    progress.close()
    assert log.getvalue().endswith("left, 3 shards\n")
    assert "\r" not in log.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_live_lines_are_replaced_cut_and_harmless(monkeypatch):
    monkeypatch.setenv("COLUMNS", "8")
    screen = Terminal()
    lines = Live(screen, live=1.0, log=1.0)
    lines.show("one", "a line that would wrap")
    lines.show("\x1b[2J")
    lines.note("stays\x07")
    lines.clear()
    replaced = ["one\na line \n", "\\x1b[2J\n", "stays\\x07\n"]
    assert screen.getvalue() == f"{replaced[0]}\x1b[2F\x1b[J{replaced[1]}\x1b[1F\x1b[J{replaced[2]}"
