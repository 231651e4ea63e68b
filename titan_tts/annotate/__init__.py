"""A page to listen to segments and correct their texts, its server, and the history of edits."""
