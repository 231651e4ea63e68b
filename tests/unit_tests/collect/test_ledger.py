"""Sources and jobs of a collection, read again from their files."""

from titan_tts.collect.ledger import JobRow, Ledger, Source

ONE, TWO, COPY = (
    Source("/s/one.wav", "one.wav", 10, 5, "1" * 16),
    Source("/s/two.wav", "two.wav", 20, 6, "2" * 16),
    Source("/s/copy.wav", "copy.wav", 10, 7, "1" * 16),
)


def test_jobs_are_the_contents_of_sources(tmp_path):
    ledger = Ledger(tmp_path, 2)
    for source in (TWO, ONE, COPY):
        ledger.put_source(source)
    ledger.fail(ONE.file, 1, "dark")
    ledger.fail(TWO.file, 1, "dark")
    ledger.fail(TWO.file, 2, "torn")
    for again in (ledger, Ledger(tmp_path, 2)):
        assert again.sources() == {source.path: source for source in (COPY, ONE, TWO)}
        wanted = {ONE.file: JobRow("pending", 1, "dark"), TWO.file: JobRow("dead", 2, "torn")}
        assert list(again.jobs().items()) == list(wanted.items())
    assert Ledger(tmp_path, 3).jobs()[TWO.file].state == "pending"
    (tmp_path / "files" / TWO.file).mkdir(parents=True)
    assert ledger.jobs()[TWO.file].state == "done"
    ledger.forget_sources([ONE.path])
    assert [*Ledger(tmp_path).jobs()] == [ONE.file, TWO.file]
    ledger.put_source(COPY._replace(version=8, file=TWO.file))
    assert [*Ledger(tmp_path).jobs()] == [TWO.file]
