"""To listen to collected segments and correct their texts: a page, its server and the history of edits."""
