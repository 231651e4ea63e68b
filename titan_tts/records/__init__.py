"""The one record that all commands share: somebody says something.

A source of any format becomes `Utterance`s (`utterance.py`), in the order of the source and without decoding audio.
How to write a reader of another format: yield, for each recording,

    make_utterance(row, sample_key(name), {"file": path}, columns, references)

`row` has the source's columns under its own names (`columns.py` knows the usual ones), `path` is relative to the
source's folder, `references` are recordings of the speaker. What cannot be used is yielded as `Unusable(id, sentence)`;
who reads decides whether that ends the run. `prepare/formats/__init__.py` says how `titan-tts prepare` finds a reader.

Rows of a list in CSV or JSON lines are what people, `collect` and `annotate` write: any columns, of which those in
`columns.py` have a meaning. `Utterance.to_json` is the checked form of a row, as a work folder of `prepare` keeps it.
"""
